from __future__ import annotations

import io
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from PIL import Image

from gpusup.worker import golden
from gpusup.worker.digits import Digits, weights_path
from gpusup.worker.loader import load_weights
from gpusup.worker.model import ConfigProblem, InvalidInput, Request

FOLDER = Path(str(files("gpusup.conf") / "digits"))


def model(version: str) -> Digits:
    digits = Digits()
    digits.settings, digits.weights, digits.dtype = {}, "", "model"
    digits.load(torch.device("cpu"), version)
    return digits


def ask(digits: Digits, body: bytes) -> dict[str, float]:
    request = Request(body=body)
    out = digits.forward(digits.decode(request).unsqueeze(0))
    answer: dict[str, float] = digits.encode({k: v[0] for k, v in out.items()}, request)
    return answer


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_shipped_digits_are_read_rightly(version: str) -> None:
    digits = model(version)
    images = sorted(FOLDER.glob("held-out-*.png"))
    assert len(images) == 20
    right = [ask(digits, path.read_bytes())["digit"] == int(path.stem[-1]) for path in images]
    assert sum(right) >= 19


@pytest.mark.parametrize("version", ["1", "2"])
def test_its_accuracy_is_told_beside_the_weights(version: str) -> None:
    about = json.loads((FOLDER / f"digits-{version}.json").read_text())
    assert about["held_out_accuracy"] >= 0.97
    assert about["held_out_right"] / about["held_out"] >= 0.97


def test_the_two_versions_differ() -> None:
    one, two = (load_weights(weights_path("", version)) for version in ("1", "2"))
    assert any(not torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("version", ["1", "2"])
def test_the_golden_example_agrees(version: str) -> None:
    inputs, outputs = golden.read(str(FOLDER / f"golden-{version}.npz"))
    got = model(version).forward(inputs["image"])
    for name, want in outputs.items():
        assert torch.allclose(got[name], want, atol=1e-4), name


def test_any_size_and_form_of_image_will_do() -> None:
    digits = model("1")
    path = sorted(FOLDER.glob("*-is-4.png"))[0]
    large = Image.open(path).convert("RGB").resize((400, 300))
    out = io.BytesIO()
    large.save(out, "JPEG", quality=95)
    assert ask(digits, out.getvalue())["digit"] == 4


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot decode the image"):
        model("1").decode(Request(body=b"not an image"))
    with pytest.raises(InvalidInput, match="got JSON"):
        model("1").decode(Request(json={"digit": 7}))


def test_missing_and_broken_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblem, match=r"no weights for version 9 .*; there are 1, 2"):
        weights_path("", "9")
    (tmp_path / "digits-1.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(ConfigProblem, match=r"digits-1\.safetensors"):
        load_weights(weights_path(str(tmp_path), "1"))

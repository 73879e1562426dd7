from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpusup.supervisor import plan

MIB = 2**20


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    plan.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["plan", *words])
    code: int = arguments.func(arguments)
    return code


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(*words, "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def llm(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 32,
                "hidden_size": 4096,
                "torch_dtype": "float16",
            }
        )
    )
    return str(path)


def test_by_numbers_it_says_why_four_are_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    result = planned(capsys, "--gpu-memory", "24GiB", "--safety", "2GiB", "--model", "5.2GiB")
    assert (result["naive_workers"], result["workers"]) == (4, 3)
    assert "queue mark" in result["reason"]
    assert any("naive says 4" in line for line in result["lines"])


def test_a_language_models_cache_counts_its_layers(
    capsys: pytest.CaptureFixture[str], llm: str
) -> None:
    result = planned(capsys, "--llm", llm, "--tokens", "512", "--sequences", "10")
    assert result["kv_bytes_per_sequence"] == 268_435_456
    assert result["kv_bytes"] == 10 * 268_435_456


def test_the_cache_is_a_peak_beside_the_weights(
    capsys: pytest.CaptureFixture[str], llm: str
) -> None:
    result = planned(
        capsys, "--gpu-memory", "80GiB", "--model", "14GiB", "--llm", llm, "--tokens", "512",
        "--sequences", "40",
    )  # fmt: skip
    assert result["peak"] == 10 * 2**30
    assert result["workers"] == 3
    assert result["sequences_one_worker"] > 200


def test_a_weights_file_is_measured_by_its_header(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": np.zeros(MIB, np.float32)}, path)
    result = planned(capsys, "--gpu-memory", "24GiB", "--weights", str(path))
    assert result["weights_bytes"] == 4 * MIB
    assert result["model"] == 644 * MIB


def test_a_configuration_is_planned_model_by_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "gpusup.toml"
    (tmp_path / "x.py").write_text("class A: ...\nclass B: ...\n")
    path.write_text(
        '[models.a]\nhandler = "x:A"\nstatic = "5.2GiB"\npeak = "1GiB"\n'
        '[models.b]\nhandler = "x:B"\nstatic = "4GiB"\nworkers = 1\n'
    )
    result = planned(capsys, str(path), "--gpu-memory", "24GiB")
    assert result["models"]["b"]["workers"] == {"gpu0": 1}
    assert result["models"]["a"]["workers"] == {"gpu0": 2}
    assert result["models"]["a"]["alone"]["workers"] == 3


def test_a_standby_is_a_line_of_the_arithmetic(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    section = '[models.m]\nhandler = "gpusup.worker.digits:Digits"\nstatic = "5GiB"\n'
    path = tmp_path / "gpusup.toml"
    path.write_text(section)
    without = planned(capsys, str(path), "--gpu-memory", "24GiB")["models"]["m"]
    path.write_text(section + "standby = true\n")
    result = planned(capsys, str(path), "--gpu-memory", "24GiB")
    with_one = result["models"]["m"]
    assert with_one["static"] - without["static"] == 640 * MIB
    assert (without["alone"]["workers"], with_one["alone"]["workers"]) == (4, 3)
    assert "m: 640MiB more for the context of each worker's standby = 5.62GiB" in result["lines"], (
        result["lines"]
    )


def test_the_weights_of_a_version_are_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "gpusup.toml"
    (tmp_path / "x.py").write_text("class A: ...\n")
    save_file({"a": np.zeros(MIB, np.float32)}, tmp_path / "w-7.safetensors")
    weights = f"{tmp_path}/w-{{version}}.safetensors"
    path.write_text(f'[models.a]\nhandler = "x:A"\nversion = "7"\nweights = "{weights}"\n')
    result = planned(capsys, str(path), "--gpu-memory", "24GiB")
    assert result["models"]["a"]["static"] == 644 * MIB


def test_a_model_that_fits_nowhere_fails_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "gpusup.toml"
    (tmp_path / "x.py").write_text("class A: ...\nclass B: ...\n")
    path.write_text('[models.a]\nhandler = "x:A"\nstatic = "50GiB"\n')
    assert run(str(path), "--gpu-memory", "24GiB") == 1
    assert "a fits on no device" in capsys.readouterr().out
    assert run("--gpu-memory", "4GiB", "--model", "5GiB") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "5GiB"], "--gpu-memory is missing"),
        (["--gpu-memory", "5GiB", "--model", "0"], "at rest, got 0 bytes"),
        (["--gpu-memory", "5GiB", "--model", "1GiB", "--weights", "x"], "give one"),
        (["--gpu-memory", "5GiB", "--weights", "/none.safetensors"], "cannot read /none"),
        (["--llm", "/none.json"], "cannot read /none.json"),
        (["/none.toml"], "cannot read /none.toml"),
        (["--gpu-memory", "5GiB", "--model", "1GiB", "--queue", "0.95"], "0.95 and 0.92"),
    ],
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], words: list[str], complaint: str
) -> None:
    assert run(*words) == 2
    errors = capsys.readouterr().err
    assert complaint in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("size", ["24", "-1GiB", "many", "24G"])
def test_sizes_without_a_unit_are_refused(capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--gpu-memory=" + size, "--model", "1GiB")
    assert stopped.value.code == 2
    assert "--gpu-memory" in capsys.readouterr().err

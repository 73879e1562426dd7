"""The handlers that need no code, on small models made here."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from gpusup.worker.builtin_exported import Exported
from gpusup.worker.builtin_image import ImageClassifier, read_labels
from gpusup.worker.model import ConfigProblem, InvalidInput, Model, Request
from gpusup.worker.precheck import load_problem

CPU = torch.device("cpu")


class Scorer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(features))


class Colours(torch.nn.Module):  # type: ignore[misc]
    """Scores an image by its mean red, green and blue."""

    def __init__(self, sharpness: float = 4.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3) * sharpness)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3)) @ self.weight


def loaded(model: Model, weights: Path, **settings: Any) -> Any:
    model.weights, model.settings, model.dtype = str(weights), settings, "model"
    model.load(CPU, "1")
    return model


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scorer, Path]:
    """The module, and a folder with it as any.pt2 (any rows), two.pt2 (two rows) and script.pt."""
    torch.manual_seed(0)
    module = Scorer().eval()
    folder = tmp_path_factory.mktemp("exported")
    two = torch.zeros(2, 4)
    rows = torch.export.Dim("rows", min=1, max=64)
    any_rows = torch.export.export(module, (two,), dynamic_shapes=({0: rows},))
    torch.export.save(any_rows, folder / "any.pt2")
    torch.export.save(torch.export.export(module, (two,)), folder / "two.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions say that it is old
        torch.jit.trace(module, two).save(str(folder / "script.pt"))
    return module, folder


@pytest.mark.parametrize("name", ["any.pt2", "two.pt2", "script.pt"])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_from_a_file_gives_what_the_module_gives(
    scorer: tuple[Scorer, Path], name: str, rows: int
) -> None:
    module, folder = scorer
    model = loaded(Exported(), folder / name)
    batch = torch.randn(rows, 4)
    assert torch.allclose(model.forward(batch), module(batch), atol=1e-6)


def test_a_program_takes_json_of_its_own_shape(scorer: tuple[Scorer, Path]) -> None:
    model = loaded(Exported(), scorer[1] / "any.pt2")
    assert model.decode(Request(json={"features": [1, 2, 3, 4]})).shape == (4,)
    assert model.decode(Request(json=[1, 2, 3, 4])).dtype == torch.float32
    assert [tuple(example.shape) for example in model.warm_up()] == [(4,)]
    for wrong in ([1, 2, 3], {"a": [1], "b": [2]}, "text", [[1], [2, 3]], {"features": "x"}):
        with pytest.raises(InvalidInput):
            model.decode(Request(json=wrong))


@pytest.mark.parametrize("name", ["broken.pt2", "broken.pt", "missing.pt2"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_that_is_no_program_is_named(tmp_path: Path, name: str) -> None:
    if not name.startswith("missing"):
        (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigProblem, match=f"cannot read .*{name}"):
        loaded(Exported(), tmp_path / name)


def png(colour: str, size: tuple[int, int] = (40, 30)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    save_file(Colours().state_dict(), str(tmp_path / "w.safetensors"))
    torch.save(Colours().state_dict(), tmp_path / "w.pth")
    (tmp_path / "labels.txt").write_text("red\ngreen\nblue\n")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "class Colours(torch.nn.Module):\n"
        "    def __init__(self, sharpness=4.0):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.eye(3) * sharpness)\n"
        "    def forward(self, images):\n"
        "        return images.mean(dim=(2, 3)) @ self.weight\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("resize", [0, 32])
def test_an_image_classifier_needs_weights_and_labels_only(
    colours: Path, name: str, resize: int
) -> None:
    model = loaded(
        ImageClassifier(), colours / name, network=f"{colours}/net.py:Colours",
        labels="labels.txt", size=[24, 24], resize=resize, top=2,
    )  # fmt: skip
    for colour in ("red", "blue"):
        item = model.decode(Request(body=png(colour)))
        assert item.shape == (3, 24, 24)
        assert item.dtype == torch.uint8
        answer = model.encode(model.forward(item[None])[0], Request())
        assert answer["label"] == colour
        assert len(answer["top"]) == 2
    assert model.forward(model.warm_up()[0][None]).shape == (1, 3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"size": [0, 4]}, r"settings.size: expected \[height, width\]"),
        ({"size": 300}, "settings.resize: 256 is below the smaller side of size, 300"),
        ({"std": [1, 0, 1]}, "settings.std: can't be 0"),
        ({"labels": "gone.txt"}, "cannot read labels"),
        ({"network": "net.py"}, None),
    ],
)
def test_settings_that_can_not_work_are_named(
    colours: Path, settings: dict[str, Any], complaint: str | None
) -> None:
    given = {"network": f"{colours}/net.py:Colours", **settings}
    with pytest.raises(Exception, match=complaint or "should read"):
        loaded(ImageClassifier(), colours / "w.safetensors", **given)


def test_weights_of_another_network_are_refused(colours: Path) -> None:
    save_file({"bias": torch.zeros(3)}, str(colours / "other.safetensors"))
    with pytest.raises(ConfigProblem, match="does not fit"):
        loaded(
            ImageClassifier(), colours / "other.safetensors", network=f"{colours}/net.py:Colours"
        )


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "lacks weight"),
        ({"weight": torch.eye(3), "b": torch.ones(1), "c": torch.ones(1)},
         "has what is not in it: b and 1 more"),
        ({"weight": torch.eye(4)}, "weight has shape [4, 4], [3, 3] is wanted"),
        ({"other": torch.eye(3)}, "lacks weight; has what is not in it: other"),
        ({"weight": 3}, "weight is a int, no tensor"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_in_one_line(
    colours: Path, tensors: dict[str, Any], said: str
) -> None:
    torch.save(tensors, colours / "w.pth")
    with pytest.raises(ConfigProblem) as raised:
        loaded(ImageClassifier(), colours / "w.pth", network=f"{colours}/net.py:Colours")
    assert str(raised.value) == f"{colours}/w.pth does not fit {colours}/net.py:Colours: {said}"


def test_a_pickle_that_runs_code_is_not_run(colours: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(colours / "was-run"), "w"))

    torch.save({"weight": Evil()}, colours / "evil.pth")
    with pytest.raises(ConfigProblem, match="cannot read"):
        loaded(ImageClassifier(), colours / "evil.pth", network=f"{colours}/net.py:Colours")
    assert not (colours / "was-run").exists()


def test_labels_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text(json.dumps(["a", "b"]))
    assert read_labels(tmp_path / "labels.json") == ["a", "b"]


def checked(model: Model, weights: Path, **settings: Any) -> str:
    """What the look before a swap says: it loads on the device that has no memory."""
    return load_problem(type(model), {"settings": settings}, str(weights), "2")


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_an_image_classifier_passes_the_check_before_a_swap(colours: Path, name: str) -> None:
    assert not checked(ImageClassifier(), colours / name, network=f"{colours}/net.py:Colours")


def test_the_check_before_a_swap_finds_weights_of_another_network(colours: Path) -> None:
    save_file({"other": torch.zeros(3)}, str(colours / "w.safetensors"))
    said = checked(
        ImageClassifier(), colours / "w.safetensors", network=f"{colours}/net.py:Colours"
    )
    assert "does not fit" in said


@pytest.mark.parametrize("name", ["any.pt2", "two.pt2", "script.pt"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_passes_the_check_before_a_swap(scorer: tuple[Scorer, Path], name: str) -> None:
    assert not checked(Exported(), scorer[1] / name)


class Wordy(Model):
    def load(self, device: torch.device, version: str) -> None:
        raise ConfigProblem("keys:\n" + "\n\tlayer.weight" * 1000)


def test_the_check_before_a_swap_says_one_short_line(tmp_path: Path) -> None:
    said = checked(Wordy(), tmp_path / "w")
    assert said.startswith("keys: layer.weight layer.weight")
    assert "\n" not in said
    assert len(said) <= 500


class OnCpuOnly(Model):
    """`wrap`: as a handler does that says itself whatever its library says."""

    wrap = True

    def load(self, device: torch.device, version: str) -> None:
        try:
            raise RuntimeError(f"device {device} is invalid")
        except RuntimeError as error:
            if self.wrap:
                raise ConfigProblem(f"cannot read {self.weights}: {error}") from error
            raise ValueError(str(error)) from OSError("of another kind")


class Unwrapped(OnCpuOnly):
    wrap = False


@pytest.mark.parametrize("kind", [OnCpuOnly, Unwrapped])
def test_what_the_meta_device_can_not_do_is_no_verdict(tmp_path: Path, kind: Any) -> None:
    assert not checked(kind(), tmp_path / "w")


class Meta(Model):
    def load(self, device: torch.device, version: str) -> None:
        raise ConfigProblem(f"{self.weights} has no classes")


def test_a_path_with_that_word_is_no_excuse(tmp_path: Path) -> None:
    assert checked(Meta(), tmp_path / "metal") == f"{tmp_path}/metal has no classes"


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier with random weights and a word tokenizer, saved as a folder."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("text")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "day"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, id2label={0: "up", 1: "down"},
        label2id={"up": 0, "down": 1},
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_text_classification_needs_a_folder_only(text_model: Path) -> None:
    from gpusup.worker.builtin_transformers import TextClassification

    model = loaded(TextClassification(), text_model)
    items = [model.decode(Request(body=b"good day")), model.decode(Request(json={"text": "bad"}))]
    assert [tuple(item.shape) for item in items] == [(2, 16), (2, 16)]
    rows = model.forward(torch.stack(items))
    answer = model.encode(rows[0], Request())
    assert set(answer["scores"]) == {"up", "down"}
    assert answer["probability"] == max(answer["scores"].values())
    alone = model.forward(items[0][None])
    assert torch.allclose(alone[0], rows[0], atol=1e-5)


def test_a_text_model_passes_the_check_before_a_swap(text_model: Path) -> None:
    from gpusup.worker.builtin_transformers import TextClassification

    assert not checked(TextClassification(), text_model)


def test_embeddings_do_not_depend_on_their_neighbours(text_model: Path) -> None:
    from gpusup.worker.builtin_transformers import Embeddings

    model = loaded(Embeddings(), text_model)
    texts = ["good day", "bad " * 30, "day"]
    together = model.embed(texts, {})
    assert together.shape == (3, 16)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-4)
    for text, row in zip(texts, together, strict=True):
        assert np.allclose(model.embed([text], {})[0], row, atol=1e-5)


def test_without_the_library_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpusup.worker.builtin_transformers import TextClassification

    monkeypatch.setitem(sys.modules, "transformers", None)  # not installed, wherever this runs
    with pytest.raises(ConfigProblem, match="pip install"):
        loaded(TextClassification(), tmp_path)

"""conf/default.toml is documentation that can't drift: it is compared with the schema."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusup.conf.load import load, parse
from gpusup.conf.schema import Config, ModelConfig

PATH = Path(str(files("gpusup.conf") / "default.toml"))
TEXT = PATH.read_text()


def example_of_a_model() -> str:
    """The commented section, as it reads without the comment signs."""
    _, _, below = TEXT.partition("# [models.resnet50]\n")
    return "[models.resnet50]\n" + "".join(
        line.removeprefix("# ") for line in below.splitlines(keepends=True)
    )


def keys_of(value: Any, path: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {path}
    return {path} | {k for key, inner in value.items() for k in keys_of(inner, f"{path}.{key}")}


def test_it_says_the_defaults_and_nothing_else() -> None:
    assert load(PATH).server == Config().server
    written = msgspec.structs.asdict(load(PATH))
    for name, default in msgspec.structs.asdict(Config()).items():
        if name != "models":
            assert written[name] == default, name


def test_it_lists_every_key_there_is() -> None:
    known = msgspec.to_builtins(Config())
    written = tomllib.loads(TEXT)
    known.pop("models")
    written.pop("models")
    assert keys_of(written) == keys_of(known)


def test_its_commented_model_has_every_key_with_its_default(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("class Classifier: pass")
    model = parse(example_of_a_model(), tmp_path).models["resnet50"]
    default = ModelConfig(handler=f"{tmp_path.resolve()}/handler.py:Classifier")
    assert model == default
    written = set(tomllib.loads(example_of_a_model())["models"]["resnet50"])
    assert written == set(ModelConfig.__struct_fields__)


def test_no_file_and_this_file_serve_the_same_model() -> None:
    assert load(PATH).models == load(None).models


@pytest.mark.parametrize(
    "line",
    [line for line in (TEXT + example_of_a_model()).splitlines() if re.match(r"[a-z_]+ = ", line)],
)
def test_every_key_has_a_reason(line: str) -> None:
    if line.startswith(("handler", 'retry = "safe"')):
        return
    _, _, reason = line.partition("# ")
    assert len(reason) >= 10, line

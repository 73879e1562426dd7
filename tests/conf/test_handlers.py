from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gpusup.conf.handlers import find_module, resolve_handler, split_handler


def test_a_module_is_found_without_importing_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "inner.py").write_text("class X: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = find_module("loud_package.inner")
    assert spec is not None
    assert spec.origin == str(package / "inner.py")
    assert "loud_package" not in sys.modules
    assert find_module("loud_package.gone") is None
    assert find_module("gone.inner") is None
    assert find_module("json.decoder.deeper") is None


@pytest.mark.parametrize("place", ["gpusup.worker.digits", "gpusup.worker.echo"])
def test_our_own_models_are_found(place: str, tmp_path: Path) -> None:
    name = "Digits" if place.endswith("digits") else "Echo"
    assert resolve_handler(f"{place}:{name}", tmp_path) == f"{place}:{name}"


@pytest.mark.parametrize(
    "source",
    [
        "class X: ...",
        "from elsewhere import X",
        "import elsewhere as X",
        "X = make()",
        "X: type = make()",
        "try:\n  class X: ...\nexcept ImportError:\n  X = None",
        "if fast:\n  from a import X\nelse:\n  from b import X",
        "from everything import *",
        "def __getattr__(name): ...",
    ],
)
def test_a_class_may_come_about_in_many_ways(tmp_path: Path, source: str) -> None:
    (tmp_path / "h.py").write_text(source)
    assert resolve_handler("h.py:X", tmp_path) == f"{tmp_path.resolve()}/h.py:X"


@pytest.mark.parametrize("source", ["", "def f():\n  class X: ...", "class Y:\n  X = 1", "x = 1"])
def test_a_class_that_is_not_there_is_missed(tmp_path: Path, source: str) -> None:
    (tmp_path / "h.py").write_text(source)
    with pytest.raises(ValueError, match="defines no X"):
        resolve_handler("h.py:X", tmp_path)


@pytest.mark.parametrize("text", ["", "x", ":X", "x:", "x:1", "x:a.b", "x.py"])
def test_what_is_no_handler_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        split_handler(text)


def test_another_interpreters_modules_are_taken_at_their_word(tmp_path: Path) -> None:
    assert resolve_handler("only.there:X", tmp_path, other_python=True) == "only.there:X"

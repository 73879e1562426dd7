"""One request through the worker's own code: what works, and how each mistake reads."""

from __future__ import annotations

import json
import os
import signal
import time
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from gpusup.conf.load import load
from gpusup.supervisor import try_model

from .commands import gpusup

PNG = sorted(Path(str(files("gpusup.conf") / "digits")).glob("*-is-7.png"))[0]
DIGITS = '[models.digits]\nhandler = "gpusup.worker.digits:Digits"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gpusup.toml"
    path.write_text(DIGITS)
    return path


def with_handler(config: Path, source: str) -> Path:
    (config.parent / "handler.py").write_text(
        "from gpusup.worker.model import InvalidInput, Model\n" + source
    )
    config.write_text('[models.mine]\nhandler = "handler.py:Mine"\nbudget = "1s"\n')
    return config


def test_an_image_gets_its_answer(config: Path) -> None:
    done = gpusup("try", config, "digits", "--input", PNG)
    assert done.returncode == 0, done
    assert json.loads(done.out)["digit"] == 7
    assert "golden" in done.err


def test_an_array_is_sent_as_a_tensor(config: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 8, 8), dtype=np.float32))
    done = gpusup(
        "try", config, "digits", "--input", tmp_path / "x.npy", "--json", "--version", "2"
    )
    assert done.returncode == 0, done
    parts = {part["name"]: part["shape"] for part in json.loads(done.out)["answers"][0]["parts"]}
    assert parts == {"logits": [1, 10], "probabilities": [1, 10]}


def test_what_the_client_would_be_told_is_told(config: Path, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"no image")
    done = gpusup("try", config, "digits", "--input", tmp_path / "x.png")
    assert done.returncode == 1
    assert "gpusup: digits: invalid: cannot decode the image" in done.err


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["gone"], 4, 'has no model "gone"; there are: digits'),
        (["digits", "--input", "/no/such/file"], 2, "cannot read /no/such/file"),
        (["digits", "--version", "x"], 2, 'expected digits, such as "1", got "x"'),
        (["digits", "--version", "9"], 1, "no weights for version 9"),
        (["digits", "--param", "top"], 2, 'expected KEY=VALUE, got "top"'),
    ],
)
def test_a_wrong_word_is_one_line(
    config: Path, words: list[str], code: int, complaint: str
) -> None:
    done = gpusup("try", config, *words)
    assert done.returncode == code, done
    assert complaint in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("raise RuntimeError('at import')\nclass Mine(Model): ...\n", "at import"),
        ("class Mine(Model):\n  def load(self, d, v): raise KeyError('in load')\n", "in load"),
        ("import os\nclass Mine(Model):\n  def load(self, d, v): os.abort()\n", "SIGABRT"),
    ],
)
def test_a_handler_that_fails_is_told_in_a_line(config: Path, source: str, complaint: str) -> None:
    done = gpusup("try", with_handler(config, source), "mine")
    assert done.returncode == 1, done
    assert complaint in done.err.splitlines()[-1]


def tried(config: Path) -> try_model.Result:
    return try_model.try_model(load(config), "mine", device="cpu", quiet=True)


def test_a_model_that_never_loads_is_ended_and_told(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(try_model, "LIMIT_S", 0.5)
    source = "import time\nclass Mine(Model):\n  def load(self, d, v): time.sleep(600)\n"
    result = tried(with_handler(config, source))
    assert result.problem == "the worker code has moved nothing for 0.5 s"
    assert (result.cause, result.returncode) == ("hang", -signal.SIGKILL)


def test_what_a_dead_child_leaves_behind_is_not_waited_for(config: Path) -> None:
    source = """
import os, time
class Mine(Model):
  def load(self, d, v):
    if child := os.fork():
      open("{0}", "w").write(str(child))
      os.abort()
    time.sleep(600)
"""
    left = config.parent / "left"
    began = time.monotonic()
    try:
        result = tried(with_handler(config, source.format(left)))
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert result.problem == "the worker code ended with SIGABRT"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("kill -9 $$", "the worker code ended with SIGKILL"),
        ("kill -40 $$", "the worker code ended with signal 40"),
        ("exit 0", "the worker code ended in the middle of a word"),
    ],
)
def test_a_word_that_breaks_off_is_one_line(config: Path, end: str, problem: str) -> None:
    python = config.parent / "python"
    python.write_text(f'#!/bin/bash\nprintf \'{{"kind": "rea\' >&$4\n{end}\n')
    python.chmod(0o755)
    path = with_handler(config, "class Mine(Model): ...\n")
    path.write_text(path.read_text() + f'python = "{python}"\n')
    assert tried(path).problem == problem

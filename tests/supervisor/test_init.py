from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

from gpusup.conf.load import load

from .commands import gpusup


def test_what_it_writes_loads_answers_and_passes_its_own_test(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    done = gpusup("init", folder)
    assert done.returncode == 0, done
    assert load(folder / "gpusup.toml").models["classifier"].budget == 10.0

    tried = gpusup(
        "try", folder / "gpusup.toml", "classifier", "--input", folder / "example.png", "--json"
    )
    assert tried.returncode == 0, tried
    (answer,) = json.loads(tried.out)["answers"]
    assert answer["parts"][0]["json"]["label"] in ("cat", "dog", "bird")

    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text("mine")
    done = gpusup("init", tmp_path)
    assert done.returncode == 1
    assert "handler.py already; --force overwrites" in done.err
    assert (tmp_path / "handler.py").read_text() == "mine"
    assert not (tmp_path / "gpusup.toml").exists()
    assert gpusup("init", tmp_path, "--force").returncode == 0


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = gpusup("init", tmp_path / "file" / "below")
    assert done.returncode == 1
    assert "cannot write" in done.err


def test_every_option_in_its_comments_is_a_real_key() -> None:
    text = (files("gpusup.conf") / "template/gpusup.toml").read_text()
    lines = [
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line
        for line in text.splitlines()
    ]
    written = tomllib.loads("\n".join(lines))
    known = load(None)
    assert set(written["models"]["classifier"]) <= set(known.models["digits"].__struct_fields__)
    assert set(written["server"]) <= set(known.server.__struct_fields__)


def test_the_defaults_can_be_shown() -> None:
    done = gpusup("init", "--show-defaults")
    assert done.returncode == 0
    assert tomllib.loads(done.out)["watermark"]["queue"] == 0.85
    assert gpusup("init").returncode == 2

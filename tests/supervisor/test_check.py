from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusup.supervisor import check

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check a file with this text; (exit code, standard output, standard error)."""

    def checked(text: str, *words: str) -> tuple[int, str, str]:
        path = tmp_path / "gpusup.toml"
        path.write_text(text)
        parser = argparse.ArgumentParser()
        check.add_parser(parser.add_subparsers())
        args: Any = parser.parse_args(["check", str(path), *words])
        code: int = args.func(args)
        out, err = capsys.readouterr()
        return code, out, err

    return checked


DIGITS = '[models.digits]\nhandler = "gpusup.worker.digits:Digits"\n'


def test_a_usable_file_is_said_to_be_usable(run: Check) -> None:
    code, out, err = run('[server]\nlisten = ":0"\n' + DIGITS)
    assert code == 0
    assert "is usable" in out
    assert "digits@1 from gpusup.worker.digits:Digits" in out
    assert "port (any free one)" in out
    assert err == ""


def test_each_problem_has_a_line_of_its_own_and_the_code_is_2(run: Check) -> None:
    code, out, err = run('[server]\nlisen = "x"\nbacklog = 0\n')
    assert code == 2
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("gpusup: ") for line in lines)
    assert 'did you mean "listen"?' in lines[0]


def test_a_missing_file_is_named(run: Check, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    check.add_parser(parser.add_subparsers())
    args: Any = parser.parse_args(["check", str(tmp_path / "gone.toml")])
    assert args.func(args) == 2


def test_a_model_that_fits_nowhere_is_refused_with_the_numbers(run: Check) -> None:
    code, _, err = run('[devices]\nuse = ["cpu"]\n' + DIGITS + 'static = "20GiB"\n')
    assert code == 2
    assert "digits fits on no device" in err
    assert "1.84GiB below the shed mark" in err


def test_a_gpu_whose_size_is_declared_is_reckoned_with(run: Check) -> None:
    text = '[devices]\nuse = ["gpu0"]\n[devices.memory]\ngpu0 = "24GiB"\n' + DIGITS
    code, out, _ = run(text + 'static = "5.2GiB"\npeak = "1GiB"\n')
    assert code == 0
    assert "gpu0: 3 x digits" in out
    code, _, err = run(text + 'static = "25GiB"\n')
    assert code == 2
    assert "gpu0" in err


def test_json_says_the_same(run: Check) -> None:
    code, out, _ = run("[server", "--json")
    said = json.loads(out)
    assert code == 2
    assert said["ok"] is False
    assert "not valid TOML" in said["problems"][0]
    assert json.loads(run(DIGITS, "--json")[1]) == {
        "ok": True,
        "problems": [],
        "models": ["digits"],
    }

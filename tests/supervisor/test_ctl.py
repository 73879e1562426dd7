from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpusup.supervisor import ctl, ctl_reports, ctl_view
from gpusup.supervisor.control import Control
from gpusup.supervisor.ctl_client import candidates

from .fake_commands import FakeCommands

PATH = f"/tmp/gpusup-test-ctl-{os.getpid()}.sock"


class Ctl:
    """Runs `gpusupctl` against a fake supervisor; `out` and `err` are what it last printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.commands = FakeCommands()
        self._capsys = capsys
        self.out = self.err = ""

    async def __call__(self, *words: str) -> int:
        code = await asyncio.to_thread(ctl.run, [*words, "--socket", PATH])
        self.out, self.err = self._capsys.readouterr()
        return code

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
async def gpusupctl(capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Ctl]:
    made = Ctl(capsys)
    control = Control(made.commands)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(PATH)
    listener.listen()
    await control.serve(listener)
    yield made
    await control.close()
    listener.close()
    os.unlink(PATH)


def test_starting_it_loads_nothing_heavy() -> None:
    code = """
import sys, gpusup.supervisor.ctl
heavy = {"aiohttp", "torch", "rich", "asyncio", "msgspec", "numpy", "psutil"} & set(sys.modules)
sys.exit(" ".join(sorted(heavy)) or 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


async def test_status_is_a_table_and_says_when_not_all_is_well(gpusupctl: Ctl) -> None:
    assert await gpusupctl("status") == 0
    lines = gpusupctl.out.splitlines()
    assert lines[0] == "gpusup 0.1.0 is ready on 127.0.0.1:8000, pid 1, up 1h01m"
    gpu1 = next(line for line in lines if line.startswith("gpu1"))
    assert gpu1.split()[:4] == ["gpu1", "backoff", "1m01s", "digits@1"]
    assert "exit -9; next try in 2.1s" in gpu1
    assert "3.0GiB" in next(line for line in lines if line.startswith("gpu0"))
    assert "50%" in gpusupctl.out
    assert "unknown" in gpusupctl.out
    gpusupctl.commands.state = "degraded"
    assert await gpusupctl("status") == 3
    assert "gpu1 is in back-off" in gpusupctl.out


async def test_status_of_one_slot_is_about_that_slot(gpusupctl: Ctl) -> None:
    assert await gpusupctl("status", "gpu0", "-o", "json") == 0
    assert [s["slot"] for s in gpusupctl.json["slots"]] == ["gpu0"]
    assert await gpusupctl("status", "gpu1") == 3
    assert await gpusupctl("status", "gpu9") == 4
    assert gpusupctl.err == "gpusupctl: there is no slot gpu9\n"
    assert await gpusupctl("status", "-o", "wide") == 0
    assert "proxy0" in gpusupctl.out


@pytest.mark.parametrize(
    ("outcome", "code"), [("done", 0), ("failed", 1), ("rolled-back", 6), ("aborted", 1)]
)
async def test_the_exit_code_says_how_a_change_ended(
    gpusupctl: Ctl, outcome: str, code: int
) -> None:
    gpusupctl.commands.outcome = outcome
    assert await gpusupctl("reload-model", "digits", "--version", "2") == code
    assert "drained" in gpusupctl.out
    said = gpusupctl.err if code else gpusupctl.out
    assert f"change c1: reload digits: {outcome}: because" in said
    assert await gpusupctl("rollback", "digits") == code


async def test_waiting_too_long_is_124_and_the_change_goes_on(gpusupctl: Ctl) -> None:
    gpusupctl.commands.outcome = "running"
    assert await gpusupctl("drain", "gpu1", "--timeout", "100ms") == 124
    assert "it goes on: gpusupctl change c1" in gpusupctl.err
    assert gpusupctl.commands.calls[0][:3] == ("drain", "gpu1", None)
    assert await gpusupctl("drain", "gpu1", "--no-wait", "--limit", "5s") == 0
    assert gpusupctl.out == "change c2 started\n"
    assert gpusupctl.commands.calls[1][:3] == ("drain", "gpu1", 5.0)


async def test_all_options_of_a_reload_arrive(gpusupctl: Ctl) -> None:
    words = "--weights /w.safetensors --set max_rows=8 --set label=cat --strategy in-place"
    code = await gpusupctl(
        "reload-model", "digits@3", *words.split(), "--slots", "gpu0,gpu1",
        "--canary", "10%", "--allow-gap", "10s",
    )  # fmt: skip
    assert code == 0
    assert gpusupctl.commands.calls[0][2] == {
        "version": "3", "weights": "/w.safetensors", "set": {"max_rows": 8, "label": "cat"},
        "strategy": "in-place", "slots": ["gpu0", "gpu1"], "canary": 0.1, "dry_run": False,
        "allow_gap": 10.0,
    }  # fmt: skip
    assert await gpusupctl("reload-model", "digits", "--dry-run") == 0
    assert gpusupctl.out.splitlines()[1].split()[:4] == ["gpu0", "surge", "2.0GiB", "5.0GiB"]


async def test_a_conflict_names_the_change_in_the_way(gpusupctl: Ctl) -> None:
    assert await gpusupctl("reload-model", "digits", "--version", "99") == 1
    assert gpusupctl.err == "gpusupctl: change c1 is at work on digits\n"


async def test_small_verbs(gpusupctl: Ctl) -> None:
    assert await gpusupctl("cordon", "gpu0", "--why", "fan") == 0
    assert await gpusupctl("uncordon", "gpu0") == 0
    assert await gpusupctl("reset-failed", "gpu0") == 0
    assert await gpusupctl("restart", "proxy0") == 0
    assert await gpusupctl("promote", "digits") == 0
    assert await gpusupctl("stop", "--no-wait") == 0
    assert [call[0] for call in gpusupctl.commands.calls] == [
        "cordon", "uncordon", "reset-failed", "restart", "promote", "stop",
    ]  # fmt: skip
    assert await gpusupctl("drain", "gpu7") == 4
    assert await gpusupctl("logs", "gpu0", "-n", "1") == 0
    assert gpusupctl.out == "three\n"
    assert await gpusupctl("dump", "gpu0") == 0
    assert gpusupctl.out == "Thread 0x1 (most recent call first):\n"
    assert await gpusupctl("events") == 0
    assert gpusupctl.out.endswith("move       gpu0 ready  a=1\n")
    assert await gpusupctl("events", "-o", "json") == 0
    assert gpusupctl.json["serial"] == 1
    assert await gpusupctl("plan") == 0
    assert "gpu0 (generation 7)  5.0GiB" in gpusupctl.out
    assert "room for more: 9.0GiB" in gpusupctl.out
    assert await gpusupctl("leases") == 0
    assert "gpu0    proxy0  3MiB" in gpusupctl.out
    assert "proxy0  4          2       1MiB of 256MiB" in gpusupctl.out
    assert await gpusupctl("leases", "-o", "json") == 0
    assert gpusupctl.json["queued"] == {"proxy0": {"digits": 2}}
    assert await gpusupctl("reload-config") == 0
    assert await gpusupctl("reexec") == 2
    assert await gpusupctl("buckets", "digits") == 1  # a defect there is one line here
    assert gpusupctl.err == "gpusupctl: ZeroDivisionError: a defect\n"


async def test_changes_are_listed_shown_and_aborted(gpusupctl: Ctl) -> None:
    assert await gpusupctl("changes") == 0
    assert gpusupctl.out == "no changes\n"
    gpusupctl.commands.outcome = "running"
    await gpusupctl("drain", "gpu0", "--no-wait")
    assert await gpusupctl("changes") == 0
    assert gpusupctl.out.splitlines()[1].split()[:3] == ["c1", "running", "1.5s"]
    assert await gpusupctl("change", "c1") == 0
    assert "+  1.250s  drained" in gpusupctl.out
    assert "gap_s = 0.4" in gpusupctl.out
    assert await gpusupctl("abort", "c1") == 0
    assert await gpusupctl("change", "c1", "--wait") == 1
    assert await gpusupctl("change", "c9") == 4


async def test_top_once_is_one_picture(gpusupctl: Ctl) -> None:
    assert await gpusupctl("top", "--once") == 0
    assert "gpu0" in gpusupctl.out
    assert "50%" in gpusupctl.out
    assert "digits@1" in gpusupctl.out
    assert "\x1b" not in gpusupctl.out


async def test_a_support_bundle_has_everything_but_secrets(gpusupctl: Ctl, tmp_path: Path) -> None:
    path = str(tmp_path / "bundle.tar.gz")
    assert await gpusupctl("support-bundle", path) == 0
    assert gpusupctl.out.strip() == path
    with tarfile.open(path) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
        everything = b"".join(
            file.read() for member in tar.getmembers() if (file := tar.extractfile(member))
        )
    assert {"status.json", "support.json", "logs/gpu0.txt", "metrics.txt", "machine.json"} <= names
    assert b"hf_abc" not in everything
    assert b"/etc/keys" in everything
    assert (tmp_path / "bundle.tar.gz").stat().st_mode & 0o777 == 0o600


def test_without_a_service_it_says_where_it_looked(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.run(["status", "--socket", "/nope.sock"]) == 7
    assert capsys.readouterr().err == (
        "gpusupctl: no gpusup answers at /nope.sock: No such file or directory\n"
    )


def test_the_variable_names_a_socket_or_its_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUSUP_CONTROL", str(tmp_path))
    assert ctl.run(["status"]) == 7
    assert f"{tmp_path}/control.sock" in capsys.readouterr().err
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/mine:/run/other")
    assert candidates()[0] == "/run/mine/control.sock"


@pytest.mark.parametrize(
    "words",
    [
        [], ["dance"], ["drain"], ["drain", "gpu0", "--timeout", "soon"], ["logs", "g", "-n", "x"],
        ["reload-model", "m", "--canary", "200%"], ["reload-model", "m", "--set", "novalue"],
    ],
)  # fmt: skip
def test_a_misspelt_command_is_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.run(words) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.run(["--help"]) == 0
    assert "124 timed out" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb in ctl.VERBS:
        assert verb in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_verb_of_the_parser_is_done_by_somebody() -> None:
    from gpusup.supervisor.ctl_completion import _verbs
    from gpusup.supervisor.ctl_parser import make_parser

    assert set(_verbs(make_parser(""))) == set(ctl.VERBS) | {"completion"}


def test_bucket_advice_reads_as_a_sum() -> None:
    found = {
        "model": "m", "requests": 10, "shapes": 2, "current": [[8, 8]], "padding_now": None,
        "padding_with_one_bucket": 0.25,
        "proposals": [{"buckets": [[4, 4], [8, 8]], "padding": 0.05, "saves": 0.2}],
    }  # fmt: skip
    assert ctl_reports.buckets(found) == [
        "m: 10 requests of 2 shapes",
        "  now: 8x8: some shapes fit in none",
        "  with one bucket: 25.0% padding",
        "  2 buckets: 4x4, 8x8: 5.0% padding, 20.0% less",
    ]


def test_ages_and_sizes_are_short() -> None:
    ages = [ctl_view.age(s) for s in (None, 0.44, 12, 303, 25_920, 273_600)]
    assert ages == ["-", "0.4s", "12s", "5m03s", "7h12m", "3d04h"]
    sizes = [ctl_view.size(n) for n in (None, 0, 1536, 512 << 20, 25 << 30)]
    assert sizes == ["-", "0B", "2KiB", "512MiB", "25.0GiB"]

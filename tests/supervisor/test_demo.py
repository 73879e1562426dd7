"""The main job from end to end, as the README's first command runs it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import psutil

from .commands import gpusup


def demos(folder: str) -> set[int]:
    """Processes that were started for a demonstration in this folder."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any(f"{folder}/gpusup-demo-" in word for word in process.info["cmdline"] or ()):
            found.add(process.pid)
    return found


def test_no_request_is_lost_by_a_kill_a_drain_and_a_swap() -> None:
    with tempfile.TemporaryDirectory(prefix="gs-") as folder:
        done = gpusup("demo", "--json", limit_s=300, env={"TMPDIR": folder})
        assert not demos(folder)
        assert not list(Path(folder).iterdir())
    report = json.loads(done.out)
    assert done.returncode == 0, done
    assert report["failed"] == 0, report["problems"]
    assert report["accuracy"] >= 0.95
    assert report["requests"] > 100
    assert report["workers"] >= 1
    assert report["device"]
    assert 0 < report["kill_to_ready_s"] < 10  # the goal is 0.5; a busy machine must not fail this
    assert 0 <= report["swap_gap_s"] < 10
    assert set(report["events"]) == {"kill", "drain", "swap"}
    assert all(event["requests"] > 0 for event in report["events"].values())
    assert report["service_exit_code"] == 0

"""Precedence for a child. Not everybody may give any: root may, unless a container forbids it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusup.conf.precedence import GROUP_NICE, NICE, follow, prefer


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def nice_of(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def test_a_child_goes_before_others_or_it_is_said_that_it_does_not(child: int) -> None:
    before = nice_of(child)
    given = prefer(child)
    assert nice_of(child) == (NICE if given else before)
    group = Path(f"/proc/{child}/autogroup")
    if given and group.exists() and (told := group.read_text()):
        assert told.endswith(f"nice {GROUP_NICE}\n")


def test_what_is_not_allowed_or_gone_is_no_error(
    child: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*words: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    assert not prefer(child)
    monkeypatch.undo()
    assert not prefer(2**22 + 1)
    follow(2**22 + 1)
    follow()

"""Precedence for a child. Not everybody may give any: root may, unless a container forbids it."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusup.conf.precedence import BEHIND, GROUP_NICE, NICE, follow, prefer, step_back


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


@pytest.mark.parametrize(("own", "then"), [(NICE, NICE + BEHIND), (-3, 0), (0, 0), (7, 7)])
def test_a_thread_steps_back_behind_its_process_s_others_but_not_behind_all(
    monkeypatch: pytest.MonkeyPatch, own: int, then: int
) -> None:
    values = {threading.get_native_id(): own}
    monkeypatch.setattr(os, "getpriority", lambda which, thread: values[thread])
    monkeypatch.setattr(os, "setpriority", lambda which, thread, to: values.update({thread: to}))
    step_back()
    assert values == {threading.get_native_id(): then}


def test_only_the_thread_that_asks_steps_back() -> None:
    before = nice_of(threading.get_native_id())
    seen: list[int] = []

    def back() -> None:
        step_back()
        seen.append(nice_of(threading.get_native_id()))

    thread = threading.Thread(target=back)
    thread.start()
    thread.join()
    assert seen == [before if before >= 0 else min(0, before + BEHIND)]
    assert nice_of(threading.get_native_id()) == before

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpusup.supervisor import reexec
from gpusup.supervisor.reexec import ReexecError, descriptors, hand_over, pick_up

PROGRAM = """
import os, signal, sys
from gpusup.supervisor.reexec import pick_up, hand_over
state = pick_up()
if state is None:
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        signal.pause()
    hand_over({"pid": os.getpid(), "child": child, "n": {"link_fd": r, "unread": b"\\xff"},
               "workers": [{"output_fd": w}], "argument": sys.argv[1]})
assert state["pid"] == os.getpid(), "the same process"
assert state["argument"] == sys.argv[1], "the same command line"
r, w = state["n"]["link_fd"], state["workers"][0]["output_fd"]
assert not os.get_inheritable(r) and not os.get_inheritable(w)
os.write(w, b"through"); assert os.read(r, 10) == b"through"
assert "GPUSUP_REEXEC_FD" not in os.environ
os.kill(state["child"], 0)
fd = os.pidfd_open(state["child"])
os.kill(state["child"], 9)
assert os.waitid(os.P_PIDFD, fd, os.WEXITED).si_status == 9, "still our child"
extra = [f for f in os.listdir("/proc/self/fd") if int(f) > 2 and int(f) not in (r, w, fd)]
assert len(extra) <= 1, extra
print("went on")
"""


def test_a_program_goes_on_with_its_state_its_children_and_its_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(path), "an argument"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "went on\n", done.stderr


def test_an_ordinary_start_has_nothing_to_pick_up() -> None:
    assert pick_up() is None


def test_a_program_that_is_not_there_leaves_everything_as_it_was() -> None:
    read_fd, write_fd = os.pipe()
    gc.collect()  # what earlier tests left is not to be collected in between
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ReexecError, match="cannot start /no/such: No such file"):
        hand_over({"a_fd": read_fd}, ["/no/such"])
    assert not os.get_inheritable(read_fd)
    assert set(os.listdir("/proc/self/fd")) == before
    os.close(read_fd)
    os.close(write_fd)


def test_state_of_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    fd = os.memfd_create("x")
    os.write(fd, msgspec.msgpack.encode({"schema": reexec.SCHEMA + 1, "state": {}}))
    monkeypatch.setenv("GPUSUP_REEXEC_FD", str(fd))
    with pytest.raises(
        ReexecError, match=f"has schema {reexec.SCHEMA + 1}, this version reads {reexec.SCHEMA}"
    ):
        pick_up()


def test_descriptors_are_found_however_deep() -> None:
    assert sorted(descriptors({"a_fd": 3, "b": [{"c_fd": 4, "pid": 9}], "d_fd": -1})) == [3, 4]

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusup.worker import wire

#: What a worker may hold. Sockets: control, its own listener, the two ends of the signals' pair.
SOCKETS = 4
OTHERS = ("/dev/null", "pipe:", "/memfd:gpusup-progress-", "anon_inode:")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descriptors(pid: int) -> list[str]:
    folder = Path(f"/proc/{pid}/fd")
    return [os.readlink(folder / name) for name in os.listdir(folder)]


def test_a_worker_forked_by_the_zygote_is_the_supervisors_child_and_answers(house: Any) -> None:
    worker = house.ready()
    assert parent_of(worker.pid) == os.getpid()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (wire.Part("x", b"hello"),))]))
    answer = proxy.receive().answers[0]
    assert (answer.id, answer.status, answer.parts[0].data) == (1, "ok", b"hello")
    proxy.close()


def test_the_zygote_says_what_it_is(zygote: Any) -> None:
    assert zygote.ready.pid == zygote.process.pid
    assert zygote.ready.torch
    title = Path(f"/proc/{zygote.process.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    assert title == f"gpusup: zygote {zygote.ready.python}"
    assert len(os.listdir(f"/proc/{zygote.process.pid}/task")) == 1


def test_a_dead_zygote_kills_nobody(house: Any, extra_zygote: Callable[..., Any]) -> None:
    house.zygote = extra_zygote()
    worker = house.ready()
    os.kill(house.zygote.process.pid, signal.SIGKILL)
    house.zygote.process.wait()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, ())]))
    assert proxy.receive().answers[0].status == "ok"
    proxy.close()


def test_a_zygote_whose_supervisor_hangs_up_leaves_with_0(extra_zygote: Callable[..., Any]) -> None:
    zygote = extra_zygote()
    zygote.close()
    assert zygote.process.returncode == 0


def test_a_worker_holds_no_descriptor_but_its_own(house: Any) -> None:
    first = house.ready()
    second = house.ready()
    for worker in (first, second):
        links = [os.readlink(f"/proc/{worker.pid}/fd/{fd}") for fd in (0, 1, 2)]
        assert links[0] == "/dev/null"
        assert links[1] == links[2]
        assert links[1].startswith("pipe:")
        held = descriptors(worker.pid)
        sockets = [link for link in held if link.startswith("socket:")]
        assert len(sockets) == SOCKETS, held
        assert all(link.startswith(OTHERS) for link in held if link not in sockets), held


def test_a_big_spec_arrives_whole(house: Any) -> None:
    worker = house.ready(settings={"labels": ["x" * 100] * 3000})
    assert worker.pid


def test_spawns_sent_at_once_are_answered_in_order(house: Any) -> None:
    spawn = wire.Spawn(1, b"not a spec")
    out, into = os.pipe()
    page = os.memfd_create("page")
    peer = house.zygote.peer
    for serial in range(1, 6):
        peer.send(wire.Spawn(serial, spawn.spec), [page, into])
    answers = [peer.receive() for _ in range(5)]
    assert [a.serial for a in answers] == [1, 2, 3, 4, 5]
    os.close(into)
    for answer in answers:
        assert os.waitstatus_to_exitcode(os.waitpid(answer.pid, 0)[1]) == wire.EXIT_CONFIG
    assert b"cannot read the worker's spec" in os.read(out, 65536)
    os.close(out)
    os.close(page)


def test_a_spawn_without_descriptors_is_refused(zygote: Any) -> None:
    answer = zygote.spawn(b"", [])
    assert isinstance(answer, wire.SpawnRefused)
    assert answer.text == "0 descriptors came with the request, 2 are needed"


def test_a_zygote_with_a_second_thread_refuses_to_fork(
    house: Any, extra_zygote: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spoiler.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    zygote = extra_zygote("--preload", "spoiler")
    page = os.memfd_create("page")
    answer = zygote.spawn(wire.encode(house.spec()), [page, page])
    os.close(page)
    assert isinstance(answer, wire.SpawnRefused)
    assert "2 threads instead of 1" in answer.text


def test_a_module_that_cannot_be_preloaded_is_told_and_costs_nothing_else(
    house: Any, extra_zygote: Callable[..., Any]
) -> None:
    house.zygote = extra_zygote("--preload", "no_such_module")
    assert any("no_such_module" in problem for problem in house.zygote.ready.problems)
    assert house.ready().pid


def test_workers_get_their_threads_back_and_randomness_of_their_own(house: Any) -> None:
    said = set()
    for _ in range(2):
        worker = house.ready(config={"torch_threads": 2})
        proxy = worker.connect()
        proxy.send(wire.Work([wire.Item(1, (), params={"do": "torch"})]))
        threads, number = proxy.receive().answers[0].text.split()
        assert threads == "2"
        said.add(number)
        proxy.close()
    assert len(said) == 2

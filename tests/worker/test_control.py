from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

from gpusup.worker import wire
from gpusup.worker.control import ControlLink, report_of
from gpusup.worker.handlers import import_attribute
from gpusup.worker.streams import Loop

FakeEngine = import_attribute(f"{Path(__file__).parent / 'fakes.py'}:FakeEngine")


def test_a_ping_is_answered_while_the_main_thread_computes(house: Any, wait: Any) -> None:
    worker = house.ready()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (), params={"do": "hang"})]))
    wait(lambda: worker.progress.read().batches_started == 1)
    worker.control.send(wire.Ping(42))
    pong = worker.control.receive()
    assert (pong.serial, pong.memory.allocated) == (42, 1)
    proxy.close()


def test_a_ping_is_answered_while_the_model_loads(house: Any) -> None:
    worker = house.start(settings={"fault": "load hangs"})
    worker.control.until(wire.Loading)
    worker.control.send(wire.Ping(1))
    assert worker.control.receive().serial == 1


def test_drain_trim_and_report_reach_the_engine(house: Any) -> None:
    worker = house.ready()
    worker.control.send(wire.Trim())
    worker.control.send(wire.AskReport("memory_summary"))
    assert worker.control.receive() == wire.Report("memory_summary", "report of memory_summary")
    worker.control.send(wire.Drain())
    assert worker.control.receive() == wire.Drained()


def test_a_frame_that_cannot_be_read_ends_the_worker(house: Any) -> None:
    worker = house.ready()
    worker.control.sock.sendall(b"\0\0\0\1\xc1")
    assert worker.wait() == 1


def test_before_there_is_an_engine_pings_are_answered_and_a_drain_is_kept(
    house: Any, progress_writer: Any
) -> None:
    loop = Loop()
    ours, theirs = socket.socketpair()
    link = ControlLink(loop, theirs)
    peer_class: Any = type(house.zygote.peer)
    supervisor = peer_class(ours, wire.decode_from_worker_control)
    link.on_frame(wire.encode(wire.Ping(3)))
    link.on_frame(wire.encode(wire.Drain()))
    link.on_frame(wire.encode(wire.AskReport("memory_summary")))
    assert supervisor.receive().serial == 3
    assert isinstance(supervisor.receive(), wire.Report)
    engine = FakeEngine(house.spec(), progress_writer, print)
    link.attach(engine, engine.load(print, lambda: None))
    assert isinstance(supervisor.receive(), wire.WorkerReady)
    assert supervisor.receive() == wire.Drained()
    ours.close()
    theirs.close()


def test_a_report_that_fails_says_so() -> None:
    class Broken:
        def report(self, kind: str) -> str:
            raise RuntimeError("no allocator")

    engine: Any = Broken()
    assert report_of(engine, "memory_summary") == (
        "cannot report memory_summary: RuntimeError: no allocator"
    )


def test_a_supervisor_that_does_not_read_blocks_nobody(house: Any) -> None:
    ours, theirs = socket.socketpair()
    link = ControlLink(Loop(), theirs)
    done = threading.Event()

    def talk() -> None:
        for _ in range(200):
            link.tell(wire.Report("memory_summary", "x" * 10_000))
        done.set()

    threading.Thread(target=talk, daemon=True).start()
    assert done.wait(20)
    ours.close()
    theirs.close()

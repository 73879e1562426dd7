from __future__ import annotations

import mmap
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusup.worker import data, progress, streams, wire
from gpusup.worker.frame import MAX_FRAME_BYTES, FrameDecoder, pack
from gpusup.worker.handlers import import_attribute
from gpusup.worker.streams import Loop

FakeEngine = import_attribute(f"{Path(__file__).parent / 'fakes.py'}:FakeEngine")
LOAD = wire.Load(0, 0, 32, 0.0)


class Served:
    """A data server of this process, with its loop in a thread and the fake engine in another."""

    def __init__(self, house: Any, writer: progress.Writer) -> None:
        self.spec = house.spec()
        self.engine = FakeEngine(self.spec, writer, print)
        self.loop = Loop()
        self.server = data.DataServer(self.loop, self.spec, self.engine, writer)
        self.engine.on_relief = self.server.push_load
        self.engine.reply_all = self.server.reply_all
        self.server.listen()
        self.stopped = threading.Event()
        threading.Thread(target=self.loop.run, daemon=True).start()
        threading.Thread(target=self.engine.run, daemon=True).start()

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """The result of `call` in the loop's thread, after all that is queued there now."""
        done = threading.Event()
        result: list[Any] = []

        def queued() -> None:
            result.append(call())
            done.set()

        self.loop.call_soon(queued)
        assert done.wait(20)
        return result[0]

    def connections(self) -> list[data.Connection]:
        connections: list[data.Connection] = self.on_loop(
            lambda: list(self.server._connections.values())
        )
        return connections


@pytest.fixture
def served(house: Any, progress_writer: progress.Writer) -> Iterator[Served]:
    served = Served(house, progress_writer)
    yield served
    served.engine.stop()
    for connection in served.connections():
        served.on_loop(connection.close)


@pytest.fixture
def connect(served: Served, house: Any) -> Iterator[Callable[..., Any]]:
    """A proxy that has not said hello yet."""
    made = []

    def make(hello: bool = True, arena: int = 0, arena_bytes: int = 0) -> Any:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(served.spec.data_path)
        peer_class: Any = type(house.zygote.peer)
        peer = peer_class(sock, wire.decode_from_worker)
        made.append(peer)
        if hello:
            message = wire.DataHello("proxy 0", served.spec.generation, arena_bytes)
            peer.send(message, [arena] if arena else [])
            peer.welcome = peer.receive()
        return peer

    yield make
    for peer in made:
        peer.close()


def item(number: int, *parts: bytes | wire.Block, **params: Any) -> wire.Item:
    return wire.Item(number, tuple(wire.Part("x", p) for p in parts), params=params)


def test_a_proxy_is_welcomed_with_the_progress_page(served: Served, connect: Any) -> None:
    proxy = connect()
    assert proxy.welcome == wire.DataWelcome(1, "cpu0", served.spec.generation, "echo", "1", LOAD)
    served.engine.progress.start(1.0, [(1, 77)])
    reader = progress.Reader(os.dup(proxy.descriptors[0]))
    assert reader.executing(1) == frozenset({77})
    reader.close()


def test_only_its_owner_may_connect(served: Served) -> None:
    assert stat.S_IMODE(os.stat(served.spec.data_path).st_mode) == 0o600


def test_many_items_of_one_frame_come_back_in_one_frame(served: Served, connect: Any) -> None:
    proxy = connect()
    proxy.send(wire.Work([item(n, b"%d" % n) for n in range(1, 17)]))
    answers = proxy.receive()
    assert [a.id for a in answers.answers] == list(range(1, 17))
    assert [a.parts[0].data for a in answers.answers] == [b"%d" % n for n in range(1, 17)]
    assert answers.load == LOAD


def test_work_that_comes_with_the_hello_in_one_packet_is_done(served: Served, connect: Any) -> None:
    proxy = connect(hello=False)
    hello = wire.DataHello("proxy 0", served.spec.generation)
    both = [pack(wire.encode(m)) for m in (hello, wire.Work([item(1, b"a")]))]
    proxy.sock.sendall(b"".join(both))
    assert isinstance(proxy.receive(), wire.DataWelcome)
    assert proxy.receive().answers[0].status == "ok"


def test_a_block_is_read_from_the_arena(served: Served, connect: Any) -> None:
    arena = os.memfd_create("arena")
    os.ftruncate(arena, 2**20)
    view = mmap.mmap(arena, 2**20)
    view[1000:1005] = b"hello"
    proxy = connect(arena=arena, arena_bytes=2**20)
    os.close(arena)
    proxy.send(wire.Work([item(1, wire.Block(1000, 5))]))
    assert proxy.receive().answers[0].parts[0].data == b"hello"
    assert len(served.engine.arena) == 2**20


def test_the_arena_is_unmapped_once_nobody_looks_into_it(served: Served, connect: Any) -> None:
    def maps() -> str:
        return Path("/proc/self/maps").read_text()

    arena = os.memfd_create("arena-of-this-test")
    os.ftruncate(arena, 4096)
    proxy = connect(arena=arena, arena_bytes=4096)
    os.close(arena)
    assert "arena-of-this-test" in maps()
    served.on_loop(lambda: None)  # the welcome goes out before the engine is told
    kept = served.engine.arena[10:20]
    proxy.sock.close()
    assert served.engine.dropped.wait(20)
    served.on_loop(lambda: None)
    assert bytes(kept) == bytes(10)  # still there for those who hold it
    kept.release()
    assert "arena-of-this-test" not in maps()


@pytest.mark.parametrize("announced", [8192, -1])
def test_an_arena_that_is_not_what_was_announced_is_refused(
    served: Served, connect: Any, announced: int
) -> None:
    arena = os.memfd_create("arena")
    os.ftruncate(arena, 4096)
    proxy = connect(hello=False)
    proxy.send(wire.DataHello("proxy 0", served.spec.generation, announced), [arena])
    assert proxy.ended()
    os.close(arena)


def test_an_arena_without_its_descriptor_is_refused(served: Served, connect: Any) -> None:
    proxy = connect(hello=False)
    proxy.send(wire.DataHello("proxy 0", served.spec.generation, 4096))
    assert proxy.ended()


def test_who_means_another_generation_is_hung_up_on(served: Served, connect: Any) -> None:
    proxy = connect(hello=False)
    proxy.send(wire.DataHello("proxy 0", served.spec.generation + 1))
    assert proxy.ended()


def frame_of(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize(
    "junk",
    [
        frame_of(b"\xc1"),
        frame_of(b"\x81\xa1t\xa4nope"),
        frame_of(b"\x91" * 100_000),
        frame_of(b""),
        struct.pack("!I", MAX_FRAME_BYTES + 1),
        frame_of(wire.encode(wire.DataHello("again", 1))),
    ],
    ids=["no msgpack", "unknown tag", "nested", "empty", "too large", "second hello"],
)
def test_a_bad_frame_costs_only_its_own_connection(
    served: Served, connect: Any, junk: bytes
) -> None:
    good, bad = connect(), connect()
    bad.sock.sendall(junk)
    assert bad.ended()
    good.send(wire.Work([item(1, b"a")]))
    assert good.receive().answers[0].status == "ok"


def test_work_before_the_hello_is_refused(served: Served, connect: Any) -> None:
    proxy = connect(hello=False)
    proxy.send(wire.Work([item(1, b"a")]))
    assert proxy.ended()


def test_a_silent_stranger_is_not_kept(served: Served, connect: Any) -> None:
    stranger = connect(hello=False)
    greeted = connect()
    now = time.monotonic() + data.HELLO_LIMIT_S + 1
    served.on_loop(lambda: served.server._tick(now))
    assert stranger.ended()
    greeted.send(wire.Work([item(1, b"a")]))
    assert greeted.receive().answers[0].status == "ok"


def test_an_item_without_rows_is_invalid(served: Served, connect: Any) -> None:
    proxy = connect()
    proxy.send(wire.Work([wire.Item(1, (), rows=0), wire.Item(2, (), rows=-5)]))
    assert [(a.id, a.status) for a in proxy.receive().answers] == [(1, "invalid"), (2, "invalid")]


def test_an_engine_that_chokes_on_work_answers_it_as_failed(served: Served, connect: Any) -> None:
    proxy = connect()
    proxy.send(wire.Work([item(1, b"a", do="explode"), item(2, b"b")]))
    assert [a.status for a in proxy.receive().answers] == ["failed", "failed"]
    proxy.send(wire.Work([item(3, b"a")]))
    assert proxy.receive().answers[0].status == "ok"


def test_cancel_credit_and_the_end_reach_the_engine(served: Served, connect: Any) -> None:
    proxy = connect()
    proxy.send(wire.Cancel([1, 2]))
    proxy.send(wire.Credit(3, 4))
    proxy.sock.close()
    assert served.engine.dropped.wait(20)
    assert served.engine.calls == [("cancel", [1, 2]), ("credit", (3, 4)), ("drop", 1)]


def test_relief_is_told_without_an_answer_and_once(served: Served, connect: Any) -> None:
    proxy = connect()
    served.on_loop(lambda: [served.engine.on_relief() for _ in range(5)])
    assert proxy.receive() == wire.Answers([], LOAD)
    proxy.send(wire.Work([item(1, b"a")]))
    assert proxy.receive().answers[0].id == 1


def test_big_answers_arrive_whole(served: Served, connect: Any) -> None:
    proxy = connect()
    size = 9 * 2**20
    proxy.send(wire.Work([item(n, do="big", bytes=size) for n in range(1, 10)]))
    answers: list[wire.Answer] = []
    while len(answers) < 9:
        answers += proxy.receive().answers
    assert [a.id for a in answers] == list(range(1, 10))
    assert all(a.parts[0].data == bytes(size) for a in answers)


def test_a_proxy_that_reads_nothing_blocks_nobody_and_is_hung_up_on(
    served: Served, connect: Any, wait: Any
) -> None:
    deaf, good = connect(), connect()
    stuck = served.connections()[0]
    deaf.send(wire.Work([item(n, do="big", bytes=9 * 2**20) for n in range(9)]))
    wait(lambda: stuck._unsent_bytes > streams.UNSENT_LIMIT_BYTES)
    good.send(wire.Work([item(1, b"a")]))
    assert good.receive().answers[0].status == "ok"
    now = time.monotonic() + streams.STALL_S + 1
    served.on_loop(lambda: served.server._tick(now))
    assert stuck not in served.connections()
    assert len(served.connections()) == 1


def test_a_proxy_that_does_not_read_is_not_listened_to_until_it_does(
    served: Served, connect: Any, wait: Any
) -> None:
    slow, good = connect(), connect()
    paused = served.connections()[0]
    slow.send(wire.Work([item(n, do="big", bytes=9 * 2**20) for n in range(3)]))
    wait(lambda: paused._unsent_bytes > streams.PAUSE_BYTES)
    before = paused._unsent_bytes
    slow.send(wire.Work([item(3, do="big", bytes=9 * 2**20)]))
    for number in range(20):
        good.send(wire.Work([item(number, b"a")]))
        assert good.receive().answers[0].status == "ok"
    assert paused._unsent_bytes == before
    ids: list[int] = []
    while len(ids) < 4:
        ids += [a.id for a in slow.receive().answers]
    assert ids == [0, 1, 2, 3]


def decoded(frames: list[bytes]) -> list[wire.Answers]:
    decoder = FrameDecoder()
    return [wire.decode_from_worker(f) for data in frames for f in decoder.feed(data)]  # type: ignore[misc]


def test_an_answer_that_cannot_be_sent_is_replaced_by_one_that_says_so() -> None:
    huge = wire.Answer(1, "ok", (wire.Part("x", bytes(MAX_FRAME_BYTES)),))
    odd = wire.Answer(2, "failed", text="\ud800")
    fine = wire.Answer(3, "ok")
    answers = [a for f in decoded(data.frames([huge, odd, fine], LOAD)) for a in f.answers]
    assert [(a.id, a.status) for a in answers] == [(1, "failed"), (2, "failed"), (3, "ok")]
    assert f"{MAX_FRAME_BYTES} are allowed" in answers[0].text


def test_answers_to_one_proxy_keep_their_order_whatever_the_thread(
    served: Served, connect: Any
) -> None:
    proxy = connect()
    connection = served.connections()[0]
    for number in range(0, 1000, 2):
        connection.reply(wire.Answer(number, "ok"))
        connection.flush([wire.Answer(number + 1, "ok")])
    answers: list[int] = []
    while len(answers) < 1000:
        answers += [a.id for a in proxy.receive().answers]
    assert answers == list(range(1000))


def test_a_stale_socket_in_the_way_is_replaced(house: Any, progress_writer: Any) -> None:
    spec = house.spec()
    old = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old.bind(spec.data_path)
    old.close()
    loop = Loop()
    engine = FakeEngine(spec, progress_writer, print)
    server = data.DataServer(loop, spec, engine, progress_writer)
    server.listen()
    assert select.select([], [], [], 0) == ([], [], [])
    assert server._listener is not None
    server._listener.close()

from __future__ import annotations

import asyncio
import os
import threading

from gpusup.supervisor.output import LINE_LIMIT, LineCutter, OutputReader, SlotLog


def cut(*pieces: bytes) -> list[str]:
    log = SlotLog(1000)
    cutter = LineCutter(log)
    for piece in pieces:
        cutter.feed(piece, 0.0)
    cutter.end()
    return log.last()


def test_lines_are_put_together_from_pieces() -> None:
    assert cut(b"one\ntw", b"o\n", b"\nend") == ["one", "two", "", "end"]


def test_binary_junk_is_replaced_and_can_not_paint_the_terminal() -> None:
    (line,) = cut(b"\xff\x00\x1b[2J ok\r\n")
    assert line == "\ufffd\ufffd\ufffd[2J ok"


def test_an_endless_line_is_cut_once_and_costs_no_memory() -> None:
    lines = cut(*[b"x" * 10_000] * 50, b"\nnext\n")
    assert lines == ["x" * LINE_LIMIT + " [cut]", "next"]


def test_a_flood_is_left_out_but_for_its_end() -> None:
    log = SlotLog(100_000)
    cutter = LineCutter(log)
    for _ in range(200):
        cutter.feed(b"spam spam spam\n" * 4000, 0.0)
    cutter.feed(b"ValueError: the reason\n", 0.5)
    cutter.end()
    lines = log.last()
    assert lines[-1] == "ValueError: the reason"
    assert any("bytes of output left out" in line for line in lines)
    assert len(lines) < 90_000


def test_only_so_many_lines_a_second_go_to_the_service_log() -> None:
    told: list[str] = []
    log = SlotLog(10, told.append)
    cutter = LineCutter(log)
    cutter.feed(b"x\n" * 1000, 0.0)
    assert len(told) == 201
    assert "gpusupctl logs" in told[-1]
    cutter.feed(b"later\n", 1.5)
    assert told[-1] == "later"


def test_the_last_lines_are_kept_across_generations() -> None:
    log = SlotLog(3)
    for line in "abcde":
        log.add(line)
    assert log.last() == ["c", "d", "e"]
    assert log.last(1) == ["e"]
    assert log.last(0) == []
    assert log.since(4) == ["e"]
    assert log.since(0) == ["c", "d", "e"]
    assert log.since(5) == []


async def test_a_writer_of_megabytes_never_waits_for_ever() -> None:
    read_fd, write_fd = os.pipe()
    log = SlotLog(200)
    reader = OutputReader(read_fd, log)

    def write() -> None:
        with os.fdopen(write_fd, "wb") as file:
            file.write(os.urandom(5_000_000).replace(b"\n", b"."))
            file.write(b"\nlast words")

    writer = threading.Thread(target=write)
    writer.start()
    async with asyncio.timeout(20):
        await asyncio.to_thread(writer.join)
    reader.finish()
    assert log.last()[-1] == "last words"


async def test_what_still_holds_the_pipe_open_is_not_waited_for() -> None:
    read_fd, write_fd = os.pipe()
    log = SlotLog(200)
    reader = OutputReader(read_fd, log)
    os.write(write_fd, b"said before death\n")
    reader.finish()
    assert log.last() == ["said before death"]
    os.close(write_fd)


async def test_output_that_a_worker_has_closed_can_be_handed_on() -> None:
    read_fd, write_fd = os.pipe()
    log = SlotLog(50)
    reader = OutputReader(read_fd, log)
    os.write(write_fd, b"the last\n")
    os.close(write_fd)
    assert reader._readable()
    assert not reader._readable()  # its end
    again = OutputReader(reader.export(), log)
    assert not again._readable()
    assert log.last() == ["the last"]


async def test_the_end_of_a_flood_is_told_although_nothing_follows_it() -> None:
    told = asyncio.Event()
    log = SlotLog(50, lambda line: told.set() if "left out" in line else None)
    read_fd, write_fd = os.pipe()
    reader = OutputReader(read_fd, log)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, lambda: [os.write(write_fd, b"x" * 65536) for _ in range(48)])
    await asyncio.wait_for(told.wait(), 10)
    reader.close()
    os.close(write_fd)

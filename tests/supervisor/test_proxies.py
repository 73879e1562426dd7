from __future__ import annotations

import asyncio
import errno
import functools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpusup.supervisor import proxies as px
from gpusup.supervisor import wire
from gpusup.supervisor.family import Family, read_process
from gpusup.supervisor.proxies import Proxies, how_many
from gpusup.supervisor.wire import DeviceUpdate, Snapshot

from .processes import Told, gone

FAKE = str(Path(__file__).parent / "fake_proxy.py")


class House:
    def __init__(self, count: int = 1, how: str = "") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard, self.gone, self.notes = Told(), Told(), Told()
        self.count = count
        self.proxies = self.make(how)

    def make(self, how: str = "") -> Proxies:
        return Proxies(
            self.count, self.listener, how.encode(), Family(), self.heard, self.gone,
            command=(sys.executable, FAKE), on_note=self.notes,
        )  # fmt: skip

    async def hears(self, name: str, what: str) -> None:
        """Until that proxy has said that it heard such a message (or said one itself)."""
        while True:
            who, message = await self.heard.next()
            if who == name and what in (type(message).__name__, self.repeated(message)):
                return

    @staticmethod
    def repeated(message: Any) -> str:
        return message.fields.get("what", message.kind) if isinstance(message, wire.Notice) else ""

    def pid(self, name: str) -> int:
        return next(int(row["pid"]) for row in self.proxies.state() if row["name"] == name)


@pytest.fixture
async def house() -> AsyncIterator[House]:
    built = House()
    yield built
    built.proxies.kill()
    for row in built.proxies.state():
        if row["pid"]:
            await gone(row["pid"])
    built.listener.close()


def snapshot(serial: int) -> Snapshot:
    return Snapshot(serial=serial, routes=(), models=(), devices=(), ready=True, draining=False)


async def test_a_proxy_is_told_the_world_when_it_starts_and_when_it_changes(house: House) -> None:
    house.proxies.broadcast(snapshot(1))
    house.proxies.start()
    await house.proxies.listening()
    await house.hears("proxy0", "Snapshot")
    house.proxies.broadcast(DeviceUpdate(()))
    await house.hears("proxy0", "DeviceUpdate")
    assert house.proxies.send("proxy0", wire.Reread())
    await house.hears("proxy0", "Reread")
    assert not house.proxies.send("proxy9", wire.Reread())
    assert house.proxies.state()[0]["state"] == "serving"


async def test_a_proxy_that_dies_is_replaced_at_once_and_told_the_world(house: House) -> None:
    house.proxies.broadcast(snapshot(1))
    house.proxies.start()
    await house.proxies.listening()
    first = house.pid("proxy0")
    os.kill(first, signal.SIGKILL)
    assert await house.gone.next() == ("proxy0",)
    assert "proxy0 ended (SIGKILL)" in str(await house.notes.next())
    while house.pid("proxy0") in (0, first):
        await house.heard.next()
    await house.hears("proxy0", "Snapshot")
    assert house.proxies.state()[0]["restarts"] == 1


async def test_a_proxy_without_a_word_is_replaced_and_a_stop_of_our_own_is_not_its_fault(
    house: House,
) -> None:
    house.proxies.start()
    await house.proxies.listening()
    first = house.pid("proxy0")
    look = functools.partial(house.proxies.look, limit_s=1.0, start_limit_s=60.0)
    look(1000.0)
    look(2000.0)  # we slept in between
    for tick in range(4):
        look(2000.1 + tick / 10)
    house.proxies.broadcast(snapshot(1))
    await house.hears("proxy0", "Snapshot")  # a word of it: the count begins anew
    for tick in range(9):
        look(2001.0 + tick / 10)
    assert house.notes.empty
    for tick in range(3):
        look(2002.0 + tick / 10)
    assert "proxy0 hangs: not a word for 1 s" in str(await house.notes.next())
    assert await house.gone.next() == ("proxy0",)
    while house.pid("proxy0") in (0, first):
        await house.heard.next()


async def test_one_that_never_listens_has_the_time_of_a_start() -> None:
    house = House(how="mute")
    house.proxies.start()
    for tick in range(12):
        house.proxies.look(1000.0 + tick / 10, 0.1, 1.5)
    assert house.notes.empty
    for tick in range(12, 20):
        house.proxies.look(1000.0 + tick / 10, 0.1, 1.5)
    assert "proxy0 hangs: not a word for 1.5 s" in str(await house.notes.next())
    assert await house.gone.next() == ("proxy0",)
    house.proxies.kill()
    house.listener.close()


async def test_a_proxy_that_can_not_start_is_tried_less_and_less_often() -> None:
    house = House(how="dies")
    house.proxies.start()
    for _ in range(3):
        assert await house.gone.next() == ("proxy0",)
    assert house.proxies._waits["proxy0"] == pytest.approx(0.8)
    house.proxies.kill()
    house.listener.close()


async def test_stop_lets_them_finish_and_hears_their_last_words(house: House) -> None:
    house.proxies.start()
    await house.proxies.listening()
    await house.proxies.stop(10.0)
    await house.hears("proxy0", "last")
    assert await house.gone.next() == ("proxy0",)
    assert house.notes.empty
    assert house.proxies.state()[0]["state"] == "down"


async def test_one_that_will_not_stop_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(px, "_AFTER_STOP_S", 0.1)
    house = House(how="stays")
    house.proxies.start()
    await house.proxies.listening()
    await house.proxies.stop(0.1)
    assert "proxy0 did not stop within 0.2 s" in str(await house.notes.next())
    house.listener.close()


async def test_a_replacement_listens_before_the_old_one_stops(house: House) -> None:
    house.proxies.start()
    await house.proxies.listening()
    first = house.pid("proxy0")
    assert await house.proxies.restart("proxy0", 10.0) == ""
    await house.hears("proxy0-old", "StopProxy")
    assert await house.gone.next() == ("proxy0-old",)
    assert house.pid("proxy0") not in (0, first)
    assert [row["name"] for row in house.proxies.state()] == ["proxy0"]
    assert await house.proxies.restart("proxy7", 1.0) == "there is no proxy7"


async def test_if_the_replacement_can_not_listen_the_old_one_stays(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(px, "_NEW_ONE_S", 0.5)
    house.proxies.start()
    await house.proxies.listening()
    first = house.pid("proxy0")
    house.proxies.config = b"dies"
    assert "did not listen within" in await house.proxies.restart("proxy0", 10.0)
    assert house.pid("proxy0") == first
    assert house.proxies.state()[0]["state"] == "serving"
    house.proxies.send("proxy0", wire.Reread())
    await house.hears("proxy0", "Reread")
    # Nothing is left of what it reported under its other name meanwhile.
    while (await house.gone.next()) != ("proxy0-old",):
        pass


@pytest.mark.parametrize("old", ["dies meanwhile", "none"])
async def test_if_the_replacement_can_not_listen_and_the_old_one_is_gone_a_third_comes(
    house: House, monkeypatch: pytest.MonkeyPatch, old: str
) -> None:
    monkeypatch.setattr(px, "_NEW_ONE_S", 0.5)
    if old != "none":
        house.proxies.start()
        await house.proxies.listening()
    house.proxies.config = b"mute"
    replacing = asyncio.create_task(house.proxies.restart("proxy0", 10.0))
    if old != "none":
        await asyncio.sleep(0)
        os.kill(house.pid("proxy0-old"), signal.SIGKILL)
    assert "did not listen within" in await replacing
    house.proxies.config = b""
    while house.proxies.state()[0]["state"] != "serving":
        await house.heard.next()


async def test_a_proxy_that_is_just_leaving_can_not_be_replaced(house: House) -> None:
    house.proxies.config = b"stays"
    house.proxies.start()
    await house.proxies.listening()
    assert house.proxies.knows("proxy0")
    replacing = asyncio.create_task(house.proxies.restart("proxy0", 0.1))
    await house.hears("proxy0-old", "StopProxy")
    assert not house.proxies.knows("proxy0-old")
    assert await house.proxies.restart("proxy0-old", 0.1) == "there is no proxy0-old"
    assert await replacing == ""


@pytest.mark.parametrize("where", [(socket, "socketpair"), (px, "memory_file")])
async def test_a_proxy_is_tried_again_when_there_are_descriptors_again(
    house: House, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(*where, none_left)
        house.proxies.start()
    assert await house.notes.next() == ("cannot start proxy0: Too many open files",)
    async with asyncio.timeout(20):
        await house.proxies.listening()


async def test_of_each_name_one_start_is_waited_for_at_most(house: House) -> None:
    house.proxies._again("proxy0")
    first = house.proxies._timers["proxy0"]
    house.proxies._again("proxy0")
    second = house.proxies._timers["proxy0"]
    assert first.cancelled()
    house.proxies.start()
    assert second.cancelled()
    assert not house.proxies._timers


async def test_a_proxy_that_has_hung_up_is_ended_when_the_others_are_handed_over() -> None:
    house = House(2)
    house.proxies.start()
    await house.proxies.listening()
    deaf, other = house.pid("proxy0"), house.pid("proxy1")
    house.proxies._proxies["proxy0"].channel.close()
    exported = house.proxies.export()
    assert [row["name"] for row in exported["proxies"]] == ["proxy1"]
    await gone(deaf)
    house.proxies = house.make()
    house.proxies.restore(exported)
    await house.proxies.listening()
    assert house.pid("proxy0") != deaf
    assert house.pid("proxy1") == other
    await house.proxies.stop(10.0)
    house.listener.close()


async def test_a_proxy_that_does_not_read_piles_up_nothing(house: House) -> None:
    house.proxies.start()
    await house.proxies.listening()
    pid = house.pid("proxy0")
    os.kill(pid, signal.SIGSTOP)
    big = Snapshot(
        serial=1, routes=(), models=(), devices=(), ready=True, draining=False, reason="x" * 50_000
    )
    for _ in range(100):
        house.proxies.broadcast(big)
    assert house.proxies._proxies["proxy0"].channel.backlog < 400_000
    house.proxies.broadcast(snapshot(999))
    os.kill(pid, signal.SIGCONT)
    proxy = house.proxies._proxies["proxy0"]
    while proxy.stale:
        await house.heard.next()
    await house.hears("proxy0", "Snapshot")


async def test_proxies_live_on_when_they_are_handed_over() -> None:
    house = House(2)
    house.proxies.start()
    await house.proxies.listening()
    pids = {house.pid("proxy0"), house.pid("proxy1")}
    exported = house.proxies.export()
    house.proxies = house.make()
    house.proxies.restore(exported)
    await house.proxies.listening()
    assert {house.pid("proxy0"), house.pid("proxy1")} == pids
    house.proxies.broadcast(snapshot(1))
    await house.hears("proxy1", "Snapshot")
    await house.proxies.stop(10.0)
    assert all(read_process(pid) is None for pid in pids)
    house.listener.close()


def test_auto_is_one_on_small_machines_and_at_most_four(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for cores in (1, 2, 4, 8, 16, 128):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        counts.append(how_many("auto"))
    assert counts == [1, 1, 1, 2, 4, 4]
    assert how_many(7) == 7

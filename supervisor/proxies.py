"""The proxy processes: started, kept alive, told what the world looks like, and replaced.

All inherit one listening socket, so while one of them is gone the others take its connections, and
with a single one they wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from . import wire
from .channel import ENDED, Channel
from .family import Family, Watch, clean_env, kill
from .launcher import memory_file
from .wire import DeviceUpdate, FromProxy, Listening, Snapshot, StopProxy, ToProxy

_FIRST_WAIT_S: Final = 0.1
_WAIT_LIMIT_S: Final = 5.0
#: A proxy that lived so long had nothing wrong with it at its start.
_HEALTHY_S: Final = 30.0
#: What a proxy may have unread before tables are left out; the newest one follows later.
_BACKLOG: Final = 256 * 1024
_AFTER_STOP_S: Final = 2.0
_NEW_ONE_S: Final = 30.0
#: Between two looks more does not count as silence.
_LOOK_S: Final = 0.2
_DUMP_S: Final = 0.1

OnMessage = Callable[[str, FromProxy], None]
OnGone = Callable[[str], None]


def how_many(wanted: int | Literal["auto"]) -> int:
    """`auto`: one on small machines, else a quarter of the cores up to four."""
    if wanted != "auto":
        return wanted
    cores = len(os.sched_getaffinity(0))
    return 1 if cores <= 2 else max(1, min(4, cores // 4))


@dataclass(slots=True, eq=False)
class _Proxy:
    """One process."""

    name: str
    pid: int
    channel: Channel
    started: float
    address: str = ""  # where it listens; "" until it does
    leaving: bool = False
    stale: bool = False  # a Snapshot was left out
    silent_s: float = 0.0  # in which we listened
    watch: Watch | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Proxies:
    """`count` proxies, named proxy0, proxy1, ...; while one is being replaced, the leaving one is
    called proxy0-old.

    `on_message(name, message)` for all that they say; `on_gone(name)` once a process has ended.
    """

    def __init__(
        self,
        count: int,
        listener: socket.socket,
        config: bytes,
        family: Family,
        on_message: OnMessage,
        on_gone: OnGone,
        *,
        command: Sequence[str] = (sys.executable, "-m", "gpusup.proxy"),
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`config`: what each proxy reads from its --config-fd. `listener` stays the caller's."""
        self.count = count
        self.config = config  # of the next one started
        self._listener = listener
        self._family = family
        self._on_message = on_message
        self._on_gone = on_gone
        self._command = command
        self._on_note = on_note
        self._loop = asyncio.get_running_loop()
        self._proxies: dict[str, _Proxy] = {}
        self._snapshot: Snapshot | None = None
        self._waits: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of the next start
        self._restarts: dict[str, int] = {}
        self._closed = False
        self._looked = 0.0
        self._all_listening = asyncio.Event()

    # -- their lives -----------------------------------------------------------------------------

    def start(self) -> None:
        for number in range(self.count):
            self._start(f"proxy{number}")

    def _names(self) -> set[str]:
        return {f"proxy{number}" for number in range(self.count)}

    async def listening(self) -> None:
        """Returns when each has said once that it takes connections."""
        await self._all_listening.wait()

    def state(self) -> list[dict[str, Any]]:
        """One row each: name, pid, state, restarts; the missing ones as `down`."""
        rows = []
        for name in sorted(self._names() | set(self._proxies)):
            proxy = self._proxies.get(name)
            state = "down"
            if proxy:
                state = "serving" if proxy.address else "starting"
                state = "leaving" if proxy.leaving else state
            rows.append(
                {
                    "name": name,
                    "pid": proxy.pid if proxy else 0,
                    "state": state,
                    "restarts": self._restarts.get(name, 0),
                    "address": proxy.address if proxy else "",
                }
            )
        return rows

    def knows(self, name: str) -> bool:
        """Whether it can be replaced: one that is just leaving can't."""
        proxy = self._proxies.get(name)
        return not proxy.leaving if proxy else name in self._names()

    async def restart(self, name: str, limit_s: float) -> str:
        """Replace one: the new one listens before the old one stops. Returns "" or what failed.

        With `limit_s` the old one may finish what it has.
        """
        if not self.knows(name):
            return f"there is no {name}"
        old = self._proxies.get(name)
        if old:
            elder = self._proxies.get(f"{name}-old")
            if elder:  # a second replacement ends the first one's wait
                self._kill(elder)
                await elder.gone.wait()
            self._rename(old, f"{name}-old", leaving=True)
        self._start(name)
        if not await self._listens(name):
            failed = self._proxies.get(name)
            if failed:
                failed.leaving = True
                self._kill(failed)
                await failed.gone.wait()
            if old and not old.gone.is_set():
                self._rename(old, name, leaving=False)  # it has never stopped serving
                # What it reported under the other name would stay there for ever.
                self._on_gone(f"{name}-old")
            else:
                self._again(name)  # the one that was killed here is followed by nobody
            return f"the new {name} did not listen within {_NEW_ONE_S:g} s"
        self._restarts[name] = self._restarts.get(name, 0) + 1
        if old:
            self._tell(old, StopProxy(limit_s))
            await self._gone_within(old, limit_s + _AFTER_STOP_S)
        return ""

    def _rename(self, proxy: _Proxy, name: str, *, leaving: bool) -> None:
        if self._proxies.get(proxy.name) is proxy:
            del self._proxies[proxy.name]
        proxy.name, proxy.leaving = name, leaving
        if not proxy.gone.is_set():
            self._proxies[name] = proxy

    async def _listens(self, name: str) -> bool:
        """Whether a proxy of that name, perhaps not the first one, listens in time."""
        until = self._loop.time() + _NEW_ONE_S
        while self._loop.time() < until:
            proxy = self._proxies.get(name)
            if proxy and proxy.address:
                return True
            await asyncio.sleep(0.02)
        return False

    async def stop(self, limit_s: float) -> None:
        """Let all finish what they have; end those that are not through after the limit."""
        self._closed = True
        proxies = list(self._proxies.values())
        for proxy in proxies:
            proxy.leaving = True
            self._tell(proxy, StopProxy(limit_s))
        await asyncio.gather(*(self._gone_within(p, limit_s + _AFTER_STOP_S) for p in proxies))

    def kill(self) -> None:
        """End all at once."""
        self._closed = True
        for proxy in list(self._proxies.values()):
            self._kill(proxy)
            proxy.channel.close()

    def _start(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()
        if self._closed or name in self._proxies:
            return
        try:
            pid, ours = self._spawn(name)
        except OSError as error:
            self._on_note(f"cannot start {name}: {error.strerror}")
            self._again(name)
            return
        self._take(name, pid, ours)

    def _spawn(self, name: str) -> tuple[int, socket.socket]:
        """Its pid and our end of its line. Raises OSError, also where descriptors run out."""
        ours, its = socket.socketpair()
        try:
            with its, open(memory_file("gpusup-proxy-config", self.config), "rb") as config:
                fds = (self._listener.fileno(), its.fileno(), config.fileno())
                argv = [
                    *self._command,
                    "--listen-fd",
                    str(fds[0]),
                    "--link-fd",
                    str(fds[1]),
                    "--config-fd",
                    str(fds[2]),
                    "--name",
                    name,
                ]
                pid = self._family.spawn(argv, env=clean_env(), pass_fds=fds, new_session=True)
        except OSError:
            ours.close()
            raise
        return pid, ours

    def _take(
        self, name: str, pid: int, sock: socket.socket, unread: bytes = b"", unsent: bytes = b""
    ) -> _Proxy:
        channel = Channel(
            sock,
            lambda body: self._hear(proxy, body),
            lambda why: self._cut_off(proxy, why),
            on_drained=lambda: self._drained(proxy),
            unread=unread,
            unsent=unsent,
        )
        proxy = _Proxy(name=name, pid=pid, channel=channel, started=self._loop.time())
        self._proxies[name] = proxy
        self._family.adopt(pid)
        proxy.watch = self._family.watch(pid, lambda code, words: self._ended(proxy, code, words))
        # It waits for this before it takes any request.
        if self._snapshot:
            self._tell(proxy, self._snapshot)
        return proxy

    def _ended(self, proxy: _Proxy, returncode: int, words: str) -> None:
        proxy.channel.read_rest()  # its last counts
        proxy.channel.close()
        proxy.gone.set()
        if self._proxies.get(proxy.name) is proxy:
            del self._proxies[proxy.name]
        self._on_gone(proxy.name)
        if proxy.leaving or self._closed:
            return
        self._on_note(f"{proxy.name} ended ({words or f'exit {returncode}'})")
        self._restarts[proxy.name] = self._restarts.get(proxy.name, 0) + 1
        if self._loop.time() - proxy.started >= _HEALTHY_S:
            self._waits.pop(proxy.name, None)
        if proxy.address and proxy.name not in self._waits:
            self._waits[proxy.name] = _FIRST_WAIT_S
            self._start(proxy.name)  # it had served: clients wait, so at once
        else:
            self._again(proxy.name)

    def _again(self, name: str) -> None:
        wait = self._waits.get(name, _FIRST_WAIT_S)
        self._waits[name] = min(wait * 2, _WAIT_LIMIT_S)
        if timer := self._timers.get(name):
            timer.cancel()
        self._timers[name] = self._loop.call_later(wait, self._start, name)

    async def _gone_within(self, proxy: _Proxy, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await proxy.gone.wait()
        except TimeoutError:
            self._on_note(f"{proxy.name} did not stop within {limit_s:g} s")
            self._kill(proxy)
            await proxy.gone.wait()

    def look(self, now: float, limit_s: float, start_limit_s: float) -> None:
        """Replace those that have said nothing for so long: they hang, and so do their clients.

        Call often. Only time in which we could have heard something counts: after a stop of our
        own nobody is judged by it.
        """
        passed, self._looked = min(now - self._looked, _LOOK_S), now
        for proxy in self._proxies.values():
            proxy.silent_s += passed
            limit = limit_s if proxy.address else start_limit_s
            if proxy.silent_s > limit:
                proxy.silent_s = 0.0
                self._on_note(f"{proxy.name} hangs: not a word for {limit:g} s; it is replaced")
                with suppress(ProcessLookupError):
                    os.kill(proxy.pid, signal.SIGUSR2)  # its stacks go to the log
                self._loop.call_later(_DUMP_S, self._kill, proxy)

    def _kill(self, proxy: _Proxy) -> None:
        if not proxy.gone.is_set():
            kill(proxy.pid)

    # -- talking ---------------------------------------------------------------------------------

    def broadcast(self, message: ToProxy) -> None:
        """To all. Of Snapshots the newest is kept for those that start or lag behind."""
        if isinstance(message, Snapshot):
            self._snapshot = message
        body = wire.encode(message)
        for proxy in self._proxies.values():
            if proxy.channel.backlog <= _BACKLOG or not isinstance(
                message, Snapshot | DeviceUpdate
            ):
                proxy.channel.send(body)
            elif isinstance(message, Snapshot):
                proxy.stale = True

    def send(self, name: str, message: ToProxy) -> bool:
        """To one, e.g. the Reply to its Ask. False if it is gone."""
        proxy = self._proxies.get(name)
        if proxy is None:
            return False
        self._tell(proxy, message)
        return True

    def _tell(self, proxy: _Proxy, message: ToProxy) -> None:
        proxy.channel.send(wire.encode(message))

    def _drained(self, proxy: _Proxy) -> None:
        if proxy.stale and self._snapshot:
            proxy.stale = False
            self._tell(proxy, self._snapshot)

    def _hear(self, proxy: _Proxy, body: bytes) -> None:
        proxy.silent_s = 0.0
        message = wire.decode_from_proxy(body)
        if isinstance(message, Listening):
            proxy.address = message.address
            self._note_listening()
        self._on_message(proxy.name, message)

    def _note_listening(self) -> None:
        serving = sum(bool(p.address) and not p.leaving for p in self._proxies.values())
        if serving >= self.count:
            self._all_listening.set()

    def _cut_off(self, proxy: _Proxy, why: str) -> None:
        # Without its line it serves an old world: it ends by itself, or is ended.
        if why != ENDED:
            self._on_note(f"{proxy.name}: {why}")
        self._loop.call_later(_AFTER_STOP_S, self._kill, proxy)

    # -- upgrade in place ------------------------------------------------------------------------

    def export(self) -> dict[str, Any]:
        """Let go of all proxies; they notice nothing."""
        self._closed = True
        rows = []
        for proxy in self._proxies.values():
            if proxy.watch:
                proxy.watch.cancel()
            if proxy.channel.closed:  # nobody can talk to it any more: `restore` starts another
                self._kill(proxy)
                self._on_gone(proxy.name)
                continue
            rows.append(
                {
                    "name": proxy.name,
                    "pid": proxy.pid,
                    "address": proxy.address,
                    "leaving": proxy.leaving,
                    **proxy.channel.export(),
                }
            )
        return {"proxies": rows, "restarts": self._restarts}

    def restore(self, exported: Mapping[str, Any]) -> None:
        """Go on with them, instead of `start`; what is missing is started."""
        self._restarts.update(exported["restarts"])
        for row in exported["proxies"]:
            proxy = self._take(
                row["name"],
                row["pid"],
                socket.socket(fileno=row["link_fd"]),
                row["unread"],
                row["unsent"],
            )
            proxy.leaving = row["leaving"]
            proxy.address = row["address"]
        self.start()
        self._note_listening()

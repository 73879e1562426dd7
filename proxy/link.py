"""The proxy's end of its line to the supervisor. When the line ends, so does the proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gpusup.supervisor import wire
from gpusup.worker.frame import FrameDecoder, pack

from .errors import SupervisorLost


class Link(asyncio.Protocol):
    """`heard` gets every message but replies to `ask`; `lost` is called once at its end."""

    def __init__(self, heard: Callable[[wire.ToProxy], None], lost: Callable[[], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._frames = FrameDecoder()
        self._transport: asyncio.WriteTransport | None = None
        self._asked: dict[int, asyncio.Future[wire.Reply]] = {}
        self._next_id = 0
        #: Reports are left out while the supervisor does not read: they would only pile up.
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            message = wire.decode_to_proxy(frame)
            if isinstance(message, wire.Reply):
                future = self._asked.pop(message.id, None)
                if future is not None and not future.done():
                    future.set_result(message)
            else:
                self._heard(message)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(SupervisorLost("the supervisor is gone", retry_after_s=1))
        self._asked.clear()
        self._lost()

    def send(self, message: wire.FromProxy) -> None:
        if self._transport is not None:
            self._transport.write(pack(wire.encode(message)))

    def close(self) -> None:
        """What was sent still goes out."""
        if self._transport is not None:
            self._transport.close()

    async def ask(self, method: str, path: str, body: bytes = b"") -> wire.Reply:
        """Raises SupervisorLost when there is no answer within 30 s, or never will be."""
        if self._transport is None:
            raise SupervisorLost("the supervisor is gone", retry_after_s=1)
        self._next_id += 1
        asked = self._next_id
        future: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._asked[asked] = future
        self.send(wire.Ask(asked, method, path, body))
        try:
            async with asyncio.timeout(30.0):
                return await future
        except TimeoutError:
            raise SupervisorLost(f"no answer to {method} {path} in 30 s", retry_after_s=1) from None
        finally:
            self._asked.pop(asked, None)

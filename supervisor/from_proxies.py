"""What proxies say, and what becomes of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from . import wire
from .events import ModelUsed, ModelWanted

if TYPE_CHECKING:
    from .box import Box

log = logging.getLogger("gpusup.supervisor")


class FromProxies:
    def __init__(self, box: Box) -> None:
        self._box = box
        self._asks: set[asyncio.Task[None]] = set()

    def busy(self) -> str:
        """Why an upgrade has to wait, or ""."""
        return "a proxy waits for an answer" if self._asks else ""

    def gone(self, proxy: str) -> None:
        self._box.tallies.proxy_gone(proxy)
        if hasattr(self._box, "fleet"):
            self._box.fleet.books.ledger.leased(proxy, {})

    def handle(self, proxy: str, message: wire.FromProxy) -> None:
        box = self._box
        if isinstance(message, wire.Ask):
            self._answer(proxy, message)
            return
        if isinstance(message, wire.ProxyHello | wire.Listening):
            return
        if isinstance(message, wire.ProxyReport):
            box.tallies.on_report(proxy, message)
        if not hasattr(box, "runtime"):
            return  # nothing is served yet
        match message:
            case wire.ProxyReport():
                box.fleet.books.ledger.leased(proxy, message.leased)
            case wire.InputDied():
                if box.poison.died(message.input_hash, message.sent_at, message.died_at):
                    box.runtime.tell(
                        "poisoned",
                        f"{message.model}: an input was executing at two deaths and is refused "
                        f"from now on (hash {message.input_hash[:16]})",
                        "warning",
                    )
                    box.persist()
                box.publish()
            case wire.InputSurvived():
                if box.poison.survived(message.input_hash):
                    box.publish()
            case wire.WantModel():
                box.runtime.post(ModelWanted(model=message.model))
            case wire.Used():
                box.runtime.post(ModelUsed(models=message.models))
            case wire.Shed():
                box.on_shed(proxy, message)
            case wire.Notice():
                words = " ".join(f"{k}={v}" for k, v in message.fields.items())
                box.runtime.tell(
                    message.kind, f"{proxy}: {message.kind} {words}", "warning", message.fields
                )
            case _:
                assert_never(message)

    def _answer(self, proxy: str, ask: wire.Ask) -> None:
        task = asyncio.get_running_loop().create_task(self._reply(proxy, ask))
        self._asks.add(task)
        task.add_done_callback(self._asks.discard)

    async def _reply(self, proxy: str, ask: wire.Ask) -> None:
        status, kind, body = await self._box.control.handle(ask.method, ask.path, ask.body)
        self._box.proxies.send(proxy, wire.Reply(ask.id, status, body, kind))

"""The proxy process in this one: how it ends when a part of it does."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from gpusup.conf.schema import Config, ServerConfig
from gpusup.proxy import serve


async def test_a_proxy_that_can_no_longer_report_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its supervisor would otherwise see nothing of it, and never start another."""
    nothing = SimpleNamespace(
        collect=lambda: None, freeze=lambda: None, set_threshold=lambda *_: None
    )
    monkeypatch.setattr(serve, "gc", nothing)
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    server = ServerConfig(arena=2**20, drain_notice=0.0)
    process = serve.Process(Config(server=server), "proxy0", listener, theirs)

    def broken() -> None:
        raise ValueError("cannot add up")

    monkeypatch.setattr(process, "_report", broken)
    async with asyncio.timeout(10):
        assert await process.run() == 1
    (record,) = caplog.records
    assert record.msg == "reports-failed"
    assert "cannot add up" in record.__dict__["fields"]["error"]
    process._door.arena.close()
    for sock in (ours, theirs, listener):
        sock.close()

"""Clients in threads that keep asking, and remember every answer they got."""

from __future__ import annotations

import http.client
import json
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .service import Service


def figure(text: str) -> None:
    """A measured number, to be seen with `pytest -s`."""
    sys.stdout.write(f"\n  {text}\n")


@dataclass(frozen=True, slots=True)
class Seen:
    """`status` 0: the connection broke, `body` says how. Times are time.monotonic()."""

    began: float
    ended: float
    asked: Any
    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


def ask(
    connection: http.client.HTTPConnection, path: str, asked: Any, headers: dict[str, str]
) -> Seen:
    if connection.sock is not None and select.select([connection.sock], [], [], 0)[0]:
        connection.close()  # it was closed while it idled: as other clients do, we make another
    began = time.monotonic()
    try:
        connection.request("POST", path, json.dumps(asked).encode(), headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        return Seen(began, time.monotonic(), asked, 0, f"{type(error).__name__}: {error}")
    ended = time.monotonic()
    try:
        answer = json.loads(body)
    except ValueError:
        answer = body
    return Seen(began, ended, asked, response.status, answer, dict(response.headers))


class Load:
    """`clients` loops, each on a connection of its own, until `stop`. `what(client, number)` is
    the body, JSON, and `path` where it goes."""

    def __init__(
        self,
        service: Service,
        path: str | Callable[[int, int], str],
        what: Callable[[int, int], Any] = lambda client, number: 1.0 + client,
        *,
        clients: int = 4,
        pause_s: float = 0.01,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._service = service
        self._path = path
        self._what = what
        self._pause_s = pause_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.seen: list[Seen] = []
        self._threads = [
            threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, limit_s: float = 60.0) -> None:
        """Every request that was sent gets its answer."""
        self._stopping.set()
        end = time.monotonic() + limit_s
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
                assert not thread.is_alive(), "a client still waits for its answer"

    def _client(self, client: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=60.0)
        number = 0
        while not self._stopping.is_set():
            path = self._path if isinstance(self._path, str) else self._path(client, number)
            seen = ask(connection, path, self._what(client, number), self._headers)
            number += 1
            with self._lock:
                self.seen.append(seen)
            self._stopping.wait(self._pause_s)
        connection.close()

    def statuses(self, since: float = 0.0) -> Counter[int]:
        with self._lock:
            return Counter(seen.status for seen in self.seen if seen.ended >= since)

    def wait_for(self, more: int, limit_s: float = 30.0) -> None:
        """Until so many further answers are there."""
        target = len(self.seen) + more
        self._service.until(lambda: len(self.seen) >= target, limit_s)

    def bad(self, but: tuple[int, ...] = ()) -> list[Seen]:
        with self._lock:
            return [seen for seen in self.seen if seen.status not in (200, *but)]

"""Clients in closed loop for swaps: each answer's version must be the one whose value it has."""

from __future__ import annotations

import http.client
import threading
from collections import Counter
from types import TracebackType
from typing import NamedTuple

from .load import ask
from .service import Service

#: Between two requests of a client, so that sixteen of them leave the machine to the swap.
THINK_S = 0.004


class Answer(NamedTuple):
    ended: float
    status: int
    version: str
    wrong: str  # what disagrees in it, "" if nothing does
    took_s: float
    retry_after: str


class Clients:
    """`count` threads, each with its own connection. The model answers x times its version."""

    def __init__(self, service: Service, model: str, count: int = 16) -> None:
        self.answers: list[Answer] = []
        self._service = service
        self._model = model
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(x,)) for x in range(1, count + 1)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        self._service.until(lambda: len(self.answers) >= len(self._threads))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, x: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=60)
        while not self._over.wait(THINK_S):
            self.answers.append(self._ask(connection, x))
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, x: int) -> Answer:
        seen = ask(connection, f"/predictions/{self._model}", x, {})
        version = seen.headers.get("Gpusup-Model-Version", "")
        right = (version, x * float(version or 0))
        said = seen.body if isinstance(seen.body, dict) else {}
        wrong = ""
        if seen.status != 200:
            wrong = f"status {seen.status}: {seen.body!r}"[:300]
        elif (said.get("version"), said.get("value")) != right:
            wrong = f"header {version}, body {seen.body!r}, x {x}"[:300]
        retry_after = seen.headers.get("Retry-After", "")
        return Answer(seen.ended, seen.status, version, wrong, seen.ended - seen.began, retry_after)

    def problems(self) -> Counter[str]:
        """What was not a 200 with agreeing version and value."""
        return Counter(a.wrong for a in self.answers if a.wrong)

    def versions(self) -> set[str]:
        return {a.version for a in self.answers if a.status == 200}

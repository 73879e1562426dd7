"""Clients in closed loop for swaps: each answer's version must be the one whose value it has."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from types import TracebackType
from typing import NamedTuple

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
        began = time.monotonic()
        try:
            connection.request("POST", f"/predictions/{self._model}", str(x))
            response = connection.getresponse()
            body = response.read()
        except OSError as error:
            connection.close()
            return Answer(time.monotonic(), 0, "", str(error), time.monotonic() - began, "")
        version = response.headers.get("Gpusup-Model-Version", "")
        wrong = ""
        if response.status == 200:
            said = json.loads(body)
            if (said["version"], said["value"]) != (version, x * float(version or 0)):
                wrong = f"header {version}, body {said}, x {x}"
        else:
            wrong = f"status {response.status}: {body[:300]!r}"
        ended = time.monotonic()
        retry_after = response.headers.get("Retry-After", "")
        return Answer(ended, response.status, version, wrong, ended - began, retry_after)

    def problems(self) -> Counter[str]:
        """What was not a 200 with agreeing version and value."""
        return Counter(a.wrong for a in self.answers if a.wrong)

    def versions(self) -> set[str]:
        return {a.version for a in self.answers if a.status == 200}

    def gap_s(self, old: str, new: str) -> float:
        """From the last answer of `old` to the first of `new` after it began to serve; 0: none."""
        last = max(a.ended for a in self.answers if a.version == old)
        first = min(a.ended for a in self.answers if a.version == new)
        return max(0.0, first - last)

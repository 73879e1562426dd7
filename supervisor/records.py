"""The event stream: the last things that happened; and diagnostic records, kept as files."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

log = logging.getLogger("gpusup.supervisor")

KEPT: Final = 2000
FILES_KEPT: Final = 200
#: Workers need a moment to send their memory_summary.
EVIDENCE_S: Final = 0.3


class Events:
    def __init__(self) -> None:
        self._ring: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._serial = 0

    def add(self, kind: str, text: str, fields: dict[str, Any]) -> None:
        self._serial += 1
        event = {
            "serial": self._serial,
            "time": time.time(),
            "kind": kind,
            "text": text,
            **{k: v for k, v in fields.items() if k not in ("serial", "time", "kind", "text")},
        }
        self._ring.append(event)

    def export(self) -> list[dict[str, Any]]:
        return list(self._ring)

    def restore(self, exported: list[dict[str, Any]]) -> None:
        self._ring.extend(exported)
        self._serial = exported[-1]["serial"] if exported else 0

    def since(self, serial: int = 0) -> list[dict[str, Any]]:
        return [event for event in self._ring if event["serial"] > serial]


class Records:
    """Each a JSON file in `folder`; the oldest go. Written at most once at a time for one key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due: set[str] = set()
        self._serial = 0

    def later(self, key: str, make: Callable[[dict[str, str]], dict[str, Any]]) -> None:
        """Write what `make` returns, a moment from now. A burst for one key gives one record."""
        if key in self._due:
            return
        self._due.add(key)
        asyncio.get_running_loop().call_later(EVIDENCE_S, self._write, key, make)

    def _write(self, key: str, make: Callable[[dict[str, str]], dict[str, Any]]) -> None:
        self._due.discard(key)
        self._serial += 1
        stamp = datetime.fromtimestamp(time.time(), UTC).strftime("%Y%m%dT%H%M%S")
        path = self._folder / f"{stamp}-{self._serial:05d}-{key}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(make({}), indent=1))
        except OSError as error:
            log.warning("cannot write %s: %s", path, error.strerror)
        for old in sorted(self._folder.glob("*.json"))[:-FILES_KEPT]:
            with suppress(OSError):
                old.unlink()

    def latest(self, count: int = 20) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self._folder.glob("*.json"))[-count:]:
            with suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        return found

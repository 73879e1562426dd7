"""Did the kernel kill a worker because the host ran out of memory? The cgroup counts such kills."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


class HostOom:
    def __init__(self, events: Path | None = None) -> None:
        self._path = events or _own_events()
        self._seen = self._count()

    def happened(self) -> bool:
        """Whether there was a kill since this was last asked."""
        count = self._count()
        before, self._seen = self._seen, count
        return count > before

    def _count(self) -> int:
        if self._path is not None:
            with suppress(OSError, ValueError):
                for line in self._path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


def _own_events() -> Path | None:
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                path = Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"
                return path if path.exists() else None
    return None

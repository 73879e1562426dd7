"""What a batch costs: peak bytes above static for each (bucket, dtype, rows), as measured.

Kept in a file per model version, so that a restart need not measure again. What was never measured
is estimated from what was, with a margin, and learned when it ran.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import threading
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)

#: How much an estimate for an unmeasured shape is raised.
MARGIN: Final = 1.25
#: Shapes come from clients: what is kept of them is bounded.
MOST_KEYS: Final = 1024
_FORMAT: Final = 1


def key_of(bucket: str, rows: int) -> str:
    """`bucket` is "224x224x3/uint8"; see `pool.Key.text`."""
    return f"{bucket}/{rows}"


class Profile:
    """Thread-safe. `path` may be "": then nothing is kept.

    `kin`: what versions of one model have in common. With `borrow`, a version that was never
    measured begins with what the last one of its kin took, so that it can answer at once; each
    number is replaced by its own when a batch has run.
    """

    def __init__(
        self, path: str, signature: str = "", *, kin: str = "", borrow: bool = False
    ) -> None:
        self._path = path
        self._signature = signature
        self._kin = kin
        self._borrowed: set[str] = set()
        self._lock = threading.Lock()
        self._peaks: dict[str, int] = {}
        self._most: dict[str, int] = {}  # rows measured, by bucket
        self._changed = False
        self.known = False
        if path:
            self._load(path)
        if path and borrow and kin and not self.known:
            self._borrow(Path(path))

    def peaks(self) -> dict[str, int]:
        with self._lock:
            return dict(self._peaks)

    def has(self, bucket: str, rows: int) -> bool:
        with self._lock:
            return key_of(bucket, rows) in self._peaks

    def covers(self, bucket: str, rows: int) -> bool:
        """Whether at least so many rows were measured, or there is no room to learn more."""
        with self._lock:
            return self._most.get(bucket, 0) >= rows or len(self._peaks) >= MOST_KEYS

    def learn(self, bucket: str, rows: int, peak: int) -> None:
        """Keep the greatest peak seen; the first one is news, a greater one too."""
        key = key_of(bucket, rows)
        with self._lock:
            own = key not in self._borrowed
            if not own or peak > self._peaks.get(key, -1):
                self._borrowed.discard(key)
                self._peaks[key] = max(0, peak)
                self._most[bucket] = max(rows, self._most.get(bucket, 0))
                self._changed = True

    def cost(self, bucket: str, rows: int, elements: int = 0) -> int:
        """Bytes a batch takes above static: measured, else estimated; 0 if nothing is known.

        `elements` is the number of elements of one row, for shapes that were never measured.
        """
        with self._lock:
            exact = self._peaks.get(key_of(bucket, rows))
            if exact is not None:
                return exact
            same: list[tuple[int, int]] = []
            per_element = 0.0
            for key, peak in self._peaks.items():
                name, _, counted = key.rpartition("/")
                if name == bucket:
                    same.append((int(counted), peak))
                elif elements and (size := int(counted) * elements_of(name)):
                    per_element = max(per_element, peak / size)
        above = [(count, peak) for count, peak in same if count >= rows]
        if above:
            count, peak = min(above)
            return min(peak, int(peak * rows / count * MARGIN))
        if same:
            count, peak = max(same)
            return int(peak * rows / count * MARGIN)
        return int(per_element * elements * rows * MARGIN)

    def save(self) -> None:
        """Atomically, if anything changed. A file that can't be written is no reason to stop."""
        with self._lock:
            if not self._path or not self._changed:
                return
            measured = {k: peak for k, peak in self._peaks.items() if k not in self._borrowed}
            text = json.dumps(
                {
                    "format": _FORMAT,
                    "signature": self._signature,
                    "kin": self._kin,
                    "peaks": measured,
                },
                sort_keys=True,
            )
            self._changed = False
        path = Path(self._path)
        fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text)
            os.replace(fresh, path)
        except OSError as error:
            _log.warning("cannot keep in %s what batches cost: %s", path, error)
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _load(self, path: str) -> None:
        try:
            said = json.loads(Path(path).read_text())
            if said["format"] != _FORMAT or said["signature"] != self._signature:
                return
            peaks = {str(key): int(peak) for key, peak in said["peaks"].items()}
            for key in peaks:
                bucket, _, rows = key.rpartition("/")
                self._most[bucket] = max(int(rows), self._most.get(bucket, 0))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self._most = {}
            return  # measured anew
        self._peaks = peaks
        self.known = bool(peaks)

    def _borrow(self, path: Path) -> None:
        """From the file of another version: <model>@<version>.<kind>.json lies beside ours."""
        model, _, rest = path.name.rpartition("@")
        with contextlib.suppress(OSError):
            others = sorted(
                path.parent.glob(f"{glob.escape(model)}@*.{rest.partition('.')[2]}"),
                key=lambda other: other.stat().st_mtime,
                reverse=True,
            )
            for other in others:
                with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                    said = json.loads(other.read_text())
                    if said["format"] != _FORMAT or said["kin"] != self._kin:
                        continue
                    self._peaks = {str(key): int(peak) for key, peak in said["peaks"].items()}
                    self._borrowed = set(self._peaks)
                    self.known = bool(self._peaks)
                    return


def elements_of(bucket: str) -> int:
    """Elements in one row of a bucket's text; 0 for what has no plain shape."""
    shape = bucket.partition("/")[0]
    if shape == "scalar":
        return 1
    count = 1
    for side in shape.split("x"):
        if not side.isdigit():
            return 0
        count *= int(side)
    return count

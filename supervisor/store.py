"""One value kept in a file across restarts: written whole or not at all.

The file is JSON, `{"schema": 1, "data": ...}`, so that an operator can read it. One that can't be
used is put aside, and the service starts as if there had been none rather than not at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class StoreError(Exception):
    """The file can't be written. One line for the operator."""


class Store(Generic[T]):
    """`kind` is a msgspec struct; `schema` changes with its meaning."""

    def __init__(
        self,
        path: Path,
        kind: type[T],
        schema: int = 1,
        on_warning: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = path
        self._kind = kind
        self._schema = schema
        self._on_warning = on_warning
        self._written: bytes | None = None

    def load(self) -> T | None:
        """None if there is nothing, or nothing usable."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._on_warning(f"cannot read {self.path}: {error.strerror}; starting without it")
            return None
        try:
            envelope: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
            if envelope.get("schema") != self._schema:
                raise ValueError(
                    f"it has schema {envelope.get('schema')}, this version reads {self._schema}"
                )
            value = msgspec.convert(envelope.get("data"), self._kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._put_aside(str(error))
            return None
        self._written = data
        return value

    def save(self, value: T) -> None:
        """Returns when the disk has it. Raises StoreError."""
        data = msgspec.json.encode({"schema": self._schema, "data": value})
        if data == self._written:
            return
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self.path)
            # Without this the rename itself may be lost with the power.
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            raise StoreError(f"cannot write {self.path}: {error.strerror}") from error
        self._written = data

    def _put_aside(self, why: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.unusable-{time.strftime('%Y%m%d-%H%M%S')}")
        try:
            os.replace(self.path, aside)
        except OSError as error:
            self._on_warning(f"cannot use {self.path}: {why}; nor move it: {error.strerror}")
        else:
            self._on_warning(f"cannot use {self.path}: {why}; kept as {aside}, starting without it")

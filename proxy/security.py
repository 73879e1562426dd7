"""API keys: whose a key is, a limit for each, and nothing that can be timed.

The file of hashes (conf/keys.py) is read again on reload. A key comes as
`Authorization: Bearer KEY` or `X-Api-Key: KEY`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from gpusup.conf.keys import (
    KEY_LIMIT,
    SCRYPT_KEYS,
    KeyEntry,
    KeyFileError,
    hash_key,
    read_keys,
    scrypt,
)

from .errors import Forbidden, ProxyError, Unauthorized

#: Wrong keys may cost scrypt this often a second, all clients together.
_SCRYPT_RATE: Final = float(SCRYPT_KEYS)
_REMEMBERED: Final = 1024

__all__ = ["Grant", "KeyFileError", "KeyRing", "RateLimited", "hash_key"]


class RateLimited(ProxyError):
    status = 429
    code = "RATE_LIMITED"


class Grant:
    """One key's standing: its limits and what it uses now."""

    __slots__ = ("_clock", "_filled", "_tokens", "entry", "name", "open")

    def __init__(self, name: str, entry: KeyEntry, clock: Callable[[], float]) -> None:
        self.name = name
        self.entry = entry
        self.open = 0
        self._clock = clock
        self._filled = clock()
        self._tokens = self._burst

    @property
    def _burst(self) -> float:
        return max(1.0, self.entry.burst or self.entry.rate)

    def take(self) -> None:
        """Counts one request. Raises RateLimited."""
        rate = self.entry.rate
        if not rate:
            return
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled) * rate)
        self._filled = now
        if self._tokens < 1.0:
            raise RateLimited(
                f"key {self.name!r} may send {rate:g} requests a second",
                retry_after_s=max(1, math.ceil((1.0 - self._tokens) / rate)),
            )
        self._tokens -= 1.0

    def enter(self) -> None:
        """One more request is open; `leave` when it ended. Raises RateLimited."""
        limit = self.entry.concurrent
        if limit and self.open >= limit:
            raise RateLimited(
                f"key {self.name!r} has {self.open} requests open, {limit} are allowed",
                retry_after_s=1,
            )
        self.open += 1

    def leave(self) -> None:
        self.open -= 1

    def permits(self, model: str) -> None:
        """Raises Forbidden."""
        if self.entry.models and model not in self.entry.models:
            raise Forbidden(f"key {self.name!r} is not for model {model!r}")

    def permits_admin(self) -> None:
        """Raises Forbidden."""
        if not self.entry.admin:
            raise Forbidden(f"key {self.name!r} may not load or unload models")


class KeyRing:
    """All keys. Raises KeyFileError on reading; a failed `reload` keeps the old keys."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._grants: dict[str, Grant] = {}
        self._plain: list[tuple[bytes, Grant]] = []
        self._slow: list[tuple[bytes, bytes, Grant]] = []
        self._known: dict[bytes, Grant] = {}
        self._trying: dict[bytes, asyncio.Future[Grant | None]] = {}
        self._tries = _SCRYPT_RATE
        self._tried = clock()
        self.reload()

    def reload(self) -> None:
        entries = read_keys(self._path)
        grants: dict[str, Grant] = {}
        plain: list[tuple[bytes, Grant]] = []
        slow: list[tuple[bytes, bytes, Grant]] = []
        for name, entry in entries.items():
            grant = self._grants.get(name)
            if grant is None:
                grant = Grant(name, entry, self._clock)
            else:
                grant.entry = entry  # what is open and used goes on counting
            grants[name] = grant
            scheme, *fields = entry.hash.split(":")
            if scheme == "sha256":
                plain.append((bytes.fromhex(fields[0]), grant))
            else:
                slow.append((bytes.fromhex(fields[0]), bytes.fromhex(fields[1]), grant))
        self._grants, self._plain, self._slow = grants, plain, slow
        self._known, self._trying = {}, {}

    async def check(self, headers: Mapping[str, str]) -> Grant:
        """Whose key it is. Raises Unauthorized."""
        key = _key_of(headers)
        if key is None:
            raise Unauthorized(
                "an API key is wanted: Authorization: Bearer KEY",
                headers={"WWW-Authenticate": 'Bearer realm="gpusup"'},
            )
        grant = await self._find(key) if len(key) <= KEY_LIMIT else None
        if grant is None:
            raise Unauthorized(
                "this API key is not known",
                headers={"WWW-Authenticate": 'Bearer realm="gpusup", error="invalid_token"'},
            )
        return grant

    async def _find(self, key: str) -> Grant | None:
        digest = hashlib.sha256(key.encode()).digest()
        found: Grant | None = None
        # All of them, always: how long it takes says nothing about which one is close.
        for known, grant in self._plain:
            if hmac.compare_digest(known, digest):
                found = grant
        if found is not None or not self._slow:
            return found
        if (remembered := self._known.get(digest)) is not None:
            return remembered
        # One try for all who come with this key meanwhile: a client's first requests may be many.
        trying = self._trying.get(digest)
        if trying is None:
            if not self._may_try():
                raise RateLimited("too many unknown API keys are tried", retry_after_s=1)
            # In a thread, or every wrong key would hold up all that this process does.
            trying = asyncio.ensure_future(asyncio.to_thread(_match, key, self._slow))
            self._trying[digest] = trying
            trying.add_done_callback(partial(self._end_try, digest))
        return await asyncio.shield(trying)

    def _end_try(self, digest: bytes, trying: asyncio.Future[Grant | None]) -> None:
        if self._trying.get(digest) is not trying:
            return  # the keys were read anew meanwhile
        del self._trying[digest]
        if trying.cancelled() or trying.exception() is not None:
            return
        found = trying.result()
        if found is not None and len(self._known) < _REMEMBERED:
            self._known[digest] = found

    def _may_try(self) -> bool:
        now = self._clock()
        self._tries = min(_SCRYPT_RATE, self._tries + (now - self._tried) * _SCRYPT_RATE)
        self._tried = now
        if self._tries < len(self._slow):
            return False
        self._tries -= len(self._slow)
        return True


def _match(key: str, slow: Sequence[tuple[bytes, bytes, Grant]]) -> Grant | None:
    found: Grant | None = None
    for salt, known, grant in slow:
        if hmac.compare_digest(known, scrypt(key, salt)):
            found = grant
    return found


def _key_of(headers: Mapping[str, str]) -> str | None:
    text = headers.get("Authorization")
    if text is not None:
        scheme, _, key = text.partition(" ")
        return key.strip() if scheme.lower() == "bearer" and key.strip() else None
    return headers.get("X-Api-Key") or None


USAGE: Final = """usage: python -m gpusup.proxy.security hash [--scrypt] [--new]

Reads a key from standard input (or the terminal, unseen) and prints its hash for the key file.
--new makes a random key and prints it too. --scrypt is for keys that people made up.
"""


def main(argv: list[str]) -> int:
    known = {"--scrypt", "--new"}
    if argv[:1] != ["hash"] or not set(argv[1:]) <= known:
        sys.stderr.write(USAGE)
        return 2
    if "--new" in argv:
        key = "gk-" + secrets.token_urlsafe(32)
        sys.stdout.write(f"key:  {key}\nhash: ")
    elif os.isatty(0):
        import getpass

        key = getpass.getpass("key: ")
    else:
        key = sys.stdin.readline().strip()
    if not key or len(key) > KEY_LIMIT:
        sys.stderr.write(f"a key has 1 to {KEY_LIMIT} characters\n")
        return 2
    sys.stdout.write(hash_key(key, "scrypt" if "--scrypt" in argv else "sha256") + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The key file: names, hashes and limits of API keys. Keys themselves are nowhere.

[keys.batch-jobs]
hash = "sha256:9f86d0..."        # from: python -m gpusup.proxy.security hash
rate = 50                         # requests a second; 0 or left out: no limit
burst = 100                       # at once, after a pause; default: a second's worth
concurrent = 8                    # open at the same time; 0 or left out: no limit
models = ["resnet50"]             # left out: all
admin = true                      # may load and unload models, and see the dashboard
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

#: Longest key that is looked at; hashing must stay cheap for us.
KEY_LIMIT: Final = 512
#: Each wrong key is tried on every scrypt hash, so there must be few.
SCRYPT_KEYS: Final = 10

#: scrypt's cost: 16 MiB and some 40 ms, paid once for each new key and then remembered.
_SCRYPT: Final = {"n": 2**14, "r": 8, "p": 1}


class KeyFileError(Exception):
    """The file can't be used; says why in one line."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    hash: str
    rate: Annotated[float, Meta(ge=0)] = 0.0
    burst: Annotated[float, Meta(ge=0)] = 0.0
    concurrent: Annotated[int, Meta(ge=0)] = 0
    models: tuple[str, ...] = ()
    admin: bool = False


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: dict[str, KeyEntry]


def hash_key(key: str, scheme: str = "sha256") -> str:
    """What the key file wants. sha256 suits keys that are random; scrypt those people make up."""
    if scheme == "sha256":
        return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    if scheme == "scrypt":
        salt = secrets.token_bytes(16)
        return f"scrypt:{salt.hex()}:{scrypt(key, salt).hex()}"
    raise ValueError(f"unknown scheme {scheme!r}; there are sha256 and scrypt")


def scrypt(key: str, salt: bytes) -> bytes:
    return hashlib.scrypt(key.encode(), salt=salt, maxmem=2**26, dklen=32, **_SCRYPT)


def matches(entry: KeyEntry, key: str) -> bool:
    """Whether this is the entry's key. Costs 40 ms where the hash is scrypt."""
    scheme, *fields = entry.hash.split(":")
    if scheme == "sha256":
        return hmac.compare_digest(entry.hash, hash_key(key))
    known = bytes.fromhex(fields[1])
    return hmac.compare_digest(known, scrypt(key, bytes.fromhex(fields[0])))


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Raises KeyFileError."""
    try:
        text = path.read_text()
        if path.stat().st_mode & 0o002:
            raise KeyFileError(f"cannot use {path}: everybody may write to it")
        found = msgspec.convert(tomllib.loads(text), _KeyFile)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise KeyFileError(f"cannot use {path}: {error}") from error
    for name, entry in found.keys.items():
        _check_hash(path, name, entry.hash)
    if sum(e.hash.startswith("scrypt") for e in found.keys.values()) > SCRYPT_KEYS:
        raise KeyFileError(
            f"cannot use {path}: more than {SCRYPT_KEYS} scrypt hashes; use random keys with sha256"
        )
    return found.keys


def _check_hash(path: Path, name: str, text: str) -> None:
    scheme, *fields = text.split(":")
    lengths = {"sha256": [64], "scrypt": [32, 64]}.get(scheme)
    try:
        good = lengths is not None and [len(bytes.fromhex(f)) * 2 for f in fields] == lengths
    except ValueError:
        good = False
    if not good:
        raise KeyFileError(
            f"cannot use {path}: the hash of key {name!r} is neither sha256:HEX nor "
            "scrypt:SALT:HEX; make one with: python -m gpusup.proxy.security hash"
        )

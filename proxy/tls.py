"""TLS for the front door. A new certificate serves new connections at once, without a restart."""

from __future__ import annotations

import ssl
from pathlib import Path


class TlsError(Exception):
    """The certificate or key can't be used; says why in one line."""


class Tls:
    """`context` is given to the listening site once and never replaced: what is loaded into it
    counts for the handshakes that follow. Raises TlsError."""

    def __init__(self, cert: str, key: str) -> None:
        self._cert = cert
        self._key = key or cert
        self.context = _context()
        self._load(self.context)

    def reload(self) -> None:
        """Read both files again. Raises TlsError, and then the old certificate stays."""
        # Into a context of its own first: a half-loaded pair would fail every handshake.
        self._load(_context())
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        for path in (self._cert, self._key):
            try:
                with Path(path).open("rb"):
                    pass
            except OSError as error:
                raise TlsError(f"cannot read {path}: {error.strerror}") from error
        try:
            # A password would be asked for on the terminal, of which a service has none.
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise TlsError(f"cannot use {self._cert} with {self._key}: {why}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context

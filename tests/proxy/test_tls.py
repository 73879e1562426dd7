"""TLS: the certificate can be replaced while connections go on; broken ones change nothing."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from gpusup.proxy.tls import Tls, TlsError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the keys")


def make(folder: Path, name: str) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def served(tls: Tls) -> str:
    """The name in the certificate that a new connection gets."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    back_in, back_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    a = client.wrap_bio(incoming, outgoing)
    b = tls.context.wrap_bio(back_in, back_out, server_side=True)
    for _ in range(10):
        for side in (a, b):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
            back_in.write(outgoing.read())
            incoming.write(back_out.read())
    assert a.version() in ("TLSv1.2", "TLSv1.3")
    found = a.getpeercert(binary_form=True)
    assert found is not None
    return next(name for name in ("old", "new") if name.encode() in found)


def test_a_new_certificate_serves_new_connections(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "old")
    tls = Tls(cert, key)
    context = tls.context
    assert served(tls) == "old"
    make(tmp_path, "new")
    tls.reload()
    assert tls.context is context
    assert served(tls) == "new"


def test_a_broken_or_foreign_pair_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "old")
    tls = Tls(cert, key)
    (tmp_path / "other").mkdir()
    _, other = make(tmp_path / "other", "new")
    Path(key).write_text(Path(other).read_text())
    with pytest.raises(TlsError, match="cannot use"):
        tls.reload()
    assert served(tls) == "old"
    Path(cert).write_text("no certificate")
    with pytest.raises(TlsError):
        tls.reload()
    Path(cert).unlink()
    with pytest.raises(TlsError, match="cannot read"):
        tls.reload()
    assert served(tls) == "old"


def test_an_encrypted_key_is_refused_without_a_prompt(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "old")
    locked = str(tmp_path / "locked.pem")
    subprocess.run(
        ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(TlsError, match="encrypted"):
        Tls(cert, locked)

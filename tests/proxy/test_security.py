"""Keys: hashed in their file, limited one by one, and replaced without a restart."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpusup.conf.keys import scrypt
from gpusup.proxy import security
from gpusup.proxy.errors import Forbidden, Unauthorized
from gpusup.proxy.security import KeyFileError, KeyRing, RateLimited, hash_key

from .conftest import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def write(path: Path, **keys: str) -> str:
    """Each key: the lines of its table."""
    path.write_text("".join(f"[keys.{name}]\n{lines}\n" for name, lines in keys.items()))
    path.chmod(0o600)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def line(key: str, scheme: str = "sha256") -> str:
    return f'hash = "{hash_key(key, scheme)}"'


async def test_a_known_key_passes_and_nothing_else(tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path / "keys", a=line("one"), b=line("two", "scrypt")))
    assert (await ring.check(bearer("one"))).name == "a"
    assert (await ring.check({"X-Api-Key": "one"})).name == "a"
    assert (await ring.check(bearer("two"))).name == "b"
    assert (await ring.check(bearer("two"))).name == "b"
    for headers in (
        {},
        bearer("three"),
        bearer(""),
        bearer("x" * 600),
        {"Authorization": "Basic b25lOg=="},
        {"Authorization": "one"},
    ):
        with pytest.raises(Unauthorized) as caught:
            await ring.check(headers)
        assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
    assert "one" not in (tmp_path / "keys").read_text()


async def test_guessing_against_slow_hashes_is_throttled(tmp_path: Path) -> None:
    clock = Clock()
    ring = KeyRing(write(tmp_path / "keys", a=line("one", "scrypt")), clock)
    for guess in range(10):
        with pytest.raises(Unauthorized):
            await ring.check(bearer(f"guess {guess}"))
    with pytest.raises(RateLimited):
        await ring.check(bearer("one more"))
    clock.now += 1
    with pytest.raises(Unauthorized):
        await ring.check(bearer("one more"))


async def test_slow_hashes_hold_up_nobody_and_are_worked_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, calls = threading.Event(), 0

    def slow(key: str, salt: bytes) -> bytes:
        nonlocal calls
        calls += 1
        assert free.wait(10)
        return scrypt(key, salt)

    monkeypatch.setattr(security, "scrypt", slow)
    ring = KeyRing(
        write(tmp_path / "keys", a=line("one", "scrypt"), b=line("two")), clock := Clock()
    )
    many = [asyncio.create_task(ring.check(bearer("one"))) for _ in range(20)]
    await until(lambda: calls)
    # The loop is free: keys that cost nothing pass meanwhile.
    assert (await ring.check(bearer("two"))).name == "b"
    assert not any(task.done() for task in many)
    many.pop().cancel()  # one that leaves takes nothing from the others
    free.set()
    assert {grant.name for grant in await asyncio.gather(*many)} == {"a"}
    clock.now += 1
    assert (await ring.check(bearer("one"))).name == "a"
    assert calls == 1


async def test_a_key_that_is_looked_at_while_keys_are_reread_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = threading.Event()

    def slow(key: str, salt: bytes) -> bytes:
        assert free.wait(10)
        return scrypt(key, salt)

    monkeypatch.setattr(security, "scrypt", slow)
    path = tmp_path / "keys"
    ring = KeyRing(write(path, a=line("one", "scrypt")))
    early = asyncio.create_task(ring.check(bearer("one")))
    await until(lambda: ring._trying)
    write(path, a=line("other", "scrypt"))
    ring.reload()
    free.set()
    await early
    with pytest.raises(Unauthorized):
        await ring.check(bearer("one"))


async def test_a_rate_is_kept_and_said(tmp_path: Path) -> None:
    clock = Clock()
    ring = KeyRing(write(tmp_path / "keys", a=line("one") + "\nrate = 2\nburst = 3"), clock)
    grant = await ring.check(bearer("one"))
    for _ in range(3):
        grant.take()
    with pytest.raises(RateLimited, match="2 requests a second") as caught:
        grant.take()
    assert caught.value.status == 429
    assert caught.value.retry_after_s == 1
    clock.now += 0.5
    grant.take()
    with pytest.raises(RateLimited):
        grant.take()


async def test_open_requests_are_limited(tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path / "keys", a=line("one") + "\nconcurrent = 2"))
    grant = await ring.check(bearer("one"))
    grant.enter()
    grant.enter()
    with pytest.raises(RateLimited, match="2 requests open, 2 are allowed"):
        grant.enter()
    grant.leave()
    grant.enter()


async def test_a_key_may_be_for_some_models_only(tmp_path: Path) -> None:
    ring = KeyRing(
        write(
            tmp_path / "keys",
            a=line("one") + '\nmodels = ["m"]',
            b=line("two") + "\nadmin = true",
        )
    )
    (await ring.check(bearer("one"))).permits("m")
    with pytest.raises(Forbidden, match="'other'"):
        (await ring.check(bearer("one"))).permits("other")
    with pytest.raises(Forbidden):
        (await ring.check(bearer("one"))).permits_admin()
    (await ring.check(bearer("two"))).permits("other")
    (await ring.check(bearer("two"))).permits_admin()


async def test_reloading_takes_new_keys_and_keeps_counting(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ring = KeyRing(write(path, a=line("one")))
    grant = await ring.check(bearer("one"))
    grant.enter()
    write(path, a=line("new") + "\nconcurrent = 1")
    ring.reload()
    with pytest.raises(Unauthorized):
        await ring.check(bearer("one"))
    assert (await ring.check(bearer("new"))) is grant
    with pytest.raises(RateLimited):
        grant.enter()
    path.write_text("nonsense")
    with pytest.raises(KeyFileError):
        ring.reload()
    assert (await ring.check(bearer("new"))) is grant


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[keys.a]\nrate = 1",
        '[keys.a]\nhash = "plain"',
        '[keys.a]\nhash = "md5:00"',
        '[keys.a]\nhash = "sha256:zz"',
        '[keys.a]\nhash = "sha256:00"',
        f'[keys.a]\nhash = "sha256:{"0" * 64}"\nrtae = 1',
        f'[keys.a]\nhash = "sha256:{"0" * 64}"\nrate = -1',
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(KeyFileError, match="cannot use") as caught:
        KeyRing(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_all_may_write_or_none_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    write(path, a=line("one"))
    path.chmod(0o666)
    with pytest.raises(KeyFileError, match="everybody may write"):
        KeyRing(str(path))
    with pytest.raises(KeyFileError, match="cannot read"):
        KeyRing(str(tmp_path / "absent"))


def test_the_helper_hashes_a_key() -> None:
    command = [sys.executable, "-m", "gpusup.proxy.security"]
    found = subprocess.run(
        [*command, "hash"], input="one\n", capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == hash_key("one")
    new = subprocess.run([*command, "hash", "--new"], capture_output=True, text=True, check=True)
    key, hashed = (text.split(": ", 1)[1].strip() for text in new.stdout.splitlines())
    assert hash_key(key) == hashed
    wrong = subprocess.run([*command, "bash"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("usage:")

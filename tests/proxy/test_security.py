"""Keys: hashed in their file, limited one by one, and replaced without a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpusup.proxy.errors import Forbidden, Unauthorized
from gpusup.proxy.security import KeyFileError, KeyRing, RateLimited, hash_key


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


def test_a_known_key_passes_and_nothing_else(tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path / "keys", a=line("one"), b=line("two", "scrypt")))
    assert ring.check(bearer("one")).name == "a"
    assert ring.check({"X-Api-Key": "one"}).name == "a"
    assert ring.check(bearer("two")).name == "b"
    assert ring.check(bearer("two")).name == "b"
    for headers in (
        {},
        bearer("three"),
        bearer(""),
        bearer("x" * 600),
        {"Authorization": "Basic b25lOg=="},
        {"Authorization": "one"},
    ):
        with pytest.raises(Unauthorized) as caught:
            ring.check(headers)
        assert caught.value.headers["WWW-Authenticate"].startswith("Bearer")
    assert "one" not in (tmp_path / "keys").read_text()


def test_guessing_against_slow_hashes_is_throttled(tmp_path: Path) -> None:
    clock = Clock()
    ring = KeyRing(write(tmp_path / "keys", a=line("one", "scrypt")), clock)
    for guess in range(10):
        with pytest.raises(Unauthorized):
            ring.check(bearer(f"guess {guess}"))
    with pytest.raises(RateLimited):
        ring.check(bearer("one more"))
    clock.now += 1
    with pytest.raises(Unauthorized):
        ring.check(bearer("one more"))


def test_a_rate_is_kept_and_said(tmp_path: Path) -> None:
    clock = Clock()
    ring = KeyRing(write(tmp_path / "keys", a=line("one") + "\nrate = 2\nburst = 3"), clock)
    grant = ring.check(bearer("one"))
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


def test_open_requests_are_limited(tmp_path: Path) -> None:
    grant = KeyRing(write(tmp_path / "keys", a=line("one") + "\nconcurrent = 2")).check(
        bearer("one")
    )
    grant.enter()
    grant.enter()
    with pytest.raises(RateLimited, match="2 requests open, 2 are allowed"):
        grant.enter()
    grant.leave()
    grant.enter()


def test_a_key_may_be_for_some_models_only(tmp_path: Path) -> None:
    ring = KeyRing(
        write(
            tmp_path / "keys",
            a=line("one") + '\nmodels = ["m"]',
            b=line("two") + "\nadmin = true",
        )
    )
    ring.check(bearer("one")).permits("m")
    with pytest.raises(Forbidden, match="'other'"):
        ring.check(bearer("one")).permits("other")
    with pytest.raises(Forbidden):
        ring.check(bearer("one")).permits_admin()
    ring.check(bearer("two")).permits("other")
    ring.check(bearer("two")).permits_admin()


def test_reloading_takes_new_keys_and_keeps_counting(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    ring = KeyRing(write(path, a=line("one")))
    grant = ring.check(bearer("one"))
    grant.enter()
    write(path, a=line("new") + "\nconcurrent = 1")
    ring.reload()
    with pytest.raises(Unauthorized):
        ring.check(bearer("one"))
    assert ring.check(bearer("new")) is grant
    with pytest.raises(RateLimited):
        grant.enter()
    path.write_text("nonsense")
    with pytest.raises(KeyFileError):
        ring.reload()
    assert ring.check(bearer("new")) is grant


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

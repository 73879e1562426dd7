from __future__ import annotations

from pathlib import Path

import pytest

from gpusup.conf.places import parse_listen, run_dir, state_dir, weights_of
from gpusup.conf.schema import ServerConfig


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("localhost:0", ("localhost", 0)),
        (":80", ("", 80)),
        ("[::1]:65535", ("::1", 65535)),
        ("[::]:1", ("::", 1)),
        ("my-box.example.org:8000", ("my-box.example.org", 8000)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address


@pytest.mark.parametrize(
    "text", ["", "8000", "a:", "a:x", "a:-1", "a:65536", "::1:80", "[a]:1", "a b:1", "a:٨", "/x:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|brackets"):
        parse_listen(text)


def test_a_named_folder_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/elsewhere")
    server = ServerConfig(run_dir="/run/mine", state_dir="/var/mine")
    assert (run_dir(server), state_dir(server)) == (Path("/run/mine"), Path("/var/mine"))


def test_systemds_folders_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/one:/run/two")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/one")
    assert run_dir(ServerConfig()) == Path("/run/one")
    assert state_dir(ServerConfig()) == Path("/var/lib/one")


@pytest.mark.parametrize(
    ("user", "runtime", "folder"),
    [(0, "", "/run/gpusup"), (7, "/run/user/7", "/run/user/7/gpusup"), (7, "", "gpusup-7")],
)
def test_root_and_users_have_their_own(
    monkeypatch: pytest.MonkeyPatch, user: int, runtime: str, folder: str
) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert str(run_dir(ServerConfig())).endswith(folder)


def test_a_path_may_hold_the_version() -> None:
    assert weights_of("w-{version}.pt", "3") == "w-3.pt"
    assert weights_of("w{0}.pt", "3") == "w{0}.pt"

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusup.conf.places import host_port, parse_listen
from gpusup.supervisor.listen import ListenError, Listeners, bind_port, open_all


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Short enough for a socket, whatever the test is called."""
    path = Path(f"/tmp/gpusup-test-{os.getpid()}")
    yield path
    if path.exists():
        for child in path.iterdir():
            child.unlink()
        path.rmdir()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_do_not_depend_on_the_umask(run_dir: Path) -> None:
    before = os.umask(0)
    try:
        listeners = open_all("127.0.0.1:0", run_dir)
    finally:
        os.umask(before)
    assert mode(run_dir) == 0o750
    assert mode(run_dir / "control.sock") == 0o660
    assert mode(run_dir / "workers.sock") == 0o600
    listeners.close()


def test_leaves_no_socket_behind(run_dir: Path) -> None:
    open_all("127.0.0.1:0", run_dir).close()
    assert [p.name for p in run_dir.iterdir()] == ["lock"]


def test_a_second_instance_in_the_same_directory_is_told_who_has_it(run_dir: Path) -> None:
    first = open_all("127.0.0.1:0", run_dir)
    with pytest.raises(ListenError, match=rf"another gpusup \(pid {os.getpid()}\) runs in"):
        open_all("127.0.0.1:0", run_dir)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(first.control_path)  # the first one's socket is still there
    first.close()


def test_a_second_instance_on_the_same_port_is_told_which(run_dir: Path) -> None:
    taken, address = bind_port("127.0.0.1:0")
    with taken, pytest.raises(ListenError, match=f"cannot listen on {address}: the port is in use"):
        open_all(address, run_dir)
    open_all("127.0.0.1:0", run_dir).close()  # and the lock was given back


def test_a_stale_socket_of_a_dead_service_is_replaced(run_dir: Path) -> None:
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "control.sock"))
    listeners = open_all("127.0.0.1:0", run_dir)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(listeners.control_path)
    listeners.close()


def test_a_socket_that_somebody_answers_on_is_not_stolen(run_dir: Path) -> None:
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(run_dir / "control.sock"))
        other.listen()
        with pytest.raises(ListenError, match="another process answers there"):
            open_all("127.0.0.1:0", run_dir)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(run_dir / "control.sock"))


def test_a_file_in_the_way_is_kept(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "control.sock").write_text("notes")
    with pytest.raises(ListenError, match="a file that is no socket is in the way"):
        open_all("127.0.0.1:0", run_dir)
    assert (run_dir / "control.sock").read_text() == "notes"


def test_a_path_that_no_socket_can_have_is_refused_with_both_numbers(tmp_path: Path) -> None:
    run_dir = tmp_path / ("x" * 150)
    with pytest.raises(ListenError, match=r"path of \d+ bytes, 107 are allowed"):
        open_all("127.0.0.1:0", run_dir)
    assert not run_dir.exists()


def test_a_shared_directory_is_not_made_private() -> None:
    before = mode(Path("/tmp"))
    with pytest.raises(ListenError, match="shared with other users"):
        open_all("127.0.0.1:0", Path("/tmp"))
    assert mode(Path("/tmp")) == before


def test_an_unknown_control_group_is_named(run_dir: Path) -> None:
    with pytest.raises(ListenError, match="there is no group nosuchgroup"):
        open_all("127.0.0.1:0", run_dir, group="nosuchgroup")


@pytest.mark.parametrize(
    "listen", ["nonsense", "127.0.0.1:99999", "::1:80", "no.such.host.invalid:1"]
)
def test_an_unusable_address_is_named(listen: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {listen}"):
        bind_port(listen)


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "[::1]:8000", "a-host:1", ":0"])
def test_host_and_port_are_put_together_as_they_were(text: str) -> None:
    assert host_port(*parse_listen(text)) == text


def test_all_addresses_means_ipv4_too() -> None:
    sock, _ = bind_port(":0")
    with sock, socket.create_connection(("127.0.0.1", sock.getsockname()[1]), timeout=5):
        pass


def test_sockets_from_systemd_are_taken_only_by_the_process_they_are_for() -> None:
    code = """
import os, socket
from gpusup.supervisor.listen import bind_port
os.environ["LISTEN_FDS"] = "1"
os.environ["LISTEN_PID"] = "1"
assert bind_port("127.0.0.1:0")[0].fileno() != 3
os.environ["LISTEN_PID"] = str(os.getpid())
sock, address = bind_port("ignored:1")
assert sock.fileno() == 3 and not os.get_inheritable(3)
assert "LISTEN_FDS" not in os.environ
print(address)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = f"exec 3<&{server.fileno()}; exec {sys.executable} -c '{code}'"
        done = subprocess.run(
            ["/bin/bash", "-c", script],
            pass_fds=[server.fileno()],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.stdout.strip() == f"127.0.0.1:{server.getsockname()[1]}", done.stderr


def test_everything_survives_being_handed_on(run_dir: Path) -> None:
    first = open_all("127.0.0.1:0", run_dir)
    again = Listeners.restore(first.export())
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(again.control_path)
    with pytest.raises(ListenError, match="another gpusup"):
        open_all("127.0.0.1:0", run_dir)
    again.close()

"""The port, the control socket and the workers' socket: opened once, before anything is started.

A second instance ends here, in milliseconds and with the reason, before it can start a worker.
Modes are set on each file, since they must not depend on the umask we were started with.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpusup.conf.places import LONGEST_SOCKET, SOCKET_PATH_LIMIT, host_port, parse_listen

_CONTROL: Final = "control.sock"
_WORKERS: Final = "workers.sock"
_FIRST_PASSED_FD: Final = 3  # by systemd's convention (SD_LISTEN_FDS_START)


class ListenError(Exception):
    """The service can't listen as configured. One line for the operator; exit code 2."""


@dataclass(slots=True)
class Listeners:
    """All non-blocking and listening. `address` is what the port is really bound to."""

    run_dir: Path
    tcp: socket.socket
    control: socket.socket
    workers: socket.socket
    lock_fd: int
    address: str

    @property
    def control_path(self) -> str:
        return str(self.run_dir / _CONTROL)

    @property
    def workers_path(self) -> str:
        return str(self.run_dir / _WORKERS)

    def close(self) -> None:
        """Close all and take our files away. The lock goes last: until then nobody may start."""
        for sock, path in (
            (self.tcp, ""),
            (self.control, self.control_path),
            (self.workers, self.workers_path),
        ):
            sock.close()
            if path:
                with suppress(OSError):
                    os.unlink(path)
        os.close(self.lock_fd)

    def export(self) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "tcp_fd": self.tcp.detach(),
            "control_fd": self.control.detach(),
            "workers_fd": self.workers.detach(),
            "lock_fd": self.lock_fd,
            "address": self.address,
        }

    @classmethod
    def restore(cls, exported: Mapping[str, Any]) -> Listeners:
        def take(name: str) -> socket.socket:
            sock = socket.socket(fileno=exported[name])
            sock.setblocking(False)
            return sock

        return cls(
            run_dir=Path(exported["run_dir"]),
            tcp=take("tcp_fd"),
            control=take("control_fd"),
            workers=take("workers_fd"),
            lock_fd=exported["lock_fd"],
            address=exported["address"],
        )


def open_all(listen: str, run_dir: Path, *, backlog: int = 1024, group: str = "") -> Listeners:
    """Take the run directory, then the port, then make the sockets. Raises ListenError.

    The run directory comes first: who has it is our own kind, and says so better than a port.
    """
    length = len(os.fsencode(str(run_dir / LONGEST_SOCKET)))
    if length > SOCKET_PATH_LIMIT:
        raise ListenError(
            f"cannot use run directory {run_dir}: a socket in it would have a path of {length} "
            f"bytes, {SOCKET_PATH_LIMIT} are allowed; set server.run_dir to a shorter one"
        )
    group_id = _group_id(group)
    _prepare(run_dir, group_id)
    lock_fd = _lock(run_dir)
    opened: list[socket.socket] = []
    try:
        tcp, address = bind_port(listen, backlog)
        opened.append(tcp)
        control = _unix_socket(run_dir / _CONTROL, 0o660, group_id)
        opened.append(control)
        workers = _unix_socket(run_dir / _WORKERS, 0o600, -1)
    except BaseException:
        for sock in opened:
            sock.close()
        os.close(lock_fd)
        raise
    return Listeners(run_dir, tcp, control, workers, lock_fd, address)


def bind_port(listen: str, backlog: int = 1024) -> tuple[socket.socket, str]:
    """The socket systemd passed, or one of our own. Returns it and its address ("host:port")."""
    passed = passed_sockets()
    if passed:
        sock = passed[0]
        if len(passed) > 1:
            raise ListenError(f"systemd passed {len(passed)} sockets, one is wanted")
        if sock.type != socket.SOCK_STREAM:
            raise ListenError("the socket systemd passed is not a stream socket")
        sock.setblocking(False)
        return sock, _name(sock)
    try:
        host, port = parse_listen(listen)
    except ValueError as error:
        raise ListenError(f"cannot listen on {listen}: {error}") from error
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ListenError(f"cannot listen on {listen}: {error.strerror}") from error
    # All addresses is the dual-stack IPv6 one where there is IPv6, else the IPv4 one.
    found.sort(key=lambda entry: entry[0] != (socket.AF_INET6 if not host else socket.AF_INET))
    problem = "no address found"
    for family, kind, protocol, _, target in found:
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            problem = error.strerror or str(error)
            continue
        try:
            # Never SO_REUSEPORT: a second instance must fail here instead of taking half of the
            # connections, and a proxy that leaves would reset those in its own queue.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(host)))
            sock.bind(target)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            problem = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                problem = "the port is in use by another process"
                break
            continue
        sock.setblocking(False)
        return sock, _name(sock)
    raise ListenError(f"cannot listen on {listen}: {problem}")


def passed_sockets() -> list[socket.socket]:
    """Sockets from systemd, if they are meant for this very process. Taken only once."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    try:
        count = int(os.environ.get("LISTEN_FDS", "0"))
    except ValueError:
        return []
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    sockets = []
    for fd in range(_FIRST_PASSED_FD, _FIRST_PASSED_FD + count):
        os.set_inheritable(fd, False)
        try:
            sockets.append(socket.socket(fileno=fd))
        except OSError as error:
            raise ListenError(f"descriptor {fd} from systemd is no socket") from error
    return sockets


def _name(sock: socket.socket) -> str:
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return f"unix:{name}"
    return host_port(name[0], name[1])


def _group_id(group: str) -> int:
    if not group:
        return -1
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ListenError(f"cannot use server.control_group: there is no group {group}") from error


def _prepare(run_dir: Path, group_id: int) -> None:
    """Make the run directory ours: 0750, and the control group may pass."""
    try:
        made = not run_dir.exists()
        run_dir.mkdir(parents=True, exist_ok=True)
        status = run_dir.stat()
        if status.st_mode & stat.S_ISVTX:
            raise ListenError(f"cannot use run directory {run_dir}: it is shared with other users")
        if status.st_uid != os.geteuid():
            if made or not os.access(run_dir, os.W_OK):
                raise ListenError(
                    f"cannot use run directory {run_dir}: it belongs to user {status.st_uid}, "
                    f"we are user {os.geteuid()}"
                )
            return
        if group_id >= 0:
            os.chown(run_dir, -1, group_id)
        run_dir.chmod(0o750)
    except FileExistsError as error:
        raise ListenError(f"cannot use run directory {run_dir}: it is not a directory") from error
    except OSError as error:
        raise ListenError(f"cannot use run directory {run_dir}: {error.strerror}") from error


def _lock(run_dir: Path) -> int:
    path = run_dir / "lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ListenError(f"cannot open {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise ListenError(
            f"another gpusup{f' (pid {holder})' if holder.isdigit() else ''} runs in {run_dir}"
        ) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _unix_socket(path: Path, mode: int, group_id: int) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        # Nobody can connect before listen(), so there is no moment with the wrong mode.
        os.chmod(path, mode)
        if group_id >= 0:
            os.chown(path, -1, group_id)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise ListenError(f"cannot listen on {path}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    """A socket file of a dead service may go; one that somebody answers on may not."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ListenError(f"cannot listen on {path}: a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            pass
        except OSError as error:  # full backlog, no permission: somebody is there
            raise ListenError(f"cannot listen on {path}: {error.strerror or error}") from error
        else:
            raise ListenError(f"cannot listen on {path}: another process answers there")
    with suppress(FileNotFoundError):
        path.unlink()

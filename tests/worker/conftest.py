"""A stand-in for the supervisor and for a proxy: real sockets, real processes, no clock."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusup.worker import progress, wire
from gpusup.worker.frame import FrameDecoder, pack
from gpusup.worker.handlers import from_file

engines: Any = from_file(str(Path(__file__).parent / "engines.py"))
MODELS: str = from_file(str(Path(__file__).parent / "engine_models.py")).MODELS

Make = Callable[..., Any]

FAKE_ENGINE = f"{Path(__file__).parent / 'fakes.py'}:FakeEngine"
LIMIT_S = 20.0
_SUBREAPER = 36


class Peer:
    """One end of a framed socket, blocking, with a limit to its patience."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], Any]) -> None:
        sock.settimeout(LIMIT_S)
        self.sock = sock
        self.decode = decode
        self.decoder = FrameDecoder()
        self.frames: deque[bytes] = deque()
        self.descriptors: list[int] = []

    def send(self, message: Any, descriptors: list[int] | None = None) -> None:
        data = pack(wire.encode(message))
        sent = socket.send_fds(self.sock, [data], descriptors or [])
        if sent < len(data):  # not for nothing: the other side may have hung up by now
            self.sock.sendall(data[sent:])

    def receive(self) -> Any:
        """The next message; EOFError at the end."""
        while not self.frames:
            data, came, _, _ = socket.recv_fds(self.sock, 2**20, 8)
            self.descriptors += came
            if not data:
                raise EOFError
            self.frames.extend(self.decoder.feed(data))
        return self.decode(self.frames.popleft())

    def until(self, kind: type[Any]) -> Any:
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def ended(self) -> bool:
        """True when the other side hangs up; whatever it says until then is dropped."""
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionResetError):
            return True

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []
        self.sock.close()


class Zygote:
    def __init__(self, *options: str, engine: str = FAKE_ENGINE) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [sys.executable, "-m", "gpusup.worker.zygote", "--fd", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*argv, "--engine", engine, *options],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self.peer = Peer(ours, wire.decode_from_zygote)
        self.ready = self.peer.receive()
        self.serial = 0

    def spawn(self, spec: bytes, descriptors: list[int]) -> wire.Spawned | wire.SpawnRefused:
        self.serial += 1
        self.peer.send(wire.Spawn(self.serial, spec), descriptors)
        answer: wire.Spawned | wire.SpawnRefused = self.peer.receive()
        assert answer.serial == self.serial
        return answer

    def close(self) -> None:
        self.peer.close()
        self.process.wait(LIMIT_S)


class Worker:
    """A worker process, seen from the supervisor's side."""

    def __init__(self, spec: wire.WorkerSpec, pid: int, page: int, output: int) -> None:
        self.spec = spec
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.progress = progress.Reader(os.dup(page))
        self.page = page
        self.output_fd = output
        self.control: Peer
        self.returncode: int | None = None

    def wait(self) -> int:
        """The exit code, minus the signal's number if it was one."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            assert poll.poll(LIMIT_S * 1000), f"worker {self.pid} does not end"
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            assert result is not None
            exited = result.si_code == os.CLD_EXITED
            self.returncode = result.si_status if exited else -result.si_status
        return self.returncode

    def output(self) -> str:
        """All it has said. It must have ended, and its children."""
        data = b""
        while piece := os.read(self.output_fd, 65536):
            data += piece
        return data.decode()

    def connect(self, arena: int = 0, arena_bytes: int = 0) -> Peer:
        peer = self.bare_connection()
        hello = wire.DataHello("proxy 0", self.spec.generation, arena_bytes)
        peer.send(hello, [arena] if arena else [])
        welcome = peer.receive()
        assert isinstance(welcome, wire.DataWelcome)
        return peer

    def bare_connection(self) -> Peer:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(self.spec.data_path)
        return Peer(sock, wire.decode_from_worker)

    def close(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, 9)
            self.wait()
        self.control.close()
        self.progress.close()
        for fd in (self.pidfd, self.page, self.output_fd):
            os.close(fd)


class House:
    """What a supervisor has: a control socket, a zygote, and children of its own."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        self.folder = folder
        self.zygote = zygote
        self.workers: list[Worker] = []
        self.generation = 0
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / "workers.sock"))
        self.listener.listen()
        self.listener.settimeout(LIMIT_S)

    def spec(self, **changes: Any) -> wire.WorkerSpec:
        self.generation += 1
        settings = changes.pop("settings", {})
        spec = wire.WorkerSpec(
            slot="cpu0",
            generation=self.generation,
            model="echo",
            version="1",
            device="cpu",
            device_uuid="",
            control_path=str(self.folder / "workers.sock"),
            data_path=str(self.folder / f"cpu0.{self.generation}.sock"),
            config={"handler": "gpusup.worker.echo:Echo", "settings": settings},
        )
        return msgspec.structs.replace(spec, **changes)

    def start(self, how: str = "zygote", *, engine: str = FAKE_ENGINE, **changes: Any) -> Worker:
        """A worker that has said hello."""
        spec = self.spec(**changes)
        page = progress.create(spec.slot)
        output, into = os.pipe()
        if how == "zygote":
            answer = self.zygote.spawn(wire.encode(spec), [page, into])
            assert isinstance(answer, wire.Spawned), answer
            pid = answer.pid
        else:
            pid = self._exec(wire.encode(spec), page, into, engine)
        os.close(into)
        worker = Worker(spec, pid, page, output)
        self.workers.append(worker)
        sock, _ = self.listener.accept()
        worker.control = Peer(sock, wire.decode_from_worker_control)
        assert worker.control.receive() == wire.WorkerHello(spec.slot, spec.generation, pid)
        return worker

    def _exec(self, spec: bytes, page: int, into: int, engine: str) -> int:
        spec_fd = os.memfd_create("spec")
        os.write(spec_fd, spec)
        argv = [sys.executable, "-m", "gpusup.worker", "--spec-fd", str(spec_fd)]
        argv += ["--progress-fd", str(page), "--parent", str(os.getpid()), "--engine", engine]
        process = subprocess.Popen(argv, stdout=into, stderr=into, pass_fds=[spec_fd, page])
        os.close(spec_fd)
        process.returncode = 0  # reaped through the pidfd; Popen need not warn about it
        return process.pid

    def ready(self, how: str = "zygote", **changes: Any) -> Worker:
        worker = self.start(how, **changes)
        worker.control.until(wire.WorkerReady)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.listener.close()


def adopt_orphans(yes: bool) -> None:
    assert ctypes.CDLL(None).prctl(_SUBREAPER, int(yes), 0, 0, 0) == 0


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    adopt_orphans(True)
    zygote = Zygote()
    yield zygote
    zygote.close()
    adopt_orphans(False)


@pytest.fixture
def house(tmp_path: Path, zygote: Zygote) -> Iterator[House]:
    house = House(tmp_path, zygote)
    yield house
    house.close()


@pytest.fixture
def extra_zygote() -> Iterator[Callable[..., Zygote]]:
    """Makes zygotes of the test's own, to be killed or spoilt."""
    made: list[Zygote] = []

    def make(*options: str) -> Zygote:
        made.append(Zygote(*options))
        return made[-1]

    yield make
    for zygote in made:
        zygote.close()


def wait_until(true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """For what the kernel tells nobody about."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def wait() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def progress_writer() -> Iterator[progress.Writer]:
    fd = progress.create("test")
    yield progress.Writer(fd)
    os.close(fd)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with engines.builder(tmp_path / "models.py", MODELS) as build:
        yield build


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """The module of the models above, as the engine imports it."""
    return lambda: from_file(str(tmp_path / "models.py"))

"""`python -m gpusup.worker.zygote`: has torch imported, and forks workers on request.

Protocol: a stream Unix socket at descriptor `--fd`, frames of frame.py, messages of wire.py
(`ZygoteReady` first, then per `Spawn` one `Spawned` or `SpawnRefused`, in order). A `Spawn` comes
with two descriptors attached to its first byte: the progress page and the output pipe. The end of
the socket is the order to leave.

Forking is safe here because nothing else happens here: one thread, no CUDA, no code of a model,
and no socket but the one to the supervisor. Each worker is forked twice, so that the supervisor,
a sub-reaper, becomes its parent, and the zygote's death is nothing to it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from typing import Final, NoReturn

import setproctitle

from . import boot, precheck, wire
from .frame import FrameDecoder, pack
from .streams import complain

ADOPTION_LIMIT_S: Final = 5.0
DESCRIPTORS: Final = 2  # that come with a Spawn

#: Ours, imported ahead because each costs every worker's start some milliseconds. No CUDA in them.
OWN_MODULES: Final = ("numpy", "gpusup.worker.engine", "gpusup.worker.echo")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gpusup.worker.zygote")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--preload", default="", help="module,module")
    parser.add_argument("--engine", default=boot.ENGINE, help="another engine, for tests")
    given = parser.parse_args()
    supervisor = os.getppid()
    boot.die_with_parent(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor to act on
    setproctitle.setproctitle(f"gpusup: zygote {sys.executable}")
    sock = socket.socket(fileno=given.fd)
    sock.set_inheritable(False)
    problems = preload([name for name in given.preload.split(",") if name])
    gc.collect()
    # What is there now stays shared with the workers: no collection writes into its headers.
    gc.freeze()
    torch = sys.modules.get("torch")
    version = str(getattr(torch, "__version__", ""))
    say(sock, wire.ZygoteReady(os.getpid(), sys.executable, version, tuple(problems)))
    serve(sock, supervisor, given.engine)


def preload(modules: list[str]) -> list[str]:
    """Import torch, our own and the given modules; what can't be imported is told, not raised.

    With one thread in each pool: a parallel region here would make every child hang in its own.
    """
    for name in boot.THREAD_VARIABLES:
        os.environ[name] = "1"
    problems = []
    for module in ("torch", *OWN_MODULES, *modules):
        try:
            importlib.import_module(module)
        except Exception as error:
            text = f"cannot preload {module}: {type(error).__name__}: {error}"
            problems.append(" ".join(text.split()))
            complain(problems[-1])
    return problems


def say(sock: socket.socket, message: wire.FromZygote) -> None:
    sock.sendall(pack(wire.encode(message)))


def serve(sock: socket.socket, supervisor: int, engine: str) -> None:
    """Until the supervisor closes its end. Raises ValueError at a frame that can't be read."""
    decoder = FrameDecoder()
    descriptors: deque[int] = deque()
    while True:
        try:
            data, came, _, _ = socket.recv_fds(sock, 65536, 64, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return
        if not data:
            return
        descriptors.extend(came)
        for frame in decoder.feed(data):
            request = wire.decode_to_zygote(frame)
            # A frame's descriptors come with its first byte, so in the order of the frames.
            mine = [descriptors.popleft() for _ in range(min(DESCRIPTORS, len(descriptors)))]
            try:
                answer = spawn(request, mine, supervisor, engine)
            finally:
                for fd in mine:
                    os.close(fd)
            try:
                say(sock, answer)
            except (BrokenPipeError, ConnectionResetError):
                return


def refusal() -> str:
    """Why a fork would not be safe now; "" if it is."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return (
            f"the zygote has {threads} threads instead of 1, so its children could hang: "
            "a preloaded module has started one"
        )
    # The driver's library alone says nothing: newer torch maps it on import. Who has initialised
    # it holds the devices open, and his children could never use CUDA.
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            device = os.readlink(f"/proc/self/fd/{fd}")
            if device.startswith("/dev/nvidia"):
                return f"the zygote has {device} open: a preloaded module has initialised CUDA"
    return ""


def spawn(
    request: wire.Spawn, descriptors: list[int], supervisor: int, engine: str
) -> wire.Spawned | wire.SpawnRefused:
    """Returns in the zygote; in the worker it does not return."""
    if len(descriptors) < DESCRIPTORS:
        text = f"{len(descriptors)} descriptors came with the request, {DESCRIPTORS} are needed"
        return wire.SpawnRefused(request.serial, text)
    if text := refusal():
        return wire.SpawnRefused(request.serial, text)
    sys.stdout.flush()  # else each child would say it again
    sys.stderr.flush()
    try:
        told, tell = os.pipe()
    except OSError as error:
        return wire.SpawnRefused(request.serial, f"cannot make a pipe: {error.strerror}")
    try:
        middle = os.fork()
        if middle == 0:
            in_the_middle(request, descriptors, supervisor, engine, tell)
        os.waitpid(middle, 0)
        # Answered after the middle's end: by then the worker has got its new parent.
        words = os.read(told, 100).decode() or "the process in between died"
    except OSError as error:
        return wire.SpawnRefused(request.serial, f"cannot fork: {error.strerror}")
    finally:
        os.close(told)
        os.close(tell)
    if words.isdecimal():
        return wire.Spawned(request.serial, int(words))
    return wire.SpawnRefused(request.serial, words)


def in_the_middle(
    request: wire.Spawn, descriptors: list[int], supervisor: int, engine: str, tell: int
) -> NoReturn:
    try:
        worker = os.fork()
        if worker == 0:
            become_worker(request, descriptors, supervisor, engine)
        os.write(tell, str(worker).encode())
    except OSError as error:
        os.write(tell, f"cannot fork: {error.strerror}".encode())
    finally:
        os._exit(0)


def become_worker(
    request: wire.Spawn, descriptors: list[int], supervisor: int, engine: str
) -> NoReturn:
    try:
        progress, output = descriptors
        if request.check:
            close_all_but({0, 1, 2, output})
            wait_for(supervisor)
            gc.enable()
            boot.die_with_parent(supervisor)
            precheck.answer_forked(request.spec, output)
        os.dup2(output, 1)
        os.dup2(output, 2)
        close_all_but({0, 1, 2, progress})
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if nothing != 0:
            os.dup2(nothing, 0)
            os.close(nothing)
        sys.argv = ["gpusup.worker"]
        wait_for(supervisor)
        gc.enable()
        boot.run(request.spec, progress, engine=engine, parent=supervisor, forked=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def close_all_but(wanted: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def wait_for(supervisor: int) -> None:
    """Until the process in the middle has ended and we are the supervisor's. A poll: the kernel
    tells nobody of it, and it takes less than a millisecond."""
    end = time.monotonic() + ADOPTION_LIMIT_S
    while os.getppid() != supervisor:
        if time.monotonic() > end:
            complain(f"process {supervisor} has not adopted its worker: is it a sub-reaper?")
            boot.leave(1)
        time.sleep(0.0002)


if __name__ == "__main__":
    main()

"""The worker process from its first breath to its exit code, whichever way it was started.

Threads: main loads and computes; `sockets` (daemon) speaks with supervisor and proxies, also while
main is stuck in C with the GIL free; `beat` (daemon) shows in the progress page that the GIL moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, TextIO

import setproctitle

from gpusup.conf import heap
from gpusup.conf.precedence import follow

from . import wire
from .control import ControlLink, connect
from .data import DataServer
from .entry import EngineLike, Fence, LoadProblem
from .handlers import import_attribute, use_environment
from .model import ConfigProblem
from .progress import Writer
from .streams import Loop, complain

BEAT_S: Final = 0.25
LAST_WORDS_S: Final = 2.0
FENCE_WORDS_S: Final = 0.5
TEXT_LIMIT: Final = 1000
ENGINE: Final = "gpusup.worker.engine:Engine"

#: Set to 1 while torch is imported for forking; the worker's children must not inherit them.
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_PR_SET_PDEATHSIG: Final = 1
_SYSTEMD: Final = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_EXIT_CODES: Final = {
    "config": wire.EXIT_CONFIG,
    "oom": wire.EXIT_LOAD_OOM,
    "device": wire.EXIT_WRONG_DEVICE,
}

Cause = Literal["config", "oom", "golden", "device", "error"]
MakeEngine = Callable[[wire.WorkerSpec, Writer, Fence], EngineLike]


def die_with_parent(parent: int) -> None:
    """SIGKILL for us when `parent` ends. Main thread only. Ends the process if it has already.

    `parent` 0: whoever it is now, for when nobody has told us.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Between our start and the line above it may have died, and no signal would come any more.
    if parent and os.getppid() != parent:
        complain(f"process {parent}, which should be the parent, is gone")
        os._exit(1)


def run(
    spec_bytes: bytes, progress_fd: int, *, engine: str = ENGINE, parent: int = 0, forked: bool
) -> NoReturn:
    """Be the worker that `spec_bytes` (a WorkerSpec) describes. `engine`: "module:attribute"."""
    try:
        spec = wire.decode_spec(spec_bytes)
    except (ValueError, RecursionError) as error:
        complain(f"cannot read the worker's spec: {error}")
        leave(wire.EXIT_CONFIG)
    settle(spec, parent)
    progress = Writer(progress_fd)
    loop = Loop()
    try:
        control = ControlLink(loop, connect(spec.control_path))
    except OSError as error:
        complain(f"cannot connect to the supervisor at {spec.control_path}: {error}")
        leave(1)
    control.tell(wire.WorkerHello(spec.slot, spec.generation, os.getpid()))
    terminate = Terminate(loop)
    os.register_at_fork(
        before=lambda: mask_term(signal.SIG_BLOCK),
        after_in_parent=lambda: mask_term(signal.SIG_UNBLOCK),
        after_in_child=lambda: be_a_child(loop),
    )
    threading.Thread(target=beat, args=(progress,), name="beat", daemon=True).start()
    threading.Thread(target=loop.run, name="sockets", daemon=True).start()
    try:
        serve(spec, progress, loop, control, terminate, engine, forked)
    except LoadProblem as problem:
        traceback.print_exception(problem)
        fail(control, problem.cause, one_line(problem))
    except ConfigProblem as problem:
        traceback.print_exception(problem)
        fail(control, "config", one_line(problem))
    except BaseException as error:
        traceback.print_exception(error)
        if terminate.serving:
            leave(1)  # a crash like any other: it is too late to speak of loading
        fail(control, "error", f"{type(error).__name__}: {one_line(error)}")
    leave(0)


def serve(
    spec: wire.WorkerSpec,
    progress: Writer,
    loop: Loop,
    control: ControlLink,
    terminate: Terminate,
    engine_name: str,
    forked: bool,
) -> None:
    """Load and compute until told to stop. Raises LoadProblem, and whatever the engine raises."""
    data: DataServer | None = None

    def fence(text: str) -> NoReturn:
        control.tell(wire.Fenced(text))
        control.flush_for(FENCE_WORDS_S)
        if data is not None:
            data.finish(FENCE_WORDS_S)
        leave(wire.EXIT_FENCED)

    make_engine: MakeEngine = import_attribute(engine_name)
    engine = make_engine(spec, progress, fence)
    data = DataServer(loop, spec, engine, progress)
    engine.on_relief = data.push_load
    engine.reply_all = data.reply_all
    settle_torch(spec, forked)
    ready = engine.load(control.tell, control.wait_go)
    try:
        with control.owning(spec.data_path):
            data.listen()
    except OSError as error:
        raise LoadProblem("error", f"cannot listen on {spec.data_path}: {error}") from error
    terminate.gently(engine)
    control.attach(engine, ready)
    engine.run()
    data.finish(LAST_WORDS_S)
    control.flush_for(LAST_WORDS_S)


class Terminate:
    """SIGTERM. The byte is written by the C-level handler, so the sockets' thread learns of it
    even while the main thread, in which Python runs its handlers, is stuck in a call."""

    def __init__(self, loop: Loop) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._ours, self._theirs = ours, theirs
        self._engine: EngineLike | None = None
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        loop.add(ours.fileno(), select.EPOLLIN, self._woken)

    def gently(self, engine: EngineLike) -> None:
        """From now on there is work to finish first."""
        self._engine = engine

    @property
    def serving(self) -> bool:
        return self._engine is not None

    def _woken(self, events: int) -> None:
        try:
            # A handler of the model's may bring other signals here; only TERM is ours.
            if signal.SIGTERM not in self._ours.recv(4096):
                return
        except BlockingIOError:
            return  # nothing came
        if self._engine is None:
            leave(0)  # still loading: nobody waits for anything
        self._engine.stop()


def beat(progress: Writer) -> None:
    while True:
        progress.beat()
        time.sleep(BEAT_S)


def be_a_child(loop: Loop) -> None:
    """What a process that the model forks (a DataLoader's, say) must not have of the worker's.

    With the wake-up descriptor left, TERM for the child would be TERM for the worker; so TERM is
    masked from before the fork until here.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loop.disown()
    mask_term(signal.SIG_UNBLOCK)


def mask_term(how: int) -> None:
    """Of the thread that forks; the worker's other threads take a TERM meanwhile."""
    signal.pthread_sigmask(how, {signal.SIGTERM})


def settle(spec: wire.WorkerSpec, parent: int) -> None:
    """Session, signals, environment, title. Before torch can look at any of it."""
    die_with_parent(parent)
    with contextlib.suppress(PermissionError):  # whoever exec'ed us has done it already
        os.setsid()
        follow()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A core of a process with a CUDA context is huge, and writing it delays the memory's release.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Under memory pressure the kernel should take a worker, which comes back, not the supervisor.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("500")
    for name in [*THREAD_VARIABLES, *_SYSTEMD, *(n for n in os.environ if n.startswith("LISTEN_"))]:
        os.environ.pop(name, None)
    use_environment(spec.env)
    os.environ["CUDA_VISIBLE_DEVICES"] = spec.device_uuid if spec.device == "cuda" else ""
    # Activations are of megabytes each, and come again with every batch.
    heap.keep(blocks=32 * heap.MIB, top=64 * heap.MIB)
    setproctitle.setproctitle(
        f"gpusup: worker {spec.slot} {spec.model}@{spec.version} (generation {spec.generation})"
    )
    # New ones: those that were forked remember what kind of file their descriptor used to be.
    sys.stdout = open_output(1)
    sys.stderr = open_output(2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def open_output(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def settle_torch(spec: wire.WorkerSpec, forked: bool) -> None:
    """Threads as configured; and randomness of its own, where it was copied by the fork."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        threads = int(spec.config.get("torch_threads", 1)) or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        if forked:
            torch.default_generator.seed()
    numpy: Any = sys.modules.get("numpy")
    if forked and numpy is not None:
        numpy.random.seed()


def fail(control: ControlLink, cause: str, text: str) -> NoReturn:
    known: Cause
    match cause:
        case "config" | "oom" | "golden" | "device":
            known = cause
        case _:
            known = "error"
    control.tell(wire.LoadFailed(known, text))
    control.flush_for(LAST_WORDS_S)
    leave(_EXIT_CODES.get(known, 1))


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:TEXT_LIMIT] or type(error).__name__


def leave(code: int) -> NoReturn:
    """Without the interpreter's clean-up: daemon threads and CUDA's destructors can hang in it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

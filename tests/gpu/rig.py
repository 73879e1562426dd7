"""What the scripts for real GPUs share: configurations, clients, wrk, nvidia-smi, CPU shares.

Each script also runs with `--cpu`: the same steps on CPU slots, to try the script out.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

if not importlib.util.find_spec("gpusup"):  # not installed: from the tree, children too
    LINKS = str(Path(__file__).resolve().parents[1] / "links")
    sys.path.insert(0, LINKS)
    os.environ["PYTHONPATH"] = f"{LINKS}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "end_to_end"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench" / "apps"))
import work
from service import Service

#: So that `tests.end_to_end` is ours, whatever else is installed under that name.
_tests = types.ModuleType("tests")
_tests.__path__ = [str(Path(__file__).resolve().parents[1])]
sys.modules.setdefault("tests", _tests)

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent / "bench"
IMAGE = bytes(range(256)) * (3 * 224 * 224 // 256)
LOG_TAIL = 4000
#: torchvision takes seconds to import; the zygote does it once.
PRELOAD = '[supervision]\npreload = ["torchvision"]\n'


def devices(cpu: bool, use: Sequence[str] = ()) -> str:
    """The [devices] section: these GPUs, or as many CPU slots as there would be GPUs."""
    if cpu:
        return f'[devices]\nuse = ["cpu"]\ncpu_slots = {len(use) or 1}\ncpu_memory = "4GiB"\n'
    return f"[devices]\nuse = {json.dumps(list(use))}\n" if use else ""


def resnet(cpu: bool, **keys: Any) -> str:
    """A [models.resnet] section; `keys` are added as they are."""
    rows = 4 if cpu else 64
    known: dict[str, Any] = {
        "handler": f"{HERE}/handlers.py:ResNet50",
        "weights": work.weights_file("resnet50"),
        "max_rows": rows,
        "buckets": [[3, 224, 224]],
        "workers": 1,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in (known | keys).items()]
    return "\n".join(["[models.resnet]", *lines, ""])


@contextlib.contextmanager
def started(
    config: str, *, env: dict[str, str] | None = None, limit_s: float = 90.0
) -> Iterator[Service]:
    """A running service in a folder of its own, ready; nothing of it is left afterwards.

    After a body without an error it has to end with 0; an error gets the end of the log as a note.
    """
    folder = Path(tempfile.mkdtemp(prefix="gs-"))
    service = Service(folder, config, env=env)
    try:
        service.start(wait_ready=False)
        service.wait_ready(limit_s)
        yield service
        if code := service.stop(30):
            raise RuntimeError(f"the service ended with {code}")
    except BaseException as error:
        with contextlib.suppress(Exception):
            error.add_note(service.log()[-LOG_TAIL:])
            service.stop(10)
        raise
    finally:
        service.end()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def looking(look: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `look` so often in a thread until left; what it raises is raised then."""
    over = threading.Event()
    broken: list[Exception] = []

    def run() -> None:
        try:
            while not over.wait(every_s):
                look()
        except Exception as error:
            broken.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    if thread.is_alive():
        raise RuntimeError("a look has not ended in 30 s")
    if broken:
        raise broken[0]


def attempt(
    found: dict[str, Any],
    name: str,
    step: Callable[[], Any],
    log: Callable[[], str],
    limit_s: float = 0.0,
) -> None:
    """Put what `step` returns under `name`, or what went wrong with the end of the log.

    What is there already stays. With a limit it is broken off then; only in the main thread.
    """
    began = time.monotonic()

    def too_long(*_: object) -> None:
        raise TimeoutError(f"no end within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, too_long) if limit_s else None
    try:
        if limit_s:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
        found[name] = step()
    except (Exception, KeyboardInterrupt) as error:  # the steps after it can still tell something
        found[name] = {
            **(kept if isinstance(kept := found.get(name), dict) else {}),
            "error": f"{type(error).__name__}: {str(error)[:600]}",
            "where": "".join(traceback.format_tb(error.__traceback__)[-3:])[-1500:],
        }
        with contextlib.suppress(Exception):
            found[name]["log"] = (log() or "".join(getattr(error, "__notes__", ())))[-LOG_TAIL:]
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        if limit_s:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    if isinstance(found[name], dict):
        found[name]["took_s"] = round(time.monotonic() - began, 1)


class Answer(NamedTuple):
    began: float
    ended: float
    status: int  # 0: no answer
    pid: int
    version: str
    text: str  # of what is no 200


class Load:
    """Clients in closed loops on kept connections, each pausing 2 ms between two requests."""

    def __init__(
        self,
        service: Service,
        model: str = "resnet",
        clients: int = 16,
        *,
        body: bytes = IMAGE,
    ) -> None:
        self.answers: list[Answer] = []
        self._service, self._model = service, model
        self._body = body
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._loop) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + 30
        while len(self.answers) < len(self._threads) and time.monotonic() < end:
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(70)
            assert not thread.is_alive(), "a client still waits for its answer"

    def _loop(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=60)
        while not self._stop.wait(0.002):
            began = time.monotonic()
            try:
                connection.request("POST", f"/predictions/{self._model}", self._body)
                reply = connection.getresponse()
                body = reply.read()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.answers.append(Answer(began, time.monotonic(), 0, 0, "", repr(error)))
                continue
            ended = time.monotonic()
            version = reply.headers.get("Gpusup-Model-Version", "")
            pid, text = 0, ""
            if reply.status == 200:
                pid = json.loads(body).get("pid", 0)
            else:
                text = body[:300].decode(errors="replace")
            self.answers.append(Answer(began, ended, reply.status, pid, version, text))
        connection.close()

    def counts(self, since: float = 0.0) -> dict[str, int]:
        """Answers by status."""
        return dict(Counter(str(a.status) for a in self.answers if a.ended >= since))

    def failed(self) -> int:
        return sum(a.status != 200 for a in self.answers)

    def errors(self) -> list[str]:
        """A few of what went wrong."""
        return sorted({f"{a.status} {a.text}"[:300] for a in self.answers if a.status != 200})[:4]

    def shares(self, since: float) -> dict[int, float]:
        """By process, its share of the answers since then."""
        counts = Counter(a.pid for a in self.answers if a.pid and a.ended >= since)
        total = counts.total() or 1
        return {pid: round(count / total, 3) for pid, count in counts.items()}

    def longest_s(self) -> float:
        return round(max((a.ended - a.began for a in self.answers), default=0.0), 3)


class Wrk:
    """From `folder` (filled by tests/bench/carry_wrk.sh), or from PATH."""

    def __init__(self, folder: str = "") -> None:
        found = Path(folder).resolve() / "wrk" if folder else shutil.which("wrk")
        self.program = str(found or "")
        if not self.program or not Path(self.program).exists():
            raise FileNotFoundError(f"cannot find wrk in {folder or 'PATH'}")
        self._env = dict(os.environ)
        if folder:
            os.chmod(self.program, 0o755)
            libraries = f"{Path(folder).resolve()}:{os.environ.get('LD_LIBRARY_PATH', '')}"
            self._env["LD_LIBRARY_PATH"] = libraries

    def run(self, url: str, clients: int, seconds: float, threads: int = 0) -> dict[str, Any]:
        """images/s of 200s, p50 and p99 in ms, failed requests by kind."""
        threads = threads or min(8, max(1, (os.cpu_count() or 2) // 4))
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as body:
            body.write(IMAGE)
            body.flush()
            done = subprocess.run(
                [self.program, f"-t{min(threads, clients)}", f"-c{clients}",
                 f"-d{max(1, round(seconds))}s", "--timeout", "30s", "--latency",
                 "-s", str(BENCH / "post.lua"), url],
                env=self._env
                | {"BENCH_BODY": body.name, "BENCH_TYPE": "application/octet-stream"},
                capture_output=True, text=True, timeout=seconds + 60, check=False,
            )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("JSON ")]
        if not lines:
            raise RuntimeError(f"wrk failed: {done.stdout[-300:]}{done.stderr[-300:]}")
        said = json.loads(lines[0].removeprefix("JSON "))
        failed = {k: said[k] for k in ("connect", "read", "write", "status", "timeout") if said[k]}
        rate = (said["requests"] - said["status"]) / said["duration_us"] * 1e6
        return {
            "images_per_s": round(rate, 1),
            "p50_ms": round(said["p50_us"] / 1e3, 2),
            "p99_ms": round(said["p99_us"] / 1e3, 2),
            "failed": failed,
        }


def nvidia_smi(what: str, fields: str) -> list[list[str]]:
    """Rows of `nvidia-smi --query-WHAT=FIELDS`. Raises RuntimeError if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise RuntimeError("cannot find nvidia-smi") from error
    if done.returncode:
        raise RuntimeError(f"nvidia-smi: {(done.stderr or done.stdout)[-300:]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line]


def gpus() -> dict[str, dict[str, float]]:
    """UUID -> MiB used and free, and utilisation in percent, by nvidia-smi."""
    rows = nvidia_smi("gpu", "uuid,memory.used,memory.free,utilization.gpu")
    return {
        uuid: {"used_mib": _number(used), "free_mib": _number(free), "busy": _number(busy)}
        for uuid, used, free, busy in rows
    }


def gpu_of_pids() -> dict[int, str]:
    """Process -> UUID of the GPU it computes on, by nvidia-smi."""
    rows = nvidia_smi("compute-apps", "gpu_uuid,pid")
    return {int(pid): uuid for uuid, pid in rows if pid.isdigit()}


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return -1.0  # "[N/A]"


def metric(service: Service, name: str, label: str) -> dict[str, float]:
    """A metric's values by one of its labels."""
    found: dict[str, float] = {}
    for line in service.get("/metrics").body.decode().splitlines():
        if line.startswith(f"{name}{{") and f'{label}="' in line:
            key = line.split(f'{label}="')[1].split('"')[0]
            found[key] = found.get(key, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


class CpuShares:
    """Cores that each process of the service used between the start and `stop`, by its title."""

    def __init__(self, service: Service) -> None:
        assert service.process
        root = psutil.Process(service.process.pid)
        self._processes = [root, *root.children(recursive=True)]
        self._began = time.monotonic()
        self._before = {p.pid: self._cpu(p) for p in self._processes}

    @staticmethod
    def _cpu(process: psutil.Process) -> float:
        try:
            times = process.cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def stop(self) -> dict[str, float]:
        took = time.monotonic() - self._began
        shares: dict[str, float] = {}
        for process in self._processes:
            used = self._cpu(process) - self._before[process.pid]
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                title = " ".join(words)
                if not title.startswith("gpusup:"):
                    title = " ".join(Path(w).name for w in words[:4])
                shares[f"{title[:48]} [{process.pid}]"] = round(used / took, 2)
        return dict(sorted(shares.items(), key=lambda share: -share[1])[:16])


def machine() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    with contextlib.suppress(RuntimeError):
        found["gpus"] = nvidia_smi("gpu", "name,memory.total,driver_version")
    return found


def table(rows: Sequence[Sequence[object]]) -> str:
    """Columns lined up."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = range(max(map(len, cells)))
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in columns]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in cells
    )

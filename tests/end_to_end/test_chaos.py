"""Everything at once: 32 clients ask while a script kills, stops, hangs, floods, drains, swaps,
upgrades and replaces. Every request has one answer of a legal kind, and nothing is left behind.

By hand, for longer: `pytest tests/end_to_end/test_chaos.py --seeds 50 -s`.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from .load import Seen, ask, figure
from .service import HANDLERS, Service, running

CLIENTS = 32
SECONDS = 5.0
#: From here on a value does mischief. Each is another, or it would soon be refused.
TRIGGER = 1e6

CONFIG = f"""
[server]
proxies = 2
request_timeout = "15s"
drain_notice = "50ms"
drain_limit = "15s"

[devices]
cpu_memory = "16GiB"

[supervision]
hello_limit = "5s"      # a worker stopped while it starts or loads is found by these alone
load_stall = "5s"
warm_up_limit = "5s"
suspect_after = "300ms"
beat_limit = "1500ms"
drain_limit = "5s"

[supervision.backoff]
initial = "20ms"
limit = "100ms"
crashes = 1000

[models.safe]
handler = "{HANDLERS}:Double"
retry = "safe"
budget = "2s"
standby = true

[models.free]
handler = "{HANDLERS}:Hang"
budget = "700ms"
settings = {{ above = {TRIGGER} }}

[models.held]
handler = "{HANDLERS}:HangGil"
budget = "700ms"
settings = {{ above = {TRIGGER} }}

[models.flood]
handler = "{HANDLERS}:Flood"
budget = "5s"
settings = {{ above = {TRIGGER} }}
"""

#: (status, code) that a client may see; 0: the connection went with the proxy that was killed.
LEGAL = {
    (200, ""),
    (0, ""),
    (502, "WORKER_LOST"),
    (503, "NO_WORKER"),
    (503, "DRAINING"),
    (504, "DEADLINE_EXCEEDED"),
    (429, "QUEUE_FULL"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("seeds", 5)))


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG) as service:
        service.until(lambda: proxies_serve(service), 20)
        yield service


def proxies_serve(service: Service) -> bool:
    found = service.status()["proxies"]
    return len(found) == 2 and all(p["state"] == "serving" for p in found)


def patient(call: Callable[[], Any]) -> Any:
    """The control socket's connections, unlike the front door's, end with an upgrade."""
    for _ in range(5):
        with suppress(OSError, http.client.HTTPException):
            return call()
        time.sleep(0.1)
    return call()


class Crowd:
    """The clients, and when proxies were killed."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.seen: list[tuple[str, bool, Seen]] = []  # (model, on a fresh connection, what)
        self.harm: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            # No two seeds send the same input: one that was in two workers that died is refused.
            threading.Thread(
                target=self._client,
                args=(n, random.Random(f"{seed}.{n}"), (seed % 50 * CLIENTS + n) * 600),
            )
            for n in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _client(self, number: int, rng: random.Random, first: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=40)
        fresh, count = True, 0
        while not self._over.is_set():
            model = rng.choices(("safe", "free", "held", "flood"), (7, 1, 1, 1))[0]
            count += 1
            value = float(first + count % 600)
            seen = ask(connection, f"/predictions/{model}", value, {})
            with self._lock:
                self.seen.append((model, fresh, seen))
            fresh = seen.status == 0 or seen.headers.get("Connection") == "close"
            self._over.wait(rng.random() * 0.03)
        connection.close()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request without an answer"

    def hung_proxy(self) -> str:
        """What the log has of a proxy that was found to hang, its stacks included."""
        log = self.service.whole_log()
        at = log.rfind(" hangs: not a word")
        return log[max(0, at - 300) : at + 8000] if at >= 0 else "no proxy was found to hang"

    def harmed(self, seen: Seen) -> bool:
        return any(a <= seen.ended and seen.began <= b + 0.5 for a, b in self.harm)


class Script:
    """What happens to the service, by chance but repeatable."""

    def __init__(self, service: Service, crowd: Crowd, rng: random.Random) -> None:
        self.service, self.crowd, self.rng = service, crowd, rng
        self.done: Counter[str] = Counter()
        self._versions = 1
        self._threads: list[threading.Thread] = []
        self._acts: list[tuple[Callable[[], None], int]] = [
            (self.kill_worker, 4),
            (self.stop_worker, 2),
            (self.pause_worker, 2),
            (self.hang, 3),
            (self.flood, 1),
            (self.drain, 2),
            (self.restart_slot, 2),
            (self.swap, 2),
            (self.restart_proxy, 1),
            (self.kill_proxy, 1),
            (self.leave_early, 2),
            (self.pause_supervisor, 1),
            (self.upgrade, 1),
        ]

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            acts, weights = zip(*self._acts, strict=True)
            act = self.rng.choices(acts, weights)[0]
            self.done[act.__name__] += 1
            act()
            self.crowd._over.wait(self.rng.uniform(0.02, 0.2))
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), self.service.log()

    def _aside(self, work: Callable[[], object]) -> None:
        def run() -> None:
            # Its own connection may go with the proxy it came to.
            with suppress(OSError, http.client.HTTPException):
                work()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _worker(self) -> int:
        pids = sorted(patient(self.service.pids).values())
        return self.rng.choice(pids) if pids else 0

    def _slot(self) -> str:
        return str(self.rng.choice(patient(self.service.status)["slots"])["slot"])

    def _signal(self, pid: int, number: int) -> None:
        if pid:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(pid, number)

    def _ask(self, method: str, path: str, body: Any = None) -> None:
        """A conflict with what else goes on is an answer too."""
        status, answer = patient(lambda: self.service.control(method, path, body))
        assert status in (200, 409), (path, status, answer)

    def kill_worker(self) -> None:
        self._signal(self._worker(), signal.SIGKILL)

    def stop_worker(self) -> None:
        self._signal(self._worker(), signal.SIGSTOP)

    def pause_worker(self) -> None:
        pid = self._worker()
        self._signal(pid, signal.SIGSTOP)
        self.crowd._over.wait(0.4)
        self._signal(pid, signal.SIGCONT)

    def _mischief(self, model: str) -> None:
        value = str(TRIGGER + self.rng.randrange(10**6)).encode()
        self._aside(lambda: self.service.predict(model, value))

    def hang(self) -> None:
        self._mischief(self.rng.choice(("free", "held")))

    def flood(self) -> None:
        self._mischief("flood")

    def drain(self) -> None:
        slot = self._slot()
        self._ask("POST", f"/slots/{slot}/drain")

        def later() -> None:
            self.crowd._over.wait(0.5)
            self._uncordon(slot)

        self._aside(later)

    def _uncordon(self, slot: str) -> None:
        self._ask("POST", f"/slots/{slot}/uncordon")

    def restart_slot(self) -> None:
        self._ask("POST", f"/slots/{self._slot()}/restart")

    def swap(self) -> None:
        self._versions = 3 - self._versions
        self._ask("POST", "/models/safe/reload", {"version": str(self._versions)})

    def restart_proxy(self) -> None:
        """Loses nothing, unlike a killed one."""
        name = f"proxy{self.rng.randrange(2)}"
        self._aside(lambda: self._ask("POST", f"/proxies/{name}/restart"))

    def kill_proxy(self) -> None:
        rows = [p for p in patient(self.service.status)["proxies"] if p["pid"]]
        if not rows:  # both are being replaced
            return
        self.crowd.harm.append((time.monotonic(), time.monotonic() + 0.5))
        self._signal(self.rng.choice(rows)["pid"], signal.SIGKILL)

    def leave_early(self) -> None:
        def leave() -> None:
            for _ in range(5):
                with suppress(OSError, http.client.HTTPException):
                    self.service.request("POST", "/predictions/safe", b"5", timeout=0.002)

        self._aside(leave)

    def pause_supervisor(self) -> None:
        assert self.service.process
        os.kill(self.service.process.pid, signal.SIGSTOP)
        self.crowd._over.wait(0.7)
        os.kill(self.service.process.pid, signal.SIGCONT)

    def upgrade(self) -> None:
        self._aside(lambda: self._ask("POST", "/reexec"))


def kind(target: str) -> str:
    return target.partition(":")[0].partition("[")[0] if ":[" in target else target


def held(pid: int) -> Counter[str]:
    """What a process has open or mapped: sockets, pipes, memfds, files."""
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = kind(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
        found["memfd" if "memfd:" in target else target] += 1
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:" in line:
            found["mapped memfd"] += 1
    return found


def fewest(pid: int, seconds: float = 0.3) -> Counter[str]:
    """What it holds once it has heard that our last connection is closed."""
    looks = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        looks.append(held(pid))
        time.sleep(0.01)
    return min(looks, key=Counter.total)


def at_rest(service: Service) -> dict[str, Any]:
    """What there is when nobody asks anything: the same before and after."""
    assert service.process
    status = service.status()
    proxies = [held(p["pid"]) for p in status["proxies"]]
    family = [p.name() for p in service.processes()]
    return {
        "supervisor": fewest(service.process.pid),
        "proxies": sorted(sorted(p.items()) for p in proxies),
        "family": len(family),
        "files": len(list(service.run_dir.iterdir())),
    }


def quiet(service: Service) -> bool:
    """Nothing is in flight, waits, or is leased."""
    leases = service.control("GET", "/leases")[1]
    arenas = [a for a in leases["arena"].values() if a["free"] != a["total"]]
    numbers = [
        n for part in ("leases", "in_flight", "queued") for row in leases[part].values()
        for n in row.values()
    ]  # fmt: skip
    return not any(numbers) and not arenas


def settle(service: Service) -> None:
    status: dict[str, Any] | None = None

    def settled() -> bool:
        nonlocal status
        status = service.try_status()
        if not status or status["changes"]:
            return False
        for slot in status["slots"]:
            if slot["slot_state"] != "schedulable":
                service.control("POST", f"/slots/{slot['slot']}/uncordon")
        if any(slot["standby"] not in ("", "ready") for slot in status["slots"]):
            return False
        return status["state"] == "ready" and proxies_serve(service) and quiet(service)

    try:
        service.until(settled, 60)
    except AssertionError:
        leases = service.control("GET", "/leases")
        pytest.fail(f"not at rest: {status}\n{leases}\n{service.log()}")


def zombies(service: Service) -> list[int]:
    assert service.process
    family = psutil.Process(service.process.pid).children(recursive=True)
    return [p.pid for p in family if p.is_running() and p.status() == psutil.STATUS_ZOMBIE]


def judge(crowd: Crowd) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for model, fresh, seen in crowd.seen:
        code = seen.body.get("code", "") if isinstance(seen.body, dict) else ""
        label = (seen.status, code if seen.status else "")
        assert label in LEGAL, (model, seen)
        kinds[f"{seen.status} {code}".strip()] += 1
        if seen.status == 200:
            assert seen.body["value"] == seen.asked * (2 if model == "safe" else 1), (model, seen)
        elif seen.status == 0:
            assert crowd.harmed(seen), (model, fresh, seen, crowd.hung_proxy())
        elif seen.status == 502:
            assert model != "safe", seen
            assert seen.headers["x-should-retry"] == "false"
        elif seen.status in (429, 503):
            assert int(seen.headers["Retry-After"]) >= 1
    return kinds


def test_every_request_has_one_legal_answer_and_nothing_is_left_behind(
    service: Service, seed: int
) -> None:
    settle(service)
    before = service.until(lambda: (x := at_rest(service)) == at_rest(service) and x)
    rng = random.Random(seed)
    crowd = Crowd(service, seed)
    script = Script(service, crowd, rng)
    try:
        script.run(SECONDS)
    finally:
        crowd.stop()
    kinds = judge(crowd)
    slowest = max(seen.ended - seen.began for _, _, seen in crowd.seen)
    figure(f"seed {seed}: {len(crowd.seen)} requests {dict(kinds)}, slowest {slowest:.2f} s")
    figure(f"  {dict(script.done)}")
    assert kinds["200"] > 0.8 * len(crowd.seen)
    settle(service)
    service.until(lambda: not zombies(service), 20)
    end = time.monotonic() + 15
    while (after := at_rest(service)) != before and time.monotonic() < end:
        time.sleep(0.1)
    assert after == before


def test_it_stops_as_if_nothing_had_been(service: Service) -> None:
    left = service.processes()
    assert service.stop() == 0
    _, alive = psutil.wait_procs(left, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []

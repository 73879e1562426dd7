"""A box made of nothing: carries out a fleet's actions in memory, on a clock that tests move."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gpusup.conf.schema import Config, DevicesConfig, ModelConfig
from gpusup.supervisor import actions as act
from gpusup.supervisor import events as ev
from gpusup.supervisor import verbs
from gpusup.supervisor.fleet import Fleet
from gpusup.supervisor.layout import DevicePlace
from gpusup.supervisor.life import Life, State
from gpusup.worker.progress import Progress
from gpusup.worker.wire import Memory, WorkerReady

GIB = 2**30


def ready_info(static: int = GIB) -> WorkerReady:
    return WorkerReady(
        device_uuid="GPU-0",
        device_name="fake",
        memory=Memory(allocated=static, reserved=static, static=static),
        max_rows=8,
        budget_s=1.0,
        peaks={},
    )


@dataclass
class FakeWorker:
    launch: act.Launch
    pid: int
    alive: bool = True
    went: bool = False
    draining: bool = False
    held_memory: bool = False
    beat: float = 0.0
    batch_started: float = 0.0


@dataclass
class World:
    """`behave(launch)` says what a version does: "good", "config", "oom", "crash", "golden"."""

    config: Config
    devices: dict[str, DevicePlace]
    seed: int = 0
    static: int = GIB
    behave: Callable[[act.Launch], str] = lambda launch: "good"
    problem: str = ""
    now: float = 100.0
    workers: dict[tuple[str, int], FakeWorker] = field(default_factory=dict)
    told: list[act.Tell] = field(default_factory=list)
    signals: list[act.Signal] = field(default_factory=list)
    published: int = 0
    kill_works: bool = True
    memory_returns: bool = True
    auto: bool = True
    at_first: Callable[[World], object] = lambda world: None
    _pid: int = 1000

    def __post_init__(self) -> None:
        self._inbox: deque[act.Action] = deque()
        self._events: deque[ev.Event] = deque()
        self._busy = False
        self.fleet = Fleet(
            self.config,
            self.devices,
            fits=lambda name, model, device, sharing: 1,
            size_of=lambda assignment, kind: self.static,
            rng=random.Random(self.seed),
            now=self.now,
        )
        self.at_first(self)
        self.sample()

    # -- driving ----------------------------------------------------------------------------------

    def do(self, actions: list[act.Action]) -> None:
        """As in the runtime: what an action causes waits until all actions are done."""
        self._inbox.extend(actions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox or self._events:
                if self._inbox:
                    self._do(self._inbox.popleft())
                else:
                    self._inbox.extend(self.fleet.handle(self._events.popleft(), self.now))
        finally:
            self._busy = False

    def post(self, event: ev.Event) -> None:
        self._events.append(event)
        self.do([])

    def operate(self, rng: random.Random, deed: int, slot: str, models: str = "m") -> None:
        """What an operator may do at random, a `deed` below 7: drain, uncordon, restart, reload one
        of `models`, end m's change or any. Raises Refused."""
        match deed:
            case 0:
                self.verb(verbs.drain, slot, self.now, "walk", None)
            case 1 | 2:
                self.verb(verbs.uncordon, slot, self.now)
            case 3:
                self.verb(verbs.restart, slot, self.now)
            case 4:
                wish = verbs.ReloadWish(
                    version=str(rng.randrange(1, 9)),
                    strategy=rng.choice(("auto", "surge", "in-place")),
                    canary=rng.choice((0.0, 0.0, 0.5)),
                )
                model = rng.choice(models) if len(models) > 1 else models
                self.verb(verbs.reload, model, wish, self.now)
            case 5:
                self.verb(rng.choice((verbs.promote, verbs.rollback)), "m", self.now)
            case _:
                self.verb(verbs.abort, str(rng.randrange(1, 9)), self.now)

    def verb(self, verb: Callable[..., object], *args: object) -> object:
        result = verb(self.fleet, *args)
        if isinstance(result, tuple):
            self.do(result[1])
            return result[0]
        assert isinstance(result, list)
        self.do(result)
        return None

    def sample(self) -> None:
        for name, place in self.devices.items():
            used = sum(
                self.static
                for w in self.workers.values()
                if w.launch.device == name and (w.alive or w.held_memory)
            )
            self.post(ev.DeviceSampled(device=name, total=place.total, used=used, ours=used))

    def step(self, seconds: float = 0.05) -> None:
        self.now += seconds
        for (slot, generation), worker in list(self.workers.items()):
            if not worker.alive:
                continue
            progress = Progress(self.now - worker.beat, 0, 0, 0, 0, worker.batch_started, 1.0, 0)
            self.post(ev.ProgressSeen(slot=slot, generation=generation, progress=progress))
        if self.auto:
            self._move_on()
        self.sample()
        self.post(ev.Ticked())

    def run(self, seconds: float, step: float = 0.05) -> None:
        for _ in range(round(seconds / step)):
            self.step(step)

    def until(self, condition: Callable[[], bool], limit_s: float = 200.0) -> None:
        end = self.now + limit_s
        while not condition():
            assert self.now < end, [life.story for life in self.fleet.lives()]
            self.step()

    # -- looking ----------------------------------------------------------------------------------

    def life(self, slot: str) -> Life:
        worker = self.fleet.slots[slot].worker
        assert worker is not None
        return worker

    def state(self, slot: str) -> str:
        return self.fleet.slots[slot].state(self.now)

    def all_ready(self) -> bool:
        return all(s.is_ready() for s in self.fleet.slots.values())

    def serving(self, model: str) -> list[str]:
        return [
            life.assignment.version
            for life in self.fleet.lives()
            if life.assignment.model == model and life.state is State.READY
        ]

    def alive(self, slot: str) -> list[FakeWorker]:
        return [w for w in self.workers.values() if w.launch.slot == slot and w.alive]

    # -- what happens to workers ------------------------------------------------------------------

    def die(self, slot: str, generation: int, returncode: int = -9) -> None:
        worker = self.workers[slot, generation]
        if not worker.alive:
            return
        worker.alive = False
        worker.held_memory = not self.memory_returns
        self.post(ev.WorkerExited(slot=slot, generation=generation, returncode=returncode))

    def _move_on(self) -> None:
        """Each worker takes its next step by itself."""
        for (slot, generation), worker in list(self.workers.items()):
            life = self.fleet.life(slot, generation)
            if life is None or not worker.alive:
                continue
            at = {"slot": slot, "generation": generation}
            how = self.behave(worker.launch)
            match life.state:
                case State.SPAWNED:
                    self.post(ev.WorkerSaidHello(pid=worker.pid, **at))  # type: ignore[arg-type]
                case State.LOADING if worker.launch.held and not worker.went:
                    if how == "config":
                        self._fail(slot, generation, "config", 78)
                    else:
                        self.post(ev.WorkerPrepared(host_bytes=1, **at))  # type: ignore[arg-type]
                case State.LOADING if how in ("config", "oom", "golden"):
                    self._fail(slot, generation, how, {"config": 78, "oom": 71}.get(how, 1))
                case State.LOADING if how == "crash":
                    self.die(slot, generation, -11)
                case State.LOADING:
                    info = ready_info(self.static)
                    self.post(ev.WorkerBecameReady(info=info, **at))  # type: ignore[arg-type]
                case State.DRAINING if worker.draining:
                    self.post(ev.WorkerDrained(**at))  # type: ignore[arg-type]
                case _:
                    pass

    def _fail(self, slot: str, generation: int, cause: str, code: int) -> None:
        self.post(
            ev.LoadFailed(slot=slot, generation=generation, cause=cause, text=f"bad: {cause}")
        )
        self.die(slot, generation, code)

    def _do(self, action: act.Action) -> None:
        match action:
            case act.Launch():
                self._pid += 1
                key = (action.slot, action.generation)
                self.workers[key] = FakeWorker(action, self._pid)
                self.post(
                    ev.WorkerStarted(slot=action.slot, generation=action.generation, pid=self._pid)
                )
            case act.Signal():
                self.signals.append(action)
                if action.name == "TERM" or (action.name == "KILL" and self.kill_works):
                    code = 0 if action.name == "TERM" else -9
                    self.die(action.slot, action.generation, code)
            case act.SendGo():
                self.workers[action.slot, action.generation].went = True
            case act.SendDrain():
                self.workers[action.slot, action.generation].draining = True
            case act.Reclaim():
                if self.memory_returns:
                    self.post(ev.MemoryReturned(slot=action.slot, generation=action.generation))
            case act.RunCheck():
                self.post(ev.CheckDone(change=action.change, problem=self.problem))
            case act.Publish():
                self.published += 1
            case act.Tell():
                self.told.append(action)
            case act.Persist():
                pass


def box(
    slots: int = 2,
    *,
    kind: str = "cuda",
    gib: int = 24,
    models: dict[str, ModelConfig] | None = None,
    **world: object,
) -> World:
    models = models or {"m": ModelConfig(handler="x:Y")}
    config = Config(models=models, devices=DevicesConfig(safety=GIB))
    prefix = "gpu" if kind == "cuda" else "cpu"
    devices = {
        f"{prefix}{i}": DevicePlace(f"{prefix}{i}", kind, f"GPU-{i}", gib * GIB)
        for i in range(slots)
    }
    return World(config, devices, **world)  # type: ignore[arg-type]

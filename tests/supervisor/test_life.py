"""Every test here is: these events, at these times, ask for these actions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusup.conf.schema import ModelConfig, SupervisionConfig
from gpusup.supervisor import events as ev
from gpusup.supervisor.actions import Action, Assignment, Reclaim, SendDrain, SendGo, Signal
from gpusup.supervisor.backoff import Cause
from gpusup.supervisor.life import MOVES, IllegalMove, Life, State, diagram
from gpusup.worker.progress import Progress

from .world import ready_info

AT = {"slot": "gpu0", "generation": 1}
CONFIG = SupervisionConfig()


def spawned(*, held: bool = False) -> Life:
    assignment = Assignment(model="m", version="1", config=ModelConfig(handler="x:Y"))
    return Life("gpu0", "gpu0", 1, assignment, CONFIG, 0.0, held=held)


def ready() -> Life:
    life = spawned()
    life.handle(ev.WorkerStarted(**AT, pid=7), 0)  # type: ignore[arg-type]
    life.handle(ev.WorkerSaidHello(**AT, pid=7), 1)  # type: ignore[arg-type]
    life.handle(ev.WorkerBecameReady(**AT, info=ready_info()), 2)  # type: ignore[arg-type]
    assert life.state == State.READY.value
    return life


def seen(
    now: float, *, beat_age: float = 0.0, batch_age: float = 0.0, budget: float = 10.0
) -> ev.ProgressSeen:
    started = now - batch_age if batch_age else 0.0
    progress = Progress(now - beat_age, 0, 0, 0, 0, started, budget, 0.0)
    return ev.ProgressSeen(slot="gpu0", generation=1, progress=progress)


def names(actions: list[Action]) -> list[str]:
    return [a.name for a in actions if isinstance(a, Signal)]


def test_a_late_beat_makes_a_busy_worker_suspect_and_nothing_more() -> None:
    life = ready()
    assert life.handle(seen(20, beat_age=15, batch_age=9), 20) == []
    assert life.state == State.SUSPECT.value
    assert life.handle(seen(21), 21) == []
    assert life.state == State.READY.value


def test_a_worker_inside_the_driver_is_said_to_be_there() -> None:
    life = ready()
    event = seen(20, beat_age=4, batch_age=5)
    stuck = ev.ProgressSeen(**AT, progress=event.progress, process_state="D")  # type: ignore[arg-type]
    life.handle(stuck, 20)
    assert life.state is State.SUSPECT
    assert "inside the driver" in life.why_suspect


def test_a_hang_is_found_although_the_beat_is_fine() -> None:
    life = ready()
    assert names(life.handle(seen(20, batch_age=11.5), 20)) == ["USR2"]
    assert life.state == State.KILLING.value
    assert names(life.tick(20 + CONFIG.dump_wait)) == ["KILL"]


def test_over_budget_is_suspect_first_and_dead_before_a_fifth_more_has_passed() -> None:
    life = ready()
    life.handle(seen(20, batch_age=10.1), 20)
    assert life.state == State.SUSPECT.value
    life.handle(seen(20.5, batch_age=10.6), 20.5)
    assert life.state == State.KILLING.value


def test_a_small_budget_leaves_little_time_for_the_dump() -> None:
    life = ready()
    life.handle(seen(20, batch_age=1.03, budget=1.0), 20)
    assert life.state == State.KILLING.value
    assert names(life.tick(20.06)) == ["KILL"]


def test_an_idle_worker_without_a_beat_is_killed_only_at_the_hard_limit() -> None:
    life = ready()
    life.handle(seen(30, beat_age=19), 30)
    assert life.state == State.SUSPECT.value
    life.handle(seen(32, beat_age=21), 32)
    assert life.state == State.KILLING.value


def test_loading_may_take_for_ever_as_long_as_something_moves() -> None:
    life = spawned()
    life.handle(ev.WorkerSaidHello(**AT, pid=7), 1)  # type: ignore[arg-type]
    for now in range(10, 1000, 50):
        life.handle(ev.LoadMoved(**AT, phase="weights", done=now), now)  # type: ignore[arg-type]
        assert life.tick(now) == []
    assert names(life.tick(960 + CONFIG.load_stall + 1)) == ["USR2"]


def test_drain_finishes_then_stops_then_waits_for_the_memory() -> None:
    life = ready()
    assert life.drain(5, "drain") == [SendDrain(slot="gpu0", generation=1)]
    assert names(life.handle(ev.WorkerDrained(**AT), 6)) == ["TERM"]  # type: ignore[arg-type]
    gone = life.handle(ev.WorkerExited(**AT, returncode=0), 7)  # type: ignore[arg-type]
    assert gone == [Reclaim(slot="gpu0", generation=1, device="gpu0")]
    life.handle(ev.MemoryReturned(**AT, holders="pid 5"), 8)  # type: ignore[arg-type]
    assert (life.state, life.holders) == (State.RECLAIMING, "pid 5")
    life.handle(ev.MemoryReturned(**AT), 9)  # type: ignore[arg-type]
    assert life.state == State.GONE.value
    assert life.outcome
    assert life.outcome.cause is Cause.REQUESTED


def test_a_drain_with_a_limit_of_its_own_says_that_one_when_it_is_over() -> None:
    life = ready()
    life.drain(5, "drain", 3.0)
    assert names(life.tick(8)) == ["KILL"]
    assert life.story[-1].cause == "not drained within 3 s"


def test_what_survives_kill_is_unkillable_until_it_dies_after_all() -> None:
    life = ready()
    life.handle(seen(20, batch_age=12), 20)
    life.tick(21)
    assert life.tick(21 + CONFIG.kill_limit + 1) == []
    assert life.state == State.UNKILLABLE.value
    life.handle(ev.WorkerExited(**AT, returncode=-9), 90)  # type: ignore[arg-type]
    assert life.state == State.RECLAIMING.value


def test_the_judges_own_pause_makes_nobody_late() -> None:
    life = ready()
    life.postpone(600, 700)
    assert life.handle(seen(700, beat_age=500, batch_age=500), 700) == []
    assert life.state == State.READY.value


def test_a_held_worker_waits_for_go_and_go_may_come_first() -> None:
    life = spawned(held=True)
    life.handle(ev.WorkerSaidHello(**AT, pid=7), 1)  # type: ignore[arg-type]
    life.handle(ev.WorkerPrepared(**AT, host_bytes=1), 2)  # type: ignore[arg-type]
    assert life.state == State.HELD.value
    assert life.tick(1e9) == []
    assert life.go(3) == [SendGo(slot="gpu0", generation=1)]
    early = spawned(held=True)
    early.handle(ev.WorkerSaidHello(**AT, pid=7), 1)  # type: ignore[arg-type]
    assert early.go(2) == []
    assert early.handle(ev.WorkerPrepared(**AT, host_bytes=1), 3) == [  # type: ignore[arg-type]
        SendGo(slot="gpu0", generation=1)
    ]


@pytest.mark.parametrize(
    ("code", "cause"),
    [(78, Cause.CONFIG), (71, Cause.LOAD_OOM), (70, Cause.FENCED), (-9, Cause.CRASH)],
)
def test_the_exit_says_whose_fault_it_was(code: int, cause: Cause) -> None:
    life = ready()
    life.handle(ev.WorkerExited(**AT, returncode=code), 3)  # type: ignore[arg-type]
    assert life.outcome
    assert life.outcome.cause is cause


def test_an_illegal_move_prints_the_story() -> None:
    life = ready()
    with pytest.raises(IllegalMove, match="hello"):
        life._enter(State.LOADING, 9, "bug")


def test_every_state_can_be_reached_and_all_but_gone_left() -> None:
    assert set(MOVES) == set(State)
    assert set().union(*MOVES.values()) == set(State) - {State.SPAWNED}
    assert [s for s in State if not MOVES[s]] == [State.GONE]


def test_the_document_shows_the_moves_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert diagram() in text

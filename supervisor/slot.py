"""A slot: a place on a device for one worker. It outlives the workers in it.

What is decided here: whether a worker may be started now, what its end means for the next start
(back-off, giving up), and whether the slot takes part at all (cordoned, quarantined, lost).
During a swap a change *reserves* the slot: then nothing starts but what the change asks for.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import Any

from gpusup.conf.schema import SupervisionConfig

from . import events as ev
from .actions import Action, Assignment, Launch, Persist, Tell
from .backoff import Backoff, Cause, Pause
from .life import COMING, Life, Outcome, State


class Standing(StrEnum):
    SCHEDULABLE = "schedulable"
    CORDONED = "cordoned"
    QUARANTINED = "quarantined"
    LOST = "lost"


class Slot:
    def __init__(
        self,
        name: str,
        device: str,
        model: str,
        config: SupervisionConfig,
        rng: random.Random,
        *,
        fallback: bool = False,
    ) -> None:
        self.name = name
        self.device = device
        self.model = model
        self.config = config
        self.fallback = fallback
        self.standing = Standing.SCHEDULABLE
        self.standing_why = ""
        self.standing_by = ""
        self.standing_since = 0.0
        self.generation = 0
        self.wanted: Assignment | None = None
        self.worker: Life | None = None
        self.successor: Life | None = None
        self.successor_outcome: Outcome | None = None
        self.reserved_by = ""
        self.retiring = False  # no longer in the configuration: goes when it is empty
        self.failed = ""
        self.retry_at = 0.0
        self.restarts = 0
        self.last_exit = ""
        self.last_cause: Cause | None = None
        self.last_story: list[Any] = []
        self.waiting_for = ""
        self.backoff = Backoff(config.backoff, rng)
        self.standby_pause = Pause()
        self.short_since = 0.0  # memory, for the worker or its standby
        self.no_standby = ""  # why there is none although one is configured

    # -- looking at it ----------------------------------------------------------------------------

    def lives(self) -> list[Life]:
        return [life for life in (self.worker, self.successor) if life is not None]

    @property
    def standby(self) -> Life | None:
        heir = self.successor
        return heir if heir is not None and heir.standby else None

    def is_stuck(self) -> bool:
        """A process that does not die takes the slot; a standby's takes only its own place."""
        return any(x.state is State.UNKILLABLE and not x.standby for x in self.lives())

    def state(self, now: float) -> str:
        """What `status` shows: the worker's state, or why there is none."""
        if self.worker is not None:
            return self.worker.state
        if self.failed:
            return "failed"
        if now < self.retry_at:
            return "backoff"
        return "waiting" if self.waiting_for else "empty"

    def is_ready(self) -> bool:
        return self.worker is not None and self.worker.state is State.READY

    def takes_part(self) -> bool:
        return self.standing is Standing.SCHEDULABLE and not self.failed

    # -- standing ---------------------------------------------------------------------------------

    def stand(self, standing: Standing, now: float, by: str = "", why: str = "") -> list[Action]:
        if (self.standing, self.standing_why) == (standing, why):
            return []
        self.standing, self.standing_by, self.standing_why = standing, by, why
        self.standing_since = now
        return [Persist()]

    def drain(self, now: float, by: str, why: str, limit_s: float | None = None) -> list[Action]:
        actions = self.stand(Standing.CORDONED, now, by, why)
        for life in self.lives():
            actions += life.drain(now, "drain", limit_s)
        return actions

    def uncordon(self, now: float) -> list[Action]:
        return self.stand(Standing.SCHEDULABLE, now)

    def reset(self, now: float) -> list[Action]:
        """An operator says: try again."""
        self.failed = ""
        self.retry_at = 0.0
        self.backoff.forgive()
        actions: list[Action] = [Persist()]
        if self.standing is Standing.QUARANTINED:
            actions += self.stand(Standing.SCHEDULABLE, now)
        return actions

    # -- starting ---------------------------------------------------------------------------------

    def may_start(self, now: float) -> bool:
        return (
            self.worker is None
            and self.wanted is not None
            and not self.reserved_by
            and self.takes_part()
            and now >= self.retry_at
        )

    def start(self, now: float) -> list[Action]:
        assert self.wanted is not None
        self.waiting_for, self.short_since = "", 0.0
        if self.standby is not None and self._can_follow(self.standby):
            return self._take_over(now)
        actions = self.end_standby("not needed", now)
        self.worker = self._life(self.wanted, now, held=False)
        return [*actions, self._launch(self.worker, held_context=True)]

    def start_successor(
        self, assignment: Assignment, now: float, *, held: bool, held_context: bool = True
    ) -> list[Action]:
        self.successor = self._life(assignment, now, held=held)
        self.successor.held_context = held and held_context
        self.successor_outcome = None
        return [self._launch(self.successor, held_context=held_context)]

    def succeed(self) -> Life | None:
        """The old worker is gone: the successor, if it lives, is the slot's worker from now on."""
        assert self.worker is None
        self.worker, self.successor = self.successor, None
        if self.worker is not None:
            self.wanted = self.worker.assignment
        return self.worker

    def start_standby(self, now: float) -> list[Action]:
        assert self.wanted is not None
        actions = self.start_successor(self.wanted, now, held=True)
        assert self.successor is not None
        self.successor.standby = True
        return actions

    def end_standby(self, why: str, now: float) -> list[Action]:
        heir = self.standby
        return heir.kill(now, Outcome(Cause.REQUESTED, why)) if heir is not None else []

    def _can_follow(self, heir: Life) -> bool:
        same = heir.assignment is self.wanted
        if heir.standby:  # not started by a change: what is equal is the same to it
            same = heir.assignment == self.wanted
        return same and heir.state in COMING and self.takes_part()

    def _take_over(self, now: float) -> list[Action]:
        """The successor has the slot from now on, and may have the device."""
        heir = self.successor
        assert heir is not None
        assert self.wanted is not None
        if heir.standby:
            heir.standby = False
            heir.assignment = self.wanted  # changes tell one from the other by identity
            self.standby_pause.failures = 0
        self.succeed()
        return heir.go(now)

    def _life(self, assignment: Assignment, now: float, *, held: bool) -> Life:
        self.generation += 1
        return Life(
            self.name, self.device, self.generation, assignment, self.config, now, held=held
        )

    def heir_may_start(self) -> bool:
        """The worker died in good health and its memory is not back yet: the next one may already
        prepare, away from the device's memory. It takes over when that is certain."""
        life = self.worker
        return (
            life is not None
            and life.state is State.RECLAIMING
            and life.outcome is not None
            and life.outcome.cause in (Cause.CRASH, Cause.HANG, Cause.FENCED)
            and life.ready_at > 0
            and self.backoff.strikes == 0
            and self.successor is None
            and not self.reserved_by
            and self.takes_part()
            and life.assignment is self.wanted
        )

    def _inherit(self, now: float, *, at_once: bool, later: bool = False) -> list[Action]:
        """The old worker is gone: what was prepared meanwhile takes its place, or is not wanted.
        `later`: when the back-off is over; a standby can wait for that."""
        heir = self.successor
        if heir is None or self.reserved_by:
            return []
        if at_once and self._can_follow(heir):
            return self._take_over(now)
        if later and heir.standby and self._can_follow(heir):
            return []
        return heir.kill(now, Outcome(Cause.REQUESTED, "not needed"))

    def _launch(self, life: Life, *, held_context: bool) -> Launch:
        return Launch(
            slot=self.name,
            generation=life.generation,
            assignment=life.assignment,
            device=self.device,
            held=life.held,
            held_context=held_context,
        )

    # -- what happens -----------------------------------------------------------------------------

    def handle(self, event: ev.WorkerEvents, now: float) -> list[Action]:
        for life in self.lives():
            if life.generation == event.generation:
                return life.handle(event, now) + self.settle(now)
        return []  # about a worker that is gone

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for life in self.lives():
            actions += life.tick(now)
            if life.state is State.UNKILLABLE and not life.standby:
                why = f"pid {life.pid} does not die (KILL sent), the device needs a look"
                actions += self.stand(Standing.QUARANTINED, now, "gpusup", why)
        if self.worker is not None and self.worker.state is State.READY:
            self.backoff.healthy_for(now - self.worker.ready_at)
        return actions + self.settle(now)

    def settle(self, now: float) -> list[Action]:
        """Take leave of workers that are gone, and decide what their end means."""
        actions: list[Action] = []
        if self.successor is not None and self.successor.state is State.GONE:
            heir, self.successor = self.successor, None
            if heir.standby:
                actions += self._standby_ended(heir, now)
            else:
                self.successor_outcome = heir.outcome
                self._remember(heir)
        if self.worker is not None and self.worker.state is State.GONE:
            actions += self._worker_ended(self.worker, now)
        return actions

    def _standby_ended(self, heir: Life, now: float) -> list[Action]:
        """Nobody was served by it, so neither the worker nor the slot's tally have a part in it."""
        outcome = heir.outcome
        if outcome is None or outcome.cause is Cause.REQUESTED:
            return []
        pause = self.standby_pause.fail(f"the last one ended: {outcome.text}", now)
        text = f"{self.name}: its standby ended ({outcome.text}), the next one in {pause:g} s"
        return [Tell(kind="standby", text=text, level="warning", fields={"slot": self.name})]

    def _worker_ended(self, life: Life, now: float) -> list[Action]:
        self.worker = None
        self._remember(life)
        outcome = life.outcome or Outcome(Cause.CRASH, "unknown")
        self.last_cause = outcome.cause
        self.retry_at = now
        if outcome.cause is Cause.REQUESTED:
            return self._inherit(now, at_once=True) if self.standby else []
        self.restarts += 1
        if outcome.cause is Cause.GPU:
            # Charged to the device, by whoever reported the fault.
            return [Persist(), *self._inherit(now, at_once=False)]
        if life.ready_at:
            self.backoff.healthy_for(now - life.ready_at)
        delay, give_up = self.backoff.strike(outcome.cause, now)
        self.retry_at = now + delay
        if give_up:
            self.failed = f"{outcome.text} (given up: {give_up})"
        at_once = not give_up and delay == 0
        return [Persist(), *self._inherit(now, at_once=at_once, later=not give_up)]

    def _remember(self, life: Life) -> None:
        if life.outcome is not None:
            self.last_exit = life.outcome.text
        self.last_story = list(life.story)

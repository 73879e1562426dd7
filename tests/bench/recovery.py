"""recovery: a worker is killed, or hangs, while clients are served."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from clients import Answer, Clients, request
from contest import GPUSUP, Job, Setting, server_for, wait_for_standbys
from peers import BenchProblem
from result import Result, spread
from server import Server

CLIENTS = 8
SLOW_MS = 20
BUDGET_S = 1.0
CLIENT_TIMEOUT_S = 10.0
HANGS = ("hang", "hang-gil")


@dataclass(slots=True)
class Killed:
    """`to_answer_s` None: no new worker answered while we watched."""

    to_answer_s: float | None
    executing_errors: int
    other_errors: int
    kinds: dict[str, int]


@dataclass(slots=True)
class Hung:
    ended_s: float | None
    how: str
    new_worker_s: float | None
    other_errors: int


@dataclass(slots=True)
class Found:
    kills: list[Killed] = field(default_factory=list)
    alone: list[Killed] = field(default_factory=list)  # gpusup with a single slot
    hangs: dict[str, list[Hung]] = field(default_factory=lambda: {kind: [] for kind in HANGS})


async def kill_one(server: Server, watch_s: float, at_once: int) -> Killed:
    """SIGKILL to the worker that answered last, under clients in closed loop.

    `at_once`: batches that execute in a worker of gpusup at a time.
    """
    clients = Clients(
        url=server.url, count=CLIENTS, body=lambda: request("slow", ms=SLOW_MS),
        timeout_s=CLIENT_TIMEOUT_S,
    )  # fmt: skip
    async with clients:
        await clients.until(lambda seen: len(seen) > 10 * CLIENTS, 10)
        before = {answer.pid for answer in clients.answers if answer.what == "ok"}
        if not before:
            raise BenchProblem(f"{server.name} answered nobody: {clients.answers[-1:]}")
        victim = next(a.pid for a in reversed(clients.answers) if a.what == "ok")
        killed = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        await clients.until(
            lambda seen: any(_is_new(answer, before) for answer in seen[-100:]), watch_s
        )
        # Who was waiting at the death may still be: watch until the clients' own limit is over.
        await clients.served_since(time.perf_counter(), CLIENT_TIMEOUT_S + 1)
    after = [answer for answer in clients.answers if answer.ended > killed]
    fresh = [answer.ended for answer in after if _is_new(answer, before)]
    errors = Counter(answer.what for answer in after if answer.what != "ok")
    # One request is a batch here, so as many may fail as batches execute: in gpusup only as it
    # promises, in a peer one in any way.
    ours = server.name == GPUSUP
    executing = min(at_once, errors["http-502"]) if ours else min(1, errors.total())
    return Killed(
        to_answer_s=min(fresh) - killed if fresh else None,
        executing_errors=executing,
        other_errors=errors.total() - executing,
        kinds=dict(errors),
    )


def _is_new(answer: Answer, before: set[int]) -> bool:
    return answer.what == "ok" and answer.pid not in before


async def hang_one(server: Server, kind: str, watch_s: float) -> Hung:
    """One request that never ends, beside four clients who want no more than the no-op."""
    clients = Clients(
        url=server.url, count=4, body=lambda: request("noop"), timeout_s=5.0, think_s=0.02
    )
    async with clients, aiohttp.ClientSession() as session:
        await clients.until(lambda seen: len(seen) > 50, 10)
        before = {answer.pid for answer in clients.answers if answer.what == "ok"}
        began = time.perf_counter()
        stuck = await clients.ask(session, request(kind), watch_s)
        await clients.until(
            lambda seen: any(_is_new(answer, before) for answer in seen[-100:]),
            max(0.0, began + watch_s - time.perf_counter()),
        )
    after = [answer for answer in clients.answers if answer.ended > began]
    fresh = [answer.ended for answer in after if _is_new(answer, before)]
    return Hung(
        ended_s=None if stuck.what == "client-timeout" else stuck.ended - stuck.began,
        how=stuck.what,
        new_worker_s=min(fresh) - began if fresh else None,
        other_errors=sum(answer.what != "ok" for answer in after),
    )


def _job(workers: int, setting: Setting) -> Job:
    # One row at a time, so that it is known how many requests a death can take with it.
    return Job(
        mode="torch",
        workers=workers,
        rows=1,
        timeout_s=BUDGET_S,
        model={"budget": f"{BUDGET_S:g}s"} | ({"standby": True} if setting.standby else {}),
    )


@contextmanager
def _serving(name: str, workers: int, setting: Setting) -> Iterator[Server]:
    with server_for(name, _job(workers, setting), setting) as server:
        if setting.standby and name == GPUSUP:
            wait_for_standbys(server)
        yield server


def measure(name: str, setting: Setting, found: Found) -> None:
    """One round for one server: a kill among two workers, each hang, a kill of the only worker."""
    watch_s = 5.0 if setting.quick else 15.0
    at_once = 2 if setting.gpu else 1  # on a GPU the next batch is launched while one computes
    with _serving(name, 2, setting) as server:
        found.kills.append(asyncio.run(kill_one(server, watch_s, at_once)))
    for kind in HANGS:
        with _serving(name, 2, setting) as server:
            found.hangs[kind].append(asyncio.run(hang_one(server, kind, watch_s)))
    if name == GPUSUP:
        with _serving(name, 1, setting) as server:
            found.alone.append(asyncio.run(kill_one(server, watch_s, at_once)))


def recovery(setting: Setting) -> Result:
    columns = ("server", "kill: answers again s", "errors (executing + others)",
               "hang answered s", "hang-gil answered s", "others' errors")  # fmt: skip
    result = Result("recovery", columns)
    rounds = setting.rounds(3)
    found = {name: Found() for name in setting.names()}
    for number in range(rounds):
        for name in list(found):
            try:
                measure(name, setting, found[name])
            except BenchProblem as problem:
                setting.say(f"{name}: {problem}")
                if name == GPUSUP:
                    raise
                del found[name]
                continue
            setting.say(f"round {number + 1}/{rounds} {name}: {found[name].kills[-1]}")
    for name, of_it in found.items():
        result.rows.append(_row(name, of_it))
        result.figures |= _figures(name, of_it)
    alone = found[GPUSUP].alone
    result.figures["alone_kill_to_answer_s"] = _median([k.to_answer_s for k in alone])
    result.figures["alone_other_client_errors"] = sum(k.other_errors for k in alone)
    result.goals = {
        "kill_to_answer_s": ("<=", 1.0 if setting.gpu else 0.3),
        "other_client_errors": ("<=", 0),
        "hang_over_budget": ("<=", 1.2),
    }
    result.notes = [
        f"kill: SIGKILL to one of two workers under {CLIENTS} clients of a {SLOW_MS} ms handler; "
        "answers again: the first answer of a process that was not there before",
        "executing: at most one error (from gpusup: a 502; on a GPU two, since the next batch is "
        "launched while one computes), for the request that ran in the killed "
        "worker; every other error counts as another client's",
        f"hang: a handler asleep in C without or with the interpreter's lock; budget "
        f"{BUDGET_S:g} s, for peers the time-out they have; 'never' means not while we watched",
        "alone: the same kill with a single slot",
        *(["gpusup: standby = true, ready in each slot before the kill"] * setting.standby),
        *setting.best_settings(),
    ]
    return result


def _median(values: Sequence[float | None]) -> float | None:
    """None if one of them is: a server that came back twice of three times did not recover."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def _figures(name: str, found: Found) -> dict[str, Any]:
    prefix = "" if name == GPUSUP else f"{name}_"
    over = [
        _median([None if h.ended_s is None else h.ended_s / BUDGET_S for h in hangs])
        for hangs in found.hangs.values()
    ]
    worst = None if None in over else max(ratio for ratio in over if ratio is not None)
    return {
        f"{prefix}kill_to_answer_s": _median([kill.to_answer_s for kill in found.kills]),
        f"{prefix}executing_errors": sum(kill.executing_errors for kill in found.kills),
        f"{prefix}other_client_errors": sum(kill.other_errors for kill in found.kills),
        f"{prefix}hang_over_budget": worst,
        f"{prefix}hang_other_errors": sum(
            hang.other_errors for hangs in found.hangs.values() for hang in hangs
        ),
    }


def _row(name: str, found: Found) -> tuple[str, ...]:
    def times(values: Sequence[float | None]) -> str:
        known = [value for value in values if value is not None]
        return spread(known, 2) if len(known) == len(values) else "never"

    kills = found.kills
    errors = f"{sum(k.executing_errors for k in kills)} + {sum(k.other_errors for k in kills)}"
    hung = [times([h.ended_s for h in found.hangs[kind]]) for kind in HANGS]
    others = sum(h.other_errors for hangs in found.hangs.values() for h in hangs)
    return (name, times([k.to_answer_s for k in kills]), errors, *hung, str(others))

"""Steady load for the demonstration: clients in closed loops that check every answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import aiohttp

#: A client's pause between answer and next request, so that two cores are busy but not drowned.
PAUSE_S: Final = 0.01
LIMIT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digit:
    """A held-out image and what is written on it."""

    name: str
    label: int
    png: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request as its client saw it, by time.monotonic. `problem`: "" if all is well."""

    began: float
    ended: float
    problem: str
    digit: int = -1
    probability: float = 0.0
    version: str = ""

    @property
    def took(self) -> float:
        return self.ended - self.began


def held_out(folder: Path) -> list[Digit]:
    """The shipped images, by label: `held-out-<index>-is-<digit>.png`."""
    digits = [
        Digit(name=path.name, label=int(path.stem.rpartition("-")[2]), png=path.read_bytes())
        for path in sorted(folder.glob("held-out-*-is-*.png"))
    ]
    return sorted(digits, key=lambda digit: (digit.label, digit.name))


async def ask(session: aiohttp.ClientSession, url: str, digit: Digit) -> Seen:
    """Send one image. Whatever goes wrong is in the result: nothing is raised."""
    began = time.monotonic()
    try:
        async with session.post(
            url,
            data=digit.png,
            headers={"Content-Type": "image/png"},
            timeout=aiohttp.ClientTimeout(total=LIMIT_S),
        ) as response:
            body = await response.read()
            ended = time.monotonic()
            if response.status != 200:
                text = body[:200].decode("utf-8", "replace")
                return Seen(began=began, ended=ended, problem=f"{response.status} {text}")
            version = response.headers.get("Gpusup-Model-Version", "")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
        return Seen(began=began, ended=time.monotonic(), problem=problem)
    return judge(body, digit, began, ended, version)


def judge(body: bytes, digit: Digit, began: float, ended: float, version: str) -> Seen:
    try:
        answer: Any = json.loads(body)
        guess, sure = int(answer["digit"]), float(answer["probability"])
    except (ValueError, KeyError, TypeError) as error:
        text = body[:100].decode("utf-8", "replace")
        problem = f"unreadable answer {text!r}: {error}"
        return Seen(began=began, ended=ended, problem=problem, version=version)
    wrong = "" if guess == digit.label else f"{digit.name} was taken for a {guess}"
    return Seen(
        began=began, ended=ended, problem=wrong, digit=guess, probability=sure, version=version
    )


@dataclass(slots=True)
class Load:
    """`clients` loops that ask until `stop`. Every request is kept in `seen`."""

    session: aiohttp.ClientSession
    url: str
    digits: Sequence[Digit]
    clients: int = 4
    seen: list[Seen] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._client(random.Random(number)))
            for number in range(self.clients)
        ]

    async def stop(self) -> None:
        """Let every request that was sent have its answer."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, rng: random.Random) -> None:
        while not self._stopping:
            self.seen.append(await ask(self.session, self.url, rng.choice(self.digits)))
            await asyncio.sleep(PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What happened to the requests that were under way between two moments."""

    requests: int
    failed: int
    slowest_s: float
    gap_s: float  # the longest time in which no answer came
    problems: tuple[str, ...]


def window(seen: Sequence[Seen], began: float, ended: float) -> Window:
    inside = [one for one in seen if one.ended >= began and one.began <= ended]
    good = sorted(one.ended for one in inside if not one.problem)
    edges = [began, *[moment for moment in good if began <= moment <= ended], ended]
    gaps = [later - earlier for earlier, later in pairwise(edges)]
    problems = [one.problem for one in inside if one.problem]
    return Window(
        requests=len(inside),
        failed=len(problems),
        slowest_s=max((one.took for one in inside), default=0.0),
        gap_s=max(gaps, default=0.0),
        problems=tuple(dict.fromkeys(problems)),
    )

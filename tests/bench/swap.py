"""swap: new weights under clients in closed loop, by each strategy."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from clients import Answer, Clients, request
from contest import MODEL, Job, Setting, gpusup_server, gpusupctl
from peers import APPS, BenchProblem
from result import Result, spread
from server import Server

CLIENTS = 16
STRATEGIES = ("surge", "in-place")
COMMAND_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Swapped:
    """`gap_s`: last answer of the old version to first of the new, 0 if they overlap."""

    gap_s: float
    took_s: float
    failed: int
    answered: int
    slowest_s: float
    kinds: dict[str, int]


def number_of(version: int) -> int:
    """What the weights of this version answer."""
    return 1 + version % 2


def write_weights(folder: Path, size: int) -> dict[int, Path]:
    """Two files of `size` bytes that differ in their number; number -> file."""
    import torch
    from safetensors.torch import save_file

    piece = min(size, 256 << 20)
    files = {}
    for number in (1, 2):
        tensors = {
            f"filler.{i}": torch.zeros(piece, dtype=torch.uint8) for i in range(size // piece)
        }
        files[number] = folder / f"weights-{number}.safetensors"
        save_file({"number": torch.tensor(number), **tensors}, files[number])
    return files


async def swap_one(
    server: Server, clients: Clients, version: int, weights: Path, strategy: str
) -> Swapped:
    """`gpusupctl reload-model` while the clients go on. Raises BenchProblem if it fails."""
    began = time.perf_counter()
    command = gpusupctl(
        server, "reload-model", MODEL, "--version", str(version), "--weights", str(weights),
        "--strategy", strategy, "--allow-gap", "30s",
    )  # fmt: skip
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await asyncio.wait_for(running.communicate(), COMMAND_LIMIT_S)
    except TimeoutError:
        running.kill()
        raise BenchProblem(
            f"swap to {version} by {strategy}: no end in {COMMAND_LIMIT_S:g} s"
        ) from None
    took = time.perf_counter() - began
    if running.returncode:
        raise BenchProblem(
            f"swap to {version} by {strategy}: exit {running.returncode}\n{said.decode()[-800:]}"
        )
    if not await clients.served_since(time.perf_counter(), 10):
        raise BenchProblem(f"swap to {version} by {strategy}: a client still waits 10 s later")
    return judge(clients.answers, version, took, began)


def judge(answers: list[Answer], version: int, took_s: float, began: float = 0.0) -> Swapped:
    """Of the answers since the swap `began`; where none of them is of the old version, the gap is
    from the last one before. A 200 whose number is not that of the version it names is a failure
    too."""
    old, new = str(version - 1), str(version)
    kinds: Counter[str] = Counter()
    ends: dict[str, list[float]] = {old: [], new: []}
    during = [answer for answer in answers if answer.ended > began]
    for answer in during:
        if answer.what != "ok":
            kinds[answer.what] += 1
        elif answer.version not in ends or number_of(int(answer.version)) != answer.number:
            kinds[f"version {answer.version!r} said {answer.number}"] += 1
        else:
            ends[answer.version].append(answer.ended)
    if not ends[new]:
        raise BenchProblem(f"version {new} was swapped in and never answered; {dict(kinds)}")
    before = [a.ended for a in answers if (a.what, a.version) == ("ok", old)]
    if not before:
        raise BenchProblem(f"version {old} never answered before {new}; {dict(kinds)}")
    return Swapped(
        gap_s=max(0.0, min(ends[new]) - max(ends[old] or before)),
        took_s=took_s,
        failed=kinds.total(),
        answered=len(ends[old]) + len(ends[new]),
        slowest_s=max(answer.ended - answer.began for answer in during),
        kinds=dict(kinds),
    )


async def swaps(server: Server, files: dict[int, Path], strategy: str, count: int) -> list[Swapped]:
    clients = Clients(
        url=server.url, count=CLIENTS, body=lambda: request("noop"), timeout_s=60.0, think_s=0.002
    )
    async with clients:
        if not await clients.until(lambda seen: len(seen) > 10 * CLIENTS, 10):
            raise BenchProblem(f"nobody was answered: {clients.answers[-1:]}")
        return [
            await swap_one(server, clients, version, files[number_of(version)], strategy)
            for version in range(2, 2 + count)
        ]


def swap(setting: Setting) -> Result:
    columns = ("strategy", "swaps", "gap s", "slowest answer s", "command s", "answered", "failed")
    result = Result("swap", columns)
    files = write_weights(setting.folder, setting.weights_bytes)
    job = Job(
        mode="noop",
        handler=f"{APPS / 'gpusup_app.py'}:Weights",
        model={"weights": str(files[number_of(1)]), "version": "1"},
        tables={} if setting.gpu else {"devices": {"cpu_slots": 1, "cpu_memory": "4GiB"}},
    )
    result.figures |= {"gap_s": {}, "gap_max_s": {}, "failed": {}, "slowest_answer_s": {}}
    for strategy in STRATEGIES:
        with gpusup_server(job, setting) as server:
            done = asyncio.run(swaps(server, files, strategy, 2 if setting.quick else 10))
        gaps = [one.gap_s for one in done]
        failed = sum(one.failed for one in done)
        result.figures["gap_s"][strategy] = statistics.median(gaps)
        result.figures["gap_max_s"][strategy] = max(gaps)
        result.figures["failed"][strategy] = failed
        result.figures["slowest_answer_s"][strategy] = max(one.slowest_s for one in done)
        result.notes += [f"{strategy}: {one.kinds}" for one in done if one.kinds]
        result.rows.append((
            strategy, str(len(done)), spread(gaps, 3),
            f"{max(one.slowest_s for one in done):.3f}", spread([one.took_s for one in done], 2),
            str(sum(one.answered for one in done)), str(failed),
        ))  # fmt: skip
    result.goals = {"gap_s": ("<=", 1.0), "failed": ("<=", 0)}
    result.notes.append(
        f"{CLIENTS} clients in closed loop, weights of {setting.weights_bytes >> 20} MiB, "
        "one slot; gap: last answer of the old version to first of the new"
    )
    return result

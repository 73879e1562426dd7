"""The look at a new version, by a fork of a zygote and by a fresh interpreter."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpusup.conf.schema import ModelConfig
from gpusup.supervisor.actions import Assignment
from gpusup.supervisor.check_model import ModelCheck, size_of
from gpusup.supervisor.family import Family, become_subreaper, children
from gpusup.supervisor.launcher import Logs
from gpusup.supervisor.zygotes import ZygoteLauncher

HANDLERS = Path(__file__).parents[1] / "handlers.py"
PYTHON = sys.executable


def assignment(handler: str = f"{HANDLERS}:Echo", **fields: object) -> Assignment:
    config = ModelConfig(handler=handler, **fields)  # type: ignore[arg-type]
    return Assignment(model="m", version="2", config=config)


class Asker:
    def __init__(self, launcher: ZygoteLauncher, family: Family) -> None:
        self.launcher = launcher
        self.family = family

    async def ask(self, wish: Assignment, *, fork: bool = True) -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        check = ModelCheck(
            self.family,
            lambda change, problem: done.set_result(problem),
            self.launcher.check if fork else None,
        )
        check.start("1", wish)
        return await asyncio.wait_for(done, 60)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asker() -> AsyncIterator[Asker]:
    become_subreaper()
    family = Family()
    launcher = ZygoteLauncher(family, Logs(), PYTHON)
    launcher.start()
    async with asyncio.timeout(60):
        while not launcher.state()[0]["ready"]:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.02)
    yield Asker(launcher, family)
    launcher.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fork", [True, False])
async def test_what_is_well_passes_and_leaves_nothing_behind(asker: Asker, fork: bool) -> None:
    gc.collect()  # what earlier tests left is not to be collected in between
    before = children(os.getpid()), len(os.listdir("/proc/self/fd"))
    assert await asker.ask(assignment(), fork=fork) == ""
    assert (children(os.getpid()), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (assignment(f"{HANDLERS}:Nobody"), "Nobody"),
        (assignment("nowhere.py:X"), "nowhere.py"),
        (assignment(weights="/gone/{version}.safetensors"), "/gone/2.safetensors: No such file"),
        (assignment(golden="/gone.json"), "/gone.json"),
        (assignment(f"{HANDLERS}:RaisesInLoad", settings={"kind": "config"}), "architecture"),
        (assignment(f"{HANDLERS}:RaisesInLoad", settings={"kind": "exit"}), "SystemExit"),
        (assignment(f"{HANDLERS}:DiesInLoad"), "SIGKILL"),
    ],
)
async def test_what_is_wrong_is_named_in_one_line(
    asker: Asker, wish: Assignment, words: str
) -> None:
    problem = await asker.ask(wish)
    assert words in problem
    assert "\n" not in problem


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_zygote_it_is_asked_all_the_same(asker: Asker) -> None:
    def dead(python: str, question: bytes, fd: int, on_pid: object) -> bool:
        on_pid(0)  # type: ignore[operator]
        return True

    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    check = ModelCheck(asker.family, lambda change, problem: done.set_result(problem), dead)
    check.start("1", assignment(f"{HANDLERS}:Nobody"))
    assert "Nobody" in await asyncio.wait_for(done, 60)


def test_a_folder_of_shards_is_as_large_as_all_of_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(1000))
    empty = size_of(assignment(), "cpu")
    assert size_of(assignment(weights=str(tmp_path)), "cpu") == empty + 2000
    assert size_of(assignment(weights=str(tmp_path / "a.safetensors")), "cpu") == empty + 1000

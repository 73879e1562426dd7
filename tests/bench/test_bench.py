"""The bench's own arithmetic; the runs themselves are started by hand."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from pathlib import Path

import pytest

# As when run.py is started: its folder is the place of its modules.
sys.path.insert(0, str(Path(__file__).parent))

import clients
import contest
import load
import peers
import recovery
import result
import swap
from clients import Answer


def answer(ended: float, version: int, number: int | None = None, what: str = "ok") -> Answer:
    said = swap.number_of(version) if number is None else number
    return Answer(
        began=ended - 0.1, ended=ended, what=what, pid=1, number=said, version=str(version)
    )


def test_the_gap_is_from_the_last_old_answer_to_the_first_new_one() -> None:
    swapped = swap.judge([answer(1.0, 1), answer(1.2, 1), answer(1.5, 2), answer(1.6, 2)], 2, 9.0)
    assert swapped.gap_s == pytest.approx(0.3)
    assert swapped.failed == 0


def test_versions_that_overlap_leave_no_gap() -> None:
    assert swap.judge([answer(1.0, 1), answer(1.1, 2), answer(1.2, 1)], 2, 9.0).gap_s == 0.0


def test_a_200_with_the_other_versions_number_is_a_failure() -> None:
    wrong = answer(1.2, 2, number=swap.number_of(1))
    assert swap.judge([answer(1.0, 1), answer(1.1, 2), wrong], 2, 9.0).failed == 1


def test_a_new_version_that_never_answers_is_a_problem() -> None:
    with pytest.raises(peers.BenchProblem, match="never answered"):
        swap.judge([answer(1.0, 1)], 2, 9.0)


def test_without_an_old_answer_during_the_swap_the_gap_is_from_the_last_one_before() -> None:
    answers = [answer(1.0, 1), answer(1.2, 1), answer(2.5, 2)]
    assert swap.judge(answers, 2, 9.0, began=2.0).gap_s == pytest.approx(1.3)
    with pytest.raises(peers.BenchProblem, match="version 1 never answered"):
        swap.judge(answers[2:], 2, 9.0, began=2.0)


def test_a_client_that_breaks_is_not_swallowed() -> None:
    def body() -> bytes:
        raise ZeroDivisionError

    async def use() -> None:
        async with clients.Clients(url="", count=1, body=body):
            await asyncio.sleep(0.01)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(use())


def test_nothing_is_compared_with_a_peer_that_answered_nothing() -> None:
    assert load.ratio(6.0, 3.0) == 2.0
    found = result.Result("x", ("server",), ratios={"fast": load.ratio(6.0, 0.0)})
    found.goals = {"fast": (">=", 2.0)}
    assert found.judged()["fast"]["reached"] is None
    assert "fast = not measured" in found.to_text()


def test_a_goal_is_reached_missed_or_not_measured() -> None:
    found = result.Result("x", ("server",))
    found.ratios = {"fast": 2.5}
    found.figures = {"gap_s": {"surge": 0.0, "in-place": 1.5}}
    found.goals = {"fast": (">=", 2.0), "gap_s": ("<=", 1.0), "errors": ("<=", 0)}
    told = json.loads(found.to_json())
    assert {key: goal["reached"] for key, goal in told["goals"].items()} == {
        "fast": True,
        "gap_s": False,
        "errors": None,
    }
    assert set(told) >= {"name", "figures", "ratios", "goals", "machine"}
    assert "goal gap_s <= 1: MISSED" in found.to_text()


def test_a_server_that_came_back_only_once_did_not_recover() -> None:
    found = recovery.Found(
        kills=[recovery.Killed(0.2, 1, 0, {}), recovery.Killed(None, 0, 3, {})],
        hangs={kind: [recovery.Hung(1.1, "http-504", 1.3, 0)] for kind in recovery.HANGS},
    )
    figures = recovery._figures("mosec", found)
    assert figures["mosec_kill_to_answer_s"] is None
    assert figures["mosec_other_client_errors"] == 3
    assert figures["mosec_hang_over_budget"] == pytest.approx(1.1)


def test_the_configuration_is_toml() -> None:
    text = contest.to_toml({"server": {"proxies": 1, "listen": "a:1"}, "models.m": {
        "buckets": [[3, 224]], "settings": {"width": 16}, "graphs": True}})  # fmt: skip
    assert tomllib.loads(text) == {
        "server": {"proxies": 1, "listen": "a:1"},
        "models": {"m": {"buckets": [[3, 224]], "settings": {"width": 16}, "graphs": True}},
    }


def test_an_unknown_peer_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(peers.BenchProblem, match="unknown peer 'mosek'; there are mosec"):
        peers.chosen("mosek")

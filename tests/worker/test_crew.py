"""The threads beside the loop: where they may run, and what becomes of their jobs' errors."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from gpusup.worker.crew import Crew, cores_apart

LIMIT_S = 10.0


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4, 20)))


@pytest.mark.usefixtures("cores")
def test_each_thread_has_two_cores_of_its_own() -> None:
    found = cores_apart(8, 0, 1)
    assert [len(each) for each in found] == [2] * 8
    assert set().union(*found) == set(range(4, 20))


@pytest.mark.usefixtures("cores")
def test_workers_share_no_cores() -> None:
    found = [each for place in range(4) for each in cores_apart(2, place, 4)]
    assert [len(each) for each in found] == [2] * 8
    assert set().union(*found) == set(range(4, 20))


@pytest.mark.usefixtures("cores")
def test_what_is_left_over_is_used_too() -> None:
    found = cores_apart(3, 0, 1)
    assert sorted(len(each) for each in found) == [5, 5, 6]
    assert sum(len(each) for each in found) == len(set().union(*found)) == 16


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("threads", "workers"), [(9, 1), (3, 3), (0, 1), (2, 0)])
def test_too_few_cores_are_everybody_s(threads: int, workers: int) -> None:
    assert cores_apart(threads, 0, workers) == []


def test_a_thread_stays_where_it_may_run_and_others_are_free() -> None:
    everywhere = os.sched_getaffinity(0)
    one = min(everywhere)
    crew = Crew(1, "test", [{one}])
    seen: list[set[int]] = []
    done = threading.Event()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        done.set()

    crew.put(look)
    assert done.wait(LIMIT_S)
    crew.stop()
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == everywhere


def test_cores_that_are_not_there_any_more_stop_nobody() -> None:
    crew = Crew(1, "test", [{1023}])
    done = threading.Event()
    crew.put(done.set)
    assert done.wait(LIMIT_S)
    crew.stop()


def test_a_job_that_fails_is_logged_and_the_next_one_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise ValueError("this job fails on purpose")

    crew = Crew(1, "test")
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        crew.put(fail)
        crew.put(done.set)
        assert done.wait(LIMIT_S)
    crew.stop()
    assert "this job fails on purpose" in caplog.text

"""Which worker gets the next request."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from gpusup.proxy.routes import Place, bind_version, candidates, choose
from gpusup.supervisor.wire import Band, ModelInfo, Route
from gpusup.worker.wire import Load


def place(slot: str = "gpu0", *, free: int = 8, version: str = "1", **fields: Any) -> Place:
    found = Place(Route(**{
        "slot": slot, "generation": 1, "model": "m", "version": version, "device": slot,
        "path": "", "state": "open", "max_rows": 8, "budget_s": 1.0, **fields,
    }))  # fmt: skip
    found.connected = True
    found.loaded(Load(0, 0, free, 0.0), 1)
    return found


def model(**fields: Any) -> ModelInfo:
    return ModelInfo(**{
        "name": "m", "state": "ready", "reason": "", "version": "1", "versions": ("1",), **fields,
    })  # fmt: skip


def pick(places: list[Place], rows: int = 1, band: Band | None = None, now: float = 0.0) -> Any:
    return choose(
        places, rows, now, band=(lambda p: band) if band else None,
        headroom=lambda p: 0.0, rng=Random(1),
    )  # fmt: skip


def test_what_was_sent_since_the_last_word_counts() -> None:
    one = place(free=4)
    one.sent(3)
    assert one.takes(1, 0)
    assert not one.takes(2, 0)
    one.sent(1)
    assert not one.takes(1, 0)
    one.settled(2)
    one.loaded(Load(2, 0, 2, 0.0), 1)
    assert one.takes(2, 0)


def test_rows_on_their_way_are_not_taken_for_free_room() -> None:
    one = place(free=4)
    one.sent(2)
    one.sent(2)
    one.loaded(Load(2, 0, 2, 0.0), 1)  # it has not seen the second frame yet
    assert not one.takes(1, 0)


def test_other_proxies_rows_are_not_ours_to_use_and_the_room_is_shared() -> None:
    one = place()
    one.loaded(Load(4, 4, 8, 0.0), 2)
    assert one.takes(4, 0)
    one.sent(4)
    assert not one.takes(1, 0)


def test_only_an_idle_place_takes_more_than_it_has_room_for() -> None:
    one = place(free=4)
    assert one.takes(100, 0)
    one.sent(1)
    assert not one.takes(4, 0)


def test_closed_paused_blocked_and_unconnected_places_take_nothing() -> None:
    assert not place(state="suspect").takes(1, 0)
    one = place()
    one.blocked_until = 1.0
    assert not one.takes(1, 0.5)
    assert one.takes(1, 1.0)
    one.paused = True
    assert not one.takes(1, 2)
    one.paused, one.connected = False, False
    assert not one.takes(1, 2)


def test_the_least_work_wins_then_headroom_then_chance() -> None:
    one, two, three = place("a"), place("b"), place("c")
    one.sent(2)
    assert pick([one, two]) is two
    headroom = {"a": 0.1, "b": 0.2, "c": 0.3}
    chosen = choose(
        [one, two, three], 1, 0, band=None, headroom=lambda p: headroom[p.slot], rng=Random(1)
    )
    assert chosen is three
    rng = Random(1)
    counts = Counter(
        p.slot
        for _ in range(300)
        if (p := choose([two, three], 1, 0, band=None, headroom=lambda p: 0.0, rng=rng))
    )
    assert min(counts.values()) > 100


def test_the_queue_band_admits_to_idle_places_only_and_shed_to_none() -> None:
    idle, working = place("a"), place("b")
    working.sent(1)
    assert pick([working], band="queue") is None
    assert pick([working, idle], band="queue") is idle
    assert pick([idle], band="shed") is None
    assert pick([working], band="unknown") is working


def test_unbound_requests_go_to_the_default_version_or_to_either_while_it_changes() -> None:
    one, two = place("a", version="1"), place("b", version="2")
    assert candidates([one, two], model(), "") == [one]
    assert candidates([one, two], model(state="swapping"), "") == [one, two]
    assert candidates([two], model(), "") == [two]
    assert candidates([one, two], model(), "2") == [two]


def test_the_canary_gets_nothing_that_is_not_bound_to_it() -> None:
    one, two = place("a", version="1"), place("b", version="2")
    info = model(canary_version="2", state="swapping")
    assert candidates([one, two], info, "") == [one]
    assert candidates([two], info, "") == []


@pytest.mark.parametrize(("point", "version"), [(0.0, "2"), (0.24, "2"), (0.25, "1"), (0.99, "1")])
def test_a_session_always_falls_on_the_same_side(point: float, version: str) -> None:
    info = model(versions=("1", "2"), canary_version="2", canary_share=0.25)
    assert bind_version(info, None, point, Random(1)) == version
    assert bind_version(info, "1", point, Random(1)) == "1"
    assert bind_version(model(), None, point, Random(1)) == ""


def test_nobody_is_bound_to_a_canary_that_has_no_worker() -> None:
    info = model(versions=("1",), canary_version="2", canary_share=0.99)
    assert bind_version(info, None, 0.0, Random(1)) == ""
    assert bind_version(info, "2", 0.0, Random(1)) == "2"


def test_where_slots_hold_different_versions_by_intent_all_of_them_serve() -> None:
    one, two = place("a", version="1"), place("b", version="2")
    assert candidates([one, two], model(versions=("1", "2"), mixed=True), "") == [one, two]

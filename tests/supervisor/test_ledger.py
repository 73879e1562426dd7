from __future__ import annotations

import random

import pytest

from gpusup.supervisor.ledger import Ledger, OverCommitted

GIB = 2**30


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(safety=GIB)
    ledger.add_device("gpu0", 24 * GIB)
    return ledger


def test_what_is_promised_is_not_free_although_nothing_uses_it_yet(ledger: Ledger) -> None:
    ledger.reserve("gpu0", "gpu0", 1, 5 * GIB, GIB)
    ledger.sample("gpu0", used=0, ours=0)
    assert ledger.free("gpu0") == 17 * GIB


def test_more_than_is_left_is_refused_with_both_numbers(ledger: Ledger) -> None:
    with pytest.raises(OverCommitted, match=r"wants 24GiB on gpu0, 23GiB are free"):
        ledger.reserve("gpu0", "gpu0.1", 1, 24 * GIB)
    assert ledger.holders("gpu0") == ()


def test_other_peoples_processes_count(ledger: Ledger) -> None:
    ledger.reserve("gpu0", "gpu0", 1, 5 * GIB)
    ledger.sample("gpu0", used=15 * GIB, ours=5 * GIB)
    assert ledger.foreign("gpu0") == 10 * GIB
    assert ledger.free("gpu0") == 8 * GIB


def test_a_measurement_replaces_the_estimate_and_cuts_the_peak_to_what_is_left(
    ledger: Ledger,
) -> None:
    ledger.reserve("gpu0", "a", 1, 10 * GIB)
    ledger.reserve("gpu0", "b", 1, 5 * GIB)
    holding = ledger.settle("b", 1, 6 * GIB, 100 * GIB)
    assert holding is not None
    assert (holding.static, holding.peak, holding.settled) == (6 * GIB, 8 * GIB, True)
    assert ledger.settle("gone", 1, GIB) is None


def test_reserving_again_replaces_and_a_refusal_leaves_the_old_promise(ledger: Ledger) -> None:
    ledger.reserve("gpu0", "a", 1, 10 * GIB)
    ledger.reserve("gpu0", "a", 1, 20 * GIB)
    assert ledger.promised("gpu0") == 20 * GIB
    with pytest.raises(OverCommitted):
        ledger.reserve("gpu0", "a", 1, 30 * GIB)
    assert ledger.promised("gpu0") == 20 * GIB


def test_the_idle_baseline_is_absolute_and_the_lowest_seen(ledger: Ledger) -> None:
    for used in (600, 500, 900):
        ledger.idle("gpu0", used * 2**20)
    assert ledger.free("gpu0") == 23 * GIB - 500 * 2**20
    ledger.sample("gpu0", used=700 * 2**20, ours=0)
    assert ledger.foreign("gpu0") == 200 * 2**20


def test_a_gone_proxy_has_nothing_leased(ledger: Ledger) -> None:
    ledger.leased("proxy-0", {"gpu0": 5})
    ledger.leased("proxy-1", {"gpu0": 7, "gpu9": 1})
    ledger.leased("proxy-0", {})
    assert ledger.leases("gpu0") == {"proxy-1": 7}


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_promises_stay_between_nothing_and_the_device(seed: int) -> None:
    chance = random.Random(seed)
    ledger = Ledger(safety=chance.choice([0, GIB]), share=chance.choice([1.0, 0.92]))
    totals = {"gpu0": 24 * GIB, "gpu1": 8 * GIB}
    for device, total in totals.items():
        ledger.add_device(device, total)
    alive: set[tuple[str, int]] = set()
    generation = 0
    for _ in range(400):
        device = chance.choice(list(totals))
        match chance.randrange(6):
            case 0 | 1:
                generation += 1
                size = chance.randrange(10 * GIB)
                free = ledger.free(device)
                try:
                    ledger.reserve(device, "slot", generation, size, chance.randrange(GIB))
                    alive.add(("slot", generation))
                except OverCommitted:
                    assert size + GIB > free
            case 2 if alive:
                ledger.settle(*chance.choice(sorted(alive)), chance.randrange(12 * GIB), GIB)
            case 3 if alive:
                gone = chance.choice(sorted(alive))
                alive.discard(gone)
                ledger.release(*gone)
                ledger.release(*gone)
            case 4:
                used = chance.randrange(totals[device])
                ledger.sample(device, used, chance.randrange(used + 1))
            case _:
                ledger.idle(device, chance.randrange(GIB))
        for name, total in totals.items():
            assert 0 <= ledger.promised(name) <= total
            assert 0 <= ledger.free(name) <= total
            assert all(h.static >= 0 and h.peak >= 0 for h in ledger.holders(name))
            if free := ledger.free(name):
                with pytest.raises(OverCommitted):
                    ledger.reserve(name, "probe", 0, free + 1)
                assert ledger.reserve(name, "probe", 0, free).static == free
                ledger.release("probe", 0)
    for key in alive:
        ledger.release(*key)
    assert ledger.promised("gpu0") == ledger.promised("gpu1") == 0

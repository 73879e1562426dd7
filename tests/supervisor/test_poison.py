from __future__ import annotations

import pytest

from gpusup.supervisor.poison import KEPT, Poison


@pytest.fixture
def poison() -> Poison:
    return Poison()


def test_an_input_that_was_there_at_two_deaths_is_refused(poison: Poison) -> None:
    assert not poison.died("a", sent_at=1, at=2)
    assert poison.died("a", sent_at=3, at=4)
    assert poison.refused() == ("a",)
    assert poison.suspects() == ()


def test_two_workers_that_die_at_once_are_one_occasion(poison: Poison) -> None:
    assert not poison.died("a", sent_at=1, at=2)
    assert not poison.died("a", sent_at=1, at=2.01)
    assert poison.refused() == ()


def test_an_input_that_was_computed_since_is_forgiven(poison: Poison) -> None:
    poison.died("a", sent_at=1, at=2)
    assert poison.survived("a")
    assert not poison.survived("a")
    assert not poison.died("a", sent_at=3, at=4)


def test_it_stays_bounded_and_forgets_the_oldest(poison: Poison) -> None:
    for number in range(KEPT + 10):
        poison.died(str(number), sent_at=1, at=2)
    assert len(poison.suspects()) == KEPT
    assert poison.suspects()[0][0] == "10"


def test_all_of_it_survives_an_upgrade(poison: Poison) -> None:
    poison.died("a", sent_at=1, at=2)
    poison.died("b", sent_at=1, at=2)
    poison.died("b", sent_at=3, at=4)
    again = Poison.restore(poison.export())
    assert (again.refused(), again.suspects()) == (("b",), (("a", 2),))

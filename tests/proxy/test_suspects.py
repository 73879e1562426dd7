from __future__ import annotations

import pytest

from gpusup.proxy.suspects import Suspects


@pytest.fixture
def suspects() -> Suspects:
    return Suspects()


def test_the_second_death_counts_at_once(suspects: Suspects) -> None:
    assert not suspects.died("a", sent_at=1, now=2)
    assert suspects.died("a", sent_at=3, now=4)
    assert "a" in suspects.refused


def test_a_death_that_another_proxy_saw_counts_too(suspects: Suspects) -> None:
    suspects.update((), (("a", 2.0),), now=3)
    assert suspects.died("a", sent_at=3, now=4)


def test_what_was_there_already_at_the_first_death_dies_but_once(suspects: Suspects) -> None:
    suspects.died("a", sent_at=1, now=2)
    assert not suspects.died("a", sent_at=1, now=2.01)


def test_a_table_that_is_older_than_the_death_does_not_undo_it(suspects: Suspects) -> None:
    suspects.died("a", sent_at=1, now=2)
    suspects.died("b", sent_at=1, now=2)
    suspects.died("b", sent_at=3, now=4)
    suspects.update((), (), now=2.5)
    assert ("a" in suspects.once, "b" in suspects.refused) == (True, True)
    suspects.update((), (), now=10)
    assert (suspects.once, suspects.refused) == ({}, {})


def test_what_was_computed_is_forgiven(suspects: Suspects) -> None:
    suspects.died("a", sent_at=1, now=2)
    assert suspects.survived("a")
    assert not suspects.died("a", sent_at=3, now=4)

from __future__ import annotations

from gpusup.worker.budgets import FEWEST, LEAST_S, Budgets


def noted(budgets: Budgets, *took: float, shape: str = "a") -> Budgets:
    for seconds in took:
        budgets.note(shape, seconds)
    return budgets


def test_what_is_configured_counts_until_enough_is_known() -> None:
    budgets = noted(Budgets(30.0, 10), *[0.5] * (FEWEST - 1))
    assert budgets.of("a") == 30.0
    assert noted(budgets, 0.5).of("a") == 5.0
    assert budgets.of("b") == 30.0


def test_it_is_never_below_the_least_nor_above_what_is_configured() -> None:
    assert noted(Budgets(30.0, 10), *[0.001] * FEWEST).of("a") == LEAST_S
    assert noted(Budgets(30.0, 10), *[9.0] * FEWEST).of("a") == 30.0
    assert noted(Budgets(1.0, 10), *[0.001] * FEWEST).of("a") == 1.0


def test_a_slow_one_now_and_then_is_no_hang() -> None:
    budgets = noted(Budgets(30.0, 10), *[0.1] * (FEWEST - 1), 4.0)
    assert budgets.of("a") == 8.0


def test_it_follows_what_becomes_slower_and_forgets() -> None:
    budgets = noted(Budgets(30.0, 10), *[0.5] * 500)
    assert noted(budgets, *[0.8] * FEWEST).of("a") == 8.0
    assert noted(budgets, *[0.3] * 500).of("a") == 3.0


def test_without_a_factor_nothing_is_measured_and_many_shapes_take_no_room() -> None:
    assert noted(Budgets(30.0, 0), *[0.5] * FEWEST).of("a") == 30.0
    budgets = Budgets(30.0, 10)
    for shape in range(1000):
        noted(budgets, 0.1, shape=str(shape))
    assert len(budgets._took) == 256

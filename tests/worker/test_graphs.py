"""What can be said of graphs without a GPU; the rest is in tests/gpu."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpusup.worker.graphs import CannotCapture, Graphs, _compare
from gpusup.worker.outputs import Outputs
from gpusup.worker.pace import Pace, Room
from gpusup.worker.pool import Key
from gpusup.worker.settings import graph_sizes

KEY = Key((("", (4,), "FP32"),), pooled=True)


def outputs(*values: torch.Tensor) -> Outputs:
    return Outputs("tuple", tuple(f"o{n}" for n in range(len(values))), list(values))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Two slabs; what is captured is told by names."""
    for name in ("Stream", "graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    slabs = ["first", "second"]
    pool = SimpleNamespace(lease=lambda key: slabs[0], give_back=lambda slab: None)
    pool.slabs = lambda key: slabs
    runner: Any = SimpleNamespace(
        pool=pool,
        status={},
        profile=SimpleNamespace(cost=lambda text, rows: 0),
        room_left=lambda: 0,
        device=SimpleNamespace(trim=lambda: None),
    )
    made = Graphs(runner, "")
    monkeypatch.setattr(made, "_one", lambda key, rows, slab: f"{slab}/{rows}")
    return made


def found(graphs: Graphs, rows: int) -> list[Any]:
    return [graphs.find(KEY, rows, slot) for slot in (0, 1)]


def test_one_slab_is_captured_at_a_time_and_both_are_used_together(graphs: Graphs) -> None:
    graphs.want(KEY, 4)
    graphs.want(KEY, 2)
    assert graphs.step()
    assert graphs.find(KEY, 4, 0) is None  # the other slab could not be computed yet
    assert graphs.pending()
    assert graphs.status == {}
    assert graphs.step()
    assert found(graphs, 3) == ["first/4", "second/4"]
    assert graphs.step()
    assert graphs.step()
    assert not graphs.pending()
    assert not graphs.step()
    assert graphs.sizes(KEY) == [2, 4]
    assert graphs.status == {f"{KEY.text}/{rows}": "captured" for rows in (2, 4)}


def test_a_graph_that_fails_at_its_second_slab_leaves_nothing_behind(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(key: Key, rows: int, slab: str) -> str:
        if (rows, slab) == (4, "second"):
            raise CannotCapture("its replay differs")
        return f"{slab}/{rows}"

    monkeypatch.setattr(graphs, "_one", one)
    graphs.want(KEY, 4)
    graphs.want(KEY, 2)
    while graphs.step():
        pass
    assert graphs.sizes(KEY) == []
    assert set(graphs.status.values()) == {"eager: its replay differs"}
    graphs.want(KEY, 1)
    while graphs.step():
        pass
    assert found(graphs, 1) == ["first/1", "second/1"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_replay_may_differ_by_rounding_only(dtype: torch.dtype) -> None:
    eager = torch.linspace(-3, 3, 64).to(dtype)
    _compare(outputs(eager * (1 + 1e-4)), outputs(eager))
    with pytest.raises(CannotCapture, match="'o0' off by"):
        _compare(outputs(eager + 1), outputs(eager))


def test_a_replay_of_whole_numbers_is_exact() -> None:
    with pytest.raises(CannotCapture, match="another 'o1'"):
        _compare(
            outputs(torch.zeros(2), torch.tensor([1, 2])),
            outputs(torch.zeros(2), torch.tensor([1, 3])),
        )


def test_nan_equals_nan() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    _compare(outputs(nan), outputs(nan.clone()))


def test_the_next_batch_is_due_just_before_the_device_idles() -> None:
    pace = Pace()
    pace.launched(KEY, 8, 10.0)
    assert pace.next_due == 10.0  # nothing is known yet
    pace.landed(KEY, 8, 0.1)
    pace.launched(KEY, 8, 20.0)
    assert 20.05 < pace.next_due < 20.1
    pace.launched(KEY, 8, 20.05)  # behind the first
    assert 20.15 < pace.next_due < 20.2


def test_a_launch_that_takes_long_is_begun_earlier() -> None:
    pace = Pace()
    pace.landed(KEY, 8, 0.1)
    for _ in range(100):
        pace.launched(KEY, 8, 0.0, 0.02)
    pace.launched(KEY, 8, 30.0, 0.02)
    assert pace.next_due == pytest.approx(30.1 - 0.015 - 0.02, abs=1e-4)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]),
     (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
     (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100])],
)  # fmt: skip
def test_graphs_lie_close_where_padding_costs_most(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


SIZES = [8, 16, 24, 32, 40, 48, 56, 64]


def test_a_little_more_than_a_size_is_taken_as_that_size() -> None:
    pace = Pace()
    assert pace.portion(KEY, 50, 200, SIZES) == 50  # nothing is known yet
    pace.landed(KEY, 48, 3.27e-3)
    pace.landed(KEY, 56, 3.75e-3)
    assert pace.portion(KEY, 50, 200, SIZES) == 48
    assert pace.portion(KEY, 56, 200, SIZES) == 56
    assert pace.portion(KEY, 64, 200, SIZES) == 64
    assert pace.portion(KEY, 5, 5, SIZES) == 5
    assert pace.portion(KEY, 50, 200, []) == 50


def test_a_batch_leaves_about_half_for_the_next_one() -> None:
    pace = Pace()
    assert pace.portion(KEY, 64, 96, SIZES) == 48  # 64 wait, 32 are computed
    assert pace.portion(KEY, 64, 128, SIZES) == 64
    assert pace.portion(KEY, 64, 100, []) == 48
    assert pace.portion(KEY, 20, 24, SIZES) == 16  # less is not worth a division
    assert pace.portion(KEY, 12, 13, SIZES) == 12
    assert pace.portion(KEY, 1, 1, SIZES) == 1


def test_rows_are_gathered_until_the_next_batch_is_due() -> None:
    pace = Pace()
    pace.landed(KEY, 8, 0.1)
    pace.launched(KEY, 8, 10.0, 0.0)
    assert 0 < pace.gather(10.0, 10.02, answered=False) < 0.001
    assert 0 < pace.gather(pace.next_due - 1e-5, 10.2, answered=False) <= 1.1e-5
    assert pace.gather(pace.next_due, 10.2, answered=False) == 0  # not ripe, and late already


def test_who_was_answered_since_the_launch_is_waited_for_to_the_end() -> None:
    """Else the device is through before their next requests are seen, each time."""
    pace = Pace()
    pace.landed(KEY, 8, 0.004)
    pace.launched(KEY, 8, 10.0)
    assert pace.gather(10.002, math.inf, answered=False) == 0
    for now in (10.002, pace.next_due, 10.0039):
        assert 0 < pace.gather(now, math.inf, answered=True) < 0.001
    # One that takes far longer is looked at less often.
    assert pace.gather(13.0, math.inf, answered=True) == pytest.approx(0.005)


def test_one_slow_batch_does_not_make_the_later_ones_late() -> None:
    pace = Pace()
    for took in (0.1, 5.0, 0.1):
        pace.landed(KEY, 8, took)
    pace.launched(KEY, 8, 20.0)
    assert pace.next_due < 20.1


def test_a_fast_device_takes_as_many_rows_as_end_while_the_next_request_is_away() -> None:
    room = Room(64, depth=2)
    assert room.rows == 192  # two in flight, one that gathers
    for _ in range(100):
        room.landed(64, 4.2e-3)
    assert room.rows == pytest.approx(192 + 152, abs=2)
    for _ in range(200):
        room.landed(64, 1e-5)
    assert room.rows == 192 + 3 * 64


def test_a_slow_device_takes_no_more_rows_than_it_has_use_for() -> None:
    room = Room(4, depth=1)
    for _ in range(100):
        room.landed(4, 0.2)
    assert room.rows == 8


def test_one_quick_batch_changes_little() -> None:
    room = Room(64, depth=2)
    room.landed(1, 1e-3)
    assert room.rows == 193

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusup.supervisor.placement import (
    LlmShape,
    Marks,
    Need,
    Room,
    kv_bytes_per_sequence,
    llm_shape,
    place,
    workers_per_device,
)

GIB = 2**30
MARKS = Marks(safety=GIB)


def test_the_naive_rule_says_four_where_three_fit() -> None:
    fit = workers_per_device(total=24 * GIB, static=int(5.2 * GIB), marks=Marks(safety=2 * GIB))
    assert (fit.naive_workers, fit.workers, fit.binds) == (4, 3, "both")
    assert "87%" in fit.lines[-1]


def test_a_large_peak_binds_before_rest_does() -> None:
    fit = workers_per_device(total=24 * GIB, static=4 * GIB, peak=4 * GIB, marks=MARKS)
    assert (fit.workers, fit.binds) == (2, "peak")


def test_without_safety_rest_binds_first() -> None:
    marks = Marks(queue=0.5, shed=0.99, safety=0)
    fit = workers_per_device(total=24 * GIB, static=4 * GIB, marks=marks)
    assert (fit.workers, fit.binds) == (3, "rest")


def test_a_model_larger_than_the_device_gets_no_worker() -> None:
    fit = workers_per_device(total=4 * GIB, static=5 * GIB, marks=MARKS)
    assert fit.workers == 0
    assert "6GiB" in fit.reason


@pytest.mark.parametrize(
    ("total", "static", "peak"), [(0, 1, 0), (GIB, 0, 0), (GIB, -1, 0), (GIB, 1, -1)]
)
def test_impossible_sizes_are_refused(total: int, static: int, peak: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        workers_per_device(total=total, static=static, peak=peak, marks=MARKS)


def test_marks_in_the_wrong_order_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"0\.92 and 0\.85"):
        Marks(queue=0.92, shed=0.85)


@given(
    total=st.integers(GIB, 200 * GIB),
    static=st.integers(2**20, 50 * GIB),
    peak=st.integers(0, 50 * GIB),
)
def test_the_answer_is_the_largest_number_that_keeps_both_rules(
    total: int, static: int, peak: int
) -> None:
    fit = workers_per_device(total=total, static=static, peak=peak, marks=MARKS)

    def holds(n: int) -> bool:
        work = n * (static + peak) + MARKS.safety <= int(MARKS.shed * total)
        return n == 0 or (work and n * static <= int(MARKS.queue * total))

    assert holds(fit.workers)
    assert not holds(fit.workers + 1)


def test_a_cache_of_512_tokens_of_a_7b_model_takes_256_mib() -> None:
    shape = LlmShape(layers=32, kv_heads=32, head_size=128)
    assert kv_bytes_per_sequence(shape, 512) == 268_435_456


def test_grouped_heads_share_their_keys_and_values() -> None:
    shape = llm_shape(
        {
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "torch_dtype": "bfloat16",
        }
    )
    assert (shape.kv_heads, shape.head_size, shape.value_bytes) == (8, 128, 2)
    assert kv_bytes_per_sequence(shape, 512) == 64 * 2**20


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "above 0"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 10}, "multiple"),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "torch_dtype": "odd"},
            "odd",
        ),
    ],
)
def test_what_a_model_config_lacks_is_named(config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        llm_shape(config)


H200 = [Room(device=f"gpu{n}", kind="cuda", total=140 * GIB) for n in range(2)]


def test_each_model_gets_its_number_on_each_of_its_devices() -> None:
    placement = place(
        H200,
        [
            Need(model="a", workers=2, static=5 * GIB),
            Need(model="b", workers=1, devices=("gpu1",), static=5 * GIB),
        ],
        MARKS,
    )
    assert [placement.count("gpu0", m) for m in "ab"] == [2, 0]
    assert [placement.count("gpu1", m) for m in "ab"] == [2, 1]


def test_auto_stops_at_the_limit_and_at_one_while_the_size_is_unknown() -> None:
    placement = place(
        H200[:1], [Need(model="known", static=GIB), Need(model="unknown")], MARKS, auto_limit=3
    )
    assert placement.count("gpu0", "known") == 3
    assert placement.count("gpu0", "unknown") == 1


def test_no_model_is_crowded_out_by_another_ones_second_worker() -> None:
    room = [Room(device="gpu0", kind="cuda", total=24 * GIB)]
    placement = place(
        room,
        [Need(model="a", workers=4, static=5 * GIB), Need(model="b", static=6 * GIB)],
        MARKS,
    )
    assert placement.count("gpu0", "b") == 1
    assert placement.count("gpu0", "a") == 2
    assert "2 of 4" in placement.short["a"]


def test_a_model_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    placement = place(H200, [Need(model="huge", static=200 * GIB)], MARKS)
    assert placement.placed == ()
    assert "201GiB" in placement.refused["huge"]
    assert "128.80GiB" in placement.refused["huge"]


def test_an_unknown_device_is_named() -> None:
    placement = place(H200, [Need(model="a", devices=("gpu7",), static=GIB)], MARKS)
    assert "gpu7" in placement.refused["a"]


def test_a_small_cpu_slot_is_not_swallowed_by_the_safety_margin() -> None:
    room = [Room(device="cpu0", kind="cpu", total=GIB // 2)]
    assert place(room, [Need(model="a", static=GIB // 8)], MARKS).placed == (("cpu0", "a"),)


def test_all_means_the_gpus_where_there_are_any() -> None:
    rooms = [*H200, Room(device="cpu0", kind="cpu", total=GIB)]
    placement = place(rooms, [Need(model="a", workers=1, static=GIB // 8)], MARKS)
    assert placement.placed == (("gpu0", "a"), ("gpu1", "a"))

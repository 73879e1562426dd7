"""What a request costs, what is promised, and which band that makes."""

from __future__ import annotations

import random

import pytest

from gpusup.conf.schema import WatermarkConfig
from gpusup.proxy.admission import MARGIN, Bands, Costs, Ledger, parse_peaks

from .conftest import device

PEAKS = {"8x8/fp32/1": 100, "8x8/fp32/4": 300, "16x16/fp32/1": 400}


def test_a_measured_batch_costs_what_was_measured() -> None:
    costs = Costs(PEAKS)
    assert costs.of((8, 8), "FP32", 1) == 100
    assert costs.of((8, 8), "FP32", 4) == 300
    assert costs.of((8, 8), "FP32", 3) == 300  # as the next larger one
    assert costs.batch == 400


def test_more_rows_than_measured_are_scaled_with_a_margin() -> None:
    assert Costs(PEAKS).of((8, 8), "FP32", 8) == int(300 * 2 * MARGIN)


def test_an_unknown_shape_is_scaled_from_the_nearest_one_with_a_margin() -> None:
    assert Costs(PEAKS).of((32, 16), "FP32", 1) == int(400 * 2 * MARGIN)
    assert Costs(PEAKS).of((4, 4), "FP32", 1) == int(100 * MARGIN)  # never scaled down


def test_opaque_bytes_cost_as_the_dearest_bucket() -> None:
    assert Costs(PEAKS).of(None, "", 1) == 400


def test_without_a_measurement_nothing_is_charged() -> None:
    assert Costs({}).of((8, 8), "FP32", 1) == 0
    assert Costs({"8x8/fp32/1": 0}).of(None, "", 1) == 0


def test_what_is_no_peak_is_left_out() -> None:
    assert parse_peaks({"rubbish": 1, "8/fp32/x": 1, "/fp32/2": 7})[0].shape == ()


def test_a_worker_is_not_charged_for_more_than_one_batch_at_a_time() -> None:
    ledger = Ledger()
    for _ in range(100):
        assert ledger.take("d", "w", 10, cap=50, total=1000)
    assert ledger.leased("d") == 50
    assert ledger.take("d", "w2", 10, cap=50, total=1000)
    assert ledger.leased("d") == 60
    for _ in range(100):
        ledger.give("d", "w", 10)
    assert ledger.leased("d") == 10


def test_more_than_the_device_has_is_not_promised() -> None:
    ledger = Ledger()
    assert ledger.take("d", "w", 600, cap=0, total=1000)
    assert not ledger.take("d", "w", 500, cap=0, total=1000)
    assert not ledger.take("d", "other", 500, cap=0, total=1000)
    assert ledger.leased("d") == 600
    with pytest.raises(ValueError, match="not leased"):
        ledger.give("d", "other", 500)


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_is_never_negative_and_never_above_the_device(seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger()
    total = 1000
    held: list[tuple[str, str, int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            ledger.give(*held.pop(rng.randrange(len(held))))
        else:
            lease = (rng.choice("ab"), rng.choice("wxyz"), rng.choice([0, 1, 7, 90, 400, 1001]))
            if ledger.take(*lease, cap=rng.choice([0, 100]), total=total):
                held.append(lease)
        for name in "ab":
            mine = [cost for dev, _, cost in held if dev == name]
            assert 0 <= ledger.leased(name) <= total
            assert ledger.leased(name) <= sum(mine)
            assert bool(ledger.leased(name)) == any(mine)
    for lease in held:
        ledger.give(*lease)
    assert ledger.all() == {}


def bands(watermark: float, **fields: int) -> tuple[Bands, Ledger]:
    ledger = Ledger()
    found = Bands(WatermarkConfig(), ledger, "proxy0")
    found.update([device("d", watermark=watermark, **fields)])
    return found, ledger


def test_the_bands_are_those_of_the_table() -> None:
    for watermark, band in (
        (0.0, "normal"), (0.84, "normal"), (0.85, "queue"), (0.91, "queue"), (0.92, "shed"),
    ):  # fmt: skip
        assert bands(watermark)[0].judge("d", 0) == band


def test_a_request_is_judged_with_its_own_cost_and_all_leases() -> None:
    found, ledger = bands(0.5, leased={"proxy0": 999, "proxy1": 100})  # type: ignore[arg-type]
    assert found.judge("d", 240) == "normal"
    assert found.judge("d", 250) == "queue"  # 0.5 + 0.1 of the other proxy + 0.25
    ledger.take("d", "w", 100, cap=0, total=1000)
    assert found.judge("d", 240) == "shed"


def test_leases_that_are_allocated_already_are_not_counted_twice() -> None:
    found, ledger = bands(0.8, dynamic=300)
    ledger.take("d", "w", 300, cap=0, total=1000)
    assert found.projected("d", 0) == pytest.approx(0.8)
    ledger.take("d", "w", 40, cap=0, total=1000)
    assert found.projected("d", 0) == pytest.approx(0.84)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_easy_is_normal_on_every_device(seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger()
    found = Bands(WatermarkConfig(), ledger, "proxy0")
    easy = 0
    for _ in range(500):
        found.update([
            device(
                name,
                watermark=rng.choice([0.0, 0.3, 0.6, 0.84, 0.86, 0.93]),
                dynamic=rng.choice([0, 100, 300]),
                leased={"proxy0": 999, "proxy1": rng.choice([0, 50, 400])},
                known=rng.random() < 0.9,
            )
            for name in "ab"[: rng.randrange(3)]
        ])  # fmt: skip
        lease = (rng.choice("ab"), "w", rng.choice([10, 100, 300]))
        taken = rng.random() < 0.7 and ledger.take(*lease, cap=0, total=1000)
        cost = rng.choice([0, 1, 50, 300])
        if found.easy(cost):
            easy += 1
            assert {found.judge(name, cost) for name in "ab"} <= {"normal", "unknown"}
        if taken:
            ledger.give(*lease)
    assert 50 < easy < 450


def test_a_band_is_left_two_points_below_where_it_began() -> None:
    found, _ = bands(0.92)
    for watermark, band in ((0.91, "shed"), (0.89, "queue"), (0.84, "queue"), (0.82, "normal"),
                            (0.84, "normal")):  # fmt: skip
        found.update([device("d", watermark=watermark)])
        assert found.bands["d"] == band


def test_each_change_of_band_is_told_once() -> None:
    found, _ = bands(0.5)
    (change,) = found.update([device("d", watermark=0.95)])
    assert (change.before, change.after) == ("normal", "shed")
    assert found.update([device("d", watermark=0.95)]) == []


def test_a_device_that_cannot_be_read_has_no_band() -> None:
    found, _ = bands(0.99, known=False)
    assert found.judge("d", 10**9) == "unknown"
    assert found.judge("never heard of", 1) == "unknown"


def test_what_could_never_fit_is_known() -> None:
    found, _ = bands(0.95, reclaimable=100, dynamic=50)
    assert found.can_ever("d", 200)
    assert not found.can_ever("d", 201)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_of_watermarks_moves_only_across_its_edges(seed: int) -> None:
    rng = random.Random(seed)
    found, _ = bands(0.5)
    for _ in range(2000):
        before = found.bands["d"]
        watermark = rng.uniform(0.7, 1.0)
        found.update([device("d", watermark=watermark)])
        after = found.bands["d"]
        plain = "shed" if watermark >= 0.92 else "queue" if watermark >= 0.85 else "normal"
        if after != plain:  # only because of the hysteresis
            assert before in ("queue", "shed")
            assert 0 < min(abs(watermark - e) for e in (0.85, 0.92)) <= 0.02

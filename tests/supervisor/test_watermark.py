from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusup.supervisor.watermark import Bands, plausible, projected, reclaimable, watermark
from gpusup.supervisor.wire import Band
from gpusup.worker.wire import Memory

GIB = 2**30
BANDS = Bands()


def test_what_torch_keeps_in_its_cache_counts_as_free() -> None:
    mark = watermark(24 * GIB, int(2.2 * GIB), 11 * GIB)
    assert mark == pytest.approx(0.45, abs=0.001)


def test_both_versions_of_the_drivers_call_agree() -> None:
    # 24 GiB, 1.2 GiB of it reserved by the driver, 2.2 GiB free: used/total would say 86 or 91 %.
    assert watermark(24 * GIB, int(2.2 * GIB)) == pytest.approx(0.908, abs=0.001)


@pytest.mark.parametrize(
    ("total", "free"),
    [(0, 0), (None, 5), (5, None), (5, 6), (-1, 0), (2**60, 5), (5, -1)],
)
def test_absurd_figures_are_unknown_neither_full_nor_empty(
    total: int | None, free: int | None
) -> None:
    assert not plausible(total, free)
    assert watermark(total, free) is None
    assert BANDS.next("normal", watermark(total, free)) == "unknown"
    assert projected(None, 5, 1) is None
    assert projected(0.5, 0, 1) is None


def test_bytes_that_are_free_and_still_reserved_are_not_counted_beyond_the_device() -> None:
    assert watermark(10, 9, 5) == 0.0


def test_negative_reports_reclaim_nothing() -> None:
    assert reclaimable([Memory(allocated=5, reserved=3), Memory(allocated=1, reserved=4)]) == 3


def test_a_band_is_left_only_when_the_use_is_clear_of_its_mark() -> None:
    band: Band = "normal"
    story = []
    for use in (0.84, 0.85, 0.84, 0.831, 0.83, 0.829, 0.92, 0.91, 0.89, 0.5):
        band = BANDS.next(band, use)
        story.append(band)
    assert story == [
        "normal", "queue", "queue", "queue", "queue", "normal", "shed", "shed", "queue", "normal",
    ]  # fmt: skip


def test_from_unknown_the_plain_band_holds() -> None:
    assert BANDS.next("unknown", 0.84) == "normal"
    assert BANDS.next("shed", None) == "unknown"


@pytest.mark.parametrize("marks", [(0.92, 0.85, 0.02), (0.85, 0.85, 0.02), (0.85, 0.92, 0.9)])
def test_marks_that_make_no_sense_are_refused(marks: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="below"):
        Bands(*marks)


@given(st.lists(st.floats(0, 1.5), max_size=60))
def test_a_band_never_understates_the_use_and_overstates_by_the_hysteresis_at_most(
    uses: list[float],
) -> None:
    order = ["normal", "queue", "shed"]
    band: Band = "normal"
    for use in uses:
        band = BANDS.next(band, use)
        assert order.index(band) >= order.index(BANDS.plain(use))
        assert order.index(band) <= order.index(BANDS.plain(use + BANDS.hysteresis))
        assert BANDS.next(band, use) == band

from __future__ import annotations

import pytest

from gpusup.supervisor.watermark import plausible, reclaimable, watermark, worst_band
from gpusup.supervisor.wire import Band, ProxyReport
from gpusup.worker.wire import Memory

GIB = 2**30


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


def test_bytes_that_are_free_and_still_reserved_are_not_counted_beyond_the_device() -> None:
    assert watermark(10, 9, 5) == 0.0


def test_negative_reports_reclaim_nothing() -> None:
    assert reclaimable([Memory(allocated=5, reserved=3), Memory(allocated=1, reserved=4)]) == 3


@pytest.mark.parametrize(
    ("seen", "worst"),
    [
        (["normal", "shed", "queue"], "shed"),
        (["unknown", "normal"], "normal"),
        (["unknown"], "unknown"),
        ([], "unknown"),
    ],
)
def test_of_several_proxies_opinions_the_worst_holds(seen: list[Band], worst: Band) -> None:
    reports = [ProxyReport(), *(ProxyReport(bands={"gpu0": band}) for band in seen)]
    assert worst_band("gpu0", reports) == worst

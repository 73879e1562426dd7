from __future__ import annotations

import random

from gpusup.supervisor.tally import VERSIONS_KEPT, Tally
from gpusup.supervisor.wire import ModelStats, Observed, ProxyReport, Sample
from gpusup.worker.wire import Counters

BUSY = "gpusup_worker_busy_seconds_total"


def report(ok: int) -> ProxyReport:
    return ProxyReport(
        counters=[Sample("gpusup_requests_total", ("m", "ok"), ok)],
        queued={"m": 3},
        stats=[
            ModelStats("m", "1", success=ok, success_s=0.5, rows=2 * ok, compute_s=0.25, last=7.0)
        ],
    )


def test_totals_outlive_the_proxy_that_counted_and_its_gauges_do_not() -> None:
    tally = Tally()
    tally.proxy_said("proxy-0", report(2))
    tally.proxy_said("proxy-1", report(3))
    tally.proxy_gone("proxy-0")
    tally.proxy_said("proxy-0", report(1))
    tally.proxy_gone("proxy-1")
    assert tally.value("gpusup_requests_total", ("m", "ok")) == 6
    assert list(tally.reports) == ["proxy-0"]


def test_a_new_generation_counts_from_zero_and_the_total_goes_on() -> None:
    tally = Tally()
    for generation, busy in ((1, 2.0), (1, 5.0), (2, 1.0), (1, 9.0), (2, 4.0)):
        tally.worker_said("gpu0", generation, "m", "1", Counters(busy_s=busy, batches=int(busy)))
    assert tally.value(BUSY, ("gpu0",)) == 9.0
    assert tally.v2_stats("m", "1")["execution_count"] == 9


def test_random_walk_no_total_ever_falls() -> None:
    chance = random.Random(3)
    tally = Tally()
    last = 0.0
    generation, busy = 1, 0.0
    for _ in range(500):
        match chance.randrange(3):
            case 0:
                busy += chance.random()
            case 1:
                generation, busy = generation + 1, 0.0
            case _:
                tally.worker_said("s", generation, "m", "1", Counters(busy_s=busy))
        now = tally.value(BUSY, ("s",))
        assert now >= last
        last = now


def test_what_is_unknown_or_misshapen_is_dropped() -> None:
    tally = Tally()
    tally.proxy_said(
        "p",
        ProxyReport(
            counters=[
                Sample("no_such_metric", (), 1),
                Sample("gpusup_requests_total", ("m",), 1),
                Sample("gpusup_requests_total", ("m", "ok"), -1),
                Sample("gpusup_requests_total", ("m", "ok"), float("nan")),
            ],
            histograms=[Observed("gpusup_batch_rows", ("m",), (1, 2), 3.0)],
        ),
    )
    assert tally.value("gpusup_requests_total", ("m", "ok")) == 0
    assert tally.histograms == {}


def test_statistics_are_complete_before_anything_ran() -> None:
    stats = Tally().v2_stats("m", "1")
    assert set(stats["inference_stats"]) == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output",
        "cache_hit", "cache_miss",
    }  # fmt: skip
    assert all(value == {"count": 0, "ns": 0} for value in stats["inference_stats"].values())
    assert (stats["inference_count"], stats["execution_count"], stats["version"]) == (0, 0, "1")


def test_the_items_of_a_batch_add_up_to_one_batch_whichever_proxy_they_came_through() -> None:
    tally = Tally()
    for proxy in ("p0", "p1"):
        stats = ModelStats("m", "1", success=2, rows=4, batches={8: (0.5, 0.05)}, last=5.0)
        tally.proxy_said(proxy, ProxyReport(stats=[stats]))
    shown = tally.v2_stats("m", "1", {"gpu1": 9})
    assert shown["inference_count"] == 8
    assert shown["batch_stats"][0]["batch_size"] == 8
    assert shown["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 100_000_000}
    assert shown["last_inference"] == 5000
    assert shown["memory_usage"] == [{"type": "GPU", "id": 1, "byte_size": 9}]


def test_without_reported_statistics_the_metrics_serve() -> None:
    tally = Tally()
    tally.proxy_said(
        "p",
        ProxyReport(
            counters=[
                Sample("gpusup_rows_total", ("m", "1"), 30),
                Sample("gpusup_rows_total", ("m", "2"), 10),
                Sample("gpusup_requests_total", ("m", "ok"), 8),
                Sample("gpusup_requests_total", ("m", "queue_full"), 4),
            ],
            histograms=[Observed("gpusup_compute_seconds", ("m",), (8, *[0] * 16), 0.4)],
        ),
    )
    stats = tally.v2_stats("m", "1")
    assert stats["inference_count"] == 30
    assert stats["inference_stats"]["compute_infer"] == {"count": 6, "ns": 300_000_000}
    assert stats["inference_stats"]["fail"]["count"] == 3


def test_versions_of_long_ago_become_one_series_and_no_row_is_lost() -> None:
    tally = Tally()
    for version in range(1, 101):
        tally.count("gpusup_rows_total", ("m", str(version)), 2)
        tally.count("gpusup_rows_total", ("m", "1"))  # in use all the time, so kept
        tally.worker_said("gpu0", version, "m", str(version), Counters(batches=1))
    rows = tally.counters["gpusup_rows_total"]
    assert len(rows) == VERSIONS_KEPT + 1
    assert rows["m", "1"] == 102
    assert sum(rows.values()) == 300
    assert tally.v2_stats("m", "100")["execution_count"] == 1
    assert tally.v2_stats("m", "50")["execution_count"] == 0

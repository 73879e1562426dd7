"""What is counted between two reports."""

from __future__ import annotations

from gpusup.conf.metrics import SECONDS
from gpusup.proxy.counts import Counts
from gpusup.supervisor.wire import ModelStats, Sample
from gpusup.worker.wire import Answer


def test_values_fall_into_their_buckets_and_are_told_once() -> None:
    counts = Counts()
    for value in (0.001, 0.0011, 100.0):
        counts.observe("gpusup_request_seconds", ("m",), value)
    counts.add("gpusup_refused_total", ("why",))
    counts.add("gpusup_refused_total", ("why",))
    assert counts.changed()
    samples, (observed,), stats = counts.drain(0.0, 0.0)
    assert samples == [Sample("gpusup_refused_total", ("why",), 2.0)]
    assert observed.counts == (1, 1, *[0] * (len(SECONDS) - 2), 1)
    assert stats == []
    assert not counts.changed()
    assert counts.drain(0.0, 0.0) == ([], [], [])


def test_answers_become_metrics_and_v2_statistics() -> None:
    counts = Counts()
    answer = Answer(1, "ok", queue_s=0.5, compute_s=0.25, batch_rows=8)
    counts.done("m", "1", 2, 0.125, 1.0, answer)
    counts.done("m", "1", 2, 0.125, 3.0, answer)
    counts.failed("m", "1", "QUEUE_FULL", 0.5)
    samples, histograms, stats = counts.drain(10.0, 77.0)
    found = {(s.name, s.labels): s.value for s in samples}
    assert found["gpusup_requests_total", ("m", "ok")] == 2
    assert found["gpusup_requests_total", ("m", "QUEUE_FULL")] == 1
    assert found["gpusup_rows_total", ("m", "1")] == 4
    assert {h.name: h.sum for h in histograms}["gpusup_request_seconds"] == 4.0
    assert stats == [
        ModelStats(
            "m", "1", success=2, success_s=4.0, rows=4, queue_s=1.25, compute_s=0.5,
            last=77.0, batches={8: (0.5, 0.125)},
        ),
        ModelStats("m", "1", fail=1, fail_s=0.5),
    ]  # fmt: skip
    assert counts.latency(10.0) == {"m": (3.0, 3.0)}
    assert counts.latency(100.0) == {}

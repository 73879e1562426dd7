from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpusup.conf.metrics import METRICS
from gpusup.supervisor.probe_wire import DeviceSample
from gpusup.supervisor.render_metrics import Facts, render
from gpusup.supervisor.tally import Tally
from gpusup.supervisor.wire import DeviceInfo, Observed, ProxyReport, Sample
from gpusup.worker.wire import Counters, Memory


def device(name: str = "gpu0", *, known: bool = True) -> DeviceInfo:
    return DeviceInfo(
        name=name, uuid="GPU-a", kind="cuda", total=100, free=40, reclaimable=10, dynamic=0,
        watermark=0.5, known=known, age_s=0.1, foreign=7, source="nvml" if known else "none",
    )  # fmt: skip


@pytest.fixture
def tally() -> Tally:
    tally = Tally()
    tally.proxy_said(
        "proxy-0",
        ProxyReport(
            counters=[Sample("gpusup_requests_total", ("m", "ok"), 5)],
            histograms=[Observed("gpusup_batch_rows", ("m",), (1, 0, 2, *[0] * 6, 1), 300.0)],
            queued={"m": 2},
            in_flight={"gpu0": 3},
            leased={"gpu0": 11},
            bands={"gpu0": "queue"},
        ),
    )
    tally.proxy_said("proxy-1", ProxyReport(queued={"m": 1}, bands={"gpu0": "normal"}))
    tally.worker_said("gpu0", 1, "m", "1", Counters(busy_s=1.5, ooms=2))
    return tally


FACTS = Facts(
    devices=[device(), device("gpu1", known=False)],
    samples={
        "gpu0": DeviceSample(name="gpu0", uuid="GPU-a", index=0, at=0.0, utilisation=0.25),
    },
    workers={"gpu0": Memory(allocated=20, reserved=30, peak=40, static=10)},
    worker_device={"gpu0": "gpu0"},
    ready={("m", "1"): 1},
    slots={"gpu0": "ready", "gpu1": "backoff"},
    standbys={"gpu0": True, "gpu1": False},
    leak_slopes={"gpu0": 12.5},
    models=["m", "idle"],
    build=("0.1.0", "3.11", "2.13"),
)


def value(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    assert found, f"{series} is not in\n{text}"
    return float(found[1])


def test_the_figures_add_up_over_proxies_and_workers(tally: Tally) -> None:
    text = render(tally, FACTS)
    assert value(text, 'gpusup_requests_total{code="ok",model="m"}') == 5
    assert value(text, 'gpusup_queued_requests{model="m"}') == 3
    assert value(text, 'gpusup_queued_requests{model="idle"}') == 0
    assert value(text, 'gpusup_leased_bytes{device="gpu0"}') == 11
    assert value(text, 'gpusup_device_memory_bytes{device="gpu0",state="reserved"}') == 30
    assert value(text, 'gpusup_worker_ooms_total{slot="gpu0"}') == 2
    assert value(text, 'gpusup_slot_state{slot="gpu1",state="backoff"}') == 1
    assert value(text, 'gpusup_slot_standby{slot="gpu0"}') == 1
    assert value(text, 'gpusup_slot_standby{slot="gpu1"}') == 0
    assert value(text, "gpusup_probe_restarts_total") == 0


def test_histograms_are_cumulative(tally: Tally) -> None:
    text = render(tally, FACTS)
    assert value(text, 'gpusup_batch_rows_bucket{le="1.0",model="m"}') == 1
    assert value(text, 'gpusup_batch_rows_bucket{le="4.0",model="m"}') == 3
    assert value(text, 'gpusup_batch_rows_bucket{le="+Inf",model="m"}') == 4
    assert value(text, 'gpusup_batch_rows_count{model="m"}') == 4
    assert value(text, 'gpusup_batch_rows_sum{model="m"}') == 300


def test_a_device_is_in_the_worst_band_any_proxy_sees(tally: Tally) -> None:
    text = render(tally, FACTS)
    assert value(text, 'gpusup_device_band{band="queue",device="gpu0"}') == 1
    assert value(text, 'gpusup_device_band{band="normal",device="gpu0"}') == 0
    assert value(text, 'gpusup_device_band{band="unknown",device="gpu1"}') == 1


def test_what_cannot_be_told_has_no_series(tally: Tally) -> None:
    text = render(tally, FACTS)
    assert "gpusup_device_temperature_celsius{" not in text
    assert 'gpusup_device_watermark_ratio{device="gpu1"}' not in text
    assert 'gpusup_device_memory_bytes{device="gpu1"' not in text
    assert value(text, 'gpusup_device_unknown{device="gpu1"}') == 1


def test_exactly_the_listed_metrics_are_there_and_the_text_parses(tally: Tally) -> None:
    text = render(tally, FACTS)
    families = {family.name for family in text_string_to_metric_families(text)}
    assert families == {name.removesuffix("_total") for name in METRICS}
    assert text.endswith("\n")
    assert "_created" not in text


def test_an_empty_box_renders_too() -> None:
    assert "gpusup_proxy_restarts_total 0.0" in render(Tally(), Facts())

"""The dashboard and the alerts speak of metrics that there are, with labels that these have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusup.conf.metrics import METRICS, Metric
from gpusup.proxy import app, errors
from gpusup.supervisor.backoff import Cause

CONF = Path(__file__).parents[2] / "conf"
ALERTS = (CONF / "alerts.yml").read_text()
BOARD: dict[str, Any] = json.loads((CONF / "grafana.json").read_text())

#: Prometheus adds these to every series.
ANYWHERE = {"instance", "job"}

_NAME = re.compile(r"\b((?:gpusup|http_server)_[a-z0-9_]+)\b(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"([^\"]*)\"")
_GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def metric_of(name: str) -> Metric:
    """Of a series' name, whichever suffix its kind adds."""
    if name in METRICS:
        assert METRICS[name].kind != "histogram", f"{name} has no series of that name"
        return METRICS[name]
    stem, _, suffix = name.rpartition("_")
    assert suffix in ("bucket", "sum", "count"), f"there is no metric {name}"
    assert METRICS[stem].kind == "histogram", name
    return METRICS[stem]


def check(expression: str) -> set[str]:
    """The metrics in it. Fails if one of them, or one of its labels, does not exist."""
    labels: set[str] = set()
    found = set()
    for name, matchers in _NAME.findall(expression):
        metric = metric_of(name)
        found.add(metric.name)
        allowed = {*metric.labels, *ANYWHERE, *(("le",) if name.endswith("_bucket") else ())}
        labels |= allowed
        for label, _ in _LABEL.findall(matchers):
            assert label in allowed, f"{name} has no label {label}"
    assert found, expression
    for group in _GROUPED.findall(expression):
        for label in group.split(","):
            assert label.strip() in labels, f"{label} in {expression}"
    assert expression.count("(") == expression.count(")")
    return found


def alerts() -> Iterator[tuple[str, str, str]]:
    """(name, expression, the rest). The file is ours, so its form is known."""
    for part in ALERTS.split("- alert: ")[1:]:
        name, _, body = part.partition("\n")
        expression, _, rest = body.partition("        labels: ")
        expression = expression.partition("expr:")[2].partition("        for:")[0]
        yield name, " ".join(expression.replace("|\n", "\n").split()), rest


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in BOARD["panels"] if panel["type"] != "row")


@pytest.mark.parametrize(("name", "expression", "rest"), list(alerts()))
def test_an_alert_speaks_of_what_there_is_and_says_what_to_do(
    name: str, expression: str, rest: str
) -> None:
    check(expression)
    assert re.search(r"severity: (page|ticket)", rest)
    assert 'summary: "' in rest
    assert len(rest.partition('runbook: "')[2]) > 60, "what should who is woken by it do?"


def test_alerts_name_codes_and_causes_that_there_are() -> None:
    codes = {
        cls.code
        for module in (errors, app)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, errors.ProxyError)
    }
    for label, value in _LABEL.findall(ALERTS):
        if label == "code":
            assert set(value.split("|")) <= codes
        if label == "cause":
            assert set(value.split("|")) <= {str(cause) for cause in Cause}


def test_every_panel_speaks_of_what_there_is() -> None:
    shown: set[str] = set()
    for panel in panels():
        for target in panel["targets"]:
            shown |= check(target["expr"].replace("$__rate_interval", "1m"))
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                metrics = [metric_of(n) for n, _ in _NAME.findall(target["expr"])]
                assert any(label in m.labels for m in metrics), (label, target["expr"])
    missing = set(METRICS) - shown
    assert missing <= {
        "gpusup_worker_starts_total",
        "gpusup_worker_memory_bytes",
        "gpusup_slot_state",
        "gpusup_rows_total",
        "gpusup_device_unknown",
    }


def test_the_dashboard_can_be_imported() -> None:
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} covers another"
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert {v["name"] for v in BOARD["templating"]["list"]} == {"datasource", "instance"}
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels())


def test_promtool_accepts_the_alerts() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("there is no promtool (Debian's package prometheus)")
    asked = subprocess.run(
        [tool, "check", "rules", CONF / "alerts.yml"], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr

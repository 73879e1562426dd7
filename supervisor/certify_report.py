"""report.html (one file), report.json and junit.xml, from what the tests found."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Final

from . import certify_plots
from .certify_bench import Options
from .certify_machine import Machine
from .certify_ramp import ms, per_s
from .certify_result import Result, Verdict, counted

_SIGNS: Final[dict[Verdict, str]] = {"passed": "✓", "failed": "✗", "skipped": "-"}


def write_all(
    options: Options,
    headline: str,
    results: Sequence[Result],
    *,
    machine: Machine | None,
    facts: Mapping[str, Any],
    series: Mapping[str, Sequence[tuple[float, float]]],
    began: float,
) -> list[Path]:
    """Returns the paths. `began`: seconds since the epoch. Raises OSError."""
    folder = options.report
    folder.mkdir(parents=True, exist_ok=True)
    told = as_json(options, headline, results, machine=machine, facts=facts, began=began)
    plots: dict[str, str] = {}
    if certify_plots.available():
        sla = (options.sla.share, options.sla.limit_s)
        plots = certify_plots.draw_all(results, series, facts.get("marks", {}), sla)
    html, data, junit = folder / "report.html", folder / "report.json", folder / "junit.xml"
    html.write_text(as_html(told, plots), encoding="utf-8")
    data.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    junit.write_bytes(as_junit(results))
    return [html, data, junit]


def as_json(
    options: Options,
    headline: str,
    results: Sequence[Result],
    *,
    machine: Machine | None,
    facts: Mapping[str, Any],
    began: float,
) -> dict[str, Any]:
    """The whole report as builtins; what is infinite or undefined is null."""
    found: dict[str, Any] = {
        "schema": 1,
        "headline": headline,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "took_s": round(time.time() - began, 1),
        "profile": options.profile.name,
        "sla": str(options.sla),
        "machine": dict(machine.lines) if machine else {},
        "gpu": bool(machine and machine.gpu),
        "facts": dict(facts),
        "counts": counted(list(results)),
        "tests": [
            {
                "name": result.name,
                "title": result.title,
                "verdict": result.verdict,
                "skipped": result.skipped,
                "took_s": round(result.took_s, 2),
                "checks": [dataclasses.asdict(check) for check in result.checks],
                "figures": result.figures,
                "notes": result.notes,
                "rates": result.rates,
                "events": [
                    {"after_s": round(m.at - result.began, 3), "text": m.text} for m in result.marks
                ],
            }
            for result in results
        ],
    }
    return dict(_finite(found))


def _finite(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6) if math.isfinite(value) else None
        case dict():
            return {str(k): _finite(v) for k, v in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value


def as_junit(results: Sequence[Result]) -> bytes:
    """One suite a test, one case a check."""
    top = ET.Element("testsuites", name="gpusup certify")
    for result in results:
        checks = result.checks
        suite = ET.SubElement(
            top, "testsuite", name=result.name, time=f"{result.took_s:.3f}",
            tests=str(max(1, len(checks))),
            failures=str(sum(c.verdict == "failed" for c in checks)),
            skipped=str(sum(c.verdict == "skipped" for c in checks) or int(not checks)),
        )  # fmt: skip
        for check in checks:
            case = ET.SubElement(
                suite, "testcase", classname=f"certify.{result.name}", name=check.name
            )
            if check.verdict == "failed":
                ET.SubElement(case, "failure", message=_printable(check.text))
            elif check.verdict == "skipped":
                ET.SubElement(case, "skipped", message=_printable(check.text))
            else:
                ET.SubElement(case, "system-out").text = _printable(check.text)
        if not checks:
            case = ET.SubElement(
                suite, "testcase", classname=f"certify.{result.name}", name=result.name
            )
            ET.SubElement(case, "skipped", message=_printable(result.skipped))
    ET.indent(top)
    return bytes(ET.tostring(top, encoding="utf-8", xml_declaration=True))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def as_html(told: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """`told`: what `as_json` makes. Nothing in the page is loaded from elsewhere."""
    template = Template((files("gpusup.supervisor") / "certify_report.html").read_text("utf-8"))
    counts = told["counts"]
    state = "failed" if counts["failed"] else "skipped" if counts["skipped"] else "passed"
    machine = "".join(
        f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>"
        for k, v in [
            *told["machine"].items(),
            ("requests", str(told["facts"].get("bodies", ""))),
            ("profile", f"{told['profile']}, SLA {told['sla']}"),
            ("when", f"{told['began']}, {told['took_s']:.0f} s"),
        ]
    )
    return template.substitute(
        state=state,
        headline=escape(told["headline"]),
        summary=escape(
            f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped "
            f"of {len(told['tests'])} tests"
        ),
        machine=machine,
        tiles="".join(_tile(name, value, note) for name, value, note in tiles(told)),
        plots=_plots(plots),
        tests="".join(_test(test, plots) for test in told["tests"]),
        notes="".join(f"<li>{escape(n)}</li>" for n in told["facts"].get("notes", [])),
    )


def tiles(told: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, figure, remark) for the head of the page."""
    figures = {test["name"]: test["figures"] for test in told["tests"]}
    found: list[tuple[str, str, str]] = []
    if load := figures.get("load"):
        held = load["held"]
        found += [
            ("highest rate within the SLA", per_s(load["highest_rate"]), told["sla"]),
            ("p50 · p99", f"{_ms(held['p50'])} · {_ms(held['p99'])}",
             f"at {per_s(load['stated_rate'])}"),
            ("requests lost", str(load["lost"]), f"of {load['requests']}, overload included"),
        ]  # fmt: skip
    if swap := figures.get("swap"):
        found.append(
            ("swaps", str(swap["swaps"]), f"{swap['requests']} requests, {swap['bad']} failed")
        )
    if faults := figures.get("faults"):
        if (kill := faults.get("kill_s")) is not None:
            found.append(("kill -9 to ready", _ms(kill), "worker replaced by itself"))
        if (hang := faults.get("hang_s")) is not None:
            found.append(("hang to answer", _ms(hang), f"budget {faults['budget_s']:g} s"))
    if stability := figures.get("stability"):
        seconds = stability["seconds"]
        lasted = (
            f"{seconds:.0f} s"
            if seconds < 120
            else f"{seconds / 60:.0f} min"
            if seconds < 7200
            else f"{seconds / 3600:.0f} h"
        )
        served = f"{stability['requests']} requests, {stability['restarts']} restarts"
        found.append(("steady for", lasted, served))
    if hostile := figures.get("hostile"):
        found.append(("hostile requests refused", f"{hostile['refused']} of {hostile['sent']}",
                      f"slowest {_ms(hostile['slowest_s'])}"))  # fmt: skip
    return found


def _ms(seconds: float | None) -> str:
    return "never" if seconds is None else ms(seconds)


def _tile(name: str, value: str, note: str) -> str:
    return (
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b>'
        f"<small>{escape(note)}</small></div>"
    )


def _plots(plots: Mapping[str, str]) -> str:
    if not plots:
        return f"<p class=muted>{escape(certify_plots.MISSING)}</p>"
    wide = "".join(
        f"<figure>{plots[name]}</figure>" for name in ("latency", "memory") if name in plots
    )
    half = "".join(
        f"<figure>{plots[name]}</figure>" for name in ("rates", "distribution") if name in plots
    )
    return f'<div class="pair">{half}</div>{wide}' if half else wide


def _test(test: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    verdict: Verdict = test["verdict"]
    rows = "".join(
        f'<tr class="{c["verdict"]}"><td>{_SIGNS[c["verdict"]]}</td><th>{escape(c["name"])}</th>'
        f"<td>{escape(c['text'])}</td></tr>"
        for c in test["checks"]
    )
    if test["skipped"]:
        rows += (
            f'<tr class="skipped"><td>-</td><th>skipped</th><td>{escape(test["skipped"])}</td></tr>'
        )
    notes = "".join(f"<p class=muted>{escape(note)}</p>" for note in test["notes"])
    picture = plots.get(f"series-{test['name']}", "")
    figure = f"<figure>{picture}</figure>" if picture else ""
    return (
        f'<section><h2><i class="{verdict}">{verdict}</i> {escape(test["title"])}'
        f"<small>{test['took_s']:.0f} s</small></h2><table>{rows}</table>{notes}{figure}</section>"
    )

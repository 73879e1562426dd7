"""The report's pictures, by matplotlib, as SVG to put into the page. Needs gpusup[report]."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .certify_math import LOST, Sample, over_time, percentile
from .certify_result import Mark, Result

MISSING: Final = 'plots need matplotlib: pip install "gpusup[report]"'

_INK: Final = "#1f2937"
_FAINT: Final = "#9ca3af"
_P50, _P95, _P99, _RED = "#2563eb", "#7c3aed", "#db2777", "#dc2626"
_DEVICES: Final = (
    "#0d9488",
    "#2563eb",
    "#d97706",
    "#7c3aed",
    "#db2777",
    "#65a30d",
    "#0891b2",
    "#57534e",
)
#: Windows of a plot over time: fine enough to see an event, coarse enough for a p99.
_WINDOWS: Final = 160
_LEAST_S: Final = 0.25
#: Marks of an end: the line says enough.
QUIET: Final = ("back", "calm")


def available() -> bool:
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        return False
    return True


def draw_all(
    results: Sequence[Result],
    series: Mapping[str, Sequence[tuple[float, float]]],
    marks: Mapping[str, float],
    sla: tuple[float, float],
) -> dict[str, str]:
    """Name -> SVG. `marks`: the watermarks' bands; `sla`: (share, seconds)."""
    import matplotlib

    matplotlib.use("svg")
    style = {
        "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _FAINT,
        "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "text.color": _INK,
        "axes.grid": True, "grid.color": "#e5e7eb", "grid.linewidth": 0.8,
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "legend.frameon": False, "svg.hashsalt": "gpusup",
    }  # fmt: skip
    found: dict[str, str] = {}
    with matplotlib.rc_context(style):
        by_name = {result.name: result for result in results}
        if load := by_name.get("load"):
            if load.rates:
                found["rates"] = _rates(load.rates, sla)
            if held := held_of(load):
                found["distribution"] = _distribution(held, sla)
        every = [r for r in results if r.samples]
        if every:
            found["latency"] = _latency(every, sla)
        if any(name.endswith(" watermark") for name in series):
            found["memory"] = _memory(series, marks, every)
        for result in results:
            if result.series:
                found[f"series-{result.name}"] = _series(result)
    return found


def held_of(load: Result) -> list[Sample]:
    """The samples of the stretch at the stated rate: what was due after its mark."""
    moments = [mark.at for mark in load.marks]
    return [s for s in load.samples if moments and s.due >= moments[-1]]


def _axes(height: float, width: float = 10.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, name: str) -> str:
    """Without the XML head, and with ids of its own: several share one page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', ' width="100%"', text, count=1)


def _rates(rates: Sequence[Mapping[str, Any]], sla: tuple[float, float]) -> str:
    figure, axes = _axes(3.4, 5.0)
    ramp = sorted((r for r in rates if not r.get("stated")), key=lambda r: float(r["offered"]))
    finite = [r for r in ramp if math.isfinite(r["p99"])]
    for key, colour in (("p50", _P50), ("p95", _P95), ("p99", _P99)):
        axes.plot(
            [r["offered"] for r in finite], [r[key] * 1000 for r in finite], ".-",
            color=colour, label=key,
        )  # fmt: skip
    bad = [r for r in ramp if not r["kept"]]
    if bad:
        axes.axvspan(bad[0]["offered"], ramp[-1]["offered"] * 1.08, color=_RED, alpha=0.08, lw=0)
        axes.axvline(bad[0]["offered"], color=_RED, lw=1, ls=":", label="not kept")
    stated = [rate["offered"] for rate in rates if rate.get("stated")]
    for rate in stated[-1:]:
        axes.axvline(rate, color=_INK, lw=1.2, ls="--", label="rate held")
    axes.axhline(sla[1] * 1000, color=_RED, lw=1, label=f"SLA p{sla[0] * 100:g}")
    axes.set(
        xscale="log", yscale="log", xlabel="requests/s offered", ylabel="ms",
        title="Latency by rate",
    )  # fmt: skip
    ticks = [r["offered"] for r in ramp]
    steps = [t for n, t in enumerate(ticks) if not n or t / ticks[n - 1] > 1.6]
    axes.set_xticks(steps, [f"{t:.0f}" for t in steps])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="upper left")
    return _svg(figure, "rates")


def _distribution(samples: Sequence[Sample], sla: tuple[float, float]) -> str:
    figure, axes = _axes(3.4, 5.0)
    latencies = sorted(s.latency * 1000 for s in samples if s.status > 0)
    count = len(latencies)
    if count:
        # 1 / (1 - share): each nine takes the same room, so the tail can be seen.
        nines = [count / (count - n) for n in range(count)]
        axes.plot(nines, latencies, color=_P50, lw=1.8)
    axes.axhline(sla[1] * 1000, color=_RED, lw=1)
    axes.plot([1 / (1 - sla[0])], [sla[1] * 1000], "v", color=_RED, ms=7)
    ticks = [t for t in (1, 2, 10, 100, 1000, 10_000, 100_000) if t <= max(100, count)]
    words = {1: "0", 2: "50 %", 10: "90 %", 100: "99 %", 1000: "99.9 %"}
    axes.set(xscale="log", yscale="log", ylabel="ms", xlabel="share of requests within",
             title=f"Latencies at the stated rate ({count} requests)")  # fmt: skip
    axes.set_xticks(ticks, [words.get(t, f"{100 - 100 / t:g} %") for t in ticks])
    axes.minorticks_off()
    return _svg(figure, "distribution")


def _latency(results: Sequence[Result], sla: tuple[float, float]) -> str:
    figure, axes = _axes(3.6)
    start = min(r.began for r in results)
    end = max(max(s.ended for s in r.samples) for r in results)
    width = max(_LEAST_S, (end - start) / _WINDOWS)
    for result in results:
        points = over_time(result.samples, width, start)
        times = [p[0] for p in points]
        for column, (label, colour) in enumerate((("p50", _P50), ("p95", _P95), ("p99", _P99)), 1):
            axes.plot(
                times, [p[column] * 1000 for p in points], color=colour, lw=1.3,
                label=label if result is results[0] else None,
            )  # fmt: skip
        bad = [s for s in result.samples if s.status == LOST]
        refused = [s for s in result.samples if s.status > 0 and not s.good]
        floor = 0.5
        axes.plot([s.due - start for s in bad], [floor] * len(bad), "x", color=_RED, ms=5)
        axes.plot(
            [s.due - start for s in refused], [floor] * len(refused), "|", color="#d97706", ms=6
        )
    axes.axhline(sla[1] * 1000, color=_RED, lw=1, label=f"SLA p{sla[0] * 100:g}")
    axes.plot([], [], "|", color="#d97706", label="refused or failed")
    axes.plot([], [], "x", color=_RED, label="lost")
    axes.set(yscale="log", ylabel="ms", xlabel="s", title="Latency over the whole run")
    axes.set_xlim(0, end - start)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 3)  # room for the names of the tests
    _tests(axes, results, start)
    _marks(axes, [m for r in results for m in r.marks if r.name != "load"], start)
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=6)
    return _svg(figure, "latency")


def _memory(
    series: Mapping[str, Sequence[tuple[float, float]]],
    marks: Mapping[str, float],
    results: Sequence[Result],
) -> str:
    figure, axes = _axes(3.2)
    names = sorted(n.removesuffix(" watermark") for n in series if n.endswith(" watermark"))
    start = min(
        [series[f"{n} watermark"][0][0] for n in names] + [r.began for r in results if r.began]
    )
    top = 0.0
    for number, name in enumerate(names):
        points = series[f"{name} watermark"]
        colour = _DEVICES[number % len(_DEVICES)]
        total = series.get(f"{name} total", [(0.0, 0.0)])[-1][1] / 2**30
        # A service of another test: the line must not join them.
        times, values = _with_gaps([(t - start, v * 100) for t, v in points])
        axes.plot(times, values, color=colour, lw=1.5, label=f"{name} ({total:.0f} GiB)")
        top = max([top, *(v for v in values if not math.isnan(v))])
    for name, colour in (("queue", "#d97706"), ("shed", _RED)):
        if name in marks:
            axes.axhline(marks[name] * 100, color=colour, lw=1.2, ls="--", label=f"{name} mark")
    axes.set(ylabel="% of the device", xlabel="s", ylim=(0, 108),
             title="Device memory in use")  # fmt: skip
    _tests(axes, results, start)
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.99), ncols=6)
    return _svg(figure, "memory")


def _with_gaps(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    times: list[float] = []
    values: list[float] = []
    for time, value in points:
        if times and time - times[-1] > 5:
            times.append(time)
            values.append(math.nan)
        times.append(time)
        values.append(value)
    return times, values


def _tests(axes: Any, results: Sequence[Result], start: float) -> None:
    for number, result in enumerate(sorted(results, key=lambda r: r.began)):
        left, right = result.began - start, result.began - start + result.took_s
        if number % 2 == 0:
            axes.axvspan(left, right, color="#f3f4f6", lw=0, zorder=0)
        axes.text(
            (left + right) / 2, 1.0 - 0.06 * (number % 2), result.name,
            transform=axes.get_xaxis_transform(), ha="center", va="top", fontsize=8,
            color=_FAINT, weight="bold",
        )  # fmt: skip


def _marks(axes: Any, marks: Sequence[Mark], start: float) -> None:
    """A line for each; words only where there is room for them, and none for an end."""
    left, right = axes.get_xlim()
    last = -math.inf
    for mark in sorted(marks, key=lambda m: m.at):
        at = mark.at - start
        axes.axvline(at, color=_FAINT, lw=0.6, ls=":", zorder=1)
        if mark.text in QUIET or at - last < (right - left) * 0.012:
            continue
        last = at
        axes.text(
            at, 0.02, f" {mark.text}", transform=axes.get_xaxis_transform(),
            rotation=90, fontsize=6.5, color=_INK, va="bottom", ha="right",
        )  # fmt: skip


def _series(result: Result) -> str:
    """Growth of each reading since its first, so that slopes of large things can be seen."""
    names = sorted(result.series)
    figure, axes = _axes(3.0)
    for number, name in enumerate(names):
        points = result.series[name]
        base = percentile([v for _, v in points[: max(1, len(points) // 10)]], 0.5)
        axes.plot(
            [t for t, _ in points], [v - base for _, v in points],
            color=_DEVICES[number % len(_DEVICES)], lw=1.2, label=name,
        )  # fmt: skip
    axes.set(xlabel="s", ylabel="MiB since the start", title=f"Memory during {result.name}")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.2), max(high, 1.0))  # pages of noise are not to look like a leak
    axes.legend(fontsize=7, ncols=3, loc="upper left")
    return _svg(figure, f"series-{result.name}")

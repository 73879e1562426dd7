"""docs/metrics.md, made from metrics.py: `python -m gpusup.conf.metrics_page > docs/metrics.md`."""

from __future__ import annotations

import sys
from typing import Final

from .metrics import METRICS, Metric

_HEAD: Final = """\
# Metrics

`GET /metrics` on the port (or, with `server.metrics = "control"`, only `gpusupctl metrics`)
answers in Prometheus' text format, for all proxies and workers together. Counters survive restarts
of proxies and workers. Labels hold only what the configuration bounds, never what a client sent.

```sh
curl --fail-with-body -s http://127.0.0.1:8000/metrics
gpusupctl metrics
```

This page is made from `conf/metrics.py`.
"""

#: Title -> beginnings of names, in the order of the page; the first that fits has the metric.
_GROUPS: Final = (
    ("Requests", ("http_", "gpusup_request", "gpusup_queue", "gpusup_batch", "gpusup_compute",
                  "gpusup_rows", "gpusup_degraded", "gpusup_shed", "gpusup_client",
                  "gpusup_retries", "gpusup_refused", "gpusup_in_flight")),
    ("Devices", ("gpusup_device", "gpusup_leased", "gpusup_probe")),
    ("Workers and models", ("gpusup_slot", "gpusup_worker", "gpusup_leak", "gpusup_swaps",
                            "gpusup_model")),
    ("The rest", ("",)),
)  # fmt: skip


def page() -> str:
    left = list(METRICS.values())
    parts = [_HEAD]
    for title, beginnings in _GROUPS:
        mine = [m for m in left if m.name.startswith(beginnings)]
        left = [m for m in left if m not in mine]
        if mine:
            rows = "\n".join(_row(m) for m in mine)
            parts.append(
                f"## {title}\n\n| name | kind | labels | what |\n| - | - | - | - |\n{rows}\n"
            )
    return "\n".join(parts) + _buckets()


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _buckets() -> str:
    found: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS.values():
        if metric.buckets:
            found.setdefault(metric.buckets, []).append(metric.name)
    lines = ["", "## Buckets", ""]
    for buckets, names in found.items():
        lines.append(
            f"- {', '.join(f'`{n}`' for n in names)}: {', '.join(f'{b:g}' for b in buckets)}"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())

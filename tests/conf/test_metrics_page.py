from __future__ import annotations

from pathlib import Path

from gpusup.conf.metrics import METRICS
from gpusup.conf.metrics_page import page

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_lists_the_metrics_there_are() -> None:
    assert DOCUMENT.read_text() == page(), "python -m gpusup.conf.metrics_page > docs/metrics.md"


def test_every_metric_has_one_row() -> None:
    for name in METRICS:
        assert page().count(f"\n| `{name}` |") == 1, name

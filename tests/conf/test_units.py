from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusup.conf.units import (
    format_size,
    format_time,
    parse_share,
    parse_size,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30), ("500MB", 500_000_000), ("1.5GiB", 3 * 2**29), ("0B", 0),
        ("8190 B", 8190), ("1_000kB", 1_000_000), (" 2 TiB ", 2**41), (0, 0), ("0", 0),
    ],
)  # fmt: skip
def test_sizes(text: object, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25), ("10s", 10), ("5m", 300), ("2h", 7200), ("1.5 h", 5400), ("1d", 86400),
        ("100us", 0.0001), (0, 0),
    ],
)  # fmt: skip
def test_times(text: object, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "share"), [(0.85, 0.85), ("85%", 0.85), (1, 1.0), ("0.5", 0.5)])
def test_shares(text: object, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (24, "expected a size with its unit.*got 24"),
        (True, "got true"),
        ("24", "expected a size"),
        ("24G", r"two readings: write GiB \(powers of 1024\) or GB"),
        ("-1GiB", "can't be negative"),
        ("9999999999TiB", "more than any machine has"),
        ("1e400B", "expected a size"),
        ("GiB", "expected a size"),
        ("24 gibibytes", "expected a size"),
        (["1GiB"], r"got \[\"1GiB\"\]"),
        (None, "got None"),
    ],
)
def test_what_is_no_size_is_refused(value: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_size(value)


@pytest.mark.parametrize("value", [30, "30", "10 fortnights", "-1s", True, "nans", [], "1:30"])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"time"):
        parse_time(value)


@pytest.mark.parametrize("value", [1.5, -0.1, "101%", float("nan"), "x", True, None, "5s"])
def test_what_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="expected a share"):
        parse_share(value)


@given(st.integers(0, 2**50))
def test_a_written_size_reads_back_nearly_the_same(count: int) -> None:
    assert parse_size(format_size(count)) == pytest.approx(count, rel=0.01)


@given(st.floats(0.001, 1e6))
def test_a_written_time_reads_back_nearly_the_same(seconds: float) -> None:
    assert parse_time(format_time(seconds)) == pytest.approx(seconds, rel=0.01)


@given(st.text() | st.floats() | st.integers() | st.none() | st.lists(st.text()))
def test_nothing_but_valueerror_comes_out(value: object) -> None:
    for parse in (parse_size, parse_time, parse_share):
        with contextlib.suppress(ValueError):
            assert parse(value) >= 0

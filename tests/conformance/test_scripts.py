"""Every check of the conformance scripts, as a test of its own."""

from __future__ import annotations

import os

import pytest

from . import fuzz, raw_http_probe, samples, v2_raw
from .conftest import MAX_BODY, SLOW_S
from .report import Skip
from .v2_server import Server

OURS = "GPUSUP_TEST_URL" not in os.environ
MODEL = os.environ.get("GPUSUP_TEST_MODEL", "identity_fp32")

_servers: dict[tuple[str, str], Server] = {}


def server(url: str, model: str) -> Server:
    """One for all checks: it remembers the metadata."""
    key = (url, model)
    if key not in _servers:
        _servers[key] = Server(url, model, identity=OURS)
    return _servers[key]


def skipped(skip: Skip) -> None:
    """Ours announces everything and its limits are known, so no check may pass it over."""
    if OURS:
        pytest.fail(f"left out with our own server: {skip}")
    pytest.skip(str(skip))


@pytest.mark.parametrize("name", list(v2_raw.check.table))
def test_v2(url: str, name: str) -> None:
    try:
        v2_raw.check.table[name](server(url, MODEL))
    except Skip as skip:
        skipped(skip)


@pytest.mark.skipif(not OURS, reason="these models are those of our own test server")
@pytest.mark.parametrize("model", ["identity_bytes", "identity_bf16", "identity_bool"])
def test_v2_with_other_datatypes(url: str, model: str) -> None:
    failed = {}
    for name, check in v2_raw.check.table.items():
        try:
            check(server(url, model))
        except Exception as error:  # a Skip too
            failed[name] = str(error)
    assert not failed


@pytest.mark.parametrize("name", list(raw_http_probe.check.table))
def test_http(url: str, name: str) -> None:
    target = raw_http_probe.Target(
        url,
        post=f"/predictions/{'m' if OURS else MODEL}",
        max_body=MAX_BODY if OURS else 0,
        slow_s=SLOW_S if OURS else 0.0,
        patience_s=2.0,
    )
    try:
        raw_http_probe.check.table[name](target)
    except Skip as skip:
        skipped(skip)


@pytest.mark.skipif(not OURS, reason="the samples speak to a model of our own test server")
@pytest.mark.parametrize("name", list(samples.SAMPLES))
def test_sample(url: str, name: str) -> None:
    samples.check_sample(name, url)


def test_all_checks_are_there() -> None:
    assert len(v2_raw.check.table) >= 61
    assert len(raw_http_probe.check.table) >= 79
    assert len(samples.SAMPLES) >= 19


def test_nothing_that_is_nearly_right_hurts(url: str) -> None:
    fuzz.Fuzz(url, MODEL, seed=1).run(600)

"""What heads say: deadlines, priorities, traces, origins."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict

from gpusup.proxy import http_rules
from gpusup.proxy.errors import InvalidInput

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def head(**fields: str) -> CIMultiDict[str]:
    return CIMultiDict({name.replace("_", "-"): value for name, value in fields.items()})


def test_a_timeout_is_seconds() -> None:
    assert http_rules.read_timeout(head()) is None
    assert http_rules.read_timeout(head(X_Request_Timeout="2.5")) == 2.5
    assert http_rules.read_timeout(head(Prefer="respond-async, wait=10")) == 10
    assert http_rules.read_timeout(head(Prefer="return=minimal")) is None
    for bad in ("0", "-1", "nan", "inf", "soon", "1_0", ""):
        with pytest.raises(InvalidInput):
            http_rules.read_timeout(head(X_Request_Timeout=bad))


def test_urgency_maps_to_our_priorities() -> None:
    assert http_rules.header_priority(head()) == 0
    assert http_rules.header_priority(head(Priority="u=0, i")) == 1
    assert http_rules.header_priority(head(Priority="u=3")) == 0
    assert http_rules.header_priority(head(Priority="i, u=7")) == 6
    assert http_rules.header_priority(head(Priority="i")) == 0
    for bad in ("u=8", "u=high", "u=-1", "u="):
        with pytest.raises(InvalidInput):
            http_rules.header_priority(head(Priority=bad))


def test_a_trace_goes_on_and_a_broken_one_is_dropped() -> None:
    assert http_rules.trace(head(traceparent=PARENT, tracestate="a=b")) == (PARENT, "a=b")
    assert http_rules.trace_params(head(traceparent=PARENT)) == {"traceparent": PARENT}
    assert http_rules.trace_params(head()) == {}
    for bad in (
        PARENT.upper(),
        PARENT[:-1],
        "ff" + PARENT[2:],
        PARENT + "-x",
        "00-" + "0" * 32 + PARENT[35:],
        "",
    ):
        assert http_rules.trace(head(traceparent=bad, tracestate="a=b")) == ("", "")
    assert http_rules.trace(head(traceparent=PARENT, tracestate="x" * 600)) == (PARENT, "")


def test_cors_is_off_unless_origins_are_named() -> None:
    off = http_rules.Cors(())
    assert not off
    assert off.headers("https://a.example") == {}
    assert off.preflight(
        head(Origin="https://a.example", Access_Control_Request_Method="POST"), "POST"
    ) == {"Allow": "POST"}


def test_cors_speaks_to_the_named_origins_only() -> None:
    cors = http_rules.Cors(("https://a.example",))
    assert cors.headers("https://a.example")["Access-Control-Allow-Origin"] == "https://a.example"
    assert cors.headers("https://b.example") == {"Vary": "Origin"}
    assert cors.headers("null") == {"Vary": "Origin"}
    assert cors.headers(None) == {"Vary": "Origin"}
    answer = cors.preflight(
        head(
            Origin="https://a.example",
            Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="content-type, x-request-id",
        ),
        "POST, PUT",
    )
    assert answer["Access-Control-Allow-Methods"] == "POST, PUT"
    assert answer["Access-Control-Allow-Headers"] == "content-type, x-request-id"
    assert "Access-Control-Allow-Methods" not in cors.preflight(
        head(Origin="https://b.example", Access_Control_Request_Method="POST"), "POST"
    )
    assert http_rules.Cors(("*",)).allows("https://any.example")

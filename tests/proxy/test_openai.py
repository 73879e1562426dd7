"""OpenAI's forms: what is taken, what is refused with which parameter, and how answers look."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusup.proxy import openai, v2_checks
from gpusup.proxy.errors import (
    DeadlineExceeded,
    InputTooLarge,
    ModelFailed,
    ModelNotFound,
    ProxyError,
    QueueFull,
    Unauthorized,
)
from gpusup.proxy.generate_routes import read_generate, read_raw
from gpusup.proxy.raw_codec import JSON
from gpusup.worker.wire import Part

HI = [{"role": "user", "content": "hi there"}]


def read(kind: str = "chat", **said: Any) -> openai.TextRequest:
    given: dict[str, Any] = {"model": "m", **said}
    if kind == "chat":
        given.setdefault("messages", HI)
    return openai.read(json.dumps(given).encode(), kind)


def test_a_chat_is_read_with_what_is_for_the_model() -> None:
    found = read(
        stream=True,
        stream_options={"include_usage": True},
        temperature=1,
        max_tokens=5,
        stop=["x"],
        user="me",
        n=1,
    )
    assert (found.model, found.stream, found.usage, found.max_tokens) == ("m", True, True, 5)
    assert found.params == {"temperature": 1, "max_tokens": 5, "stop": ["x"]}
    assert found.messages == HI
    assert found.prompt_words == 2
    parts = [{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "image_url"}]}]
    assert read(messages=parts).prompt_words == 2


@pytest.mark.parametrize(
    ("kind", "said", "param"),
    [
        ("chat", {"model": None}, "model"),
        ("chat", {"model": 3}, "model"),
        ("chat", {"messages": "not a list"}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": ["x"]}, "messages[0]"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"temperature": 3}, "temperature"),
        ("chat", {"temperature": True}, "temperature"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"n": 2}, "n"),
        ("chat", {"n": True}, "n"),
        ("chat", {"stream": "yes"}, "stream"),
        ("chat", {"stream_options": 1}, "stream_options"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": [1, 2]}, "prompt"),
        ("completions", {"prompt": ["a", "b"], "stream": True}, "prompt"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [[1, 2]]}, "input"),
        ("embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_the_member_at_fault_is_named(kind: str, said: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequest) as caught:
        read(kind, **said)
    error = openai.error_object(caught.value)["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_too_many_texts_are_refused_with_both_numbers() -> None:
    with pytest.raises(ProxyError, match="2049 texts, 2048 are allowed"):
        read("embeddings", input=["x"] * 2049)


def test_embeddings_come_as_floats_or_as_base64() -> None:
    rows = np.array([[1, 2.5], [3, 4]], "<f4")
    part = Part("embedding", rows.tobytes(), "FP32", (2, 2))
    found = json.loads(openai.embeddings(part, read("embeddings", input=["a b", "c"])))
    assert [entry["embedding"] for entry in found["data"]] == rows.tolist()
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    asked = read("embeddings", input=["a b", "c"], encoding_format="base64")
    found = json.loads(openai.embeddings(part, asked))
    raw = base64.b64decode(found["data"][1]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == [3, 4]
    half = Part("embedding", rows.astype("<f2").tobytes(), "FP16", (2, 2))
    found = json.loads(openai.embeddings(half, read("embeddings", input=["a", "b"])))
    assert found["data"][0]["embedding"] == [1, 2.5]


@pytest.mark.parametrize(
    "part",
    [
        Part("e", b"", "FP32", (0, 4)),
        Part("e", bytes(16), "FP32", (4,)),
        Part("e", b"{}", content_type="application/json"),
        Part("e", np.array([[np.nan]], "<f4").tobytes(), "FP32", (1, 1)),
    ],
)
def test_an_odd_embedding_is_the_model_s_fault(part: Part) -> None:
    with pytest.raises(ModelFailed):
        openai.embeddings(part, read("embeddings", input="a"))


def test_a_stream_begins_with_the_role_and_ends_with_done() -> None:
    talk = openai.Talk(chat=True, id="7", model="m", created=1, prompt_words=2, max_tokens=2)
    first = json.loads(talk.chunk("a", first=True))
    assert first["id"] == "chatcmpl-7"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert json.loads(talk.chunk("b", first=False))["choices"][0]["delta"] == {"content": "b"}
    end, usage, done = talk.last(2, usage=True)
    assert json.loads(end)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["total_tokens"] == 4
    assert json.loads(usage)["choices"] == []
    assert done == b"[DONE]"
    assert len(talk.last(1, usage=False)) == 2


def test_errors_have_openai_s_types() -> None:
    for error, kind, code in (
        (QueueFull("x"), "rate_limit_error", "queue_full"),
        (Unauthorized("x"), "authentication_error", "unauthorized"),
        (DeadlineExceeded("x"), "server_error", "deadline_exceeded"),
        (ModelNotFound("x"), "invalid_request_error", "model_not_found"),
    ):
        found = json.loads(openai.error_body(error))["error"]
        assert (found["type"], found["code"], found["message"]) == (kind, code, "x")


@settings(max_examples=300, deadline=None)
@given(
    body=st.binary(max_size=60)
    | st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "input", "stream", "n", "temperature"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    ).map(lambda said: json.dumps({"model": "m", **said}).encode()),
    kind=st.sampled_from(["chat", "completions", "embeddings"]),
)
def test_any_body_is_read_or_refused(body: bytes, kind: str) -> None:
    refused: ProxyError | None = None
    try:
        _ = openai.read(body, kind).prompt_words
    except ProxyError as error:
        refused = error
    assert refused is None or refused.status in (400, 413)


def test_what_is_for_the_model_is_bounded() -> None:
    """It travels inside a frame, and a frame has a limit."""
    limit = v2_checks.PARAMS_LIMIT
    read(tools=["x" * (limit - 100)])
    large = "x" * limit
    for refuse in (
        lambda: read(tools=[large]),
        lambda: read_generate(json.dumps({"text_input": "", "tools": large}).encode(), 64),
        lambda: read_raw(json.dumps({"prompt": "", "tools": large}).encode(), JSON, 64),
    ):
        with pytest.raises(InputTooLarge, match=f"bytes, {limit} are allowed"):
            refuse()

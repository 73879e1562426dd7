"""OpenAI's own client against our server."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    openai = pytest.importorskip(
        "openai", reason="openai is not installed (tests/conformance/requirements.txt)"
    )

pytestmark = pytest.mark.filterwarnings("ignore")

MESSAGES = [{"role": "user", "content": "say hello"}]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    made = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=30)
    yield made
    made.close()


def test_models(client: Any) -> None:
    assert "text" in {model.id for model in client.models.list().data}
    assert client.models.retrieve("text").id == "text"


def test_chat(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(model="text", messages=MESSAGES)
    assert raw.headers["x-request-id"]
    answer = raw.parse()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "SAY HELLO")
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_ends_with_its_usage(client: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model="text",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "SAY HELLO"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2


def test_completions(client: Any) -> None:
    whole = client.completions.create(model="text", prompt="hi there")
    assert (whole.object, whole.choices[0].text) == ("text_completion", "HI THERE")
    many = client.completions.create(model="text", prompt=["a", "b"])
    assert [choice.text for choice in many.choices] == ["A", "B"]
    pieces = client.completions.create(model="text", prompt="hi there", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == "HI THERE"


def test_streams_one_after_another_leave_nothing_behind(client: Any) -> None:
    for _ in range(100):  # more than the worker has rows
        pieces = client.completions.create(model="text", prompt="hi", stream=True)
        assert "".join(p.choices[0].text for p in pieces if p.choices) == "HI"


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}], ids=["default", "float"])
def test_embeddings(client: Any, options: dict[str, Any]) -> None:
    found = client.embeddings.create(model="text", input=["a", "b"], **options)
    assert [list(entry.embedding) for entry in found.data] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_errors_are_the_typed_ones(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no_such_model", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    assert missing.value.body["message"]
    with pytest.raises(openai.BadRequestError) as bad:
        client.post("/chat/completions", body={"model": "text", "messages": "x"}, cast_to=object)
    assert bad.value.param == "messages"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="identity_fp32", messages=MESSAGES)

"""OpenAI's API, as bytes and dicts: requests checked, answers and errors in its form. No I/O.

Tokens are not known here: usage counts words, and the pieces of a stream.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from gpusup.worker.wire import Block, Part

from .datatypes import SIZES, to_values
from .errors import InputTooLarge, InvalidInput, ModelFailed, ProxyError
from .jsoncheck import DEPTH, load
from .v2_checks import check_params

#: Texts in one embeddings request, prompts in one completions request.
MAX_TEXTS: Final = 2048
MAX_PROMPTS: Final = 16

_encode: Final = msgspec.json.Encoder().encode
_NUMBERS: Final = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
_COUNTS: Final = ("max_tokens", "max_completion_tokens", "seed", "top_k", "dimensions")
_OURS: Final = frozenset(
    {"model", "messages", "prompt", "input", "stream", "stream_options", "encoding_format", "user",
     "n", "best_of", "metadata", "store"}
)  # fmt: skip


class BadRequest(InvalidInput):
    """`param` is the member at fault."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


@dataclass(slots=True, kw_only=True)
class TextRequest:
    """`params` is what the model is given beside its input."""

    model: str
    params: dict[str, Any] = field(default_factory=dict)
    stream: bool = False
    usage: bool = False  # a last chunk with the usage is wanted
    messages: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    base64: bool = False
    max_tokens: int = 0

    @property
    def prompt_words(self) -> int:
        texts = self.texts or [_text_of(message.get("content")) for message in self.messages]
        return sum(len(text.split()) for text in texts)


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(
            part["text"]
            for part in content
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return ""


def read(body: bytes, kind: str, depth: int = DEPTH) -> TextRequest:
    """`kind` is "chat", "completions" or "embeddings". Raises BadRequest, InputTooLarge."""
    try:
        said = load(body, depth=depth)
    except InvalidInput as error:
        raise BadRequest(f"could not parse the JSON body: {error}") from None
    if not isinstance(said, dict):
        raise BadRequest("the body is not a JSON object")
    model = said.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("you must provide a model parameter", "model")
    request = TextRequest(model=model)
    request.stream = _flag(said, "stream")
    options = said.get("stream_options")
    if options is not None:
        if not isinstance(options, dict):
            raise BadRequest("stream_options is not an object", "stream_options")
        request.usage = _flag(options, "include_usage")
    for name in ("n", "best_of"):
        if said.get(name) not in (None, 1) or said.get(name) is True:
            raise BadRequest(f"{name} is {said[name]!r:.40}, only 1 is supported", name)
    _check_numbers(said)
    request.params = {k: v for k, v in said.items() if k not in _OURS and v is not None}
    check_params(request.params)
    request.max_tokens = said.get("max_completion_tokens") or said.get("max_tokens") or 0
    if kind == "chat":
        request.messages = _messages(said.get("messages"))
    elif kind == "completions":
        request.texts = _texts(said, "prompt", MAX_PROMPTS)
        if request.stream and len(request.texts) != 1:
            raise BadRequest("a stream takes one prompt", "prompt")
    else:
        request.texts = _texts(said, "input", MAX_TEXTS)
        form = said.get("encoding_format")
        if form not in (None, "float", "base64"):
            raise BadRequest(
                f"encoding_format is {form!r:.40}; it is float or base64", "encoding_format"
            )
        request.base64 = form == "base64"
        request.stream = False
    return request


def _flag(said: dict[str, Any], name: str) -> bool:
    value = said.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} is {value!r:.40} and neither true nor false", name)
    return bool(value)


def _check_numbers(said: dict[str, Any]) -> None:
    for name, (low, high) in _NUMBERS.items():
        value = said.get(name)
        if value is None:
            continue
        if type(value) not in (int, float) or not low <= value <= high:
            raise BadRequest(f"{name} is {value!r:.40}; it is {low:g} to {high:g}", name)
    for name in _COUNTS:
        value = said.get(name)
        if value is not None and (type(value) is not int or (value < 1 and name != "seed")):
            raise BadRequest(f"{name} is {value!r:.40} and not a positive integer", name)


def _messages(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages is not a list of at least one message", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where} is not an object", where)
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"{where} has no role", f"{where}.role")
        if not isinstance(message.get("content"), str | list | None):
            raise BadRequest(
                f"{where}.content is neither a string nor a list of parts", f"{where}.content"
            )
    return messages


def _texts(said: dict[str, Any], name: str, limit: int) -> list[str]:
    value = said.get(name)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        raise BadRequest(f"{name} is neither a string nor a list of strings", name)
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{name} is not all strings; token numbers are not supported here", name)
    if len(texts) > limit:
        raise InputTooLarge(f"{name} has {len(texts)} texts, {limit} are allowed")
    return texts


# -- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Talk:
    """One chat or completion under way; makes its whole answer or its chunks."""

    chat: bool
    id: str
    model: str
    created: int
    prompt_words: int
    max_tokens: int = 0

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        return {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + self.id,
            "object": ("chat.completion.chunk" if chunk else "chat.completion")
            if self.chat
            else "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _usage(self, completion: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_words,
            "completion_tokens": completion,
            "total_tokens": self.prompt_words + completion,
        }

    def _reason(self, pieces: int) -> str:
        return "length" if self.max_tokens and pieces >= self.max_tokens else "stop"

    def whole(self, texts: Sequence[str]) -> bytes:
        choices: list[dict[str, Any]] = []
        for index, text in enumerate(texts):
            said: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self.chat
                else {"text": text}
            )
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": "stop"})
        words = sum(len(text.split()) for text in texts)
        return _encode({**self._head(chunk=False), "choices": choices, "usage": self._usage(words)})

    def chunk(self, text: str, *, first: bool) -> bytes:
        if self.chat:
            delta = {"role": "assistant", "content": text} if first else {"content": text}
            choice: dict[str, Any] = {"index": 0, "delta": delta}
        else:
            choice = {"index": 0, "text": text}
        return self._chunk([{**choice, "logprobs": None, "finish_reason": None}])

    def last(self, pieces: int, *, usage: bool) -> list[bytes]:
        choice: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        end = {"index": 0, **choice, "logprobs": None, "finish_reason": self._reason(pieces)}
        chunks = [self._chunk([end])]
        if usage:
            chunks.append(
                _encode({**self._head(chunk=True), "choices": [], "usage": self._usage(pieces)})
            )
        return [*chunks, b"[DONE]"]

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return _encode({**self._head(chunk=True), "choices": choices})


def embeddings(part: Part, request: TextRequest) -> bytes:
    """One row for each text. Raises ModelFailed if the model gave something else."""
    assert not isinstance(part.data, Block)
    count = len(request.texts)
    if part.datatype not in SIZES or len(part.shape) != 2 or part.shape[0] != count:
        raise ModelFailed(
            f"the model gave {part.datatype or 'no tensor'} {list(part.shape)} "
            f"for {count} texts, wanted are {[count, 'size']}"
        )
    if part.datatype == "FP32":
        rows = np.frombuffer(part.data, "<f4").reshape(part.shape)
    else:
        values = to_values(part.data, part.datatype, part.name)
        rows = np.asarray(values, "<f4").reshape(part.shape)
    if not np.isfinite(rows).all():
        raise ModelFailed("the model gave an embedding that is not finite")
    said: list[Any] = (
        [base64.b64encode(row.tobytes()).decode() for row in rows]
        if request.base64
        else rows.tolist()
    )
    words = request.prompt_words
    return _encode(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": value}
                for index, value in enumerate(said)
            ],
            "model": request.model,
            "usage": {"prompt_tokens": words, "total_tokens": words},
        }
    )


def error_object(error: ProxyError) -> dict[str, Any]:
    """OpenAI's form of what went wrong."""
    if error.status == 429:
        kind = "rate_limit_error"
    elif error.status == 401:
        kind = "authentication_error"
    elif error.status == 403:
        kind = "permission_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    param = getattr(error, "param", None)
    if error.code == "MODEL_NOT_FOUND":
        param = "model"
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": param,
            "code": error.code.lower(),
        }
    }


def error_body(error: ProxyError) -> bytes:
    return _encode(error_object(error))

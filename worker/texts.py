"""generate, chat and embed: one call each, in threads of their own, answered piece by piece.

A piece is sent only if the reader gave credit for it, so a slow client holds its own thread and
nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

from . import wire
from .codec import is_json, parse_json, part_of
from .compute import failure_of
from .crew import Crew
from .entry import Entry
from .model import InvalidInput
from .running import Running, Work

THREADS: Final = 4
#: How often a thread that waits for credit looks around, and says that it does not hang.
_LOOK: Final = 1.0

Answerer = Callable[[Entry, wire.Answer], None]


class Stopped(Exception):
    """The client is gone, or its time is over. `status` is the answer."""

    def __init__(self, status: wire.Status) -> None:
        super().__init__(status)
        self.status: wire.Status = status


class Texts:
    """`answer` gives an entry its last answer, `poisoned` hears of a sticky device error."""

    def __init__(
        self,
        model: Any,
        running: Running,
        *,
        budget: float,
        answer: Answerer,
        poisoned: Callable[[str], None],
    ) -> None:
        self._model = model
        self._running = running
        self._budget = budget
        self._answer = answer
        self._poisoned = poisoned
        self._credit = threading.Condition()
        self._waiting: dict[int, Entry] = {}
        self._crew = Crew(int(getattr(model, "text_threads", THREADS)), "text")

    def take(self, entry: Entry) -> None:
        with self._credit:
            self._waiting[id(entry)] = entry
        self._crew.put(self._serve, entry)

    def sweep(self) -> None:
        """Answer what waits for a thread in vain: cancelled, or expired."""
        if not self._waiting:
            return
        now = time.monotonic()
        with self._credit:
            dead = [entry for entry in self._waiting.values() if _over(entry, now)]
            for entry in dead:
                del self._waiting[id(entry)]
        for entry in dead:
            status: wire.Status = "cancelled" if entry.cancelled else "expired"
            self._answer(entry, wire.Answer(entry.item.id, status, started=False))

    def credit(self, entry: Entry, count: int) -> None:
        with self._credit:
            entry.credit += count
            self._credit.notify_all()

    def wake(self) -> None:
        """Some entries were cancelled."""
        with self._credit:
            self._credit.notify_all()

    def stop(self) -> None:
        self._crew.stop()

    def _serve(self, entry: Entry) -> None:
        item = entry.item
        began = time.monotonic()
        with self._credit:
            if self._waiting.pop(id(entry), None) is None:
                return  # swept
        try:
            self._check(entry)
        except Stopped as stop:
            self._answer(entry, wire.Answer(item.id, stop.status, started=False))
            return
        work = self._running.begin(
            self._budget, [(entry.connection, item.id)], [item.request_id], rows=1
        )
        status: wire.Status = "ok"
        parts: tuple[wire.Part, ...] = ()
        text = ""
        fatal = ""
        try:
            parts = self._run(entry, work)
        except Stopped as stop:
            status = stop.status
        except Exception as error:
            failure = failure_of(error)
            status = failure.status
            text = failure.text
            fatal = failure.text if failure.kind == "sticky" else ""
        finally:
            self._running.end(work)
        self._answer(
            entry,
            wire.Answer(
                item.id,
                status,
                parts,
                text,
                queue_s=began - entry.arrived,
                compute_s=time.monotonic() - began,
                batch_rows=1,
            ),
        )
        if fatal:
            self._poisoned(fatal)

    def _run(self, entry: Entry, work: Work) -> tuple[wire.Part, ...]:
        item = entry.item
        said = _said(entry)
        params = {k: v for k, v in {**said, **item.params}.items() if k not in _INPUTS}
        with torch.inference_mode():
            if item.method == "embed":
                return (_embedding(self._model.embed(_texts(said), params)),)
            pieces: Iterable[str]
            if item.method == "chat":
                pieces = self._model.chat(_messages(said), params)
            else:
                pieces = self._model.generate(_prompt(said), params)
            return self._send(entry, work, pieces)

    def _send(self, entry: Entry, work: Work, pieces: Iterable[str]) -> tuple[wire.Part, ...]:
        kept: list[str] = []
        iterator = iter(pieces)
        try:
            for piece in iterator:
                self._running.again(work)
                self._check(entry)
                if not isinstance(piece, str):
                    raise TypeError(f"the model gave {type(piece).__name__} as a piece of text")
                if entry.item.stream:
                    self._wait_for_credit(entry, work)
                    entry.reply(wire.Answer(entry.item.id, "ok", (_text_part(piece),), more=True))
                else:
                    kept.append(piece)
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
        return () if entry.item.stream else (_text_part("".join(kept)),)

    def _wait_for_credit(self, entry: Entry, work: Work) -> None:
        with self._credit:
            while entry.credit <= 0:
                self._check(entry)
                self._credit.wait(_LOOK)
                # Waiting for a reader is no hang of the model.
                self._running.again(work)
            entry.credit -= 1

    def _check(self, entry: Entry) -> None:
        if _over(entry, time.monotonic()):
            raise Stopped("cancelled" if entry.cancelled else "expired")


def _over(entry: Entry, now: float) -> bool:
    return entry.cancelled or bool(entry.item.deadline and now >= entry.item.deadline)


#: Names under which the input may come, in the item's parameters, its JSON or its parts.
_INPUTS: Final = frozenset({"prompt", "text_input", "messages", "input", "texts"})


def _said(entry: Entry) -> Mapping[str, Any]:
    """All that the client said, whichever way the proxy put it: JSON, named parts, parameters."""
    said: dict[str, Any] = dict(entry.item.params)
    for part in entry.item.parts:
        data = bytes(entry.data(part))
        if is_json(part.content_type):
            value = parse_json(data)
            if isinstance(value, dict) and part.name not in _INPUTS:
                said.update(value)
            else:
                said[part.name if part.name in _INPUTS else "input"] = value
            continue
        try:
            said[part.name if part.name in _INPUTS else "prompt"] = data.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput("the text is not UTF-8") from error
    return said


def _first(said: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if name in said:
            return said[name]
    raise InvalidInput(f"the request has no {names[0]!r}")


def _prompt(said: Mapping[str, Any]) -> str:
    prompt = _first(said, "prompt", "text_input", "input")
    if isinstance(prompt, str):
        return prompt
    raise InvalidInput(f"the prompt is {type(prompt).__name__}, not a string")


def _messages(said: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = _first(said, "messages")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        return messages
    raise InvalidInput("messages is not a list of objects")


def _texts(said: Mapping[str, Any]) -> list[str]:
    texts = _first(said, "input", "texts", "prompt")
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return texts
    raise InvalidInput("the input is not a string or a list of strings")


def _text_part(text: str) -> wire.Part:
    return wire.Part("text", text.encode(), content_type="text/plain")


def _embedding(value: Any) -> wire.Part:
    array = value.detach().cpu() if isinstance(value, torch.Tensor) else np.asarray(value)
    return part_of("embedding", torch.as_tensor(array), "FP32")

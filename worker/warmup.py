"""The first batches: they load kernels, measure what a batch costs, and prove the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .batcher import Unit
from .codec import DTYPES, NAMES
from .compute import Failure, Placed, Runner, attempt, one_line
from .device import is_oom
from .entry import LoadProblem
from .golden import compare, read
from .model import ConfigProblem
from .outputs import Outputs, joined
from .pool import Key
from .profile import Profile
from .settings import Settings, graph_sizes, ladder

_log = logging.getLogger(__name__)


class WarmUp:
    """`moved` is called after each batch: loading makes progress."""

    def __init__(
        self,
        model: Any,
        settings: Settings,
        runner: Runner,
        profile: Profile,
        moved: Callable[[], None],
    ) -> None:
        self._model = model
        self._settings = settings
        self._runner = runner
        self._profile = profile
        self._moved = moved

    def run(self) -> bool:
        """Raises LoadProblem. True if graphs may be captured right away: with a known profile the
        worker answers first, and captures them in the gaps."""
        settings, profile, runner = self._settings, self._profile, self._runner
        with as_problem("warm_up"):
            given = list(self._model.warm_up())
        if given and not settings.buckets:
            # The examples' shapes are those that matter.
            shapes = {tuple(e.shape) for e in given if isinstance(e, torch.Tensor)}
            settings.buckets = tuple(sorted(shapes))
        keys: dict[Key, dict[str, Any]] = {}
        examples = map(_example, given) if given else default_examples(settings)
        for placed in examples:
            keys.setdefault(_key(placed, settings), placed)
        known = profile.known
        for key, example in keys.items():
            steps = [1] if known and profile.has(key.text, 1) else ladder(settings.max_rows)
            self._climb(key, example, steps, given=bool(given))
            runner.want_graphs(key, graph_sizes(settings.max_rows))
        return not known

    def _climb(
        self,
        key: Key,
        example: dict[str, Any],
        steps: Sequence[int],
        *,
        given: bool,
    ) -> None:
        """Batches of 1, 2, 4, ... rows; their peaks are measured on the way. Raises LoadProblem if
        not even one row works."""
        runner = self._runner
        runner.learning = False  # the first run also pays for what is made only once
        outcome = self._compute(key, example, 1)
        runner.learning = True
        for rows in steps:
            if not isinstance(outcome, Failure):
                outcome = self._compute(key, example, rows)
            self._moved()
            if not isinstance(outcome, Failure):
                continue
            if outcome.kind == "oom" and rows > 1:
                _log.warning("%s does not fit with %d rows: %s", key.text, rows, outcome.text)
                runner.device.trim()
                return
            if outcome.kind == "oom":
                raise LoadProblem(
                    "oom",
                    f"one {key.text} input does not fit: {outcome.text}; the worker may take "
                    f"{runner.device.room()} bytes",
                )
            if outcome.kind == "sticky":
                raise LoadProblem("device", f"warm-up with {key.text}: {outcome.text}")
            if given:
                raise LoadProblem("error", f"warm-up with {key.text}: {outcome.text}")
            _log.warning("no warm-up with %s: %s", key.text, outcome.text)
            return

    def _compute(self, key: Key, example: dict[str, Any], rows: int) -> Outputs | Failure:
        tensors = {name: _repeated(value, rows) for name, value in example.items()}
        shape = key.tensors[0][1]
        placed = Placed(tensors, rows, true_size=shape)
        unit = Unit(_Example(), key, rows, 0.0, notes=placed)
        with torch.inference_mode():
            return attempt(self._runner, key, [unit], rows)

    def golden(self, path: str) -> None:
        """Raises LoadProblem if the example at `path` fails, or differs by more than allowed."""
        settings = self._settings
        inputs, expected = read(path)
        single = len(inputs) == 1 and len(settings.inputs) < 2
        tensors = {"" if single else name: value for name, value in inputs.items()}
        rows = min(value.shape[0] for value in tensors.values())
        key = _key({name: value[:1] for name, value in tensors.items()}, settings)
        pieces: list[Outputs] = []
        for first in range(0, rows, settings.max_rows):
            some = min(settings.max_rows, rows - first)
            outcome = self._compute(
                key, {name: value[first : first + some] for name, value in tensors.items()}, some
            )
            if isinstance(outcome, Failure):
                raise LoadProblem("golden", f"the golden example failed: {outcome.text}")
            pieces.append(outcome)
        compare(joined(pieces), expected, settings.golden_tolerance)


class _Example:
    cancelled = False


def default_examples(settings: Settings) -> Iterator[dict[str, Any]]:
    """One example (1, *shape) per bucket, or one of the declared shape; none if nothing is
    declared. What is variable gets 1, or the bucket's side."""
    declared = settings.inputs
    if not declared:
        return
    if len(declared) == 1:
        first = declared[0]
        shapes = settings.buckets or (tuple(1 if s < 0 else s for s in first.shape),)
        for shape in shapes:
            yield {"": _zeros(first.datatype, (1, *shape))}
        return
    yield {
        tensor.name: _zeros(tensor.datatype, (1, *(1 if s < 0 else s for s in tensor.shape)))
        for tensor in declared
    }


def _zeros(datatype: str, shape: Sequence[int]) -> Any:
    if datatype == "BYTES":
        array = np.empty(tuple(shape), dtype=object)
        array.fill(b"")
        return array
    return torch.zeros(tuple(shape), dtype=DTYPES[datatype])


def _example(example: Any) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return {str(name): value[None] for name, value in example.items()}
    return {"": example[None]}


def _repeated(value: Any, rows: int) -> Any:
    if value.shape[0] == rows:
        return value
    if isinstance(value, torch.Tensor):
        return value[:1].expand(rows, *value.shape[1:]).contiguous()
    return np.repeat(value[:1], rows, axis=0)


def _key(tensors: Mapping[str, Any], settings: Settings) -> Key:
    """The key of an example, as the engine would make it for a request."""
    listed = tuple(
        (
            name,
            tuple(value.shape[1:]),
            NAMES[value.dtype] if isinstance(value, torch.Tensor) else "BYTES",
        )
        for name, value in tensors.items()
    )
    pooled = len(listed) == 1 and listed[0][1] in settings.buckets and listed[0][2] != "BYTES"
    return Key(listed, pooled=pooled)


@contextmanager
def as_problem(what: str) -> Iterator[None]:
    """Turn what the handler raises into a LoadProblem of one line."""
    try:
        yield
    except LoadProblem:
        raise
    except ConfigProblem as error:
        raise LoadProblem("config", one_line(error, named=False)) from error
    except FileNotFoundError as error:
        raise LoadProblem("config", f"{what}: {one_line(error)}") from error
    except Exception as error:
        if is_oom(error):
            raise LoadProblem("oom", one_line(error)) from None
        raise LoadProblem("error", f"{what} failed: {one_line(error)}") from error

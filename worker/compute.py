"""A batch through the model: gathered, computed, and contained when it fails.

`Runner` is the plain way (CPU); graphs.py has the one for CUDA. A failure is a value here, since a
live exception holds the frames that hold the tensors, and with them the memory that ran out.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch

from . import wire
from .batcher import Unit
from .device import Device, is_oom, is_sticky, tried_bytes
from .model import InvalidInput, overrides
from .outputs import Outputs, WrongRows, joined, outputs_of
from .pool import Key, Pool, Slab, place, zero_rest
from .profile import Profile
from .tell import tell

#: How much of an error's text a client is shown.
_TEXT_LIMIT: Final = 300
#: For how long a batch size that did not fit is not tried again.
_REMEMBER_S: Final = 60.0

_STATUS: Final[dict[str, wire.Status]] = {
    "invalid": "invalid",
    "too_large": "too_large",
    "oom": "oom",
    "failed": "failed",
    "rows": "failed",
    "sticky": "failed",
}


@dataclass(slots=True)
class Failure:
    kind: Literal["invalid", "too_large", "failed", "rows", "oom", "sticky"]
    text: str
    asked: int = 0  # bytes, oom

    @property
    def status(self) -> wire.Status:
        """What the client is answered."""
        return _STATUS[self.kind]


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, InvalidInput) or _is_bad_image(error):
        return Failure("invalid", one_line(error, named=False))
    if isinstance(error, WrongRows):
        return Failure("rows", str(error))
    if is_oom(error):
        return Failure("oom", one_line(error), tried_bytes(error))
    tell(error)
    return Failure("sticky" if is_sticky(error) else "failed", one_line(error))


def one_line(error: BaseException, *, named: bool = True) -> str:
    """The exception for a client: its type and first line, no frames, no paths of ours."""
    text = (str(error).strip().splitlines() or [""])[0][:_TEXT_LIMIT]
    name = type(error).__name__
    if not named:
        return text or name
    return f"{name}: {text}" if text else name


def _is_bad_image(error: BaseException) -> bool:
    """Pillow's own words for a client's broken file, from a model that did not wrap them."""
    kind = type(error)
    return kind.__module__.startswith("PIL.") and kind.__name__ in (
        "UnidentifiedImageError",
        "DecompressionBombError",
    )


class Flight(Protocol):
    """A batch that was launched. `slab` is what it leased."""

    slab: Slab | None

    def done(self) -> bool: ...

    def result(self) -> Outputs:
        """Waits; raises what went wrong. The outputs lie on the CPU."""
        ...

    def release(self) -> None:
        """The outputs were used: the memory under them may be leased again."""
        ...


@dataclass(slots=True)
class Landed:
    """A batch that was computed within its launch."""

    outputs: Outputs
    pool: Pool
    slab: Slab | None = None

    def done(self) -> bool:
        return True

    def result(self) -> Outputs:
        return self.outputs

    def release(self) -> None:
        slab, self.slab = self.slab, None
        if slab is not None:
            self.pool.give_back(slab)


class Runner:
    """Computes where it is called. One thread only."""

    #: Batches that may be in flight at once.
    depth = 1

    def __init__(
        self, model: Any, device: Device, profile: Profile, max_rows: int, names: Sequence[str]
    ) -> None:
        self.model = model
        self.device = device
        self.profile = profile
        self.max_rows = max_rows
        self.names = names  # of the declared outputs
        self.pool = Pool(device.torch, max_rows, depth=2)
        self.status: dict[str, str] = {}
        self.learning = True
        self._ceilings: dict[Key, tuple[int, float]] = {}
        self._gives_sizes = "sizes" in inspect.signature(model.forward).parameters

    def launch(self, key: Key, units: Sequence[Unit], rows: int) -> Flight:
        """Raises whatever the model or the device raises."""
        text = key.text
        self.device.check_room(self.profile.cost(text, rows))
        unknown = self.learning and not self.profile.covers(text, rows)
        before = 0
        if unknown:
            self.device.begin_peak()
            before = self.device.allocated()
        batch, slab = self._gather(key, units, rows)
        try:
            returned = self.forward(key, batch, units)
            outputs = outputs_of(returned, rows, self.names)
        except BaseException:
            if slab is not None:
                self.pool.give_back(slab)
            raise
        if unknown:
            self.profile.learn(text, rows, self.device.peak() - before)
        return Landed(outputs, self.pool, slab)

    def forward(self, key: Key, batch: Any, units: Sequence[Unit]) -> Any:
        extra: dict[str, Any] = {}
        if self._gives_sizes:
            extra["sizes"] = self.sizes(units)
        if not key.degrade:
            return self.model.forward(batch, **extra)
        if key.degrade == "lower_precision" and not overrides(self.model, "forward_degraded"):
            kind = self.device.torch.type
            lower = torch.float16 if kind == "cuda" else torch.bfloat16
            with torch.autocast(kind, dtype=lower):
                return self.model.forward(batch, **extra)
        return self.model.forward_degraded(batch, key.degrade, **extra)

    def sizes(self, units: Sequence[Unit]) -> torch.Tensor:
        """(rows, dimensions): each row's true size, for a `forward` that asks for `sizes`."""
        each = [list(unit.notes.true_size) for unit in units for _ in range(unit.rows)]
        return torch.tensor(each, dtype=torch.int64, device=self.device.torch)

    def limit(self, key: Any) -> int:
        """Rows of one batch that the device has memory for, by what was measured and seen."""
        ceiling, until = self._ceilings.get(key, (0, 0.0))
        if ceiling and time.monotonic() < until:
            return ceiling
        return self.max_rows

    def did_not_fit(self, key: Key, rows: int) -> None:
        """Smaller batches for a while; what took the memory may be gone later."""
        self._ceilings[key] = (max(1, rows // 2), time.monotonic() + _REMEMBER_S)

    def want_graphs(self, key: Key, rows: Sequence[int]) -> None:
        """Capture batches of so many rows when there is time."""

    def steps(self, key: Key) -> Sequence[int]:
        """Rows that batches of the key are padded to, rising; empty if they are not."""
        return ()

    def pending(self) -> bool:
        """Whether `idle_step` has something to do."""
        return False

    def idle_step(self) -> bool:
        """Something to do in a gap (capture a graph). False: nothing is left."""
        return False

    def _gather(self, key: Key, units: Sequence[Unit], rows: int) -> tuple[Any, Slab | None]:
        """The units' rows as one tensor (or a dict of them). A lone unit's is not copied."""
        if len(units) == 1 and units[0].notes.fits:
            whole = rows_of(units[0])
            return as_given(whole), None
        slab = self.pool.lease(key)
        batch: dict[str, Any] = {}
        try:
            for name, shape, _ in key.tensors:
                items = [rows_of(unit)[name] for unit in units]
                if not isinstance(items[0], torch.Tensor):
                    batch[name] = np.concatenate(items)
                    continue
                if slab is None:
                    if all(unit.notes.fits for unit in units):
                        batch[name] = torch.cat(items)
                        continue
                    target = torch.zeros((rows, *shape), dtype=items[0].dtype)
                else:
                    target = slab.device[name]
                    zero_rest(target, rows, slab.dirty)
                    target = target[:rows]
                fill(target, items, units)
                batch[name] = target
        except BaseException:
            if slab is not None:
                slab.dirty = self.max_rows
                self.pool.give_back(slab)
            raise
        if slab is not None:
            slab.dirty = rows
        return as_given(batch), slab


def as_given(batch: dict[str, Any]) -> Any:
    """As `forward` takes it: a single input has no name."""
    return batch.get("", batch)


def fill(target: torch.Tensor, items: Sequence[torch.Tensor], units: Sequence[Unit]) -> None:
    """Copy the items' rows below each other into `target`, (rows, *bucket)."""
    if all(unit.notes.fits for unit in units):
        torch.cat(list(items), out=target)
        return
    at = 0
    for item in items:
        place(target[at : at + item.shape[0]], item)
        at += item.shape[0]


def rows_of(unit: Unit) -> dict[str, Any]:
    """The unit's own rows by input name ("" for a single input)."""
    tensors: dict[str, Any] = unit.notes.tensors
    if unit.rows == unit.notes.rows:
        return tensors
    last = unit.first + unit.rows
    return {name: tensor[unit.first : last] for name, tensor in tensors.items()}


@dataclass(slots=True)
class Placed:
    """An item ready for a batch: its tensors by input name, and how they lie in the bucket."""

    tensors: dict[str, Any]
    rows: int
    true_size: tuple[int, ...] = ()
    fits: bool = True  # of exactly the bucket's shape
    registered: bool = False  # lies in memory that the device can read by itself


def attempt(runner: Runner, key: Key, units: Sequence[Unit], rows: int) -> Outputs | Failure:
    """Launch and wait. No exception and no frame of a failed one survives the return."""
    flight: Flight | None = None
    try:
        flight = runner.launch(key, units, rows)
        outputs = flight.result()
        # They outlive the batch's slab, and `forward` may have returned its own input.
        return outputs.copied() if flight.slab is not None else outputs
    except Exception as error:
        return failure_of(error)
    finally:
        if flight is not None:
            flight.release()


class Containment:
    """Runs a failed batch again in smaller pieces, so that only the culprit fails."""

    def __init__(self, runner: Runner, device: Device, *, limit_s: float) -> None:
        self._runner = runner
        self._device = device
        self._limit_s = limit_s
        self.ooms = 0

    def settle(
        self, key: Key, units: list[Unit], failure: Failure, again: Any
    ) -> Iterator[tuple[list[Unit], Outputs | Failure]]:
        """Outcomes that together cover all `units`. `again()` is called before each try, to
        restart the batch's clock. Bounded: after `limit_s` what is left fails as the batch did."""
        yield from self._settle(key, units, failure, again, time.monotonic() + self._limit_s)

    def _settle(
        self, key: Key, units: list[Unit], failure: Failure, again: Any, until: float
    ) -> Iterator[tuple[list[Unit], Outputs | Failure]]:
        if failure.kind in ("rows", "sticky") or time.monotonic() > until:
            yield units, failure
        elif failure.kind == "oom":
            self.ooms += 1
            self._device.trim()
            if len(units) > 1:
                self._runner.did_not_fit(key, sum(unit.rows for unit in units))
                middle = len(units) // 2
                for half in (units[:middle], units[middle:]):
                    yield from self._again(key, half, again, until)
            else:
                yield units, self._alone(key, units[0], failure, again)
        elif len(units) > 1:
            for unit in units:
                yield from self._again(key, [unit], again, until)
        else:
            yield units, failure

    def _again(
        self, key: Key, units: list[Unit], again: Any, until: float
    ) -> Iterator[tuple[list[Unit], Outputs | Failure]]:
        again()
        outcome = attempt(self._runner, key, units, sum(unit.rows for unit in units))
        if isinstance(outcome, Failure):
            yield from self._settle(key, units, outcome, again, until)
        else:
            yield units, outcome

    def _alone(self, key: Key, unit: Unit, failure: Failure, again: Any) -> Outputs | Failure:
        """One item that did not fit: once more into the trimmed device, then in halves of rows."""
        again()
        outcome = attempt(self._runner, key, [unit], unit.rows)
        if not isinstance(outcome, Failure) or outcome.kind != "oom":
            return outcome
        self._device.trim()
        if unit.rows == 1:
            return self._hopeless(key, unit, outcome if outcome.asked else failure)
        middle = unit.rows // 2
        pieces: list[Outputs] = []
        for first, rows in ((unit.first, middle), (unit.first + middle, unit.rows - middle)):
            half = Unit(
                unit.what, key, rows, unit.arrived, unit.deadline, first=first, notes=unit.notes
            )
            piece = self._alone(key, half, outcome, again)
            if isinstance(piece, Failure):
                return piece
            pieces.append(piece)
        return joined(pieces)

    def _hopeless(self, key: Key, unit: Unit, failure: Failure) -> Failure:
        known = self._runner.profile.cost(key.text, unit.rows, key.elements)
        wants = max(failure.asked, known)
        room = max(0, self._device.room() - self._runner.device.memory().static)
        wanted = f"{wants} bytes" if wants else "more memory"
        # More than the worker may ever have will not fit later either.
        return Failure(
            "too_large" if wants > room else "oom",
            f"an input of {key.text} wants {wanted} on {self._device.name}, "
            f"{room} bytes are there for it ({failure.text})",
            wants,
        )

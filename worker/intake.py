"""From an entry to something that can join a batch: validated, decoded, given its bucket.

Runs in the decode threads or inline. Raises InvalidInput and TooLarge for the client's faults.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from . import wire
from .codec import DTYPES, NAMES, request_of, shape_text, tensor_of, view_of
from .compute import Placed
from .entry import Entry
from .model import InvalidInput, Tensor, overrides
from .pool import Key, TooLarge, choose, resized
from .settings import Settings

#: So many shapes are made buckets because they come often.
_MOST_PROMOTED: Final = 5
_TENSOR: Final = torch.Tensor


class Intake:
    def __init__(self, model: Any, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._declared = {tensor.name: tensor for tensor in settings.inputs}
        self._own_bucket = overrides(model, "bucket_of")
        self._decodes = overrides(model, "decode")
        #: (shape with rows, dtype, degrade) of a lone tensor -> rows, true size, key, fits.
        self._quick: dict[tuple[Any, ...], tuple[int, tuple[int, ...], Key, bool]] = {}
        self._through = bool(model.tensors_through_decode)
        self._keys: dict[tuple[Any, ...], tuple[Key, bool]] = {}
        self._raw = None if self._decodes else _fixed(settings.inputs)
        self._promoted: set[tuple[tuple[int, ...], str]] = set()
        self._sizes_lock = threading.Lock()
        self._sizes: dict[tuple[int, ...], int] = {}
        self._registered: frozenset[int] = frozenset()

    def registered(self, connections: frozenset[int]) -> None:
        """Connections whose arenas the device reads by itself."""
        self._registered = connections

    def promote(self, key: Key) -> Key | None:
        """Make a bucket of a shape that comes often, where the configuration names none."""
        if self._settings.buckets or len(key.tensors) != 1 or len(self._promoted) >= _MOST_PROMOTED:
            return None
        name, shape, datatype = key.tensors[0]
        if datatype == "BYTES" or key.degrade:
            return None
        self._promoted.add((shape, datatype))
        self._keys.clear()
        self._quick.clear()
        return Key(((name, shape, datatype),), key.degrade, key.extra, True)

    def needs_decode(self, item: wire.Item) -> bool:
        """Whether the model's `decode` is to see it: opaque bytes, mostly."""
        if self._through:
            return True
        if not self._decodes:
            return False
        # A request comes as tensors or not; a mixture is for `decode` to sort out.
        return not all([part.datatype for part in item.parts])

    def prepare(self, entry: Entry) -> None:
        """Set `entry.bucket` (a Key) and `entry.tensor` (Placed); `entry.request` too if it goes
        through `decode` and `encode`."""
        item = entry.item
        if self.needs_decode(item):
            entry.request = request_of(item, entry.data)
            tensors = self._decoded(self._model.decode(entry.request))
            direct = False
        elif item.parts and item.parts[0].datatype:
            tensors = self._tensors(entry)
            direct = True
        else:
            tensors = self._whole_body(entry)
            direct = True
        self._place(entry, tensors, direct)

    def seen(self) -> dict[str, int]:
        """Histogram of the input shapes since the last call."""
        with self._sizes_lock:
            sizes, self._sizes = self._sizes, {}
        return {shape_text(shape): count for shape, count in sizes.items()}

    # -- from the wire ------------------------------------------------------------------------

    def _tensors(self, entry: Entry) -> dict[str, Any]:
        parts = entry.item.parts
        if not self._declared:
            if len(parts) == 1:
                return {"": tensor_of(parts[0], entry.data(parts[0]))}
            return {part.name: tensor_of(part, entry.data(part)) for part in parts}
        tensors: dict[str, Any] = {}
        for part in parts:
            declared = self._declared.get(part.name)
            if declared is None:
                raise InvalidInput(
                    f"unknown input {part.name!r}; the model takes {', '.join(self._declared)}"
                )
            if part.name in tensors:
                raise InvalidInput(f"input {part.name!r} came twice")
            check_declared(declared, part)
            tensors[part.name] = tensor_of(part, entry.data(part))
        missing = [name for name in self._declared if name not in tensors]
        if missing:
            raise InvalidInput(f"input {missing[0]!r} is missing")
        if len(self._declared) == 1:
            return {"": tensors.popitem()[1]}
        return {name: tensors[name] for name in self._declared}

    def _whole_body(self, entry: Entry) -> dict[str, Any]:
        """Opaque bytes for a model without a `decode`: they are the one declared tensor's, if they
        have its size."""
        parts = entry.item.parts
        if self._raw is None or len(parts) != 1:
            self._model.decode(request_of(entry.item, entry.data))  # says what it takes instead
            raise InvalidInput("this model takes tensors only")
        tensor, size = self._raw
        data = entry.data(parts[0])
        if len(data) != size:
            raise InvalidInput(
                f"the body has {len(data)} bytes; {tensor.datatype} of shape "
                f"{list(tensor.shape)} takes {size}"
            )
        entry.request = request_of(_bare(entry.item), entry.data)
        return {"": view_of(tensor.name, data, DTYPES[tensor.datatype], (1, *tensor.shape))}

    def _decoded(self, value: Any) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            return {"": value.unsqueeze(0)}
        if isinstance(value, np.ndarray):
            return {"": torch.from_numpy(value)[None]}
        if isinstance(value, Mapping):
            return {
                str(name): (torch.as_tensor(inner) if not _is_objects(inner) else inner)[None]
                for name, inner in value.items()
            }
        raise TypeError(f"decode returned {type(value).__name__}, not a tensor")

    # -- buckets ------------------------------------------------------------------------------

    def _place(self, entry: Entry, tensors: dict[str, Any], direct: bool) -> None:
        item = entry.item
        quick: tuple[Any, ...] | None = None
        lone: Any = tensors.get("")
        if type(lone) is _TENSOR and not self._own_bucket and len(tensors) == 1:
            quick = (lone.shape, lone.dtype, item.degrade)
            known = self._quick.get(quick)
            if known is not None:
                rows, shape, entry.bucket, fits = known
                with self._sizes_lock:
                    self._sizes[shape] = self._sizes.get(shape, 0) + 1
                inside = direct and bool(self._registered) and self._in_arena(entry)
                entry.tensor = Placed(tensors, rows, shape, fits, inside)
                return
        rows = -1
        for name, tensor in tensors.items():
            if not tensor.ndim:
                raise InvalidInput(f"tensor {name!r} has no row dimension")
            if rows not in (-1, tensor.shape[0]):
                raise InvalidInput(
                    f"tensor {name!r} has {tensor.shape[0]} rows, another one has {rows}"
                )
            rows = tensor.shape[0]
        extra = ""
        if self._own_bucket and lone is not None:
            extra = str(self._model.bucket_of(lone[0] if rows else lone))
        shape = tuple(lone.shape[1:]) if lone is not None else ()
        if lone is not None:
            with self._sizes_lock:
                self._sizes[shape] = self._sizes.get(shape, 0) + 1
        kind = tuple((name, tuple(t.shape[1:]), t.dtype) for name, t in tensors.items())
        cached = self._keys.get((kind, item.degrade, extra))
        if cached is None:
            cached = self._key(kind, item.degrade, extra)
            if len(self._keys) > 4096:  # a client that sends ever new shapes
                self._keys.clear()
            self._keys[kind, item.degrade, extra] = cached
        key, fits = cached
        if not fits and self._settings.fit == "resize":
            assert lone is not None
            tensors = {"": resized(lone, key.tensors[0][1])}
            fits = True
        if not fits and entry.request is not None:
            entry.request.true_size = shape
        entry.bucket = key
        if quick is not None and cached[1]:
            if len(self._quick) > 4096:
                self._quick.clear()
            self._quick[quick] = (max(rows, 0), shape, key, True)
        entry.tensor = Placed(
            tensors,
            max(rows, 0),
            true_size=shape,
            fits=fits,
            registered=direct and bool(self._registered) and self._in_arena(entry),
        )

    def _key(self, kind: tuple[Any, ...], degrade: str, extra: str) -> tuple[Key, bool]:
        """The key for what has these names, shapes and dtypes, and whether it fits exactly."""
        listed = tuple(
            (name, shape, NAMES.get(dtype, "BYTES") if isinstance(dtype, torch.dtype) else "BYTES")
            for name, shape, dtype in kind
        )
        if degrade not in ("", *self._model.degrade_steps):
            degrade = ""
        settings = self._settings
        if len(listed) != 1 or listed[0][2] == "BYTES" or not settings.buckets:
            pooled = len(listed) == 1 and listed[0][1:] in self._promoted
            return Key(listed, degrade, extra, pooled), True
        name, shape, datatype = listed[0]
        bucket = choose(shape, settings.buckets, settings.fit)
        if bucket is not None:
            return Key(((name, bucket, datatype),), degrade, extra, True), bucket == shape
        if settings.no_bucket == "refuse":
            sizes = ", ".join(shape_text(b) for b in settings.buckets)
            raise TooLarge(f"an input of {shape_text(shape)} fits no bucket (there are {sizes})")
        return Key(listed, degrade, extra), True

    def _in_arena(self, entry: Entry) -> bool:
        return entry.connection in self._registered and all(
            isinstance(part.data, wire.Block) for part in entry.item.parts
        )


def check_declared(declared: Tensor, part: wire.Part) -> None:
    """Raises InvalidInput that names both."""
    if part.datatype != declared.datatype:
        raise InvalidInput(f"input {part.name!r} is {part.datatype}, not {declared.datatype}")
    shape = part.shape[1:]
    wanted = declared.shape
    if (
        not part.shape
        or len(shape) != len(wanted)
        or any(want not in (-1, side) for want, side in zip(wanted, shape, strict=True))
    ):
        raise InvalidInput(
            f"input {part.name!r} has shape {list(part.shape)}, the model takes "
            f"{[-1, *wanted]} (rows first)"
        )


def _fixed(inputs: Sequence[Tensor]) -> tuple[Tensor, int] | None:
    """The one declared input and its bytes, if those are always the same."""
    if len(inputs) != 1 or inputs[0].datatype == "BYTES" or any(s < 0 for s in inputs[0].shape):
        return None
    size = DTYPES[inputs[0].datatype].itemsize
    for side in inputs[0].shape:
        size *= side
    return inputs[0], size


def _bare(item: wire.Item) -> wire.Item:
    """The item without its bulk, for the request that `encode` sees: nobody decodes that again."""
    kept = tuple(
        wire.Part(part.name, b"", content_type="", filename=part.filename) for part in item.parts
    )
    return wire.Item(
        item.id, kept, degrade=item.degrade, params=item.params, request_id=item.request_id
    )


def _is_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "O"

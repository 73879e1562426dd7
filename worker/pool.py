"""Buckets, and the memory cut for them: slabs that are allocated once and leased.

A slab holds the rows of one batch, on the host (page-locked where there is a GPU) and on the
device. It is leased to one batch at a time, and whatever a batch does not fill is zeroed first:
nothing of an earlier request is ever visible to a later one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import torch

from .codec import DTYPES, shape_text
from .model import InvalidInput

Fit = Literal["exact", "pad", "resize"]
#: A side this short is taken for the channels of an image.
_CHANNELS: Final = 4


class TooLarge(Exception):
    """No bucket takes the input, and the model wants none without one. The text is for clients."""


class Key(NamedTuple):
    """What a batch has in common. `tensors`: (name, shape without rows, datatype); the name is ""
    for a model with one input."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    degrade: str = ""
    extra: str = ""
    pooled: bool = False

    @property
    def text(self) -> str:
        """ "3x224x224/FP32"; several inputs are joined by "+"."""
        one = "+".join(f"{shape_text(shape)}/{datatype}" for _, shape, datatype in self.tensors)
        tail = "/".join(filter(None, (self.degrade, self.extra)))
        return f"{one}/{tail}" if tail else one

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for _, shape, _ in self.tensors)


def holds(bucket: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether every side of the bucket is long enough; channels must be the same."""
    if len(bucket) != len(shape):
        return False
    if any(b < s for b, s in zip(bucket, shape, strict=True)):
        return False
    channels = channel_axis(bucket)
    return channels is None or bucket[channels] == shape[channels]


def channel_axis(shape: Sequence[int]) -> int | None:
    """Where an image of three dimensions has its channels, None if it is no image."""
    if len(shape) != 3:
        return None
    if shape[0] <= _CHANNELS and shape[0] < shape[2]:
        return 0
    return 2 if shape[2] <= _CHANNELS and shape[2] < shape[0] else None


def choose(
    shape: Sequence[int], buckets: Sequence[tuple[int, ...]], fit: Fit
) -> tuple[int, ...] | None:
    """The bucket for an item: the smallest by area whose sides are *all* long enough.

    `resize` also shrinks: what is larger than every bucket gets the largest.
    """
    shape = tuple(shape)
    if shape in buckets:
        return shape
    if fit == "exact":
        return None
    fitting = [bucket for bucket in buckets if holds(bucket, shape)]
    if fitting:
        return min(fitting, key=math.prod)
    if fit == "resize":
        alike = [bucket for bucket in buckets if _same_kind(bucket, shape)]
        return max(alike, key=math.prod, default=None)
    return None


def _same_kind(bucket: Sequence[int], shape: Sequence[int]) -> bool:
    if len(bucket) != len(shape):
        return False
    channels = channel_axis(bucket)
    if channels is None:
        return len(bucket) == 2
    return bucket[channels] == shape[channels]


def resized(tensor: torch.Tensor, bucket: Sequence[int]) -> torch.Tensor:
    """(rows, *shape) -> (rows, *bucket) by bilinear interpolation. Raises InvalidInput."""
    axis = channel_axis(bucket)
    if len(bucket) not in (2, 3) or (len(bucket) == 3 and axis is None):
        raise InvalidInput(f"an input of shape {list(tensor.shape[1:])} can't be resized")
    image = tensor.float()
    if len(bucket) == 2:
        image, size = image.unsqueeze(1), (bucket[0], bucket[1])
    elif axis == 0:
        size = (bucket[1], bucket[2])
    else:
        image, size = image.permute(0, 3, 1, 2), (bucket[0], bucket[1])
    image = torch.nn.functional.interpolate(image, size=size, mode="bilinear", antialias=True)
    if len(bucket) == 2:
        image = image.squeeze(1)
    elif axis == 2:
        image = image.permute(0, 2, 3, 1)
    if not tensor.dtype.is_floating_point:
        image = image.round()
    return image.to(tensor.dtype).contiguous()


@dataclass(slots=True, eq=False)
class Slab:
    """One batch's memory. `dirty` is how many of the first rows may hold something.

    `host` is None where the device reads the items themselves (CPU).
    """

    device: dict[str, torch.Tensor]
    host: dict[str, torch.Tensor] | None
    slot: int
    dirty: int = 0
    leased: bool = False
    singles: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def batch(self, rows: int) -> Any:
        """The device's first `rows`, as `forward` takes them: a tensor, or a dict of them."""
        first = self.device.get("")
        if first is not None:
            return first[:rows]
        return {name: tensor[:rows] for name, tensor in self.device.items()}

    def row_views(self, name: str) -> list[torch.Tensor]:
        """The device's rows one by one, (1, *shape) each; made once."""
        views = self.singles.get(name)
        if views is None:
            views = self.singles[name] = list(self.device[name].split(1))
        return views


class Pool:
    """Slabs by key; `depth` for each, so that copies of one batch overlap compute of another.

    Keys beyond `most_keys` get none: they are assembled in memory of their own.
    """

    def __init__(
        self, device: torch.device, max_rows: int, *, depth: int, most_keys: int = 64
    ) -> None:
        self._device = device
        self._max_rows = max_rows
        self._depth = depth
        self._most_keys = most_keys
        self._slabs: dict[Key, list[Slab]] = {}

    def lease(self, key: Key) -> Slab | None:
        """A free slab of the key, or None: all are out, or the key has none.

        Raises an out-of-memory error if a first slab can't be allocated.
        """
        if not key.pooled:
            return None
        slabs = self._slabs.get(key)
        if slabs is None:
            if len(self._slabs) >= self._most_keys:
                return None
            slabs = [self._make(key, slot) for slot in range(self._depth)]
            self._slabs[key] = slabs
        for slab in slabs:
            if not slab.leased:
                slab.leased = True
                return slab
        return None

    def give_back(self, slab: Slab) -> None:
        """Raises ValueError if it is not out: two batches would share it next."""
        if not slab.leased:
            raise ValueError(f"slab {slab.slot} was given back twice")
        slab.leased = False

    def leased(self) -> int:
        return sum(slab.leased for slabs in self._slabs.values() for slab in slabs)

    def slabs(self, key: Key) -> list[Slab]:
        return self._slabs.get(key, [])

    def forget(self, key: Key) -> None:
        """Give a key's memory up; only while nothing of it is leased."""
        if any(slab.leased for slab in self._slabs.get(key, [])):
            raise ValueError(f"slabs of {key.text} are leased")
        self._slabs.pop(key, None)

    def _make(self, key: Key, slot: int) -> Slab:
        device: dict[str, torch.Tensor] = {}
        host: dict[str, torch.Tensor] | None = None if self._device.type == "cpu" else {}
        for name, shape, datatype in key.tensors:
            size = (self._max_rows, *shape)
            dtype = DTYPES[datatype]
            device[name] = torch.zeros(size, dtype=dtype, device=self._device)
            if host is not None:
                host[name] = torch.zeros(size, dtype=dtype, pin_memory=True)
        return Slab(device, host, slot)


def zero_rest(slab: torch.Tensor, rows: int, dirty: int) -> None:
    """Blank the rows of `slab` beyond `rows` that an earlier batch has filled."""
    if dirty > rows:
        slab[rows:dirty].zero_()


def place(target: torch.Tensor, item: torch.Tensor) -> None:
    """Copy (rows, *shape) into the corner of (rows, *bucket), zero around it."""
    if target.shape != item.shape:
        target.zero_()
        target = target[tuple(slice(0, side) for side in item.shape)]
    target.copy_(item)

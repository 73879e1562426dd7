"""Weights from a safetensors file to a device, by several threads through page-locked buffers.

For handlers: `load_weights(self.weights, device)` in `load`; `prefetch(self.weights)` in `prepare`
(which is what happens without a `prepare`). One thread copying from pageable memory leaves most
of the bus idle; eight that each read into their own page-locked buffer and copy on their own stream
fill it. Nothing is held twice: the file goes in chunks from the page cache to where it stays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch

from gpusup.conf.safetensors_header import BrokenWeights, Header, read_header

from .model import ConfigProblem

THREADS: Final = 8
CHUNK: Final = 32 * 2**20

_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

#: What a model's `dtype` names; with "model" the weights stay as they are.
PRECISIONS: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

#: Told how many bytes have just been read, from any thread. The worker's start-up listens.
Moved = Callable[[int], None]


class _Listener:
    def __init__(self) -> None:
        self.moved: Moved | None = None

    def tell(self, count: int) -> None:
        if self.moved is not None:
            self.moved(count)


_listener: Final = _Listener()


def on_moved(moved: Moved | None) -> None:
    """Who hears of each chunk. One at a time: a process loads one model."""
    _listener.moved = moved


def load_weights(path: str | Path, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The file's tensors by name, on `device` ("meta" too: then nothing but the header is read).

    On a GPU they share one allocation. Raises ConfigProblem on a file that is broken or incomplete.
    """
    device = torch.device(device)
    header = _header(path)
    if device.type == "meta":
        return {
            name: torch.empty(place.shape, dtype=_dtype(path, name, place.dtype), device="meta")
            for name, place in header.tensors.items()
        }
    with torch.inference_mode(False):
        flat = torch.empty(header.data_bytes, dtype=torch.uint8, device=device)
        _read(path, header, flat)
        return {
            name: _view(flat, place.start, place.end, _dtype(path, name, place.dtype), place.shape)
            for name, place in header.tensors.items()
        }


def prefetch(path: str | Path) -> int:
    """Bring a file into the page cache, where `load_weights` finds it; returns its bytes.

    For `prepare`: it needs no device and no memory of the worker's own.
    Raises ConfigProblem if it can't be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigProblem(f"cannot read {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size

        def touch(start: int) -> None:
            buffer = bytearray(min(2**20, CHUNK))
            at, end = start, min(size, start + CHUNK)
            while at < end:
                count = os.preadv(fd, [memoryview(buffer)[: end - at]], at)
                if not count:
                    return
                at += count
                _listener.tell(count)

        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(touch, range(0, size, CHUNK)))
    finally:
        os.close(fd)
    if torch.cuda.is_initialized():
        # Locking pages takes a while too; now nobody waits for it.
        while len(_spare_gear) < min(_threads(), -(-size // CHUNK)):
            _spare_gear.append(_new_gear(min(CHUNK, size)))
    return size


def _header(path: str | Path) -> Header:
    try:
        return read_header(Path(path))
    except BrokenWeights as error:
        raise ConfigProblem(str(error)) from error
    except OSError as error:
        raise ConfigProblem(f"cannot read {path}: {error.strerror}") from error


def _dtype(path: str | Path, name: str, said: str) -> torch.dtype:
    dtype = _DTYPES.get(said)
    if dtype is None:
        raise ConfigProblem(f"{path}: tensor {name!r} is {said}, which torch can't hold")
    return dtype


def _view(
    flat: torch.Tensor, start: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    piece = flat[start:end]
    if start % dtype.itemsize:
        piece = piece.clone()  # a view needs its elements aligned
    return piece.view(dtype).reshape(shape)


def _read(path: str | Path, header: Header, flat: torch.Tensor) -> None:
    """All data bytes of the file into `flat`, in chunks, by several threads."""
    total = header.data_bytes
    if not total:
        return
    starts = range(0, total, CHUNK)
    threads = min(_threads(), len(starts))
    own = threading.local()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    on_gpu = flat.device.type == "cuda"

    def move(start: int) -> None:
        count = min(CHUNK, total - start)
        target = flat[start : start + count]
        if not on_gpu:
            _fill(fd, memoryview(target.numpy()), header.data_offset + start, path)
        else:
            buffer, stream = _gear(own, min(CHUNK, total))
            _fill(fd, memoryview(buffer[:count].numpy()), header.data_offset + start, path)
            with torch.cuda.stream(stream):
                target.copy_(buffer[:count], non_blocking=True)
            # The next chunk comes into the same buffer, and it goes with its thread.
            stream.synchronize()
        _listener.tell(count)

    try:
        if on_gpu:
            torch.cuda.synchronize()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, starts))
    finally:
        os.close(fd)
        _spare_gear.clear()


def _threads() -> int:
    return min(THREADS, max(2, os.cpu_count() or 1))


def _new_gear(size: int) -> tuple[torch.Tensor, Any]:
    """A page-locked buffer and a stream."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream()


#: Made by `prefetch` for the threads of the `load_weights` that follows.
_spare_gear: Final[list[tuple[torch.Tensor, Any]]] = []


def _gear(own: Any, size: int) -> tuple[torch.Tensor, Any]:
    """This thread's page-locked buffer and stream."""
    if not hasattr(own, "gear"):
        try:
            gear = _spare_gear.pop()
        except IndexError:
            gear = _new_gear(size)
        own.gear = gear if gear[0].numel() >= size else _new_gear(size)
    found: tuple[torch.Tensor, Any] = own.gear
    return found


def _fill(fd: int, target: memoryview, offset: int, path: str | Path) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(fd, [target[done:]], offset + done)
        if not count:
            raise ConfigProblem(f"{path} became shorter while it was read")
        done += count

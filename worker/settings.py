"""The model's section of the configuration, as the worker uses it; and what its class can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import wire
from .model import Tensor, overrides


@dataclass(slots=True)
class Settings:
    """Times are seconds; `buckets` are shapes without the rows."""

    max_rows: int
    wait: float
    starvation: float
    budget: float
    budget_p99: float  # times; 0: not measured
    buckets: tuple[tuple[int, ...], ...]
    fit: Any
    no_bucket: str
    graphs: bool
    compile: bool
    decode_threads: int
    torch_threads: int
    golden: str
    golden_tolerance: float
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def settings_of(config: Mapping[str, Any], model: Any) -> Settings:
    """What the file says; declared tensors fall back on the model's own."""
    get = config.get
    inputs = _tensors(get("inputs")) or tuple(model.inputs)
    buckets = list(get("buckets") or getattr(model, "buckets", None) or ())
    if not buckets and len(inputs) == 1 and all(side >= 0 for side in inputs[0].shape):
        # The one shape there is needs no bucket in the file.
        buckets = [inputs[0].shape]
    return Settings(
        max_rows=int(get("max_rows", 32)),
        wait=float(get("wait", 0.002)),
        starvation=float(get("starvation", 5.0)),
        budget=float(get("budget", 30.0)),
        budget_p99=float(get("budget_p99", 0.0)),
        buckets=tuple(tuple(map(int, bucket)) for bucket in buckets),
        fit=get("fit", "exact"),
        no_bucket=get("no_bucket", "eager"),
        graphs=bool(get("graphs", True)) and bool(getattr(model, "capturable", True)),
        compile=bool(get("compile", False)),
        decode_threads=0
        if getattr(model, "decode_inline", False)
        else int(get("decode_threads", 2)),
        torch_threads=int(get("torch_threads", 1)),
        golden=str(get("golden", "")),
        golden_tolerance=float(get("golden_tolerance", 1e-2)),
        inputs=inputs,
        outputs=_tensors(get("outputs")) or tuple(model.outputs),
    )


def _tensors(declared: Any) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(d["name"], d["datatype"], tuple(d["shape"]))
        if isinstance(d, Mapping)
        else Tensor(d.name, d.datatype, tuple(d.shape))
        for d in (declared or ())
    )


def methods_of(model: Any) -> list[wire.Method]:
    found: list[wire.Method] = []
    if overrides(model, "forward"):
        found.append("predict")
    if overrides(model, "embed"):
        found.append("embed")
    if overrides(model, "generate"):
        found.append("generate")
    if overrides(model, "generate") or overrides(model, "chat"):
        found.append("chat")
    return found


def ladder(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    steps = []
    rows = 1
    while rows < most:
        steps.append(rows)
        rows *= 2
    return [*steps, most]


def graph_sizes(most: int) -> list[int]:
    """The ladder, and from 16 rows on up to three sizes between its steps, 8 rows apart at least: a
    batch is padded to the next size, and 40 rows that cost as much as 64 are felt."""
    steps = ladder(most)
    between = (
        size
        for rows in steps
        if rows >= 16
        for size in range(rows, min(2 * rows, most), max(8, rows // 4))
    )
    return sorted({*steps, *between})

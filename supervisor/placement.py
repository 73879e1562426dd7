"""How many workers fit on a device, and which model goes where. Pure arithmetic, with its working
shown.

A worker at rest holds `static` bytes (CUDA context, weights, graphs, pool); while it computes it
holds up to `peak` more. Two things bound their number, and they are different things: with all of
them at work the device must stay below the shed mark, and with all of them at rest below the queue
mark, or the first request of the day would already find the device "busy".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gpusup.conf.schema import Config, ModelConfig
from gpusup.conf.units import format_size

#: A CUDA context with its kernels, as measured on an H200 (0.5 to 0.6 GiB), rounded up.
CONTEXT_BYTES: Final = 640 * 2**20


def standby_bytes(model: ModelConfig) -> int:
    """What a worker's standby holds of a GPU: no more than a context, until it takes over."""
    return CONTEXT_BYTES if model.standby else 0


#: `workers = "auto"` starts no more than this on one device: further ones share the same compute
#: and only cost memory. An explicit number is taken at its word.
AUTO_LIMIT: Final = 4

#: peak: memory at work, under the shed mark · rest: memory at rest, under the queue mark · both ·
#: limit: the number asked for, not memory
Binds = Literal["peak", "rest", "both", "limit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Shares of the device's total (0 to 1), and bytes nobody may plan with."""

    queue: float = 0.85
    shed: float = 0.92
    safety: int = 2**30

    @classmethod
    def of(cls, config: Config) -> Marks:
        mark = config.watermark
        return cls(queue=mark.queue, shed=mark.shed, safety=config.devices.safety)

    def __post_init__(self) -> None:
        if not 0 < self.queue < self.shed <= 1:
            raise ValueError(
                f"watermark.queue must be below watermark.shed and both within 0 and 1, "
                f"got {self.queue:g} and {self.shed:g}"
            )
        if self.safety < 0:
            raise ValueError(f"safety can't be negative, got {self.safety} bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`workers` of one model on one device; `binds` is what forbids one more."""

    workers: int
    naive_workers: int
    binds: Binds
    reason: str
    lines: tuple[str, ...]


def workers_per_device(
    *,
    total: int,
    static: int,
    peak: int = 0,
    marks: Marks,
    limit: int | None = None,
) -> Fit:
    """The largest N with N*static + N*peak + safety <= shed*total and N*static <= queue*total.

    All sizes are bytes. Raises ValueError for sizes that make no sense.
    """
    if total <= 0:
        raise ValueError(f"a device must have memory, got {total} bytes")
    if static <= 0:
        raise ValueError(f"a worker must take some memory at rest, got {static} bytes")
    if peak < 0:
        raise ValueError(f"a batch's peak can't be negative, got {peak} bytes")
    shed_bytes = int(marks.shed * total)
    queue_bytes = int(marks.queue * total)
    by_peak = max(0, (shed_bytes - marks.safety) // (static + peak))
    by_rest = max(0, queue_bytes // static)
    # The usual rule, which knows neither the marks nor what a batch takes.
    naive = max(0, (total - marks.safety) // static)
    workers = min(by_peak, by_rest)
    binds: Binds = "both" if by_peak == by_rest else "peak" if by_peak < by_rest else "rest"
    if limit is not None and limit < workers:
        workers, binds = limit, "limit"
    size = format_size
    lines = [
        f"device: {size(total)}; safety: {size(marks.safety)}",
        f"a worker: {size(static)} at rest, {size(peak)} more at the peak of a batch",
        f"shed mark: {marks.shed:.0%} of {size(total)} = {size(shed_bytes)}",
        f"queue mark: {marks.queue:.0%} of {size(total)} = {size(queue_bytes)}",
        f"at work: ({size(shed_bytes)} - {size(marks.safety)}) / "
        f"({size(static)} + {size(peak)}) = {by_peak} workers",
        f"at rest: {size(queue_bytes)} / {size(static)} = {by_rest} workers",
        f"naive: ({size(total)} - {size(marks.safety)}) / {size(static)} = {naive} workers",
    ]
    if limit is not None:
        lines.append(f"asked for: at most {limit}")
    more = workers + 1
    at_work = more * (static + peak) + marks.safety
    too_full = (
        f"{more} at work need {size(at_work)} with the safety margin, "
        f"above the shed mark of {size(shed_bytes)}"
    )
    too_busy = (
        f"{more} at rest hold {size(more * static)} ({more * static / total:.0%}), "
        f"above the queue mark of {size(queue_bytes)}"
    )
    what, reason = {
        "peak": ("memory at work", too_full),
        "rest": ("memory at rest", too_busy),
        "both": ("memory, at rest and at work", f"{too_busy}; and {too_full}"),
        "limit": ("the number asked for", f"no more than {limit} are wanted"),
    }[binds]
    lines.append(f"what binds: {what}")
    lines.append(f"result: {workers}, because {reason}")
    if naive > workers and binds != "limit":
        lines.append(_why_naive_fails(naive, total, static, peak, marks))
    return Fit(workers=workers, naive_workers=naive, binds=binds, reason=reason, lines=tuple(lines))


def _why_naive_fails(naive: int, total: int, static: int, peak: int, marks: Marks) -> str:
    rest = naive * static
    work = naive * (static + peak) + marks.safety
    faults = []
    if rest > marks.queue * total:
        faults.append(
            f"at rest they already use {rest / total:.0%}, above the queue mark of "
            f"{marks.queue:.0%}, so every request would queue"
        )
    if work > marks.shed * total:
        faults.append(
            f"at work they need {format_size(work)} with the safety margin, "
            f"above the shed mark of {format_size(int(marks.shed * total))}"
        )
    return f"naive says {naive}, but " + "; and ".join(faults)


# -- key-value caches -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmShape:
    """What the size of a key-value cache depends on. `value_bytes`: 2 for fp16 and bf16."""

    layers: int
    kv_heads: int
    head_size: int
    value_bytes: int = 2
    query_heads: int = 0


_VALUE_BYTES: Final = {
    "float32": 4, "fp32": 4, "float": 4,
    "float16": 2, "fp16": 2, "half": 2, "bfloat16": 2, "bf16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1, "int8": 1,
}  # fmt: skip


def kv_bytes_per_sequence(shape: LlmShape, tokens: int) -> int:
    """Keys and values of every layer: 2 * layers * kv_heads * head_size * tokens * bytes.

    It is the number of key-value heads that counts: with grouped heads there are fewer of those
    than of query heads.
    """
    if tokens < 1:
        raise ValueError(f"a sequence has at least one token, got {tokens}")
    return 2 * shape.layers * shape.kv_heads * shape.head_size * tokens * shape.value_bytes


def llm_shape(config: Mapping[str, Any]) -> LlmShape:
    """Read a model's config.json as published beside its weights.

    Raises ValueError that names the missing or odd key.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and "num_hidden_layers" not in config:
        config = {**config, **nested}
    layers = _whole(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _whole(config, "num_attention_heads", "n_head", "num_heads")
    if any(config.get(k) is not None for k in ("num_key_value_heads", "num_kv_heads")):
        kv_heads = _whole(config, "num_key_value_heads", "num_kv_heads")
    else:
        kv_heads = 1 if config.get("multi_query") is True else heads
    if config.get("head_dim") is not None:
        head_size = _whole(config, "head_dim")
    else:
        hidden = _whole(config, "hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is no multiple of {heads} attention heads")
        head_size = hidden // heads
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _VALUE_BYTES:
        raise ValueError(f"don't know the size of a {dtype!r} value")
    return LlmShape(
        layers=layers,
        kv_heads=kv_heads,
        head_size=head_size,
        value_bytes=_VALUE_BYTES[dtype],
        query_heads=heads,
    )


def _whole(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
        return value
    raise ValueError(f"the model's config has no {names[0]}")


# -- which model goes where -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A device as placement sees it."""

    device: str
    kind: Literal["cuda", "cpu"]
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one worker of a model takes. `static` 0: not known yet (see `place`)."""

    model: str
    workers: int | Literal["auto"] = "auto"
    devices: tuple[str, ...] | Literal["all"] = "all"
    static: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`placed`: (device, model), one a worker, in the order of starting. `refused`: models without
    any worker, and why. `short`: models with fewer workers than asked for, and why."""

    placed: tuple[tuple[str, str], ...]
    refused: Mapping[str, str]
    short: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()

    def count(self, device: str, model: str) -> int:
        return sum(1 for pair in self.placed if pair == (device, model))


@dataclass(slots=True)
class _Filling:
    room: Room
    marks: Marks
    static: int = 0
    peak: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def shortage(self, need: Need) -> str:
        """Why one more worker of it can't go here; empty if it can."""
        total = self.room.total
        # Meant for a GPU; a CPU slot of half a GiB must not be swallowed by it whole.
        safety = (
            self.marks.safety if self.room.kind == "cuda" else min(self.marks.safety, total // 8)
        )
        rest = self.static + need.static
        work = rest + self.peak + need.peak + safety
        shed, queue = int(self.marks.shed * total), int(self.marks.queue * total)
        if work > shed:
            return (
                f"{self.room.device}: {format_size(work)} needed at work with the safety margin, "
                f"{format_size(shed)} below the shed mark"
            )
        if rest > queue:
            return (
                f"{self.room.device}: {format_size(rest)} needed at rest, "
                f"{format_size(queue)} below the queue mark"
            )
        return ""

    def add(self, need: Need) -> None:
        self.static += need.static
        self.peak += need.peak
        self.counts[need.model] = self.counts.get(need.model, 0) + 1


def place(
    rooms: Sequence[Room], needs: Sequence[Need], marks: Marks, *, auto_limit: int = AUTO_LIMIT
) -> Placement:
    """Put workers on devices: `workers` of a model on *each* of its devices.

    First one of each model on each of its devices, then the explicit numbers, then the "auto" ones
    in turn until nothing more fits or `auto_limit` is reached. A CPU device is one slot's worth:
    "auto" is one there. A model of unknown size gets one worker, as does one whose number is
    "auto" until its first load has been measured. A model that gets no worker at all is refused
    with the figures of the device that came closest.
    """
    fillings = {room.device: _Filling(room, marks) for room in rooms}
    placed: list[tuple[str, str]] = []
    shortages: dict[str, list[str]] = {need.model: [] for need in needs}
    refused: dict[str, str] = {}
    short: dict[str, str] = {}

    def put(need: Need, filling: _Filling) -> bool:
        shortage = filling.shortage(need)
        if shortage:
            shortages[need.model].append(shortage)
            return False
        filling.add(need)
        placed.append((filling.room.device, need.model))
        return True

    def homes(need: Need) -> list[_Filling]:
        if need.devices == "all":
            # A CPU slot beside GPUs is there for degraded requests only.
            gpus = [filling for filling in fillings.values() if filling.room.kind == "cuda"]
            return gpus or list(fillings.values())
        return [fillings[name] for name in need.devices if name in fillings]

    for need in needs:
        missing = [d for d in need.devices if d not in fillings] if need.devices != "all" else []
        if missing:
            shortages[need.model].append(f"no device is called {', '.join(missing)}")
    for need in needs:
        for filling in homes(need):
            put(need, filling)
    for need in needs:
        if need.workers != "auto":
            for filling in homes(need):
                # A device that had no room for the first one has none for the second either.
                while 0 < filling.counts.get(need.model, 0) < need.workers and put(need, filling):
                    pass
    growing = True
    while growing:
        growing = False
        for need in needs:
            if need.workers != "auto" or need.static <= 0:
                continue
            for filling in homes(need):
                have = filling.counts.get(need.model, 0)
                if filling.room.kind == "cuda" and 0 < have < auto_limit and put(need, filling):
                    growing = True
    for need in needs:
        have = sum(1 for _, model in placed if model == need.model)
        if not have:
            why = shortages[need.model] or ["there is no device"]
            refused[need.model] = f"{need.model} fits on no device: " + "; ".join(why)
        elif need.workers != "auto" and have < (wanted := need.workers * len(homes(need))):
            short[need.model] = f"{need.model} gets {have} of {wanted} workers: " + "; ".join(
                shortages[need.model]
            )
    lines = [
        f"{device}: {', '.join(f'{n} x {model}' for model, n in filling.counts.items()) or 'empty'}"
        + (
            f" = {format_size(filling.static)} at rest + {format_size(filling.peak)} at work of "
            f"{format_size(filling.room.total)}"
            if filling.static or not filling.counts
            else f"; measured at the first load, {format_size(filling.room.total)} in all"
        )
        for device, filling in fillings.items()
    ]
    return Placement(placed=tuple(placed), refused=refused, short=short, lines=tuple(lines))

"""`gpusup plan`: how many workers fit on a device, with every line of the arithmetic.

From numbers, from a weights file's header, from a language model's config.json, or from a whole
gpusup configuration. Needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpusup.conf.load import ConfigError, load
from gpusup.conf.places import weights_of
from gpusup.conf.safetensors_header import weights_bytes
from gpusup.conf.schema import Config, ModelConfig
from gpusup.conf.units import format_size, parse_share, parse_size

from . import exit_codes
from .devices import cpu_devices
from .placement import (
    CONTEXT_BYTES,
    Marks,
    Need,
    Room,
    kv_bytes_per_sequence,
    llm_shape,
    place,
    standby_bytes,
    workers_per_device,
)
from .probe_link import ProbeLink

#: A driver that doesn't answer within this leaves `plan` without GPUs, not without an answer.
_DISCOVER_S = 8.0


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `plan` to the command line; its `func(arguments)` returns the exit code."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="how many workers fit on a GPU, and why",
        description="How many workers fit on a GPU, and why. With a configuration: for each of "
        "its models on each device. With --model or --weights: for one worker of that size.",
    )
    size, share, count = _argument(parse_size), _argument(parse_share), _argument(_count)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="a gpusup.toml")
    parser.add_argument("--gpu-memory", type=size, metavar="SIZE", help="memory of the GPU")
    parser.add_argument(
        "--safety", type=size, metavar="SIZE", help="never planned with (default: devices.safety)"
    )
    parser.add_argument(
        "--model",
        type=size,
        metavar="SIZE",
        help="what a worker holds at rest: context, weights, graphs, pool",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="instead of --model: a .safetensors file (or a folder of them), of which only the "
        f"header is read; a context of {format_size(CONTEXT_BYTES)} is added",
    )
    parser.add_argument(
        "--peak",
        type=size,
        default=None,
        metavar="SIZE",
        help="what a worker takes on top while it computes a batch (default: 0, only rest counts)",
    )
    parser.add_argument("--queue", type=share, metavar="SHARE", help="the queue mark (0.85)")
    parser.add_argument("--shed", type=share, metavar="SHARE", help="the shed mark (0.92)")
    parser.add_argument(
        "--llm", type=Path, metavar="CONFIG_JSON", help="a language model's config.json"
    )
    parser.add_argument("--tokens", type=count, default=2048, help="tokens in a sequence (2048)")
    parser.add_argument("--sequences", type=count, default=1, help="sequences at a time (1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(func=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    try:
        result, code = make_plan(arguments)
    except (ValueError, OSError, ConfigError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"cannot read {error.filename}: {error.strerror}"
        print(f"gpusup plan: {text}", file=sys.stderr)  # noqa: T201
        return exit_codes.USAGE
    shown = json.dumps(result, indent=2) if arguments.json else "\n".join(result["lines"])
    print(shown)  # noqa: T201
    return code


def make_plan(arguments: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The object that `--json` prints, and the exit code. Raises ValueError or OSError."""
    if arguments.model is not None and arguments.weights is not None:
        raise ValueError("--model and --weights both say how large the model is; give one")
    by_numbers = arguments.model is not None or arguments.weights is not None
    if by_numbers and arguments.gpu_memory is None:
        raise ValueError("--gpu-memory is missing: how large is the GPU?")
    result: dict[str, Any] = {"lines": []}
    peak = arguments.peak or 0
    if arguments.llm is not None:
        peak += _add_llm(arguments, result)
    if by_numbers:
        fits = _add_numbers(arguments, peak, result)
        return result, exit_codes.OK if fits else exit_codes.FAILED
    if arguments.llm is not None and arguments.config is None:
        return result, exit_codes.OK
    return result, _add_config(arguments, result)


def _add_llm(arguments: argparse.Namespace, result: dict[str, Any]) -> int:
    path = arguments.llm / "config.json" if arguments.llm.is_dir() else arguments.llm
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path} is no table")
    shape = llm_shape(table)
    one = kv_bytes_per_sequence(shape, arguments.tokens)
    every: int = one * arguments.sequences
    grouped = (
        f" ({shape.query_heads} query heads share them)"
        if shape.query_heads != shape.kv_heads
        else ""
    )
    result["kv_bytes_per_sequence"] = one
    result["kv_bytes"] = every
    result["sequences"] = arguments.sequences
    result["tokens"] = arguments.tokens
    result["lines"] += [
        f"key-value cache of a sequence: 2 (keys and values) x {shape.layers} layers x "
        f"{shape.kv_heads} key-value heads{grouped} x {shape.head_size} per head x "
        f"{arguments.tokens} tokens x {shape.value_bytes} bytes = {format_size(one)}",
        f"{arguments.sequences} at a time: {format_size(every)}",
    ]
    if arguments.gpu_memory is not None and arguments.model is None and arguments.weights is None:
        free = int(_marks(arguments, None).shed * arguments.gpu_memory)
        result["lines"].append(
            f"the weights come on top: give --model or --weights; without them "
            f"{format_size(free)} below the shed mark hold {free // one} sequences"
        )
    return every


def _marks(arguments: argparse.Namespace, config: Config | None) -> Marks:
    words = {name: getattr(arguments, name) for name in ("queue", "shed", "safety")}
    given = {name: value for name, value in words.items() if value is not None}
    return replace(Marks.of(config or Config()), **given)


def _add_numbers(arguments: argparse.Namespace, peak: int, result: dict[str, Any]) -> bool:
    static: int = arguments.model or 0
    if arguments.weights is not None:
        weights = weights_bytes(arguments.weights)
        static = weights + CONTEXT_BYTES
        result["weights_bytes"] = weights
        result["lines"].append(
            f"weights: {format_size(weights)} by the header of {arguments.weights.name}, "
            f"and {format_size(CONTEXT_BYTES)} for the CUDA context"
        )
    config = load(arguments.config) if arguments.config is not None else None
    marks = _marks(arguments, config)
    fit = workers_per_device(total=arguments.gpu_memory, static=static, peak=peak, marks=marks)
    result["lines"] += fit.lines
    result.update(
        naive_workers=fit.naive_workers,
        workers=fit.workers,
        binds=fit.binds,
        reason=fit.reason,
        gpu_memory=arguments.gpu_memory,
        safety=marks.safety,
        model=static,
        peak=peak,
    )
    if "kv_bytes_per_sequence" in result and fit.workers:
        one = result["kv_bytes_per_sequence"]
        batch = arguments.peak or 0
        room = int(marks.shed * arguments.gpu_memory) - marks.safety - static - batch
        result["sequences_one_worker"] = max(0, room // one)
        result["lines"].append(
            f"a single worker would have room for {result['sequences_one_worker']} sequences"
        )
    return fit.workers > 0


# -- a whole configuration ------------------------------------------------------------------------


def _add_config(arguments: argparse.Namespace, result: dict[str, Any]) -> int:
    config = load(arguments.config)
    marks = _marks(arguments, config)
    rooms = _rooms(arguments, config)
    needs = [
        _need(name, model, arguments, rooms, result["lines"])
        for name, model in config.models.items()
    ]
    placement = place(rooms, needs, marks)
    result["devices"] = [{"name": r.device, "kind": r.kind, "total": r.total} for r in rooms]
    models: dict[str, Any] = {}
    for need in needs:
        entry: dict[str, Any] = {"static": need.static, "peak": need.peak, "workers": {}}
        for room in rooms:
            entry["workers"][room.device] = placement.count(room.device, need.model)
            if need.static > 0 and room.kind == "cuda":
                fit = workers_per_device(
                    total=room.total, static=need.static, peak=need.peak, marks=marks
                )
                entry["alone"] = {
                    "workers": fit.workers,
                    "naive_workers": fit.naive_workers,
                    "binds": fit.binds,
                    "reason": fit.reason,
                }
                result["lines"] += [f"{need.model} alone on {room.device}: {x}" for x in fit.lines]
        if need.model in placement.refused:
            entry["refused"] = placement.refused[need.model]
        if need.model in placement.short:
            entry["short"] = placement.short[need.model]
        models[need.model] = entry
    result["models"] = models
    result["workers"] = len(placement.placed)
    result["reason"] = "; ".join([*placement.refused.values(), *placement.short.values()])
    result["lines"] += [
        *placement.lines,
        *placement.refused.values(),
        *placement.short.values(),
    ]
    return exit_codes.FAILED if placement.refused else exit_codes.OK


def _rooms(arguments: argparse.Namespace, config: Config) -> list[Room]:
    if arguments.gpu_memory is not None:
        return [Room(device="gpu0", kind="cuda", total=arguments.gpu_memory)]
    gpus = asyncio.run(_find_gpus(config))
    cpus = [
        Room(device=cpu.name, kind="cpu", total=cpu.total)
        for cpu in cpu_devices(config.devices, gpus=len(gpus))
    ]
    return [*gpus, *cpus]


async def _find_gpus(config: Config) -> list[Room]:
    link = ProbeLink(
        config.probe,
        lambda _sample: None,
        lambda _fault: None,
        lambda _state: None,
        devices=config.devices,
    )
    link.start()
    try:
        found = await link.discover(_DISCOVER_S)
    finally:
        link.stop()
        await link.stopped()
    rooms = []
    for sample in found:
        budget = config.devices.memory.get(sample.name, 0)
        total = sample.total or 0
        if total:
            total = min(total, budget) if budget else total
            rooms.append(Room(device=sample.name, kind="cuda", total=total))
    return rooms


def _need(
    name: str,
    model: ModelConfig,
    arguments: argparse.Namespace,
    rooms: Sequence[Room],
    lines: list[str],
) -> Need:
    """What a worker of the model takes, as well as can be told without running it."""
    static = model.static
    path = Path(weights_of(model.weights, model.version))
    on_gpu = any(room.kind == "cuda" for room in rooms)
    if static:
        lines.append(f"{name}: {format_size(static)} at rest, as configured")
    elif path.suffix == ".safetensors" and path.is_file():
        weights = weights_bytes(path)
        static = weights + (CONTEXT_BYTES if on_gpu else 0)
        lines.append(
            f"{name}: {format_size(static)} at rest, from {path.name}"
            + (f" and {format_size(CONTEXT_BYTES)} for the CUDA context" if on_gpu else "")
        )
    else:
        lines.append(
            f"{name}: size not known before its first load (set `static`); one worker a device"
        )
    if static and on_gpu and (more := standby_bytes(model)):
        static += more
        lines.append(
            f"{name}: {format_size(more)} more for the context of each worker's standby "
            f"= {format_size(static)}"
        )
    peak = arguments.peak if arguments.peak is not None else model.peak
    return Need(
        model=name,
        workers=model.workers,
        devices=model.devices,
        static=static,
        peak=peak,
    )

"""`gpusup check CONFIG`: is the file usable here, and would its models fit?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusup.conf.load import ConfigError, load_file
from gpusup.conf.places import parse_listen, run_dir, state_dir, weights_of
from gpusup.conf.schema import Config, ModelConfig

from .devices import cpu_devices
from .exit_codes import OK, USAGE
from .placement import CONTEXT_BYTES, Marks, Need, Placement, Room, place, standby_bytes

Parsers = Any  # argparse's own type for it is private


def add_parser(subparsers: Parsers) -> None:
    parser = subparsers.add_parser(
        "check",
        help="say all that is wrong with a configuration",
        description="Reads a configuration as `gpusup run` would, starts nothing, and names every "
        "problem with its place. Exit code 0: usable; 2: not.",
    )
    parser.add_argument("config", type=Path, help="the file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    try:
        loaded = load_file(args.config)
    except ConfigError as error:
        return _refuse(error.lines, args.json)
    config = loaded.config
    rooms = known_rooms(config)
    placement = placed(config, rooms)
    if placement is not None and placement.refused:
        return _refuse([f"{args.config}: {text}" for text in placement.refused.values()], args.json)
    if args.json:
        _print(json.dumps({"ok": True, "problems": [], "models": sorted(config.models)}))
        return OK
    host, port = parse_listen(config.server.listen)
    _print(f"{args.config} is usable")
    _print(f"  listen     {host or 'all addresses'} port {port or '(any free one)'}")
    _print(f"  run_dir    {run_dir(config.server)}")
    _print(f"  state_dir  {state_dir(config.server)}")
    for name, model in config.models.items():
        _print(f"  model      {name}@{model.version} from {model.handler}")
    for line in placement.lines if placement else ():
        _print(f"  memory     {line}")
    for text in placement.short.values() if placement else ():
        _print(f"  memory     {text}")
    if placement is None:
        _print("  memory     not checked: [devices.memory] names no GPU's size (see gpusup plan)")
    return OK


def known_rooms(config: Config) -> list[Room]:
    """Devices whose size can be told from the file: a GPU's own size only its driver knows."""
    gpus = [
        Room(device=name, kind="cuda", total=size)
        for name, size in config.devices.memory.items()
        if not name.startswith("cpu")
    ]
    hidden = bool(gpus) or has_gpu()
    if config.devices.use != "auto":
        named = [name for name in config.devices.use if not name.startswith("cpu")]
        gpus = [room for room in gpus if room.device in named]
        hidden = bool(named)
    cpus = [
        Room(device=device.name, kind="cpu", total=device.total)
        for device in cpu_devices(config.devices, gpus=int(hidden))
    ]
    return [*gpus, *cpus]


def placed(config: Config, rooms: Sequence[Room]) -> Placement | None:
    """Where the models would go; None if no device's size is known."""
    if not rooms:
        return None
    kind = "cuda" if any(room.kind == "cuda" for room in rooms) else "cpu"
    if kind == "cpu" and (config.devices.use == "auto") and has_gpu():
        return None
    # On a box with GPUs a CPU slot is for fallbacks only.
    homes = [room for room in rooms if room.kind == kind]
    known = {room.device for room in rooms}
    needs = [
        Need(
            model=name,
            workers=model.workers,
            devices=_homes_of(model, homes, known),
            static=_size_of(model, kind),
            peak=model.peak,
        )
        for name, model in config.models.items()
    ]
    return place(rooms, needs, Marks.of(config))


def has_gpu() -> bool:
    """Whether an NVIDIA driver shows a device here. Asks the file system, not the driver."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _homes_of(model: ModelConfig, homes: Sequence[Room], known: set[str]) -> tuple[str, ...]:
    if model.devices == "all":
        return tuple(room.device for room in homes)
    cpus = tuple(room.device for room in homes if room.kind == "cpu")
    found: list[str] = []
    for name in model.devices:
        found += cpus if name == "cpu" else [name]
    # A UUID or a GPU without a known size can't be judged here: leave it to the run.
    return tuple(name for name in found if name in known) or tuple(r.device for r in homes)


def _size_of(model: ModelConfig, kind: str) -> int:
    """Bytes at rest: as declared, else the weights' files and, on a GPU, a context; there also
    what a standby takes. 0: unknown."""
    standby = standby_bytes(model) if kind == "cuda" else 0
    if model.static:
        return model.static + standby
    if not model.weights:
        return 0
    path = Path(weights_of(model.weights, model.version))
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    size = sum(os.stat(file).st_size for file in files)
    return size + standby + (CONTEXT_BYTES if kind == "cuda" else 0)


def _refuse(lines: Sequence[str], as_json: bool) -> int:
    if as_json:
        _print(json.dumps({"ok": False, "problems": list(lines)}))
    else:
        for line in lines:
            sys.stderr.write(f"gpusup: {line}\n")
    return USAGE


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")

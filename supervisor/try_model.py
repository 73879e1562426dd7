"""`gpusup try CONFIG MODEL --input FILE`: one request through the real worker code, no server.

A child process loads the model exactly as a worker would (handler, weights, warm-up, golden
example) and answers the file; this side only starts it and shows what it says.
"""

from __future__ import annotations

import argparse
import json
import mimetypes
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from gpusup.conf.load import ConfigError, load
from gpusup.conf.schema import Config, ModelConfig
from gpusup.worker import wire

from .check import has_gpu
from .exit_codes import FAILED, NOT_FOUND, OK, USAGE
from .family import describe

Told = Mapping[str, Any]

#: Loading may take for ever as long as it moves; this is for one that does not.
LIMIT_S: Final = 1800.0


@dataclass(slots=True)
class Result:
    """What the child said. `problem`: "" if the model loaded and every answer was ok."""

    returncode: int = 0
    ready: Told = field(default_factory=dict)
    answers: list[Told] = field(default_factory=list)
    problem: str = ""
    cause: str = ""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "try",
        help="run one request through a model, without a server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, help="the configuration")
    parser.add_argument("model", help="a model in it")
    parser.add_argument("--input", type=Path, help="the request's body; without it: load only")
    parser.add_argument("--content-type", help="media type of the input; default: by its name")
    parser.add_argument("--param", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--version", dest="wanted", metavar="V", help="version to load; default: the configured one"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="ask N times")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    try:
        config = load(args.config)
    except ConfigError as error:
        for line in error.lines:
            sys.stderr.write(f"gpusup: {line}\n")
        return USAGE
    model = config.models.get(args.model)
    if model is None:
        names = ", ".join(sorted(config.models))
        return _refuse(f'{args.config} has no model "{args.model}"; there are: {names}', NOT_FOUND)
    if args.wanted is not None and not (args.wanted.isascii() and args.wanted.isdigit()):
        return _refuse(f'--version: expected digits, such as "1", got "{args.wanted}"', USAGE)
    if args.repeat < 1:
        return _refuse(f"--repeat: expected at least 1, got {args.repeat}", USAGE)
    params: dict[str, str] = {}
    for pair in args.param:
        key, equals, value = pair.partition("=")
        if not equals:
            return _refuse(f'--param: expected KEY=VALUE, got "{pair}"', USAGE)
        params[key] = value
    if args.input is not None:
        try:
            with args.input.open("rb"):
                pass
        except OSError as error:
            return _refuse(f"cannot read {args.input}: {error.strerror}", USAGE)
    result = try_model(
        config,
        args.model,
        path=args.input,
        content_type=args.content_type,
        params=params,
        version=args.wanted or model.version,
        device=args.device,
        repeat=args.repeat,
        hear=None if args.json else _show,
    )
    if args.json:
        fields = {name: getattr(result, name) for name in Result.__slots__}
        sys.stdout.write(json.dumps({"ok": not result.problem, **fields}) + "\n")
    elif result.problem:
        sys.stderr.write(f"gpusup: {args.model}: {result.problem}\n")
    return FAILED if result.problem else OK


def try_model(
    config: Config,
    name: str,
    *,
    path: Path | None = None,
    content_type: str | None = None,
    params: Mapping[str, str] | None = None,
    version: str = "",
    device: str = "auto",
    repeat: int = 1,
    quiet: bool = False,
    hear: Callable[[Told], None] | None = None,
) -> Result:
    """Load a model in a child as a worker would and, with `path`, ask it. Raises nothing.

    `hear` gets each word of the child as it comes; `quiet` hides what the handler prints.
    """
    model = config.models[name]
    kind = device if device != "auto" else ("cuda" if has_gpu() else "cpu")
    spec = _spec(config, name, model, version or model.version, kind)
    guessed = mimetypes.guess_type(str(path))[0] if path is not None else None
    task = {
        "spec": msgspec.to_builtins(spec),
        "path": "" if path is None else str(path.absolute()),
        "content_type": content_type or guessed or "application/octet-stream",
        "params": dict(params or {}),
        "repeat": repeat,
        "limit_s": model.budget + 30.0,
    }
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(task).encode())
        stdin.seek(0)
        return _child(model, stdin.fileno(), quiet, hear)


def _child(
    model: ModelConfig, stdin: int, quiet: bool, hear: Callable[[Told], None] | None
) -> Result:
    result = Result()
    ours, theirs = os.pipe()
    python = model.python or sys.executable
    try:
        process = subprocess.Popen(
            [python, "-m", "gpusup.worker.trial", "--result-fd", str(theirs)],
            stdin=stdin,
            stdout=subprocess.DEVNULL if quiet else sys.stderr,
            stderr=subprocess.DEVNULL if quiet else sys.stderr,
            pass_fds=(theirs,),
        )
    except OSError as error:
        os.close(ours)
        result.problem = f"cannot start {python}: {error.strerror}"
        return result
    finally:
        os.close(theirs)
    broken = False
    try:
        for line in _lines(process, ours):
            try:
                told: Told = json.loads(line)
            except ValueError:
                broken = True  # killed in the middle of it: its end, which follows, says more
                continue
            _take(result, told)
            if hear is not None:
                hear(told)
        result.returncode = process.wait(LIMIT_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        if not result.problem:
            result.problem = f"the worker code has moved nothing for {LIMIT_S:g} s"
            result.cause = "hang"
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
            result.returncode = process.wait()
    if result.returncode and not result.problem:
        result.problem = f"the worker code ended with {_name(result.returncode)}"
    elif broken and not result.problem:
        result.problem = "the worker code ended in the middle of a word"
    return result


def _lines(process: subprocess.Popen[bytes], said: int) -> Iterator[bytes]:
    """What the child says, until it has ended; what it forked may hold the pipe for longer.

    Raises TimeoutError after LIMIT_S of silence.
    """
    rest = b""
    heard = time.monotonic()
    while True:
        dead = process.poll() is not None  # asked before the look: its last words are there then
        if select.select([said], [], [], 0.0 if dead else min(0.2, LIMIT_S))[0]:
            data = os.read(said, 2**16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from lines
            heard = time.monotonic()
        elif dead:
            break
        elif time.monotonic() - heard > LIMIT_S:
            raise TimeoutError
    if rest:
        yield rest


def _take(result: Result, told: Told) -> None:
    match told["kind"]:
        case "ready":
            result.ready = told["ready"]
        case "answer":
            result.answers.append(told)
            if told["status"] != "ok":
                result.problem = f"{told['status']}: {told['text']}"
        case "problem":
            result.problem, result.cause = told["text"], told["cause"]
        case _:
            pass


def _spec(
    config: Config, name: str, model: ModelConfig, version: str, kind: str
) -> wire.WorkerSpec:
    return wire.WorkerSpec(
        slot="try",
        generation=1,
        model=name,
        version=version,
        device=kind,
        device_uuid="",
        control_path="",
        data_path="",
        config=msgspec.to_builtins(model),
        env={"GPUSUP_PIXELS": str(config.server.pixels), **model.env},
    )


def _show(told: Told) -> None:
    match told["kind"]:
        case "loading":
            sys.stderr.write(f"{told['phase']} ...\n")
        case "ready":
            ready = told["ready"]
            phases = ", ".join(f"{k} {v:.2f} s" for k, v in ready.get("seconds", {}).items())
            sys.stderr.write(f"ready on {ready['device_name'] or 'cpu'}: {phases}\n")
            for row in ("inputs", "outputs"):
                for tensor in ready.get(row, ()):
                    shape = "x".join("?" if n < 0 else str(n) for n in tensor["shape"])
                    sys.stderr.write(
                        f"  {row[:-1]} {tensor['name']} {tensor['datatype']} {shape}\n"
                    )
        case "answer" if told["status"] == "ok":
            for part in told["parts"]:
                sys.stdout.write(_part(part) + "\n")
            sys.stdout.flush()
            sys.stderr.write(
                f"answered in {told['took_s'] * 1000:.1f} ms: decode "
                f"{told['decode_s'] * 1000:.1f}, compute {told['compute_s'] * 1000:.1f}, "
                f"encode {told['encode_s'] * 1000:.1f}\n"
            )
        case _:
            pass


def _part(part: Told) -> str:
    if "json" in part:
        return json.dumps(part["json"], ensure_ascii=False)
    if "text" in part:
        return str(part["text"])
    if "values" in part:
        return f"{part['name']} {part['datatype']} {part['shape']}: {part['values']}"
    return f"{part['bytes']} bytes of {part['content_type']}"


def _name(returncode: int) -> str:
    if returncode < 0:
        return describe(os.CLD_KILLED, -returncode)[1]
    return f"exit code {returncode}"


def _refuse(text: str, code: int) -> int:
    sys.stderr.write(f"gpusup: {text}\n")
    return code

"""`gpusup doctor [CONFIG]`: look at everything a GPU service trips over, and say how to mend it.

Each finding is `ok`, `note` or `fail`; what is not well comes with its remedy. Exit code 0: nothing
failed. The driver is asked in a child process, since its calls may never return.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpusup.conf.load import ConfigError, load
from gpusup.conf.schema import Config

from .exit_codes import FAILED, OK

Level = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy`: what to type or change; empty where all is well."""

    level: Level
    what: str
    text: str
    remedy: str = ""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="find what is wrong with this machine, and how to mend it",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", type=Path, nargs="?", help="default: the built-in configuration")
    parser.add_argument("--no-models", action="store_true", help="do not load the models")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    found: list[Finding] = []
    for finding in examine(args.config, models=not args.no_models):
        found.append(finding)
        if not args.json:
            show(finding)
    failed = sum(1 for finding in found if finding.level == "fail")
    if args.json:
        report = {"ok": not failed, "findings": [asdict(finding) for finding in found]}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        words = "all is well" if not failed else f"{failed} of {len(found)} failed"
        sys.stdout.write(f"{words}\n")
    return FAILED if failed else OK


def examine(path: Path | None, *, models: bool) -> Iterator[Finding]:
    """All findings, in the order in which they are made."""
    from . import checkup

    config: Config | None = None
    try:
        config = load(path)
        yield Finding("ok", "configuration", str(path or "built-in"))
    except ConfigError as error:
        for line in error.lines:
            yield Finding("fail", "configuration", line, "correct the file; gpusup check reads it")
    yield from checkup.software()
    yield from checkup.gpu()
    yield from checkup.system(config or Config())
    yield from checkup.addresses(config or Config())
    if config is not None and models:
        yield from _models(config)


def _models(config: Config) -> Iterator[Finding]:
    from .try_model import try_model

    for name in config.models:
        what = f"model {name}"
        result = try_model(config, name, quiet=True)
        if result.problem:
            remedy = _REMEDIES.get(result.cause, _REMEDIES["error"]).format(name=name)
            yield Finding("fail", what, result.problem, remedy)
            continue
        seconds = result.ready.get("seconds", {})
        where = result.ready.get("device_name") or "cpu"
        text = f"loads on {where} in {sum(seconds.values()):.1f} s"
        yield Finding("ok", what, text)


_REMEDIES = {
    "config": "correct [models.{name}] or its files",
    "oom": "use a smaller max_rows or dtype for {name}, or a device with more room (gpusup plan)",
    "golden": "the weights do not give what the golden example says: are both of one version?",
    "device": "the device refused; see the findings about driver and GPU",
    "hang": "the model did not answer within its budget; run gpusup try to see where it hangs",
    "error": "run gpusup try CONFIG {name} to see what the handler prints",
}


def show(finding: Finding) -> None:
    sys.stdout.write(f"{finding.level:<5} {finding.what}: {finding.text}\n")
    if finding.remedy:
        sys.stdout.write(f"      -> {finding.remedy}\n")
    sys.stdout.flush()

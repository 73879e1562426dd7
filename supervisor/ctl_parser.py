"""The command line of `gpusupctl`, and nothing else."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

_TIME = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)?$")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def seconds(text: str) -> float:
    """ "10s", "1.5m", "250ms", or plain seconds."""
    match = _TIME.match(text)
    if not match:
        raise argparse.ArgumentTypeError(f'"{text}" is no time; say 10s, 2m or 250ms')
    return float(match[1]) * _UNITS[match[2]]


def share(text: str) -> float:
    """ "10%" or "0.1"."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no share between 0% and 100%; say 10%')
    return value


def setting(text: str) -> tuple[str, Any]:
    """key=value; the value is JSON if it reads as such, else a word."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f'"{text}" is no key=value')
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value


def count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f'"{text}" is no number of lines')
    return number


def make_parser(description: str) -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    # Both before and after the verb; the one after it must not undo the one before.
    shared.add_argument(
        "--socket",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help="control socket, or the run directory it is in (default: GPUSUP_CONTROL, or where "
        "a service of yours or of the system keeps it)",
    )
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument(
        "-o", "--output", choices=("text", "wide", "json"), default="text", help="how to show it"
    )
    waiting = argparse.ArgumentParser(add_help=False)
    waiting.add_argument("--no-wait", action="store_true", help="print the change's id and leave")
    waiting.add_argument(
        "--timeout", type=seconds, metavar="TIME", help="wait no longer (exit 124; it goes on)"
    )

    parser = argparse.ArgumentParser(
        prog="gpusupctl",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(
        name: str, help_text: str, *parents: argparse.ArgumentParser
    ) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=help_text, description=help_text, parents=[shared, *parents]
        )

    one = verb("status", "Show slots, models and devices; exit 3 if anything is not well.", output)
    one.add_argument("slots", nargs="*", metavar="SLOT", help="only these slots, devices, models")
    one.add_argument("-w", "--watch", action="store_true", help="again every second")

    one = verb("drain", "Cordon a slot and wait until its work has left.", output, waiting)
    one.add_argument("slot", metavar="SLOT", help="a slot or a device")
    one.add_argument(
        "--limit", type=seconds, metavar="TIME", help="end the work that takes longer (default: "
        "supervision.drain_limit)",
    )  # fmt: skip
    one = verb("cordon", "Give a slot no new work.")
    one.add_argument("slot", metavar="SLOT")
    one.add_argument("--why", default="", help="for those who will wonder")
    one = verb("uncordon", "Let a slot work again.")
    one.add_argument("slot", metavar="SLOT")
    one = verb("restart", "Replace a slot's worker, or a proxy.", output, waiting)
    one.add_argument("target", metavar="SLOT|PROXY")
    one = verb("reset-failed", "Try again what was given up: a slot, or all slots of a model.")
    one.add_argument("target", metavar="SLOT|MODEL")

    one = verb("reload-model", "Swap a model's workers for new ones.", output, waiting)
    one.add_argument("model", metavar="NAME[@VERSION]")
    one.add_argument("--version", default="", help="default: the same version once more")
    one.add_argument("--weights", default="", metavar="PATH", help="another file of weights")
    one.add_argument(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE",
        help="change one setting of the model; can be repeated",
    )  # fmt: skip
    one.add_argument("--strategy", choices=("auto", "surge", "in-place"), default="auto")
    one.add_argument("--slots", default="", metavar="SLOT,SLOT", help="only these")
    one.add_argument(
        "--canary", type=share, default=0.0, metavar="10%", help="only this share of the traffic"
    )
    one.add_argument(
        "--allow-gap", type=seconds, metavar="TIME", help="if the only worker has to leave first, "
        "requests wait for so long, instead of the model's `hold`; refused if it will take longer",
    )  # fmt: skip
    one.add_argument("--dry-run", action="store_true", help="say what would be done, and why")
    for name, help_text in (
        ("promote", "Give a canary all the traffic."),
        ("rollback", "Go back to the version before."),
        ("load", "Load a model that was unloaded."),
        ("unload", "Take a model off its devices."),
    ):
        one = verb(name, help_text, output, waiting)
        one.add_argument("model", metavar="NAME")

    verb("changes", "List the long operations, running and past.", output)
    one = verb("change", "Show one change with its steps.", output)
    one.add_argument("id", metavar="ID")
    one.add_argument("--wait", action="store_true", help="until it has ended")
    one.add_argument("--timeout", type=seconds, metavar="TIME")
    one = verb("abort", "Give up a change that is under way.")
    one.add_argument("id", metavar="ID")

    one = verb("logs", "Show what a slot's workers printed last.")
    one.add_argument("target", metavar="SLOT")
    one.add_argument("-n", "--lines", type=count, default=200, metavar="N")
    one.add_argument("-f", "--follow", action="store_true")
    one = verb("events", "Show what has happened.", output)
    one.add_argument("-f", "--follow", action="store_true")
    one.add_argument("--since", type=count, default=0, metavar="SERIAL")
    one = verb("dump", "Print the stacks of all threads of a slot's worker.")
    one.add_argument("slot", metavar="SLOT")
    one = verb("top", "Watch devices, slots, queues and latencies live.")
    one.add_argument("--once", action="store_true", help="one picture, for scripts")
    one = verb("buckets", "Propose input shapes for a model from what it was sent.", output)
    one.add_argument("model", metavar="MODEL")
    verb("plan", "Print the arithmetic of workers per device.", output)
    verb("leases", "Show who holds which bytes of which device.", output)
    verb("metrics", "Print the metrics.")
    one = verb("support-bundle", "Write one tar with everything but secrets.")
    one.add_argument("file", nargs="?", default="", metavar="FILE")

    one = verb("stop", "Drain and stop the service.")
    one.add_argument("--no-wait", action="store_true")
    one.add_argument("--timeout", type=seconds, default=120.0, metavar="TIME")
    one = verb("reexec", "Go on with new code; workers and connections stay.")
    one.add_argument("--timeout", type=seconds, default=60.0, metavar="TIME")
    verb("reload-config", "Read the configuration again.", output, waiting)
    one = verb("completion", "Print a completion script for a shell.")
    one.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser

"""``gpusup``: run the service, or one of the commands around it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

#: Commands and the modules that have them; imported only when needed to keep `--help` quick.
MODULES: Final = (
    "run",
    "check",
    "demo",
    "plan",
    "init",
    "try_model",
    "doctor",
    "dashboard",
    "install",
    "certify",
)


def parser(names: Sequence[str] = MODULES) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="gpusup", description="Keeps PyTorch inference workers alive on every GPU slot."
    )
    top.add_argument("--version", action="store_true", help="print the version and stop")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name in names:
        try:
            module = importlib.import_module(f"gpusup.supervisor.{name}")
        except ModuleNotFoundError as missing:
            if missing.name != f"gpusup.supervisor.{name}":
                raise
            continue
        module.add_parser(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    first = {"try": "try_model", "install-unit": "install"}.get(words[0], words[0]) if words else ""
    top = parser((first,) if first in MODULES else MODULES)
    args = top.parse_args(words)
    if args.version:
        from gpusup.conf.package import package_version

        print(f"gpusup {package_version()}")
        return 0
    if args.command is None:
        top.print_help(sys.stderr)
        return 2
    try:
        code: int = args.func(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    return code


if __name__ == "__main__":
    raise SystemExit(main())

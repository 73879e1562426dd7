"""`gpusup certify`: seven tests that decide whether a box may go live, and a report."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpusup.conf.load import ConfigError
from gpusup.conf.units import parse_time

from .certify_bench import PROFILES, Options, Sla
from .certify_load import LoadError
from .certify_progress import Shown
from .certify_run import TESTS, certify, exit_code
from .certify_service import CertifyError
from .child_service import interruptible
from .exit_codes import FAILED, INTERRUPTED, USAGE

EPILOG: Final = """\
Without CONFIG the bundled model is served. With CONFIG a service of its own is started from it, on
a free port, with its own folders. With --url a running service is tested: only what is safe there,
and faults only with --allow-faults and --control.

The report's folder gets report.html (plots need the extra gpusup[report]), report.json, junit.xml.
Exit code: 0 all tests ran and passed, 1 one failed, 3 one or more could not run here, 2 usage.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "certify",
        help="run the seven tests that decide whether this box may go live",
        description="Load, GPU faults, mixed load, stability, hot swap, clients that vanish, "
        "hostile input: with one report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", type=Path, help="a TOML file")
    parser.add_argument("--url", default="", help="a running service, such as http://host:8000")
    parser.add_argument(
        "--control", default="", help="with --url: its control socket or run directory"
    )
    parser.add_argument("--model", default="", help="which model (default: the only or first one)")
    parser.add_argument("--profile", choices=tuple(PROFILES), default="standard",
        help="quick: about five minutes; standard: about 45; soak: three days")  # fmt: skip
    parser.add_argument("--only", default="", metavar="NAME[,NAME]",
        help=f"some of {', '.join(TESTS)}")  # fmt: skip
    parser.add_argument("--sla", default="p99=2s", help='such as "p99=200ms"')
    parser.add_argument("--rate", type=float, default=0.0,
        help="requests a second to certify (default: half of the highest kept)")  # fmt: skip
    parser.add_argument("--report", type=Path, default=Path("certify-report"), help="folder")
    parser.add_argument("--allow-faults", action="store_true",
        help="with --url: kill and stop processes of the running service")  # fmt: skip
    parser.add_argument("--sizes", type=Path, metavar="FILE",
        help='JSON, image sizes and shares: {"256": 0.4, "640x480": 0.6}')  # fmt: skip
    parser.add_argument("--input", type=Path, action="append", default=[], dest="inputs",
        help="a file, or a folder of files, to send as they are")  # fmt: skip
    parser.add_argument("--stability", default="", metavar="TIME",
        help='how long the stability test takes, "2m" (default: by the profile)')  # fmt: skip
    # Stretches by so much shorter than the profile's: for tests of the command itself.
    parser.add_argument("--scale", type=float, default=1.0, help=argparse.SUPPRESS)
    parser.set_defaults(func=run)


def parse_sla(text: str) -> Sla:
    """ "p99=2s", "p99.9=250ms". Raises ValueError that says what is wrong."""
    name, equals, limit = text.partition("=")
    try:
        share = float(name.removeprefix("p"))
    except ValueError:
        share = 0.0
    if not equals or not name.startswith("p") or not 0 < share < 100:
        raise ValueError(f'--sla is "{text}", something like "p99=2s" is wanted')
    seconds = parse_time(limit)
    if seconds <= 0:
        raise ValueError(f'--sla is "{text}", its time must be above 0')
    return Sla(share=share / 100, limit_s=seconds)


def parse_only(text: str) -> tuple[str, ...]:
    """Names in the usual order. Raises ValueError for unknown ones."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in TESTS:
            raise ValueError(f"--only names {name!r}, there are {', '.join(TESTS)}")
    return tuple(name for name in TESTS if not wanted or name in wanted)


def run(args: argparse.Namespace) -> int:
    try:
        options = _options(args)
        names = parse_only(args.only)
    except ValueError as error:
        return _refuse(str(error))
    began = time.monotonic()
    try:
        with Shown() as shown:
            report = asyncio.run(interruptible(certify(options, names, shown)))
    except ConfigError as error:
        return _refuse(*error.lines)
    except (CertifyError, LoadError, OSError) as error:
        _refuse(str(error))
        return FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        _refuse("interrupted")
        return INTERRUPTED
    if report.interrupted:
        _refuse("interrupted")
    sys.stdout.write(f"{report.headline} in {time.monotonic() - began:.0f} s\n")
    for path in report.files:
        sys.stdout.write(f"  {path}\n")
    return INTERRUPTED if report.interrupted else exit_code(report.results)


def _options(args: argparse.Namespace) -> Options:
    if args.url and args.config:
        raise ValueError("CONFIG and --url exclude each other")
    if args.url and not args.url.startswith(("http://", "https://")):
        raise ValueError(f"--url is {args.url!r}, http://host:port is wanted")
    if args.control and not args.url:
        raise ValueError("--control goes with --url")
    if args.rate < 0:
        raise ValueError(f"--rate is {args.rate:g}, it must be above 0")
    profile = PROFILES[args.profile]
    if not 0 < args.scale <= 1:
        raise ValueError(f"--scale is {args.scale:g}, it must be above 0 and at most 1")
    profile = replace(
        profile,
        **{
            name: getattr(profile, name) * args.scale
            for name in ("step_s", "hold_s", "window_s", "stability_s", "calm_s")
        },
    )
    if args.stability:
        profile = replace(profile, stability_s=parse_time(args.stability))
    return Options(
        config=args.config,
        url=args.url,
        control=args.control,
        model=args.model,
        profile=profile,
        sla=parse_sla(args.sla),
        report=args.report,
        allow_faults=args.allow_faults,
        rate=args.rate,
        sizes=args.sizes,
        inputs=tuple(args.inputs),
    )


def _refuse(*lines: str) -> int:
    for line in lines:
        sys.stderr.write(f"gpusup certify: {line}\n")
    return USAGE

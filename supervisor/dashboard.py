"""`gpusup dashboard`: the web view of a running service, without a word in its configuration."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

from .ctl_client import Client, CtlError, find_socket
from .exit_codes import OK, USAGE


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "dashboard",
        help="serve the web view of a running service",
        description="Serves one page that shows a running service live. It attaches to the "
        "control socket, so it needs nothing in the configuration. Ends with Ctrl-C.",
    )
    parser.add_argument(
        "--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help="default: %(default)s"
    )
    parser.add_argument("--socket", help="control socket or its folder; default: found")
    parser.add_argument(
        "--api-keys", default="", metavar="FILE", help="key file; needed beyond this machine"
    )
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="PEM chain")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="PEM key")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    try:
        path = find_socket(args.socket)
        Client(path).get("status")
    except CtlError as error:
        return _refuse(str(error), error.code)
    if bool(args.tls_cert) != bool(args.tls_key):
        return _refuse("dashboard: --tls-cert and --tls-key are needed together", USAGE)
    return asyncio.run(_serve(args, path))


async def _serve(args: argparse.Namespace, path: str) -> int:
    from .dashboard_server import Dashboard, DashboardError

    dashboard = Dashboard(
        path, args.listen, api_keys=args.api_keys, tls_cert=args.tls_cert, tls_key=args.tls_key
    )
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        await dashboard.start()
    except DashboardError as error:
        return _refuse(str(error), USAGE)
    sys.stdout.write(f"{dashboard.address}\n")
    sys.stdout.flush()
    await ended.wait()
    await dashboard.close()
    return OK


def _refuse(text: str, code: int) -> int:
    sys.stderr.write(f"gpusup: {text}\n")
    return code

"""`gpusup run [CONFIG]`: the service itself."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import sys
from pathlib import Path
from typing import Any, Final

import setproctitle

from gpusup.conf.load import ConfigError, load_file
from gpusup.conf.log import set_up
from gpusup.conf.places import run_dir, state_dir

from .exit_codes import USAGE
from .listen import ListenError, open_all

#: Found without a name given, in this order.
USUAL: Final = (Path("/etc/gpusup/gpusup.toml"),)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run the service",
        description="Runs the service in the foreground. Without CONFIG: the GPUs there are, else "
        "two CPU slots, and the bundled model.",
    )
    parser.add_argument("config", nargs="?", type=Path, help="a TOML file")
    parser.add_argument("--config", dest="named", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    path = args.config or args.named
    try:
        loaded = load_file(path)
    except ConfigError as error:
        return _refuse(*error.lines)
    config = loaded.config
    setproctitle.setproctitle("gpusup: supervisor")
    try:
        listeners = open_all(
            config.server.listen,
            run_dir(config.server),
            backlog=config.server.backlog,
            group=config.server.control_group,
        )
    except ListenError as error:
        return _refuse(str(error))
    from .box import Box, open_state_dir
    from .family import become_subreaper

    state = state_dir(config.server)
    try:
        open_state_dir(state)
        become_subreaper()
    except OSError as error:
        listeners.close()
        return _refuse(f"cannot use state directory {state}: {error.strerror}")
    # We hold the lock, so workers that these files belonged to are gone.
    for stale in listeners.run_dir.glob("*.*.sock"):
        stale.unlink(missing_ok=True)
    set_up(config.log, "supervisor")
    faulthandler.enable()
    # Everything made so far lives as long as the process: the collector need not look at it.
    gc.collect()
    gc.freeze()

    async def serve() -> int:
        return await Box(loaded, listeners).run()

    return asyncio.run(serve())


def _refuse(*lines: str) -> int:
    for line in lines:
        sys.stderr.write(f"gpusup: {line}\n")
    sys.stderr.flush()
    os.environ.pop("NOTIFY_SOCKET", None)
    return USAGE

"""`gpusup run [CONFIG]`: the service itself."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import setproctitle

from gpusup.conf.load import ConfigError, LoadedConfig, load_file
from gpusup.conf.log import set_up
from gpusup.conf.places import run_dir, state_dir

from .exit_codes import USAGE
from .listen import ListenError, Listeners, open_all
from .reexec import OUR_SIGNALS, ReexecError, hand_over, pick_up

if TYPE_CHECKING:
    from .handover import Carried

log = logging.getLogger("gpusup.supervisor")


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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        state = pick_up()
    except ReexecError as error:
        return _refuse(str(error))
    if state is not None:
        return _go_on(path, state)
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
    # There is something to take away now: from here on the box, which unblocks them, decides.
    signal.pthread_sigmask(signal.SIG_BLOCK, OUR_SIGNALS)
    from .around import open_state_dir
    from .family import become_subreaper
    from .leftovers import claim

    folder = state_dir(config.server)
    try:
        open_state_dir(folder)
        become_subreaper()
    except OSError as error:
        listeners.close()
        return _refuse(f"cannot use state directory {folder}: {error.strerror}")
    # We hold the lock, so workers that these files belonged to are gone, or must go.
    claim(listeners.run_dir)
    for stale in listeners.run_dir.glob("*.*.sock"):
        stale.unlink(missing_ok=True)
    return _serve(loaded, listeners, None)


def _go_on(path: Path | None, state: dict[str, Any]) -> int:
    """In the place of the program before us: nothing is opened, nothing is started."""
    from .family import become_subreaper
    from .handover import Carried

    setproctitle.setproctitle("gpusup: supervisor")
    become_subreaper()
    carried = Carried(state)
    # The file may say something else by now; that is for reload-config to find.
    base = path.parent.absolute() if path else Path.cwd()
    loaded = LoadedConfig(config=carried.config, path=path.absolute() if path else None, base=base)
    return _serve(loaded, Listeners.restore(state["listeners"]), carried)


def _serve(loaded: LoadedConfig, listeners: Listeners, carried: Carried | None) -> int:
    from .box import Box
    from .handover import Carried

    set_up(loaded.config.log, "supervisor")
    faulthandler.enable()
    # Everything made so far lives as long as the process: the collector need not look at it.
    gc.collect()
    gc.freeze()

    async def serve() -> tuple[int | dict[str, Any], LoadedConfig]:
        box = Box(loaded, listeners, carried)
        try:
            return await box.run(), box.loaded
        finally:
            # One more Ctrl-C must not spoil the end, nor end the program that follows.
            signal.pthread_sigmask(signal.SIG_BLOCK, OUR_SIGNALS)

    while True:
        result, loaded = asyncio.run(serve())
        if isinstance(result, int):
            return result
        try:
            hand_over(result)
        except ReexecError as error:
            log.error("%s; the old code goes on", error)
        carried = Carried(result)
        listeners = Listeners.restore(result["listeners"])
        loaded = replace(loaded, config=carried.config)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Asked to stop before anything was begun."""
    raise SystemExit(0)


def _refuse(*lines: str) -> int:
    for line in lines:
        sys.stderr.write(f"gpusup: {line}\n")
    sys.stderr.flush()
    os.environ.pop("NOTIFY_SOCKET", None)
    return USAGE

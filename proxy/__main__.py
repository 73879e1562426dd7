"""`python -m gpusup.proxy --listen-fd A --link-fd B --config-fd C --name proxy0`: one front door.

Started by the supervisor only, with the descriptors it names: the listening socket, one end of a
socket pair, and a memfd with the whole configuration as msgpack.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket
import sys

import msgspec
import setproctitle
import uvloop

from gpusup.conf import heap
from gpusup.conf.log import set_up
from gpusup.conf.schema import Config

from .security import KeyFileError
from .serve import Process
from .tls import TlsError

_PR_SET_PDEATHSIG = 1


def read_config(fd: int) -> Config:
    """Raises OSError, msgspec.ValidationError."""
    size = os.fstat(fd).st_size
    data = os.pread(fd, size, 0)
    os.close(fd)
    return msgspec.convert(msgspec.msgpack.decode(data), Config)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpusup.proxy")
    parser.add_argument("--listen-fd", type=int, required=True)
    parser.add_argument("--link-fd", type=int, required=True)
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--name", required=True)
    args = parser.parse_args()
    # From the main thread: it fires when the supervisor's creating thread ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    heap.keep(blocks=4 * heap.MIB, top=64 * heap.MIB)  # bodies come in pieces of 256 KiB
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # asked for when we seem to hang
    number = args.name.removeprefix("proxy") or args.name
    setproctitle.setproctitle(f"gpusup: proxy {number}")
    # A terminal's Ctrl-C and a service manager's TERM are for the supervisor, which tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        config = read_config(args.config_fd)
        set_up(config.log, args.name)
        listener = socket.socket(fileno=args.listen_fd)
        link = socket.socket(fileno=args.link_fd)
        process = Process(config, args.name, listener, link)
        returncode: int = uvloop.run(process.run())
        return returncode
    except (OSError, msgspec.ValidationError, TlsError, KeyFileError) as error:
        print(f"gpusup: {args.name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())

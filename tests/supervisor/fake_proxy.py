"""A proxy that serves nobody. For test_proxies.py: says hello, and repeats what it hears."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

from gpusup.supervisor import wire
from gpusup.worker.frame import FrameDecoder, pack


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--listen-fd", "--link-fd", "--config-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--name", required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with os.fdopen(given.config_fd, "rb") as file:
        how = file.read().decode()
    if how == "dies":
        sys.exit(3)
    if how == "mute":
        signal.pause()
    listener = socket.socket(fileno=given.listen_fd)
    link = socket.socket(fileno=given.link_fd)

    def say(message: wire.FromProxy) -> None:
        link.sendall(pack(wire.encode(message)))

    say(wire.ProxyHello(given.name, os.getpid()))
    say(wire.Listening("{}:{}".format(*listener.getsockname())))
    decoder = FrameDecoder()
    while data := link.recv(65536):
        for frame in decoder.feed(data):
            message = wire.decode_to_proxy(frame)
            say(wire.Notice("heard", {"what": type(message).__name__}))
            if isinstance(message, wire.StopProxy) and how != "stays":
                say(wire.Notice("last", {}))
                return


if __name__ == "__main__":
    main()

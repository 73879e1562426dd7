"""A zygote without torch, whose workers print their slot and sleep. For test_zygotes.py."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import time
from collections import deque

from gpusup.worker import wire
from gpusup.worker.frame import FrameDecoder, pack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--how", default="")
    given = parser.parse_args()
    if given.how == "dies":
        sys.exit("no module named torch")
    sock = socket.socket(fileno=given.fd)
    if given.how != "never-ready":
        ready = wire.ZygoteReady(os.getpid(), sys.executable, "0.0", (f"preload {given.preload}",))
        sock.sendall(pack(wire.encode(ready)))
    decoder = FrameDecoder()
    descriptors: deque[int] = deque()
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 65536, 64)
        if not data:
            return
        descriptors.extend(fds)
        for frame in decoder.feed(data):
            request = wire.decode_to_zygote(frame)
            spec = wire.decode_spec(request.spec)
            progress, output = descriptors.popleft(), descriptors.popleft()
            answer: wire.Spawned | wire.SpawnRefused
            if given.how == "never-ready":
                continue
            if given.how == "dies-later":
                os._exit(9)
            if given.how == "refuses":
                answer = wire.SpawnRefused(request.serial, "two threads")
            else:
                answer = wire.Spawned(request.serial, fork(spec, output, sock.fileno()))
            os.close(progress)
            os.close(output)
            sock.sendall(pack(wire.encode(answer)))


def fork(spec: wire.WorkerSpec, output: int, link: int) -> int:
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        worker = os.fork()
        if worker:
            os.write(write_fd, str(worker).encode())
            os._exit(0)
        os.setsid()
        os.close(link)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(spec.env)
        os.write(1, f"hello from {spec.slot} marked {os.environ['GPUSUP_SLOT']}\n".encode())
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(1000)
        os._exit(0)
    os.wait()
    os.close(write_fd)
    pid = int(os.read(read_fd, 20))
    os.close(read_fd)
    return pid


if __name__ == "__main__":
    main()

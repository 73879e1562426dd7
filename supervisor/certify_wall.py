"""A network namespace whose link can be cut: clients in it vanish without a word, as behind a
firewall or with a pulled cable. Needs root and the `ip` tool; where that is missing there is none.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

#: From the block that is kept for tests of network devices (RFC 2544): nobody's real address.
NETWORK: Final = "198.19"
START_LIMIT_S: Final = 10.0

#: Runs inside: opens connections as told, holds them, and cuts the link.
_INSIDE: Final = """\
import base64, json, socket, subprocess, sys
held = []
for line in sys.stdin:
    told = json.loads(line)
    if "up" in told:
        ip = told["ip"]
        for words in (["addr", "add", told["address"] + "/30", "dev", told["up"]],
                      ["link", "set", told["up"], "up"]):
            subprocess.run([ip, *words], check=True)
    elif "cut" in told:
        subprocess.run([told["ip"], "link", "set", told["cut"], "down"], check=True)
    else:
        for _ in range(told["count"]):
            sock = socket.create_connection((told["host"], told["port"]), timeout=10)
            sock.sendall(base64.b64decode(told["data"]))
            if told["read"]:
                sock.recv(65536)
            held.append(sock)
    sys.stdout.write("ok\\n")
    sys.stdout.flush()
"""


@dataclass(slots=True)
class Wall:
    """`address`: ours, as seen from inside; a service must listen on it."""

    process: subprocess.Popen[str]
    inner: str
    outer: str
    ip: str
    address: str

    def order(self, **told: object) -> None:
        """Raises OSError if the inside does not answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "ok\n":
            raise OSError("the process in the network namespace has ended")

    def open(self, port: int, data: bytes, count: int, *, read: bool) -> None:
        """`count` connections that send `data`; `read`: wait for the first piece of an answer."""
        text = base64.b64encode(data).decode()
        self.order(host=self.address, port=port, data=text, count=count, read=read)

    def cut(self) -> None:
        self.order(cut=self.inner, ip=self.ip)

    def remove(self) -> None:
        """The namespace goes with its only process; the link would too, but some time later."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            words = [self.ip, "link", "del", self.outer]
            subprocess.run(words, check=False, capture_output=True, timeout=10)
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def build() -> Wall | None:
    """None where this is not permitted or the tools are missing."""
    ip, unshare = shutil.which("ip"), shutil.which("unshare")
    if ip is None or unshare is None or os.geteuid() != 0:
        return None
    outer, inner = f"gc{os.getpid() % 10**6}o", f"gc{os.getpid() % 10**6}i"
    process = subprocess.Popen(
        [unshare, "--net", sys.executable, "-c", _INSIDE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    part = f"{NETWORK}.{os.getpid() % 250 + 1}"
    wall = Wall(process, inner, outer, ip, f"{part}.1")
    try:
        _await_namespace(process.pid)
        for words in (
            [
                "link",
                "add",
                outer,
                "type",
                "veth",
                "peer",
                "name",
                inner,
                "netns",
                str(process.pid),
            ],
            ["addr", "add", f"{wall.address}/30", "dev", outer],
            ["link", "set", outer, "up"],
        ):
            subprocess.run([ip, *words], check=True, capture_output=True, timeout=10)
        wall.order(up=inner, ip=ip, address=f"{part}.2")
    except (OSError, subprocess.SubprocessError):
        wall.remove()
        return None
    return wall


def _await_namespace(pid: int) -> None:
    """Until it has left our namespace. Raises OSError."""
    ours = os.readlink("/proc/self/ns/net")
    end = time.monotonic() + START_LIMIT_S
    while os.readlink(f"/proc/{pid}/ns/net") == ours:
        if time.monotonic() > end:
            raise OSError("no network namespace")
        time.sleep(0.01)

"""Thousands of requests that are nearly right, at a running server: nothing may hurt it.

    python tests/conformance/fuzz.py http://127.0.0.1:8000 MODEL [--requests 10000] [--seed 1]

Each answer must be one: JSON where it is an error, and no 500 or 502. In the end the server is
ready, and with --pid its memory has not grown by more than --grow MiB. Standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if __package__:
    from .report import need, say
    from .v2_server import LENGTH, Server
else:
    sys.path.insert(0, str(Path(__file__).parent))
    from report import need, say  # type: ignore[import-not-found,no-redef]
    from v2_server import LENGTH, Server  # type: ignore[import-not-found,no-redef]

ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**31, 2**32, 2**63, 2**64, 2**65, 1e39, "", "x", "é", [], [[]], {},
    [0], [2**32, 2**32], [-1, -1], [1] * 40, {"a": {}}, "9" * 400,
)  # fmt: skip
WORDS = (b"NaN", b"Infinity", b"\x00", b"\xff\xfe", b"[" * 200, b"]" * 200, b'"', b"\\u0000", b",")
TYPES = (
    "application/json", "application/octet-stream", "application/x-npy", "image/png", "",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "multipart/form-data",
)  # fmt: skip
ACCEPTS = ("*/*", "application/json", "application/x-npy", "text/event-stream;q=0", "x", "a/b")


class Fuzz:
    def __init__(self, url: str, model: str, seed: int) -> None:
        self.server = Server(url, model)
        self.model = model
        self.chance = random.Random(seed)
        self.statuses: Counter[int] = Counter()
        self._at = urlsplit(url)
        self._link: http.client.HTTPConnection | None = None

    # -- requests that are nearly right -----------------------------------------------------------

    def spoil(self, value: Any, depth: int = 0) -> Any:
        """The same with one thing changed, most of the time."""
        chance = self.chance
        if depth > 6 or chance.random() < 0.2:
            return chance.choice(ODD)
        if isinstance(value, dict) and value:
            found = dict(value)
            key = chance.choice(list(found))
            how = chance.random()
            if how < 0.15:
                del found[key]
            elif how < 0.3:
                found[str(chance.choice(ODD))[:20]] = found[key]
            else:
                found[key] = self.spoil(found[key], depth + 1)
            return found
        if isinstance(value, list) and value:
            spot = chance.randrange(len(value))
            how = chance.random()
            if how < 0.2:
                return value * 2
            if how < 0.4:
                return value[:spot]
            return [*value[:spot], self.spoil(value[spot], depth + 1), *value[spot + 1 :]]
        return chance.choice(ODD)

    def scratch(self, body: bytes) -> bytes:
        chance = self.chance
        how = chance.random()
        spot = chance.randrange(len(body) + 1)
        if how < 0.3:
            return body[:spot]
        if how < 0.6:
            return body[:spot] + chance.choice(WORDS) + body[spot:]
        if how < 0.8:
            return body[:spot] + chance.randbytes(8) + body[spot + 8 :]
        return body + chance.choice(WORDS)

    def v2(self) -> tuple[bytes, dict[str, str]]:
        chance = self.chance
        if chance.random() < 0.5:
            document = self.server.json_request(parameters={"priority": 1, "k": "v"}, id="7")
            if chance.random() < 0.8:
                document = self.spoil(document)
            return json.dumps(document).encode(), {}
        body, headers = self.server.binary_request(outputs=[{"name": "x"}], id="7")
        split = int(headers[LENGTH])
        document = self.spoil(json.loads(body[:split]))
        text = json.dumps(document).encode()
        headers[LENGTH] = str(
            chance.choice((len(text), len(text), len(text), 0, 1, -1, "x", 10**9))
        )
        return text + body[split:], headers

    def once(self) -> None:
        chance = self.chance
        body, headers = self.v2()
        if chance.random() < 0.3:
            body = self.scratch(body)
        if chance.random() < 0.6:
            path = self.server.base + "/infer"
        else:
            path = f"/predictions/{self.model}"
            headers["Content-Type"] = chance.choice(TYPES)
            headers["Accept"] = chance.choice(ACCEPTS)
            if chance.random() < 0.3:
                body = b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n" + body
                body += chance.choice((b"", b"\r\n--b--", b"\r\n--b", b"\r\n--b\r\n"))
        if chance.random() < 0.1:
            headers["Content-Encoding"] = chance.choice(("gzip", "deflate", "br", "identity", ""))
        if chance.random() < 0.1:
            headers["X-Request-Timeout"] = chance.choice(("1", "0", "nan", "-1", "x"))
        if chance.random() < 0.1:
            headers["Priority"] = chance.choice(("u=1", "u=9", "u", "i", "u=é".encode().hex()))
        self.send(path, body, headers)

    def send(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        link = self._link
        if link is None:
            assert self._at.hostname is not None
            link = http.client.HTTPConnection(self._at.hostname, self._at.port or 80, timeout=30)
            self._link = link
        link.request("POST", path, body=body, headers=headers)
        answer = link.getresponse()
        data = answer.read()
        if answer.will_close:
            link.close()
            self._link = None
        self.statuses[answer.status] += 1
        shown = f"{answer.status} {data[:200]!r} to {path} {headers} {body[:300]!r}"
        need(answer.status not in (500, 502), shown)
        if answer.status >= 400:
            need(answer.getheader("Content-Type") == "application/json", shown)
            found = json.loads(data)
            need(isinstance(found["error"], str) and len(data) < 2000, shown)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.once()
        if self._link is not None:
            self._link.close()
        need(self.server.call("GET", "/readyz")[0] == 200, "not ready any more")
        need(sum(self.statuses.values()) == count)


def resident(pid: int) -> int:
    """MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Send nearly right requests to a server.")
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pid", type=int, action="append", default=[], help="watch its memory")
    parser.add_argument("--grow", type=int, default=64, help="MiB it may grow by")
    given = parser.parse_args()
    fuzz = Fuzz(given.url, given.model, given.seed)
    fuzz.run(min(1000, given.requests))  # until caches are full
    before = {pid: resident(pid) for pid in given.pid}
    fuzz.statuses.clear()
    fuzz.run(given.requests)
    say(f"{given.requests} requests: {dict(sorted(fuzz.statuses.items()))}")
    failed = 0
    for pid, was in before.items():
        now = resident(pid)
        say(f"pid {pid}: {was} MiB before, {now} MiB after")
        failed |= now - was > given.grow
    return failed


if __name__ == "__main__":
    raise SystemExit(main())

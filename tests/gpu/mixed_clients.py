"""Clients in closed loops that send square images of several sizes; one process of them.

    python mixed_clients.py URL --clients 25 --seconds 20 --sizes 256,512 --weights 0.6,0.4 --seed 1

A client that is told 429 or 503 with Retry-After waits for about so long, as it should. Prints one
JSON object: {"counts": {status: n}, "no_retry_after": n, "lost": [...], "times": {size: [s, ...]},
"texts": {...}}.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import threading
import time
from collections import Counter
from urllib.parse import urlsplit


class Seen:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()
        self.lost: list[str] = []
        self.no_retry_after = 0
        self.times: dict[int, list[float]] = {}


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, str, bytes]:
    """Status, Retry-After, answer. Raises OSError or HTTPException where none came."""
    headers = {"Content-Type": "application/octet-stream"}
    # Refused before all of it was read: the answer is there already.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", path, body, headers)
    reply = connection.getresponse()
    data = reply.read()
    return reply.status, reply.headers.get("Retry-After", ""), data


def client(
    url: str, bodies: dict[int, bytes], weights: list[float], seed: int, end: float, seen: Seen
) -> None:
    split = urlsplit(url)
    assert split.hostname
    chance = random.Random(seed)
    sizes = list(bodies)
    connection = http.client.HTTPConnection(split.hostname, split.port, timeout=90)
    while time.monotonic() < end:
        size = chance.choices(sizes, weights)[0]
        began = time.monotonic()
        try:
            status, retry_after, data = ask(connection, split.path, bodies[size])
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            with seen.lock:
                seen.counts["lost"] += 1
                seen.lost.append(f"{size}: {error!r} after {time.monotonic() - began:.2f} s")
            time.sleep(0.1)
            continue
        took = time.monotonic() - began
        with seen.lock:
            seen.counts[str(status)] += 1
            if status == 200:
                seen.times.setdefault(size, []).append(round(took, 4))
            else:
                seen.texts[f"{status} {data[:160].decode(errors='replace')}"] += 1
            if status in (429, 503) and not retry_after:
                seen.no_retry_after += 1
        if status in (429, 503):
            pause = float(retry_after or 1) * chance.uniform(0.5, 1.0)
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
        elif status != 200:
            time.sleep(0.05)
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    bodies = {size: os.urandom(3 * size * size) for size in map(int, given.sizes.split(","))}
    weights = [float(w) for w in given.weights.split(",")]
    seen = Seen()
    end = time.monotonic() + given.seconds
    threads = [
        threading.Thread(
            target=client, args=(given.url, bodies, weights, 1000 * given.seed + n, end, seen)
        )
        for n in range(given.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(
        json.dumps(
            {
                "counts": seen.counts,
                "no_retry_after": seen.no_retry_after,
                "lost": seen.lost[:5],
                "times": seen.times,
                "texts": dict(seen.texts.most_common(4)),
            }
        )
    )


if __name__ == "__main__":
    main()

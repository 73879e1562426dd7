"""The server under test: the one at GPUSUP_TEST_URL, or a front door with models of ours."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: As tests/proxy/front.py serves.
MAX_BODY = 2**20
SLOW_S = 6.0


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    if given := os.environ.get("GPUSUP_TEST_URL"):
        yield given.rstrip("/")
        return
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "tests.proxy.front", str(port)], cwd=ROOT)
    try:
        _wait(server, port)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < end:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            link.request("GET", "/v2/health/ready")
            if link.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.05)
        finally:
            link.close()
    pytest.fail(f"the server did not come up: {server.poll()}")

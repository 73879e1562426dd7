"""The servers that gpusup is measured against: how each is installed, started and spoken to.

A peer lives in a venv of its own under the cache folder. torch is not installed there again: the
venv sees the packages of the interpreter that runs the bench behind its own, so that everybody
computes with the same torch.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

APPS = Path(__file__).parent / "apps"
JSON, BYTES = "application/json", "application/octet-stream"


class BenchProblem(Exception):
    """Something that the bench needs is missing or does not work; the text says what."""


def as_v2(body: bytes) -> tuple[bytes, str]:
    """Open Inference Protocol, JSON: the bytes as a BYTES tensor in base64."""
    data = [base64.b64encode(body).decode()]
    tensor = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": data}
    return json.dumps({"inputs": [tensor]}).encode(), JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`argv` may hold {python}, {bin} (the venv's programs), {apps}, {port}. `best` is printed."""

    name: str
    argv: tuple[str, ...]
    best: str
    module: str = ""  # what must be importable
    packages: tuple[str, ...] = ()
    path: str = "/predict"
    conv_path: str = "/predict"
    conv_body: Callable[[bytes], tuple[bytes, str]] = lambda body: (body, BYTES)
    env: dict[str, str] = field(default_factory=dict)
    program: str = ""  # that must be on PATH
    start_limit_s: float = 60.0
    gpu_workers: int = 1  # on one GPU: what served most there


def _app(name: str, *arguments: str) -> tuple[str, ...]:
    return ("{python}", f"{{apps}}/{name}_app.py", *arguments)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="mosec",
            module="mosec",
            packages=("mosec==0.9.8",),
            argv=_app(
                "mosec", "--address", "127.0.0.1", "--port", "{port}",
                "--max-request-size", str(64 << 20), "--log-level", "warning",
            ),
            gpu_workers=4,
            best="one worker process (four on a GPU), bytes passed through without a codec, "
            "dynamic batching (max_batch_size, max_wait_time 5 ms), access log off",
        ),
        Peer(
            name="litserve",
            module="litserve",
            packages=("litserve==0.2.19", "pyzmq"),
            argv=_app("litserve"),
            gpu_workers=2,
            best="fast_queue=True, restart_workers=True, batching (max_batch_size, batch_timeout "
            "5 ms), access log off; on a GPU two workers and four API servers",
        ),
        Peer(
            name="torchserve",
            module="ts",
            packages=("torchserve==0.12.0", "torch-model-archiver==0.12.0", "packaging", "pyyaml",
                      "setuptools<81"),
            argv=_app("torchserve"),
            path="/predictions/bench",
            conv_path="/predictions/bench",
            program="java",
            start_limit_s=90.0,
            best="batchSize, maxBatchDelay 5 ms, job_queue_size 1000, logs at warning",
        ),
        Peer(
            name="mlserver",
            module="mlserver",
            packages=("mlserver==1.7.1", "uvloop==0.21.0"),
            argv=_app("mlserver"),
            conv_path="/v2/models/bench/infer",
            conv_body=as_v2,
            best="one parallel worker, adaptive batching (5 ms; exists on the V2 protocol only, so "
            "base64 in JSON), uvloop 0.21",
        ),
        Peer(
            name="bentoml",
            module="bentoml",
            packages=("bentoml==1.4.40",),
            argv=("{bin}/bentoml", "serve", "bentoml_app:Bench", "--working-dir", "{apps}",
                  "--host", "127.0.0.1", "--port", "{port}"),
            env={"BENTOML_DO_NOT_TRACK": "True"},
            best="raw-bytes front service before a batchable one, access log off",
        ),
        Peer(
            name="ray",
            module="ray",
            packages=("ray[serve]==2.60.0",),
            argv=_app("ray"),
            env={"RAY_USAGE_STATS_ENABLED": "0"},
            start_limit_s=120.0,
            best="serve.batch (5 ms), one replica, access log and dashboard off",
        ),
        Peer(
            name="naive",
            module="aiohttp",
            argv=_app("naive"),
            best="none to set: the model is called in the request handler",
        ),
    )
}  # fmt: skip

#: Measured in every run on a CPU; the others only when asked for.
USUAL = ("mosec", "litserve")


def chosen(text: str) -> list[Peer]:
    """The peers named in "mosec,litserve"; raises BenchProblem for a name nobody has."""
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in PEERS:
            raise BenchProblem(f"unknown peer {name!r}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def install(peer: Peer, cache: Path, say: Callable[[str], None]) -> Path:
    """The interpreter to run `peer` with: ours if it has the module, else that of its venv."""
    if peer.program and not shutil.which(peer.program):
        raise BenchProblem(f"{peer.name} needs {peer.program!r} on PATH")
    if not peer.packages or importlib.util.find_spec(peer.module):
        return Path(sys.executable)
    venv = cache / peer.name
    python, done = venv / "bin" / "python", venv / "installed"
    wanted = "\n".join((sys.executable, *peer.packages))
    if done.exists() and done.read_text() == wanted:
        return python
    shutil.rmtree(venv, ignore_errors=True)
    say(f"installing {', '.join(peer.packages)} into {venv}")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        ours = sysconfig.get_path("purelib")
        theirs = next(venv.glob("lib/python*/site-packages"))
        (theirs / "behind.pth").write_text(ours + "\n")
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *peer.packages], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "")[-600:]
        raise BenchProblem(
            f"cannot install {peer.name}: exit {error.returncode}\n{said}"
        ) from error
    done.write_text(wanted)
    return python

"""Who takes part in a run, and how each of them is started for a kind of work."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load import Wrk
from peers import APPS, BYTES, JSON, BenchProblem, Peer, install
from server import Server, free_port

#: 100 bytes.
NOOP = json.dumps({"op": "noop", "id": "0123456789abcdef" * 2, "pad": "x" * 35}).encode()
CONV = bytes(range(256)) * 48  # one image of 3 x 64 x 64
GPUSUP = "gpusup"
MODEL = "bench"
GPU_MODES = ("resnet50", "vit_b_16")
#: gpusup's handler for each mode of apps/work.py.
HANDLERS = {"noop": "Op", "torch": "Faulty", "length": "Length", "conv": "Conv"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the caller chose, and where things are kept."""

    folder: Path  # of this run: logs, configurations, sockets
    cache: Path
    wrk: Wrk
    peers: tuple[Peer, ...]
    quick: bool
    gpu: bool
    weights_bytes: int
    nice: int
    say: Callable[[str], None]
    most_rounds: int = 99
    nets: tuple[str, ...] = ()
    standby: bool = False  # gpusup's model has one, and is measured when it is ready

    def rounds(self, usual: int) -> int:
        return 1 if self.quick else min(usual, self.most_rounds)

    def seconds(self, usual: float) -> float:
        return 1.0 if self.quick else usual

    def names(self) -> list[str]:
        return [GPUSUP, *(peer.name for peer in self.peers)]

    def best_settings(self) -> list[str]:
        return [f"{peer.name}: {peer.best}" for peer in self.peers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a server shall do. `body` None: the no-op's.

    `model`: keys of gpusup's [models.bench]; `tables`: of any of its tables.
    """

    mode: str
    body: bytes | None = None
    cores: str = ""
    workers: int = 1
    rows: int = 16
    width: int = 16
    timeout_s: float = 60.0
    fronts: int = 1
    handler: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def server_for(name: str, job: Job, setting: Setting) -> Server:
    """Not started yet; `with` starts it."""
    if name == GPUSUP:
        return gpusup_server(job, setting)
    return peer_server(next(p for p in setting.peers if p.name == name), job, setting)


def peer_server(peer: Peer, job: Job, setting: Setting) -> Server:
    python, port = install(peer, setting.cache, setting.say), free_port()
    words = {"python": python, "bin": python.parent, "apps": APPS, "port": port}
    body, kind, path = job.body or NOOP, BYTES if job.body else JSON, peer.path
    if job.mode == "conv":
        path = peer.conv_path
        body, kind = peer.conv_body(body)
    return Server(
        name=peer.name,
        argv=[word.format(**words) for word in peer.argv],
        port=port,
        path=path,
        body=body,
        content_type=kind,
        log=setting.folder / f"{peer.name}.log",
        nice=setting.nice,
        cores=job.cores,
        start_limit_s=peer.start_limit_s,
        env=dict(peer.env)
        | {
            "BENCH_MODE": job.mode,
            "BENCH_PORT": str(port),
            "BENCH_WORKERS": str(peer.gpu_workers if job.mode in GPU_MODES else job.workers),
            "BENCH_FRONTS": str(job.fronts),
            "BENCH_WIDTH": str(job.width),
            "BENCH_BATCH": str(job.rows),
            "BENCH_TIMEOUT": f"{job.timeout_s:g}",
        },
    )


def gpusup_server(job: Job, setting: Setting) -> Server:
    """`setting.folder` gets its configuration, sockets and state, fresh for each start."""
    port = free_port()
    folder = setting.folder / f"gpusup-{port}"
    folder.mkdir()
    handler = job.handler or f"{APPS / 'gpusup_app.py'}:{HANDLERS[job.mode]}"
    tables: dict[str, dict[str, Any]] = {
        "server": {
            "listen": f"127.0.0.1:{port}",
            "proxies": job.fronts,
            "run_dir": str(folder),
            "state_dir": str(folder / "state"),
        },
        "log": {"level": "warning", "requests": 0.0},
        # One GPU, also where there are more: what is compared is one, and so is the device alone.
        "devices": {"use": ["gpu0"]} if setting.gpu else {"use": ["cpu"], "cpu_slots": job.workers},
        f"models.{MODEL}": {
            "handler": handler,
            "workers": job.workers if setting.gpu else 1,
            "max_rows": job.rows,
            "settings": {"width": job.width},
            **job.model,
        },
    }
    for name, extra in job.tables.items():
        tables[name] = tables.get(name, {}) | dict(extra)
    config = folder / "gpusup.toml"
    config.write_text(to_toml(tables))
    return Server(
        name=GPUSUP,
        argv=[sys.executable, "-m", "gpusup.supervisor", "run", str(config)],
        port=port,
        path=f"/predictions/{MODEL}",
        body=job.body or NOOP,
        content_type=BYTES if job.body else JSON,
        log=folder / "log",
        nice=setting.nice,
        cores=job.cores,
        start_limit_s=120.0,
    )


def to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of strings, numbers, booleans, lists of them, and tables inline."""
    lines: list[str] = []
    for name, keys in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)  # the same in TOML for what is left


def gpusupctl(server: Server, *arguments: str) -> list[str]:
    """The command line that steers this gpusup."""
    program = "import sys; from gpusup.supervisor.ctl import main; sys.exit(main())"
    socket = str(server.log.parent / "control.sock")
    return [sys.executable, "-c", program, "--socket", socket, *arguments]


def wait_for_standbys(server: Server, limit_s: float = 60.0) -> None:
    """Until each slot of this gpusup has its standby ready."""
    end = time.monotonic() + limit_s
    while True:
        done = subprocess.run(
            gpusupctl(server, "status", "-o", "json"), capture_output=True, text=True, check=False
        )
        slots = json.loads(done.stdout)["slots"] if done.stdout else []
        said = {slot["slot"]: slot["standby"] for slot in slots}
        if said and set(said.values()) == {"ready"}:
            return
        if time.monotonic() > end:
            raise BenchProblem(f"no standby within {limit_s:g} s: {said} {done.stderr[-200:]}")
        time.sleep(0.05)

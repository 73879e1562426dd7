"""In-place swaps of a model of some 5 GB in the only slot of a GPU, under 16 clients.

    python tests/gpu/swap_5gb.py [--gb 5.4] [--swaps 6] [--folder /dev/shm]

Prints one JSON object: the gap of each swap (last answer of the old version to the first of the
new), what failed, and how long each phase took. Exit 1 if a request failed or a gap is over 1 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import rig  # first: it says where `tests` is
import torch
from safetensors.torch import save_file

from tests.end_to_end.service import Service
from tests.end_to_end.swap_clients import Clients
from tests.gpu.swap_handler import WIDTH

GOAL_S = 1.0


def write_weights(folder: Path, size: int) -> list[Path]:
    layers = max(1, size // (WIDTH * WIDTH * 2))
    identity = torch.eye(WIDTH, dtype=torch.float16)
    files = []
    for version in (1, 2):
        tensors = {f"layer.{n}": identity.clone() for n in range(layers)}
        files.append(folder / f"model-{version}.safetensors")
        save_file({"scale": torch.tensor([float(version)]), **tensors}, files[-1])
    return files


def one_swap(service: Service, clients: Clients, version: int) -> dict[str, Any]:
    seen = len(clients.answers)
    change = service.change("/models/big/reload", {"version": str(version), "strategy": "in-place"})
    service.until(lambda: any(a.version == str(version) for a in clients.answers[seen:]))
    during = clients.answers[seen:]
    old = [a.ended for a in during if a.version != str(version) and a.status == 200]
    new = [a.ended for a in during if a.version == str(version)]
    slot = service.status()["slots"][0]
    return {
        "version": version,
        "state": change["state"],
        "gap_s": round(min(new) - max(old), 4) if old and new else None,
        "slowest_s": round(max(a.took_s for a in during), 4),
        "change_s": round(change["took_s"], 3),
        "phases_s": slot["seconds"],
        "steps": [f"{at:.3f} {text}" for at, text in change["steps"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=5.4)
    parser.add_argument("--swaps", type=int, default=6)
    parser.add_argument("--folder", default="/dev/shm", help="where the weights are made")
    parser.add_argument("--log", default="", help="where to keep the service's log")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gs-", dir=given.folder) as made:
        files = write_weights(Path(made), int(given.gb * 1e9))
        with tempfile.TemporaryDirectory(prefix="gs-") as name:
            config = (
                f'[models.big]\nhandler = "{rig.HERE / "swap_handler.py"}:Layers"\n'
                f'weights = "{made}/model-{{version}}.safetensors"\nworkers = 1\nhold = "30s"\n'
                '[devices]\nuse = ["gpu0"]\n'
            )
            service = Service(Path(name), config)
            try:
                service.start()
                with Clients(service, "big") as clients:
                    swaps = [
                        one_swap(service, clients, 1 + (n + 1) % 2) for n in range(given.swaps)
                    ]
            finally:
                service.end()
                if given.log:
                    Path(given.log).write_bytes(service.log_path.read_bytes())
        size = files[0].stat().st_size
    problems = clients.problems()
    gaps = [swap["gap_s"] for swap in swaps if swap["gap_s"] is not None]
    result = {
        "weights_bytes": size,
        "gap_s": statistics.median(gaps) if gaps else None,
        "gap_max_s": max(gaps, default=None),
        "failed": problems.total(),
        "problems": dict(problems),
        "answered": len(clients.answers),
        "swaps": swaps,
    }
    print(json.dumps(result, indent=1))
    good = gaps and len(gaps) == len(swaps) and max(gaps) <= GOAL_S and not problems
    return 0 if good and all(swap["state"] == "done" for swap in swaps) else 1


if __name__ == "__main__":
    sys.exit(main())

"""`gpusup certify` with ResNet-50 on a real GPU, images of 256 to 2048 px as PNG.

    python tests/gpu/certify.py --out DIR [words for gpusup certify]

Makes two versions of the weights (of chance: the arithmetic is the same), a configuration, and runs
the command with what else is given. Needs torchvision. With --cpu: tried out on CPU slots.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import torch
import torchvision
from packaging.requirements import Requirement
from safetensors.torch import save_file

CONFIG = """\
[server]
body_limit = "64MiB"

[supervision]
preload = ["torchvision"]
{devices}
[models.resnet50]
handler = "gpusup.worker.builtin_image:ImageClassifier"
weights = "resnet50-{{version}}.safetensors"
dtype = "{dtype}"
retry = "safe"
decode_threads = 8
settings = {{ network = "torchvision.models:resnet50", size = [224, 224] }}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    args, words = parser.parse_known_args()
    if old := too_old():
        print(f"not what gpusup needs: {', '.join(old)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gr-") as folder:
        return certify(Path(folder), args.out, args.cpu, words)


def too_old() -> list[str]:
    """Packages outside of what pyproject.toml allows, as where gpusup was not installed by pip:
    with an aiohttp below the floor, slow heads and idle connections are not closed."""
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["dependencies"]
    old: list[str] = []
    for each in map(Requirement, wanted):
        with contextlib.suppress(metadata.PackageNotFoundError):
            if (found := metadata.version(each.name)) not in each.specifier:
                old.append(f"{each.name} {found}, wanted {each.specifier}")
    return old


def certify(folder: Path, out: Path, cpu: bool, words: list[str]) -> int:
    for version in (1, 2):
        torch.manual_seed(version)
        net = torchvision.models.resnet50()
        save_file(net.state_dict(), str(folder / f"resnet50-{version}.safetensors"))
    devices = '[devices]\nuse = ["gpu0"]\n'
    if cpu:
        devices = '[devices]\nuse = ["cpu"]\ncpu_memory = "4GiB"\n'
    dtype = "model" if cpu else "fp16"
    config = folder / "gpusup.toml"
    config.write_text(CONFIG.format(devices=devices, dtype=dtype))
    command = ["-m", "gpusup.supervisor", "certify", str(config), "--report", str(out)]
    return subprocess.run([sys.executable, *command, *words], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())

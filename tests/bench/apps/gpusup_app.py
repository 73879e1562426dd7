"""The bench's work as gpusup's handlers."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpusup.worker.loader import load_weights
from gpusup.worker.model import ConfigProblem, InvalidInput, Model, Request, Tensor

sys.path.insert(0, str(Path(__file__).parent))
import work

#: How the JSON handler's `op` travels through the batch.
CODES = {"noop": 0, "slow": 1, "hang": 2, "hang-gil": 3}

# The body is read-only memory of the server; nothing here writes to the tensor that views it.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


NOTHING = torch.zeros(1, dtype=torch.uint8)


class Op(Model):
    """The no-op: JSON in, JSON out, as `work.op`, and nothing on the device."""

    decode_inline = True
    capturable = False

    def decode(self, request: Request) -> torch.Tensor:
        return NOTHING

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"ok": True, "n": len(request.json.get("pad", "")), "pid": os.getpid()}

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        return (NOTHING,)


class Faulty(Model):
    """`Op` with the operations that are slow or never end; they happen in `forward`."""

    decode_inline = True
    capturable = False

    def decode(self, request: Request) -> torch.Tensor:
        asked = request.json
        code = CODES[asked["op"]]
        return torch.tensor((code, len(asked.get("pad", "")), asked.get("ms", 20) if code else 0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if batch[:, 0].any():
            for code, _, pause_ms in batch.tolist():
                if code == CODES["slow"]:
                    time.sleep(pause_ms / 1000)
                elif code:
                    work.hang(hold_gil=code == CODES["hang-gil"])
        return batch

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"ok": True, "n": int(row[1]), "pid": os.getpid()}

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(3, dtype=torch.int64),)


class Length(Model):
    """Raw bytes in, their number out."""

    decode_inline = True
    capturable = False

    def decode(self, request: Request) -> torch.Tensor:
        return torch.tensor((len(request.view),))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"len": int(row[0]), "pid": os.getpid()}

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(1, dtype=torch.int64),)


class Conv(Model):
    """Raw uint8 images of 64 x 64 through the small net. `settings`: width."""

    inputs = (Tensor("image", "UINT8", (3, work.SIDE, work.SIDE)),)
    outputs = (Tensor("class", "INT64", ()),)
    decode_inline = True

    def load(self, device: torch.device, version: str) -> None:
        self.net = work.conv_net(int(self.settings["width"])).to(device)

    def decode(self, request: Request) -> torch.Tensor:
        if len(request.view) != work.CONV_BYTES:
            raise InvalidInput(f"body has {len(request.view)} bytes, {work.CONV_BYTES} wanted")
        pixels = torch.frombuffer(request.view, dtype=torch.uint8)
        return pixels.view(3, work.SIDE, work.SIDE)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = work.conv_forward(self.net, batch)
        return classes

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"class": int(row), "pid": os.getpid()}

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(3, work.SIDE, work.SIDE, dtype=torch.uint8),)


class Weights(Model):
    """Answers with the number stored in its weights file; the file may be as large as wanted."""

    decode_inline = True
    capturable = False
    held: Mapping[str, torch.Tensor]

    def load(self, device: torch.device, version: str) -> None:
        if not self.weights:
            raise ConfigProblem("this handler needs `weights`")
        self.held = load_weights(self.weights, device)

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return self.held

    def decode(self, request: Request) -> torch.Tensor:
        return torch.tensor((len(request.json.get("pad", "")),))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * 0 + self.held["number"]

    def encode(self, row: torch.Tensor, request: Request) -> Any:
        return {"number": int(row[0]), "pid": os.getpid()}

    def warm_up(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(1, dtype=torch.int64),)

"""Models for tests, well-behaved and not. Address them as "<path of this file>:Class".

What a model does is steered by its `settings`, or by the request: a JSON body
`{"value": 1.5, "do": "hang"}`, the query's params, or, for tensor requests, the values sent.
`trigger` names the value (default 666) at which a faulty model shows its fault.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpusup.worker.model import ConfigProblem, InvalidInput, Model, Request, Response, Tensor

if TYPE_CHECKING:
    import numpy as np
    import torch

TRIGGER = 666.0


class Number(Model):
    """The base: one FP32 per row, `{"value": x}` or a number as the body of a raw request."""

    inputs = (Tensor("x", "FP32", (-1,)),)
    outputs = (Tensor("y", "FP32", (-1,)),)
    capturable = False

    def decode(self, request: Request) -> torch.Tensor:
        import torch

        try:
            body = json.loads(request.body)
            value = float(body["value"] if isinstance(body, dict) else body)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f'the body should be {{"value": number}}, not {error}') from error
        return torch.tensor([value])

    def forward(self, batch: Any) -> Any:
        return batch

    def encode(self, row: Any, request: Request) -> Any:
        return {"value": float(row[0]), "pid": os.getpid()}

    def triggered(self, batch: Any) -> bool:
        """With `settings.above`, all values from there on are triggers: each can be another."""
        if "above" in self.settings:
            return bool((batch >= float(self.settings["above"])).any())
        return bool((batch == float(self.settings.get("trigger", TRIGGER))).any())


class Echo(Number):
    """y = x, of whatever shape."""


class Double(Number):
    """y = 2 x; raw answers carry the pid of the worker and its version."""

    def load(self, device: torch.device, version: str) -> None:
        self.version = version

    def forward(self, batch: Any) -> Any:
        return batch * 2

    def encode(self, row: Any, request: Request) -> Any:
        return {"value": float(row[0]), "pid": os.getpid(), "version": self.version}


class Sleeper(Number):
    """Sleeps with the GIL free, `settings.seconds` per batch; with `settings.by_value` the
    largest value of the batch in seconds."""

    def forward(self, batch: Any) -> Any:
        seconds = float(self.settings.get("seconds", 0.1))
        if self.settings.get("by_value"):
            seconds = float(batch.max())
        time.sleep(seconds)
        return batch


class GilHolder(Number):
    """Holds the GIL at the trigger, for `settings.seconds` if given, else in a regular expression
    that backtracks: `settings.length` 28 takes some ten seconds, each one more doubles it."""

    def forward(self, batch: Any) -> Any:
        if self.triggered(batch) and "seconds" in self.settings:
            ctypes.PyDLL(None).usleep(int(float(self.settings["seconds"]) * 1e6))
        elif self.triggered(batch):
            re.match(r"(a+)+$", "a" * int(self.settings.get("length", 40)) + "b")
        return batch


class Hang(Number):
    """Stuck in C for ever at the trigger, with the GIL free: what a hung CUDA call looks like."""

    def forward(self, batch: Any) -> Any:
        while self.triggered(batch):
            ctypes.CDLL(None).pause()  # a signal ends it; the loop goes back in
        return batch


class HangGil(Number):
    """Stuck in C for ever at the trigger, with the GIL held."""

    def forward(self, batch: Any) -> Any:
        while self.triggered(batch):
            ctypes.PyDLL(None).pause()
        return batch


class Die(Number):
    """SIGKILL at the trigger; `settings.exit` leaves with that code instead."""

    def forward(self, batch: Any) -> Any:
        if self.triggered(batch):
            if "exit" in self.settings:
                os._exit(int(self.settings["exit"]))
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


class Segfault(Number):
    """SIGSEGV at the trigger."""

    def forward(self, batch: Any) -> Any:
        if self.triggered(batch):
            ctypes.string_at(0)
        return batch


class Count(Number):
    """Appends one line "pid value" per row to `settings.file`, each time it really computes."""

    def forward(self, batch: Any) -> Any:
        lines = "".join(f"{os.getpid()} {float(row.flatten()[0])}\n" for row in batch)
        fd = os.open(str(self.settings["file"]), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, lines.encode())  # one write: lines of several workers don't mix
        os.close(fd)
        time.sleep(float(self.settings.get("seconds", 0.0)))
        if self.triggered(batch):
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


class Faulty(Number):
    """An ordinary exception at the trigger: that item fails, the worker is well."""

    def forward(self, batch: Any) -> Any:
        if self.triggered(batch):
            raise RuntimeError("the trigger was there")
        return batch


class FakeCuda(Number):
    """From the first bad input on, each call fails as after a device-side assert."""

    poisoned = False

    def forward(self, batch: Any) -> Any:
        self.poisoned = self.poisoned or self.triggered(batch)
        if self.poisoned:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return batch


class Unhealthy(Number):
    """`is_healthy` says no once `settings.file` exists."""

    def is_healthy(self) -> bool:
        return not os.path.exists(str(self.settings["file"]))


class RaisesInLoad(Number):
    """`settings.kind`: "config" (ConfigProblem), "oom", "exit" (sys.exit) or anything else."""

    def load(self, device: torch.device, version: str) -> None:
        match self.settings.get("kind", "error"):
            case "config":
                raise ConfigProblem("weights.pt is of another architecture")
            case "oom":
                import torch

                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            case "exit":
                sys.exit(3)
            case _:
                raise ValueError("shape mismatch:\nexpected 3, got 4")


class DiesInLoad(Number):
    """SIGKILL while loading; with `settings.file` only as long as that does not exist."""

    def load(self, device: torch.device, version: str) -> None:
        if not os.path.exists(str(self.settings.get("file", ""))):
            os.kill(os.getpid(), signal.SIGKILL)


class SlowLoad(Number):
    """`settings.seconds` to load."""

    def load(self, device: torch.device, version: str) -> None:
        time.sleep(float(self.settings.get("seconds", 1.0)))


class HangsInLoad(Number):
    def load(self, device: torch.device, version: str) -> None:
        while True:
            ctypes.CDLL(None).pause()


class WrongRows(Number):
    """One row too few at the trigger."""

    def forward(self, batch: Any) -> Any:
        return batch[:-1] if self.triggered(batch) else batch


class Allocates(Number):
    """Holds as many MiB as the largest value of the batch says, touched, while it computes, for
    `settings.seconds`; `settings.weights_mib` for good."""

    def load(self, device: torch.device, version: str) -> None:
        import torch

        self.device = device
        mib = int(self.settings.get("weights_mib", 0))
        self.weight = torch.ones(mib * 2**20, dtype=torch.uint8, device=device)

    def forward(self, batch: Any) -> Any:
        import torch

        mib = int(batch.max())
        block = torch.ones(max(mib, 0) * 2**20, dtype=torch.uint8, device=self.device)
        time.sleep(float(self.settings.get("seconds", 0.0)))
        del block
        return batch


class Grows(Number):
    """Takes `settings.kib` (default 1) for each value of each row while it computes, touched and
    held for `settings.seconds`: the memory of a request can be told from its shape."""

    def load(self, device: torch.device, version: str) -> None:
        self.device = device

    def forward(self, batch: Any) -> Any:
        import torch

        size = batch.numel() * int(self.settings.get("kib", 1)) * 1024
        block = torch.ones(size, dtype=torch.uint8, device=self.device)
        time.sleep(float(self.settings.get("seconds", 0.0)))
        del block
        return batch

    def forward_degraded(self, batch: Any, step: str) -> Any:
        return batch

    degrade_steps = ("lower_precision",)


class Leaky(Number):
    """Keeps `settings.kib` (default 64) for each batch it has seen."""

    def load(self, device: torch.device, version: str) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []

    def forward(self, batch: Any) -> Any:
        import torch

        size = int(self.settings.get("kib", 64)) * 1024
        self.kept.append(torch.ones(size, dtype=torch.uint8, device=self.device))
        return batch


class Chatty(Number):
    """5 MB without a line's end while loading, and junk that is no UTF-8 with each batch."""

    def load(self, device: torch.device, version: str) -> None:
        sys.stdout.write("x" * 5_000_000)
        sys.stdout.flush()

    def forward(self, batch: Any) -> Any:
        os.write(1, b"\xff\xfe\x00\x1b[2Jjunk\r\n\xc3")
        return batch


class Flood(Number):
    """Writes `settings.mib` (default 8) MiB without a line's end at the trigger."""

    def forward(self, batch: Any) -> Any:
        if self.triggered(batch):
            for _ in range(int(self.settings.get("mib", 8))):
                os.write(1, b"\xfe" * 2**20)
        return batch


class Forks(Number):
    """Starts what it should not leave behind: a child, and one that has fled to a session of its
    own under another parent and ignores SIGTERM. Their pids go to `settings.file`."""

    def load(self, device: torch.device, version: str) -> None:
        command = (
            "import os, signal, time\n"
            "if os.fork(): os._exit(0)\n"
            "os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            f"open({str(self.settings['file'])!r}, 'a').write(str(os.getpid()) + chr(10))\n"
            "time.sleep(1000)\n"
        )
        subprocess.run([sys.executable, "-c", command], check=True)
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.setsid()
            while True:
                time.sleep(1000)
        with open(str(self.settings["file"]), "a") as file:
            file.write(f"{child.pid}\n")


class Scaled(Number):
    """y = x times the number in the weights file; a file that is no number can't be used.

    A stand-in for versions: its weights are text that a test can write.
    """

    def load(self, device: torch.device, version: str) -> None:
        try:
            with open(self.weights) as file:
                self.factor = float(file.read())
        except (OSError, ValueError) as error:
            raise ConfigProblem(f"cannot read weights {self.weights}: {error}") from error
        self.version = version

    def forward(self, batch: Any) -> Any:
        return batch * self.factor

    def encode(self, row: Any, request: Request) -> Any:
        return {"value": float(row[0]), "version": self.version, "pid": os.getpid()}


class Stored(Number):
    """`Scaled` with the number in a safetensors file, as tensor "factor" of shape (1,).

    `settings.seconds` to load; `settings.raises` raises in `load` on a real device only, so that
    no check beforehand can see it; `settings.forward_raises` in `forward`. `settings.mib` are held.
    """

    def load(self, device: torch.device, version: str) -> None:
        from gpusup.worker.loader import load_weights

        factor = load_weights(self.weights, device)["factor"]
        if tuple(factor.shape) != (1,):
            raise ConfigProblem(f"factor has shape {list(factor.shape)}, [1] is wanted")
        self.version = version
        if device.type != "meta":
            time.sleep(float(self.settings.get("seconds", 0.0)))
            if self.settings.get("raises"):
                raise RuntimeError("the weights are not to my liking")
            self.ballast = bytes(2**20) * int(self.settings.get("mib", 0))
            self.factor = float(factor)

    def forward(self, batch: Any) -> Any:
        if self.settings.get("forward_raises"):
            raise RuntimeError("nothing comes out of this")
        return batch * self.factor

    def encode(self, row: Any, request: Request) -> Any:
        return {"value": float(row[0]), "version": self.version, "pid": os.getpid()}

    def warm_up(self) -> Sequence[torch.Tensor]:
        import torch

        return (torch.ones(1),)


class Lengths(Number):
    """Rows of any length; says with how many others, and of what shape, each was computed."""

    def decode(self, request: Request) -> torch.Tensor:
        import torch

        return torch.tensor([float(x) for x in json.loads(request.body)])

    def forward(self, batch: Any) -> Any:
        import torch

        about = torch.tensor([float(len(batch)), float(batch.shape[1])])
        return {"sum": batch.sum(1, keepdim=True), "batch": about.expand(len(batch), 2)}

    def encode(self, row: Any, request: Request) -> Any:
        return {"sum": float(row["sum"][0]), "batch": row["batch"].tolist()}


class Degradable(Number):
    """Says whether it was served in full or under a step."""

    degrade_steps = ("skip_post_processing", "lower_precision")

    def forward_degraded(self, batch: Any, step: str) -> Any:
        return batch * 0

    def encode(self, row: Any, request: Request) -> Any:
        return Response(f"{float(row[0])} {request.degrade}".encode(), "text/plain")


class TinyText(Model):
    """Text without torch: `generate` repeats the prompt's words, `embed` counts letters.

    `params.max_tokens` (default: as many as there are words), `params.delay` seconds per word;
    the word "explode" raises, "hang" never comes.
    """

    capturable = False

    def generate(self, prompt: str, params: Mapping[str, Any]) -> Iterator[str]:
        words = prompt.split() or ["nothing"]
        limit = int(params.get("max_tokens") or len(words))
        for number in range(limit):
            word = words[number % len(words)]
            if word == "explode":
                raise RuntimeError("the word was explode")
            while word == "hang":
                ctypes.CDLL(None).pause()
            time.sleep(float(params.get("delay", self.settings.get("delay", 0.0))))
            yield word if number == 0 else f" {word}"

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]
    ) -> Iterator[str]:
        return self.generate(str(messages[-1].get("content", "")), params)

    def embed(self, texts: Sequence[str], params: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        import numpy

        alphabet = "abcdefghijklmnopqrstuvwxyz"
        counts = [[text.lower().count(letter) for letter in alphabet] for text in texts]
        return numpy.array(counts, dtype=numpy.float32)


class Boundless(Number):
    """Believes whatever it is sent: any bytes are an input, and it takes as much memory as a PNG's
    head asks for, and keeps it."""

    def load(self, device: torch.device, version: str) -> None:
        self.device = device
        self.kept: list[torch.Tensor] = []

    def decode(self, request: Request) -> torch.Tensor:
        import torch

        head = bytes(request.body[16:24])
        if len(head) == 8:
            size = int.from_bytes(head[:4], "big") * int.from_bytes(head[4:], "big")
            if size <= 2**28:
                self.kept.append(torch.ones(size, dtype=torch.uint8, device=self.device))
        return torch.tensor([1.0])

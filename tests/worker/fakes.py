"""An engine without batches, buckets or torch, for the tests of what lies around the engine."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence

from gpusup.worker import wire
from gpusup.worker.entry import Entry, Fence, LoadProblem
from gpusup.worker.progress import Writer


def nothing() -> None:
    pass


class FakeEngine:
    """Echoes parts. `config["settings"]["fault"]` makes it misbehave; see `load` and `_answer`."""

    on_relief: Callable[[], None]
    reply_all: Callable[[Sequence[tuple[Entry, wire.Answer]]], None]

    def __init__(self, spec: wire.WorkerSpec, progress: Writer, fence: Fence) -> None:
        self.spec = spec
        self.progress = progress
        self.fence = fence
        self.fault = str(spec.config.get("settings", {}).get("fault", ""))
        self.work: queue.Queue[list[Entry] | None] = queue.Queue()
        self.calls: list[tuple[str, object]] = []
        self.dropped = threading.Event()
        self.arena: memoryview | None = None
        self.on_relief = nothing

    def load(
        self, tell: Callable[[wire.FromWorkerControl], None], wait_go: Callable[[], None]
    ) -> wire.WorkerReady:
        tell(wire.Loading("import"))
        if self.fault.startswith("load-"):
            raise LoadProblem(self.fault.removeprefix("load-"), "the fake\nwas told to fail")
        if self.fault == "load raises":
            raise RuntimeError("surprise")
        if self.fault == "load hangs":
            threading.Event().wait()
        if self.spec.held:
            tell(wire.Prepared(7))
            wait_go()
        return wire.WorkerReady(
            device_uuid="",
            device_name="fake",
            memory=wire.Memory(),
            max_rows=32,
            budget_s=1.0,
            peaks={},
        )

    def run(self) -> None:
        while (entries := self.work.get()) is not None:
            self.progress.start(1.0, [(e.connection, e.item.id) for e in entries])
            self.reply_all([(e, self._answer(e)) for e in entries])
            self.progress.finish()

    def _answer(self, entry: Entry) -> wire.Answer:
        match entry.item.params.get("do", ""):
            case "crash":
                raise RuntimeError("the engine crashed")
            case "fork":
                if (pid := os.fork()) == 0:
                    while True:
                        signal.pause()
                return wire.Answer(entry.item.id, "ok", text=str(pid))
            case "hang with the GIL":
                while True:
                    ctypes.PyDLL(None).pause()
            case "hang":
                while True:
                    ctypes.CDLL(None).pause()
            case "fence":
                self.fence("device-side assert")
            case "environment":
                return wire.Answer(entry.item.id, "ok", text=json.dumps(dict(os.environ)))
            case "torch":
                import torch

                text = f"{torch.get_num_threads()} {torch.rand(1).item()}"
                return wire.Answer(entry.item.id, "ok", text=text)
            case "big":
                data = bytes(entry.item.params["bytes"])
                return wire.Answer(entry.item.id, "ok", (wire.Part("x", data),))
            case "slow":
                time.sleep(entry.item.params["s"])
            case _:
                pass
        parts = tuple(wire.Part(p.name, bytes(entry.data(p))) for p in entry.item.parts)
        return wire.Answer(entry.item.id, "ok", parts)

    def offer(self, entries: Sequence[Entry]) -> None:
        if any(e.item.params.get("do") == "explode" for e in entries):
            raise RuntimeError("offer exploded")
        self.work.put(list(entries))

    def cancel(self, connection: int, ids: Sequence[int]) -> None:
        self.calls.append(("cancel", list(ids)))

    def recall(self, connection: int, ids: Sequence[int]) -> None:
        self.calls.append(("recall", list(ids)))

    def credit(self, connection: int, item: int, count: int) -> None:
        self.calls.append(("credit", (item, count)))

    def drop(self, connection: int) -> None:
        self.calls.append(("drop", connection))
        self.arena = None
        self.dropped.set()

    def map_arena(self, connection: int, arena: memoryview) -> None:
        self.arena = arena

    def drain(self, when_empty: Callable[[], None]) -> None:
        when_empty()

    def stop(self) -> None:
        self.work.put(None)

    def trim(self) -> None:
        self.calls.append(("trim", None))

    def load_now(self) -> wire.Load:
        return wire.Load(0, 0, 32, 0.0)

    def pong(self, serial: int) -> wire.Pong:
        return wire.Pong(serial, wire.Memory(allocated=1), wire.Counters(), self.load_now())

    def report(self, kind: str) -> str:
        return f"report of {kind}"

"""A whole engine in the test's own process: real threads, the models of tests/handlers.py."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gpusup.worker import progress, wire
from gpusup.worker.engine import Engine
from gpusup.worker.entry import Entry

HANDLERS = Path(__file__).parents[1] / "handlers.py"
LIMIT_S = 20.0


class Served:
    """Collects answers; `wait(n)` returns once there are n of them."""

    def __init__(
        self, handler: str, *, settings: dict[str, Any] | None = None, **more: Any
    ) -> None:
        spec_fields: dict[str, Any] = {
            name: more.pop(name)
            for name in (
                "profile_path", "memory_cap", "canary_idle", "device", "device_uuid", "held",
                "device_total", "beside",
            )
            if name in more
        }  # fmt: skip
        if ":" not in handler:
            handler = f"{HANDLERS}:{handler}"
        config: dict[str, Any] = {
            "handler": handler,
            "settings": settings or {},
            "max_rows": 8,
            **more,
        }
        base: dict[str, Any] = {"device": "cpu", "device_uuid": "", "canary_idle": 0.0}
        self.spec = wire.WorkerSpec(
            slot="cpu0",
            generation=1,
            model="m",
            version="1",
            control_path="",
            data_path="",
            config=config,
            **{**base, **spec_fields},
        )
        self.page = progress.create("test")
        self.reader = progress.Reader(os.dup(self.page))
        self.fences: list[str] = []
        self.told: list[Any] = []
        self.engine = Engine(self.spec, progress.Writer(self.page), self.fences.append)
        self.engine.reply_all = self.take
        self.answers: list[tuple[int, wire.Answer]] = []
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None
        self.serial = 0

    def take(self, pairs: Sequence[tuple[Entry, wire.Answer]]) -> None:
        with self.changed:
            self.answers += [(entry.connection, answer) for entry, answer in pairs]
            self.changed.notify_all()

    def load(self) -> wire.WorkerReady:
        return self.engine.load(self.told.append, lambda: None)

    def start(self) -> Served:
        self.load()
        self.go()
        return self

    def go(self) -> None:
        self.thread = threading.Thread(target=self.engine.run, daemon=True)
        self.thread.start()

    def offer(
        self, *parts_lists: Sequence[wire.Part], connection: int = 1, **fields: Any
    ) -> list[Entry]:
        entries: list[Entry] = []
        for parts in parts_lists:
            self.serial += 1
            item = wire.Item(self.serial, tuple(parts), request_id=f"r{self.serial}", **fields)
            entries.append(Entry(item, connection, lambda a: self.take([(entries[0], a)])))
        self.engine.offer(entries)
        return entries

    def wait(self, count: int) -> dict[int, wire.Answer]:
        """Answers by item id."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.answers) >= count, LIMIT_S), self.answers
            return {answer.id: answer for _, answer in self.answers}

    def until(self, true: Callable[[], bool]) -> None:
        pause = threading.Event()
        for _ in range(int(LIMIT_S / 0.005)):
            if true():
                return
            pause.wait(0.005)
        raise AssertionError("it never came true")

    def one(self, *parts: wire.Part, **fields: Any) -> wire.Answer:
        before = len(self.answers)
        (entry,) = self.offer(parts, **fields)
        return self.wait(before + 1)[entry.item.id]

    def stop(self) -> None:
        if hasattr(self.engine, "_loop"):  # it was loaded
            self.engine.stop()
            self.engine._device.release()
        if self.thread is not None:
            self.thread.join(LIMIT_S)
            assert not self.thread.is_alive()
        self.reader.close()
        os.close(self.page)


def tensor(values: Any, name: str = "x") -> wire.Part:
    array = np.asarray(values, dtype=np.float32)
    return wire.Part(name, array.tobytes(), datatype="FP32", shape=array.shape)


def raw(body: bytes | str, content_type: str = "application/json") -> wire.Part:
    data = body.encode() if isinstance(body, str) else body
    return wire.Part("body", data, content_type=content_type)


def values(answer: wire.Answer) -> list[Any]:
    """The first output of a tensor answer, as nested lists."""
    part = answer.parts[0]
    assert isinstance(part.data, bytes)
    found: list[Any] = np.frombuffer(part.data, dtype=np.float32).reshape(part.shape).tolist()
    return found


@contextmanager
def builder(path: Path, models: str, **usual: Any) -> Iterator[Callable[..., Served]]:
    """Builds engines of handlers by name: of those in `models`, which is written to `path`, or of
    any other. All are stopped at the end."""
    path.write_text(models)
    made: list[Served] = []

    def build(name: str, **more: Any) -> Served:
        handler = f"{path}:{name}" if f"class {name}(" in models else name
        made.append(Served(handler, **usual, **more))
        return made[-1]

    yield build
    for served in made:
        served.stop()

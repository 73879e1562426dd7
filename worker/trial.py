"""One request through the real worker code, without a server: the child of `gpusup try`.

    python -m gpusup.worker.trial < {"spec": ..., "parts": ..., "repeat": 1}

It loads, warms up and compares the golden example as a worker does, then hands its engine one
request and writes what came of it as JSON lines to the descriptor `--result-fd`: `loading`, then
`ready`, then one `answer` each, or `problem`. What the handler prints goes where it always goes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from . import progress, wire
from .boot import ENGINE, one_line
from .entry import EngineLike, Entry, LoadProblem
from .handlers import import_attribute, use_environment
from .model import ConfigProblem


class Task(msgspec.Struct, frozen=True):
    """What comes on standard input. `path`: the file whose bytes are the request's body."""

    spec: wire.WorkerSpec
    path: str = ""
    content_type: str = ""
    params: dict[str, Any] = {}
    repeat: int = 1
    limit_s: float = 60.0


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m gpusup.worker.trial", description=__doc__)
    parser.add_argument("--result-fd", type=int, required=True)
    given = parser.parse_args()
    os.set_inheritable(given.result_fd, False)
    faulthandler.enable()
    out = os.fdopen(given.result_fd, "wb", buffering=0)

    def tell(kind: str, **fields: Any) -> None:
        out.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")

    code = 1
    try:
        task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
        settle(task.spec)
        code = Trial(task, tell).run()
    except LoadProblem as problem:
        tell("problem", cause=problem.cause, text=one_line(problem))
    except ConfigProblem as problem:
        tell("problem", cause="config", text=one_line(problem))
    except Exception as error:
        tell("problem", cause="error", text=f"{type(error).__name__}: {one_line(error)}")
    # As a worker ends: without destructors that may hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def settle(spec: wire.WorkerSpec) -> None:
    """The environment a worker has, before torch looks at it."""
    use_environment(spec.env)
    if spec.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif spec.device_uuid:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.device_uuid


class Trial:
    def __init__(self, task: Task, tell: Callable[..., None]) -> None:
        self._task = task
        self._tell = tell
        self._answers: list[wire.Answer] = []
        self._ended = threading.Event()

    def run(self) -> int:
        """The exit code: 0 if every answer was ok. Raises LoadProblem."""
        task = self._task
        page = progress.Writer(progress.create("trial"))
        make: Callable[..., EngineLike] = import_attribute(ENGINE)
        engine = make(task.spec, page, self._fence)
        engine.on_relief = lambda: None
        ready = engine.load(self._loading, lambda: None)
        self._tell("ready", ready=msgspec.to_builtins(ready))
        if not task.path:
            return 0
        parts = parts_of(task, ready)
        asker = threading.Thread(target=self._ask, args=(engine, parts), daemon=True)
        asker.start()
        engine.run()
        failed = sum(1 for answer in self._answers if answer.status != "ok")
        return 1 if failed or len(self._answers) < task.repeat else 0

    def _loading(self, message: wire.FromWorkerControl) -> None:
        if isinstance(message, wire.Loading):
            self._tell("loading", phase=message.phase)

    def _fence(self, text: str) -> None:
        self._tell("problem", cause="device", text=text)
        os._exit(wire.EXIT_FENCED)

    def _ask(self, engine: EngineLike, parts: tuple[wire.Part, ...]) -> None:
        for number in range(self._task.repeat):
            self._ended.clear()
            item = wire.Item(
                id=number,
                parts=parts,
                rows=parts[0].shape[0] if parts[0].datatype else 1,
                params=self._task.params,
                request_id=f"try-{number}",
                received=time.monotonic(),
            )
            began = time.monotonic()
            engine.offer([Entry(item=item, connection=1, reply=self._reply)])
            if not self._ended.wait(self._task.limit_s):
                limit = f"{self._task.limit_s:g} s"
                self._tell("problem", cause="hang", text=f"no answer within {limit}")
                # Where it hangs is what its author wants to know.
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
            self._show(self._answers[-1], time.monotonic() - began)
        engine.stop()

    def _reply(self, answer: wire.Answer) -> None:
        if not answer.more:
            self._answers.append(answer)
            self._ended.set()

    def _show(self, answer: wire.Answer, took: float) -> None:
        self._tell(
            "answer",
            status=answer.status,
            text=answer.text,
            parts=[shown(part) for part in answer.parts],
            took_s=took,
            decode_s=answer.decode_s,
            queue_s=answer.queue_s,
            compute_s=answer.compute_s,
            encode_s=answer.encode_s,
            batch_rows=answer.batch_rows,
        )


def parts_of(task: Task, ready: wire.WorkerReady) -> tuple[wire.Part, ...]:
    """The request as the front door would send it: bytes, or a `.npy` array as a tensor.

    Raises ConfigProblem on an array that is none.
    """
    data = Path(task.path).read_bytes()
    name = os.path.basename(task.path)
    if not task.path.endswith(".npy"):
        return (wire.Part("body", data, content_type=task.content_type, filename=name),)
    import numpy as np

    from .codec import part_of

    try:
        array = np.load(task.path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigProblem(f"cannot read {task.path}: {error}") from error
    declared = ready.inputs[0] if ready.inputs else None
    if declared is not None and array.ndim == len(declared.shape):
        array = array[None]  # one item; the worker wants rows
    part = part_of(declared.name if declared else "input", array)
    return (part,)


def shown(part: wire.Part) -> dict[str, Any]:
    """A part of an answer for people: JSON as it is, text as text, other bytes by their number."""
    data = part.data if isinstance(part.data, bytes) else b""
    told: dict[str, Any] = {"name": part.name, "bytes": len(data)}
    if part.datatype:
        from .codec import tensor_of

        told |= {"datatype": part.datatype, "shape": list(part.shape)}
        values = tensor_of(part, data)
        told["values"] = repr(values.tolist())[:2000]
        return told
    told["content_type"] = part.content_type
    if part.content_type.startswith("application/json"):
        told["json"] = json.loads(data)
    elif part.content_type.startswith("text/"):
        told["text"] = data[:2000].decode("utf-8", "replace")
    return told


if __name__ == "__main__":
    main()

"""From a spec to a model that may serve: import, device, weights, warm-up, golden example."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpusup.conf.places import weights_of

from . import progress, wire
from .batcher import Unit
from .codec import DTYPES, NAMES
from .compute import Failure, Placed, Runner, attempt, one_line
from .device import Device, is_oom, open_device
from .entry import LoadProblem
from .handlers import load_handler
from .loader import on_moved, prefetch
from .model import ConfigProblem, Model, Tensor
from .outputs import Outputs
from .pool import Key
from .profile import Profile

_log = logging.getLogger(__name__)

Tell = Callable[[wire.FromWorkerControl], None]


@dataclass(slots=True)
class Settings:
    """The model's section of the configuration, as the worker uses it. Times in seconds."""

    max_rows: int
    wait: float
    starvation: float
    budget: float
    buckets: tuple[tuple[int, ...], ...]
    fit: Any
    no_bucket: str
    graphs: bool
    compile: bool
    decode_threads: int
    torch_threads: int
    golden: str
    golden_tolerance: float
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def settings_of(config: Mapping[str, Any], model: Any) -> Settings:
    """What the file says; declared tensors fall back on the model's own."""
    get = config.get
    inputs = _tensors(get("inputs")) or tuple(model.inputs)
    buckets = list(get("buckets") or getattr(model, "buckets", None) or ())
    if not buckets and len(inputs) == 1 and all(side >= 0 for side in inputs[0].shape):
        # The one shape there is needs no bucket in the file.
        buckets = [inputs[0].shape]
    return Settings(
        max_rows=int(get("max_rows", 32)),
        wait=float(get("wait", 0.002)),
        starvation=float(get("starvation", 5.0)),
        budget=float(get("budget", 30.0)),
        buckets=tuple(tuple(map(int, bucket)) for bucket in buckets),
        fit=get("fit", "exact"),
        no_bucket=get("no_bucket", "eager"),
        graphs=bool(get("graphs", True)) and bool(getattr(model, "capturable", True)),
        compile=bool(get("compile", False)),
        decode_threads=0
        if getattr(model, "decode_inline", False)
        else int(get("decode_threads", 2)),
        torch_threads=int(get("torch_threads", 1)),
        golden=str(get("golden", "")),
        golden_tolerance=float(get("golden_tolerance", 1e-2)),
        inputs=inputs,
        outputs=_tensors(get("outputs")) or tuple(model.outputs),
    )


def _tensors(declared: Any) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(d["name"], d["datatype"], tuple(d["shape"]))
        if isinstance(d, Mapping)
        else Tensor(d.name, d.datatype, tuple(d.shape))
        for d in (declared or ())
    )


@dataclass(slots=True)
class Loaded:
    model: Any
    device: Device
    settings: Settings
    profile: Profile
    runner: Runner
    ready: wire.WorkerReady
    methods: list[wire.Method] = field(default_factory=list)


class Startup:
    """Runs the phases in order; `seconds` says how long each took."""

    def __init__(
        self, spec: wire.WorkerSpec, page: progress.Writer, tell: Tell, wait_go: Callable[[], None]
    ) -> None:
        self._spec = spec
        self._page = page
        self._tell = tell
        self._wait_go = wait_go
        self.seconds: dict[str, float] = {}
        self._read = 0
        self._total = 0

    def run(self) -> Loaded:
        """Raises LoadProblem."""
        spec = self._spec
        with self._phase("import"):
            model = self._make_model()
        settings = settings_of(spec.config, model)
        if settings.torch_threads:
            torch.set_num_threads(settings.torch_threads)
        if os.path.isfile(model.weights):
            self._total = os.path.getsize(model.weights)
        if spec.held:
            self._prepare(model)
        with self._phase("device"):
            device = open_device(spec)
        try:
            return self._onto(device, model, settings)
        except BaseException:
            device.release()
            raise

    def _onto(self, device: Device, model: Any, settings: Settings) -> Loaded:
        spec = self._spec
        on_moved(self._moved)
        try:
            with self._phase("weights"):
                before = device.allocated()
                self._load(model, device)
                self._page.load_moved(max(0, device.allocated() - before - self._read))
        finally:
            on_moved(None)
        gc.collect()
        gc.freeze()  # what was loaded stays; a collection need not walk through it again
        profile = Profile(spec.profile_path, _signature(spec))
        runner = make_runner(model, device, profile, settings)
        methods = methods_of(model)
        with self._phase("warm-up"):
            if "predict" in methods:
                self._warm_up(model, settings, runner, profile)
        if settings.golden:
            with self._phase("golden"):
                self._golden(model, settings, runner)
        device.trim()
        device.static = device.allocated()
        profile.save()
        ready = wire.WorkerReady(
            device_uuid=device.uuid,
            device_name=device.name,
            memory=device.memory(),
            max_rows=settings.max_rows,
            budget_s=settings.budget,
            peaks=profile.peaks(),
            inputs=_declared(settings.inputs),
            outputs=_declared(settings.outputs),
            methods=methods,
            graphs=dict(runner.status),
            degrade=list(getattr(model, "degrade_steps", ())),
            platform=str(getattr(model, "platform", "pytorch_eager")),
            seconds={name: round(took, 4) for name, took in self.seconds.items()},
        )
        return Loaded(model, device, settings, profile, runner, ready, methods)

    def _moved(self, count: int) -> None:
        """From the loader's threads."""
        self._read += count
        self._page.load_moved(count)
        self._tell(wire.Loading("weights", self._read, self._total))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._tell(wire.Loading(name))
        self._page.load_moved()
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - began
            self._page.load_moved()

    def _make_model(self) -> Any:
        spec = self._spec
        name = str(spec.config.get("handler", ""))
        try:
            model = load_handler(name)()
        except LoadProblem:
            raise
        except Exception as error:
            raise LoadProblem("config", f"cannot use handler {name}: {_where(error)}") from error
        model.settings = dict(spec.config.get("settings", {}))
        model.weights = weights_of(str(spec.config.get("weights", "")), spec.version)
        model.dtype = str(spec.config.get("dtype", "model"))
        return model

    def _prepare(self, model: Any) -> None:
        spec = self._spec
        if spec.device == "cuda" and spec.held_context:
            with self._phase("context"):
                open_device(spec)
                # The first kernels load with the context; they take as long as it does.
                torch.ones(16, 16, device="cuda").mm(torch.ones(16, 16, device="cuda"))
                torch.cuda.synchronize()
        before = _resident()
        read = 0
        with self._phase("prepare"), _as_problem("prepare"):
            if type(model).prepare is not Model.prepare:
                model.prepare(spec.version)
            elif os.path.isfile(model.weights):
                read = prefetch(model.weights)
        self._tell(wire.Prepared(host_bytes=max(read, _resident() - before)))
        self._wait_go()

    def _load(self, model: Any, device: Device) -> None:
        oom = ""
        try:
            with _as_problem("load"), torch.inference_mode(False):
                model.load(device.torch, self._spec.version)
        except LoadProblem as problem:
            if problem.cause != "oom":
                raise
            oom = str(problem)
        if oom:
            # Out of the except block, where the half-loaded model is not held any more.
            raise LoadProblem(
                "oom",
                f"{self._spec.model} does not fit on {device.name}: {oom}; "
                f"{device.allocated()} bytes are in use, the worker may take {device.room()}",
            )

    def _warm_up(self, model: Any, settings: Settings, runner: Runner, profile: Profile) -> None:
        with _as_problem("warm_up"):
            given = list(model.warm_up())
        if given and not settings.buckets:
            # The examples' shapes are those that matter.
            shapes = {tuple(e.shape) for e in given if isinstance(e, torch.Tensor)}
            settings.buckets = tuple(sorted(shapes))
        keys: dict[Key, dict[str, Any]] = {}
        examples = map(_example, given) if given else default_examples(settings)
        for placed in examples:
            keys.setdefault(_key(placed, settings), placed)
        known = profile.known
        for key, example in keys.items():
            steps = [1] if known and profile.has(key.text, 1) else ladder(settings.max_rows)
            self._climb(runner, key, example, steps, given=bool(given))
            runner.want_graphs(key, ladder(settings.max_rows))
        if known:
            return  # answer first; graphs are captured in the gaps
        with self._phase("graphs"), torch.inference_mode():
            while runner.idle_step():
                self._page.load_moved()

    def _climb(
        self,
        runner: Runner,
        key: Key,
        example: dict[str, Any],
        steps: Sequence[int],
        *,
        given: bool,
    ) -> None:
        """Batches of 1, 2, 4, ... rows; their peaks are measured on the way. Raises LoadProblem if
        not even one row works."""
        runner.learning = False  # the first run also pays for what is made only once
        outcome = self._compute(runner, key, example, 1)
        runner.learning = True
        for rows in steps:
            if not isinstance(outcome, Failure):
                outcome = self._compute(runner, key, example, rows)
            self._page.load_moved()
            if not isinstance(outcome, Failure):
                continue
            if outcome.kind == "oom" and rows > 1:
                _log.warning("%s does not fit with %d rows: %s", key.text, rows, outcome.text)
                runner.device.trim()
                return
            if outcome.kind == "oom":
                raise LoadProblem(
                    "oom",
                    f"one {key.text} input does not fit: {outcome.text}; the worker may take "
                    f"{runner.device.room()} bytes",
                )
            if outcome.kind == "sticky":
                raise LoadProblem("device", f"warm-up with {key.text}: {outcome.text}")
            if given:
                raise LoadProblem("error", f"warm-up with {key.text}: {outcome.text}")
            _log.warning("no warm-up with %s: %s", key.text, outcome.text)
            return

    def _compute(
        self, runner: Runner, key: Key, example: dict[str, Any], rows: int
    ) -> Outputs | Failure:
        tensors = {name: _repeated(value, rows) for name, value in example.items()}
        shape = key.tensors[0][1]
        placed = Placed(tensors, rows, true_size=shape)
        unit = Unit(_Example(), key, rows, 0.0, notes=placed)
        with torch.inference_mode():
            return attempt(runner, key, [unit], rows)

    def _golden(self, model: Any, settings: Settings, runner: Runner) -> None:
        from .golden import compare, read

        inputs, expected = read(weights_of(settings.golden, self._spec.version))
        single = len(inputs) == 1 and len(settings.inputs) < 2
        tensors = {"" if single else name: value for name, value in inputs.items()}
        rows = min(value.shape[0] for value in tensors.values())
        key = _key({name: value[:1] for name, value in tensors.items()}, settings)
        outcome = self._compute(runner, key, tensors, rows)
        if isinstance(outcome, Failure):
            raise LoadProblem("golden", f"the golden example failed: {outcome.text}")
        compare(outcome, expected, settings.golden_tolerance)


class _Example:
    cancelled = False


def make_runner(model: Any, device: Device, profile: Profile, settings: Settings) -> Runner:
    names = [tensor.name for tensor in settings.outputs]
    if device.kind == "cuda":
        from .cuda_runner import CudaRunner

        off = "" if settings.graphs else "not wanted by the model or its configuration"
        return CudaRunner(
            model,
            device,
            profile,
            settings.max_rows,
            names,
            graphs_off=off,
            compiled=settings.compile,
        )
    runner = Runner(model, device, profile, settings.max_rows, names)
    runner.status["all"] = "eager: no CUDA"
    return runner


def methods_of(model: Any) -> list[wire.Method]:
    def own(name: str) -> bool:
        return getattr(type(model), name, None) is not getattr(Model, name)

    found: list[wire.Method] = []
    if own("forward"):
        found.append("predict")
    if own("embed"):
        found.append("embed")
    if own("generate"):
        found.append("generate")
    if own("generate") or own("chat"):
        found.append("chat")
    return found


def ladder(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    steps = []
    rows = 1
    while rows < most:
        steps.append(rows)
        rows *= 2
    return [*steps, most]


def default_examples(settings: Settings) -> Iterator[dict[str, Any]]:
    """One example (1, *shape) per bucket, or one of the declared shape; none if nothing is
    declared. What is variable gets 1, or the bucket's side."""
    declared = settings.inputs
    if not declared:
        return
    if len(declared) == 1:
        first = declared[0]
        shapes = settings.buckets or (tuple(1 if s < 0 else s for s in first.shape),)
        for shape in shapes:
            yield {"": _zeros(first.datatype, (1, *shape))}
        return
    yield {
        tensor.name: _zeros(tensor.datatype, (1, *(1 if s < 0 else s for s in tensor.shape)))
        for tensor in declared
    }


def _zeros(datatype: str, shape: Sequence[int]) -> Any:
    if datatype == "BYTES":
        array = np.empty(tuple(shape), dtype=object)
        array.fill(b"")
        return array
    return torch.zeros(tuple(shape), dtype=DTYPES[datatype])


def _example(example: Any) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return {str(name): value[None] for name, value in example.items()}
    return {"": example[None]}


def _repeated(value: Any, rows: int) -> Any:
    if value.shape[0] == rows:
        return value
    if isinstance(value, torch.Tensor):
        return value[:1].expand(rows, *value.shape[1:]).contiguous()
    return np.repeat(value[:1], rows, axis=0)


def _key(tensors: Mapping[str, Any], settings: Settings) -> Key:
    """The key of an example, as the engine would make it for a request."""
    listed = tuple(
        (
            name,
            tuple(value.shape[1:]),
            NAMES[value.dtype] if isinstance(value, torch.Tensor) else "BYTES",
        )
        for name, value in tensors.items()
    )
    pooled = len(listed) == 1 and listed[0][1] in settings.buckets and listed[0][2] != "BYTES"
    return Key(listed, pooled=pooled)


def _declared(tensors: Sequence[Tensor]) -> list[wire.TensorSpec]:
    return [
        wire.TensorSpec(name=t.name, datatype=t.datatype, shape=tuple(t.shape)) for t in tensors
    ]


@contextmanager
def _as_problem(what: str) -> Iterator[None]:
    """Turn what the handler raises into a LoadProblem of one line."""
    try:
        yield
    except LoadProblem:
        raise
    except ConfigProblem as error:
        raise LoadProblem("config", one_line(error, named=False)) from error
    except FileNotFoundError as error:
        raise LoadProblem("config", f"{what}: {one_line(error)}") from error
    except Exception as error:
        if is_oom(error):
            raise LoadProblem("oom", one_line(error)) from None
        raise LoadProblem("error", f"{what} failed: {one_line(error)}") from error


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    return one_line(error)


def _resident() -> int:
    fields = Path("/proc/self/statm").read_bytes().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _signature(spec: wire.WorkerSpec) -> str:
    """Peaks of another set-up are worth nothing."""
    config = spec.config
    return "|".join(
        str(part)
        for part in (
            torch.__version__,
            spec.device,
            config.get("handler", ""),
            config.get("weights", ""),
            config.get("dtype", "model"),
            config.get("compile", False),
            sorted(map(str, config.get("settings", {}).items())),
        )
    )

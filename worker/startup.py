"""From a spec to a model that may serve: import, device, weights, warm-up, golden example."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpusup.conf.places import weights_of

from . import progress, wire
from .compute import Runner, one_line
from .device import Device, open_device
from .entry import LoadProblem
from .handlers import equip, load_handler
from .loader import on_moved, prefetch
from .model import Tensor, overrides
from .profile import Profile
from .settings import Settings, methods_of, settings_of
from .warmup import WarmUp, as_problem

Tell = Callable[[wire.FromWorkerControl], None]


@dataclass(slots=True)
class Loaded:
    model: Any
    device: Device
    settings: Settings
    profile: Profile
    runner: Runner
    ready: wire.WorkerReady


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
        # Prepared beside an old worker, it is waited for: it answers first and measures later.
        profile = Profile(
            spec.profile_path,
            _signature(spec, spec.config.get("weights", "")),
            kin=_signature(spec),
            borrow=spec.held,
        )
        runner = make_runner(model, device, profile, settings)
        methods = methods_of(model)
        warm_up = WarmUp(model, settings, runner, profile, self._page.load_moved)
        with self._phase("warm-up"):
            now = "predict" in methods and warm_up.run()
        # A swap that leaves the old worker at work can wait for graphs; first answers can't.
        if spec.beside or (now and not spec.held):
            with self._phase("graphs"), torch.inference_mode():
                while runner.idle_step():
                    self._page.load_moved()
        if settings.golden:
            with self._phase("golden"):
                warm_up.golden(weights_of(settings.golden, spec.version))
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
        return Loaded(model, device, settings, profile, runner, ready)

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
        weights = weights_of(str(spec.config.get("weights", "")), spec.version)
        equip(model, spec.config, weights)
        return model

    def _prepare(self, model: Any) -> None:
        spec = self._spec
        if spec.device == "cuda" and spec.held_context:
            with self._phase("context"):
                open_device(spec)
                load_kernels()
        before = _resident()
        read = 0
        with self._phase("prepare"), as_problem("prepare"):
            if overrides(model, "prepare"):
                model.prepare(spec.version)
            elif os.path.isfile(model.weights):
                read = prefetch(model.weights)
        self._tell(wire.Prepared(host_bytes=max(read, _resident() - before)))
        self._wait_go()

    def _load(self, model: Any, device: Device) -> None:
        oom = ""
        try:
            with as_problem("load"), torch.inference_mode(False):
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


def _declared(tensors: Sequence[Tensor]) -> list[wire.TensorSpec]:
    return [
        wire.TensorSpec(name=t.name, datatype=t.datatype, shape=tuple(t.shape)) for t in tensors
    ]


def _where(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    return one_line(error)


def _resident() -> int:
    fields = Path("/proc/self/statm").read_bytes().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def load_kernels() -> None:
    """What nearly every model calls first. Libraries and kernels load at their first use, which
    takes as long as the context does; here nobody waits for it."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        one = torch.ones(64, 64, device="cuda", dtype=dtype)
        with contextlib.suppress(RuntimeError):  # an old device knows no bfloat16
            torch.nn.functional.linear(one, one, one[0]).relu_().sum().item()
            image = one.view(1, 4, 32, 32)
            torch.nn.functional.conv2d(image, image[:, :, :3, :3]).sum().item()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _signature(spec: wire.WorkerSpec, weights: str = "") -> str:
    """Peaks of another set-up are worth nothing. Without `weights`: what all versions share."""
    config = spec.config
    return "|".join(
        str(part)
        for part in (
            torch.__version__,
            spec.device,
            config.get("handler", ""),
            weights,
            config.get("dtype", "model"),
            config.get("compile", False),
            sorted(map(str, config.get("settings", {}).items())),
        )
    )

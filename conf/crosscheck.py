"""What must hold between the keys of a configuration, and between it and this machine's files."""

from __future__ import annotations

import grp
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from .handlers import resolve_handler
from .places import (
    LONGEST_SOCKET,
    SOCKET_PATH_LIMIT,
    is_loopback,
    parse_listen,
    run_dir,
    weights_of,
)
from .schema import Config, ModelConfig, ServerConfig
from .units import format_size, format_time

Say = Callable[[str, str, str], None]

_DEVICE: Final = re.compile(
    r"^(cpu\d*|(gpu)?\d+(\.\d+)?|GPU-[0-9A-Fa-f-]{8,}|MIG-[0-9A-Za-z/_-]{8,})$"
)
#: The supervisor pins each worker with this one; a second opinion would unpin it.
_RESERVED_ENV: Final = {"CUDA_VISIBLE_DEVICES"}
#: One batch in a hundred is slower than the p99: below this, health would be taken for a hang.
LEAST_TIMES: Final = 2.0


def check_all(config: Config, base: Path) -> tuple[Config, list[str]]:
    """The configuration with absolute paths, and all problems found, one line each."""
    problems: list[str] = []

    def say(section: str, key: str, text: str) -> None:
        problems.append(f"[{section}] {key}: {text}")

    server = _server(config.server, base, say)
    if server.default_model and server.default_model not in config.models:
        names = ", ".join(sorted(config.models))
        say("server", "default_model", f'no model "{server.default_model}"; there are: {names}')
    _numbers(config, say)
    _devices(config, say)
    log = config.log
    if log.file:
        log = msgspec.structs.replace(log, file=_log_file(log.file, base, say))
    models = {name: _model(name, model, config, base, say) for name, model in config.models.items()}
    done = msgspec.structs.replace(config, server=server, log=log, models=models)
    return done, problems


def _only_here(listen: str) -> bool:
    try:
        return is_loopback(parse_listen(listen)[0])
    except ValueError:
        return True  # said already


def _server(server: ServerConfig, base: Path, say: Say) -> ServerConfig:
    for key, text in (("listen", server.listen), ("dashboard", server.dashboard)):
        if text or key == "listen":
            try:
                parse_listen(text)
            except ValueError as error:
                say("server", key, str(error))
    if server.dashboard and not server.api_keys and not _only_here(server.dashboard):
        say(
            "server",
            "dashboard",
            f'"{server.dashboard}" can be reached from other machines, so api_keys must be set',
        )
    changes: dict[str, str] = {}
    for key in ("run_dir", "state_dir"):
        text = getattr(server, key)
        if text != "auto":
            changes[key] = str(_absolute(text, base))
    for key in ("tls_cert", "tls_key", "api_keys"):
        text = getattr(server, key)
        if text:
            changes[key] = _readable("server", key, text, base, say)
    if bool(server.tls_cert) != bool(server.tls_key):
        have, lack = ("tls_cert", "tls_key") if server.tls_cert else ("tls_key", "tls_cert")
        say("server", lack, f"is needed with {have}")
    server = msgspec.structs.replace(server, **changes)
    folder = run_dir(server)
    longest = len(os.fsencode(folder / LONGEST_SOCKET))
    if longest > SOCKET_PATH_LIMIT:
        spare = len(LONGEST_SOCKET) + 1
        say(
            "server",
            "run_dir",
            f"{folder} is {len(os.fsencode(folder))} bytes, at most {SOCKET_PATH_LIMIT - spare} "
            f"leave room for a socket's name ({SOCKET_PATH_LIMIT} bytes for the whole path)",
        )
    if server.control_group:
        try:
            grp.getgrnam(server.control_group)
        except KeyError:
            say("server", "control_group", f'there is no group "{server.control_group}"')
    if server.body_limit == 0:
        say("server", "body_limit", "0 would refuse every body")
    return server


def _numbers(config: Config, say: Say) -> None:
    mark = config.watermark
    if mark.queue >= mark.shed:
        say("watermark", "queue", f"{mark.queue:g} must be below shed, which is {mark.shed:g}")
    if mark.hysteresis >= mark.queue:
        say(
            "watermark",
            "hysteresis",
            f"{mark.hysteresis:g} must be below queue, which is {mark.queue:g}",
        )
    watch = config.supervision
    less = (
        ("supervision", "keep_alive", watch.keep_alive, "suspect_after", watch.suspect_after),
        ("supervision", "suspect_after", watch.suspect_after, "beat_limit", watch.beat_limit),
        ("probe", "interval", config.probe.interval, "[watermark] stale_after", mark.stale_after),
    )
    for section, key, small, other, big in less:
        if small >= big:
            say(
                section,
                key,
                f"{format_time(small)} must be below {other}, which is {format_time(big)}",
            )
    back = watch.backoff
    if back.initial > back.limit:
        above = f"{format_time(back.initial)} is above limit, which is {format_time(back.limit)}"
        say("supervision.backoff", "initial", above)
    above_zero = (
        ("supervision", "keep_alive", watch.keep_alive),
        ("supervision", "hello_limit", watch.hello_limit),
        ("supervision", "load_stall", watch.load_stall),
        ("supervision", "proxy_limit", watch.proxy_limit),
        ("probe", "interval", config.probe.interval),
        ("probe", "call_limit", config.probe.call_limit),
        ("server", "request_timeout", config.server.request_timeout),
    )
    for section, key, value in above_zero:
        if value <= 0:
            say(section, key, "must be above 0s")


def _devices(config: Config, say: Say) -> None:
    devices = config.devices
    if devices.use != "auto":
        _names("devices", "use", devices.use, say)
        if not devices.use:
            say("devices", "use", 'names no device; "auto" takes all there are')
    for name, size in devices.memory.items():
        if not _DEVICE.match(name):
            say("devices.memory", name, f"is no device's name; {_LIKE}")
        elif not _is_cpu(name) and size <= devices.safety:
            both = (
                f"{format_size(size)} is not above safety, which is {format_size(devices.safety)}"
            )
            say("devices.memory", name, both)
    if devices.cpu_memory == 0:
        say("devices", "cpu_memory", "must be above 0B")


_LIKE: Final = 'devices are named like "gpu0", "GPU-<uuid>", "MIG-<uuid>" or "cpu"'


def _is_cpu(name: str) -> bool:
    return name.startswith("cpu")


def _names(section: str, key: str, names: tuple[str, ...], say: Say) -> None:
    for name, times in Counter(names).items():
        if not _DEVICE.match(name):
            say(section, key, f'"{name}" is no device\'s name; {_LIKE}')
        elif times > 1:
            say(section, key, f'names "{name}" {times} times')


def _model(name: str, model: ModelConfig, config: Config, base: Path, say: Say) -> ModelConfig:
    section = f"models.{name}"
    if name in (".", ".."):
        say("models", name, "would be lost in a path; choose another name")
    changes: dict[str, object] = {}
    if model.python:
        changes["python"] = _python(section, model.python, base, say)
    try:
        changes["handler"] = resolve_handler(model.handler, base, other_python=bool(model.python))
    except ValueError as error:
        say(section, "handler", str(error))
    if model.weights:
        # Other versions' files are checked when a change asks for them; they may come later.
        _readable(section, "weights", weights_of(model.weights, model.version), base, say)
        changes["weights"] = str(_absolute(model.weights, base))
    if model.golden:
        _readable(section, "golden", weights_of(model.golden, model.version), base, say)
        changes["golden"] = str(_absolute(model.golden, base))
    if model.devices != "all":
        _names(section, "devices", model.devices, say)
        use = config.devices.use
        for device in model.devices if use != "auto" else ():
            if device not in use and not (_is_cpu(device) and any(map(_is_cpu, use))):
                say(section, "devices", f'"{device}" is not among [devices] use: {", ".join(use)}')
    _model_numbers(section, model, say)
    return msgspec.structs.replace(model, **changes)


def _model_numbers(section: str, model: ModelConfig, say: Say) -> None:
    for index, bucket in enumerate(model.buckets):
        if not bucket or any(size <= 0 for size in bucket):
            say(section, f"buckets[{index}]", f"sizes must be above 0, got {list(bucket)}")
    for bucket, times in Counter(model.buckets).items():
        if times > 1:
            say(section, "buckets", f"{list(bucket)} is there {times} times")
    if model.golden_tolerance < 0:
        say(section, "golden_tolerance", f"can't be negative, got {model.golden_tolerance:g}")
    if model.budget <= 0:
        say(section, "budget", "must be above 0s")
    if 0 < model.budget_p99 < LEAST_TIMES:
        say(
            section,
            "budget_p99",
            f"must be 0 or at least {LEAST_TIMES:g} times, got {model.budget_p99:g}",
        )
    for key, tensors in (("inputs", model.inputs), ("outputs", model.outputs)):
        for name, times in Counter(tensor.name for tensor in tensors).items():
            if times > 1:
                say(section, key, f'declares "{name}" {times} times')
        for tensor in tensors:
            if any(size < -1 or size == 0 for size in tensor.shape):
                say(section, key, f'"{tensor.name}": sizes are above 0, or -1 for variable, '
                    f"got {list(tensor.shape)}")  # fmt: skip
    for step, times in Counter(rung.step for rung in model.degrade).items():
        if times > 1:
            say(section, "degrade", f'"{step}" is there {times} times')
    for key in model.env:
        if key in _RESERVED_ENV:
            say(section, f"env.{key}", "is set by the supervisor; use devices to choose GPUs")
        elif not key or "=" in key or "\0" in key:
            say(section, "env", f'"{key}" is no variable\'s name')


def _absolute(text: str, base: Path) -> Path:
    return Path(os.path.normpath(base / Path(text).expanduser()))


def _readable(section: str, key: str, text: str, base: Path, say: Say) -> str:
    """The absolute path; says so if nobody could read a file or folder there."""
    path = _absolute(text, base)
    try:
        if path.is_dir():
            os.listdir(path)
        else:
            with path.open("rb"):
                pass
    except OSError as error:
        say(section, key, f"cannot read {path}: {error.strerror}")
    return str(path)


def _python(section: str, text: str, base: Path, say: Say) -> str:
    path = _absolute(text, base)  # not resolved: a venv's python is a link, and must stay one
    if not path.is_file():
        say(section, "python", f"there is no interpreter at {path}")
    elif not os.access(path, os.X_OK):
        say(section, "python", f"{path} is not executable")
    return str(path)


def _log_file(text: str, base: Path, say: Say) -> str:
    path = _absolute(text, base)
    if path.is_dir():
        say("log", "file", f"{path} is a folder")
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        say("log", "file", f"cannot write {path}")
    return str(path)

"""`python -m gpusup.worker.precheck`: would this version of a model load? Away from any device.

Reads a msgpack map {"model", "config", "version"} on standard input and prints one JSON object
{"problem": str}; "" means that nothing was found. A zygote forks the same look, which takes
milliseconds instead of an import of torch. The weights are only read as far as their header;
`load` is tried on torch's meta device, which has shapes and types but no memory.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import setproctitle

from gpusup.conf.places import weights_of
from gpusup.conf.safetensors_header import BrokenWeights, read_header

from .entry import LoadProblem
from .golden import read as read_golden
from .handlers import equip, load_handler, use_environment
from .model import ConfigProblem


def problem_of(config: dict[str, Any], version: str) -> str:
    """ "" or one line that names the thing."""
    weights = weights_of(str(config.get("weights", "")), version)
    if weights and (problem := weights_problem(weights)):
        return problem
    try:
        handler = load_handler(str(config["handler"]))
    except LoadProblem as problem:
        return str(problem)
    if golden := str(config.get("golden", "")):
        try:
            read_golden(weights_of(golden, version))
        except LoadProblem as problem:
            return str(problem)
    return load_problem(handler, config, weights, version)


def weights_problem(weights: str) -> str:
    path = Path(weights)
    try:
        if path.is_dir():
            os.listdir(path)
            return ""
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    if path.suffix == ".safetensors":
        try:
            read_header(path)
        except BrokenWeights as error:
            return str(error)
    return ""


def load_problem(handler: type[Any], config: dict[str, Any], weights: str, version: str) -> str:
    import torch

    try:
        model = handler()
        equip(model, config, weights)
        with torch.device("meta"):
            model.load(torch.device("meta"), version)
    except NotImplementedError:
        return ""
    except Exception as error:
        # What PyTorch's meta device can't do is no verdict on the model, wrapped or not.
        said = (each for each in (error, error.__cause__) if not isinstance(each, ConfigProblem))
        if any("meta" in str(each).lower() for each in said):
            return ""
        text = " ".join(str(error).split())[:500]
        if isinstance(error, ConfigProblem):
            return text
        return f"load fails: {type(error).__name__}: {text}"
    return ""


def answer_forked(question: bytes, fd: int) -> NoReturn:
    """In a fork of the zygote: torch is there already, and nothing of ours may be left behind."""
    with contextlib.suppress(PermissionError):
        os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for taken in (0, 1, 2):
        os.dup2(nothing, taken)
    asked = msgspec.msgpack.decode(question)
    use_environment(asked["config"].get("env", {}))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    setproctitle.setproctitle(f"gpusup: check {asked['model']}@{asked['version']}")
    try:
        problem = problem_of(asked["config"], asked["version"])
    except BaseException as error:  # what it would say of it is lost with our output
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    write_answer(fd, problem)
    os._exit(0)


def write_answer(fd: int, problem: str) -> None:
    with os.fdopen(fd, "wb") as answer:
        answer.write(msgspec.json.encode({"problem": problem}))


def main() -> int:
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read())
    # What the handler prints must not end up in the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        problem = problem_of(asked["config"], asked["version"])
    write_answer(answer, problem)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

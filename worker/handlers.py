"""From `handler = "package.module:Class"` or `"path/to/file.py:Class"` to the class."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from .entry import LoadProblem
from .model import Model


def load_handler(handler: str) -> type[Model]:
    """Raises LoadProblem("config") whatever goes wrong: to try again would not help."""
    found = import_attribute(handler)
    if not (isinstance(found, type) and issubclass(found, Model)):
        raise LoadProblem(
            "config", f"{handler}: is no subclass of gpusup.worker.model.Model, but {found!r:.80}"
        )
    return found


def equip(model: Model, config: Mapping[str, Any], weights: str) -> None:
    """What a model may look at in `load`. `config` is its section of the configuration."""
    model.settings = dict(config.get("settings", {}))
    model.weights = weights
    model.dtype = str(config.get("dtype", "model"))


def use_environment(env: Mapping[str, str]) -> None:
    """As if this process had been started with the model's `env`."""
    os.environ.update(env)
    for folder in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:  # too late for the interpreter to see it by itself
            sys.path.insert(0, folder)


def import_attribute(name: str) -> Any:
    """The object. A file's folder comes first in sys.path, as for a script. Raises LoadProblem."""
    place, colon, attribute = name.rpartition(":")
    if not (colon and place and attribute):
        raise LoadProblem(
            "config", f'{name}: should read "package.module:Class" or "path/to/file.py:Class"'
        )
    try:
        module = from_file(place) if place.endswith(".py") else importlib.import_module(place)
    except LoadProblem:
        raise
    except BaseException as error:  # SystemExit too: whatever a module does on its first line
        if isinstance(error, MemoryError):
            raise LoadProblem("oom", f"{name}: out of memory while importing it") from error
        text = f"cannot import {name}: {type(error).__name__}: {error}"
        raise LoadProblem("config", " ".join(text.split())) from error
    if not hasattr(module, attribute):
        raise LoadProblem("config", f"{name}: {place} has no {attribute}")
    return getattr(module, attribute)


def from_file(path: str) -> ModuleType:
    """Raises LoadProblem if there is no such file, and whatever the file raises."""
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise LoadProblem("config", f"cannot import {path}: no such file")
    # The name is stable, so that what is pickled in one worker can be read in another, and can't
    # be that of a module somebody else imports.
    stem = os.path.splitext(os.path.basename(path))[0]
    name = f"gpusup_handler_{stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadProblem("config", f"cannot import {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module

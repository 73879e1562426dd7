"""Find a model's handler without importing it: importing may cost seconds, or a CUDA context.

A handler is "package.module:Class", or "path/to/file.py:Class" with the path relative to the
configuration's folder. "module:Class" also finds a module.py that lies in that folder.
"""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


def split_handler(handler: str) -> tuple[str, str]:
    """ "module_or_path:Class" -> both halves. Raises ValueError if it has another form."""
    place, _, name = handler.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f'expected "package.module:Class" or "path/file.py:Class", got "{handler}"'
        )
    return place, name


def is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def resolve_handler(handler: str, base: Path, *, other_python: bool = False) -> str:
    """The handler, with an absolute path if it is a file; checked without running it.

    `other_python`: the model has its own interpreter, whose modules can't be looked up from here.
    Raises ValueError: what can't be found, and where it was looked for.
    """
    place, name = split_handler(handler)
    if is_file(place):
        file = (base / Path(place).expanduser()).resolve()
        _check_source(file, name)
        return f"{file}:{name}"
    beside = base / (place.replace(".", "/") + ".py")
    if beside.is_file():
        _check_source(beside.resolve(), name)
        return f"{beside.resolve()}:{name}"
    if other_python:
        return handler
    if not all(part.isidentifier() for part in place.split(".")):
        raise ValueError(f'"{place}" is no module name (a file needs its .py)')
    spec = find_module(place)
    if spec is None:
        raise ValueError(
            f"cannot find module {place}: neither installed for {sys.executable} nor at {beside}"
        )
    if spec.origin and spec.origin.endswith(".py"):
        _check_source(Path(spec.origin), name)
    return handler


def find_module(name: str) -> ModuleSpec | None:
    """As importlib.util.find_spec, but without importing the packages above the module."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        full = ".".join(parts[:depth])
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(full, path) if find is not None else None
            if spec is not None:
                break
        if spec is None:
            return None
        if depth < len(parts):
            if spec.submodule_search_locations is None:
                return None
            path = list(spec.submodule_search_locations)
    return spec


def _check_source(file: Path, name: str) -> None:
    try:
        source = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    try:
        tree = ast.parse(source, filename=str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{file}:{line}" if line else str(file)
        raise ValueError(f"cannot parse {where}: {getattr(error, 'msg', error)}") from error
    defined = _defined(tree)
    if name not in defined and "*" not in defined:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        there = f"; it has {', '.join(classes)}" if classes else ""
        raise ValueError(f"{file} defines no {name}{there}")


def _defined(tree: ast.Module) -> set[str]:
    """Names at the top of the file, also below `if` and `try`; "*" if they can't be known."""
    names: set[str] = set()
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        match node:
            case ast.ClassDef(name=found) | ast.FunctionDef(name=found):
                # A module-level __getattr__ can answer to any name.
                names.add("*" if found == "__getattr__" else found)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name.split(".")[0] for alias in aliases)
            case ast.Assign(targets=targets):
                for target in targets:
                    names.update(n.id for n in ast.walk(target) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=found)):
                names.add(found)
            case ast.If() | ast.Try() | ast.With() | ast.For() | ast.While():
                for field in ("body", "orelse", "finalbody"):
                    todo += getattr(node, field, [])
                for handler in getattr(node, "handlers", []):
                    todo += handler.body
            case _:
                pass
    return names

"""Check what a TOML file says against the schema, and collect all that is wrong, not the first.

The result is builtins with sizes in bytes and times in seconds, ready for msgspec.convert.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import NODEFAULT, inspect

from .units import parse_share, parse_size, parse_time, show

_PARSE: Final = {"size": parse_size, "time": parse_time, "share": parse_share}

#: Stands for a value that was refused; the problem is in the list already.
_REFUSED: Final = object()


class Checker:
    """One pass over one file. `problems` are lines without the file's name."""

    def __init__(self, root: type) -> None:
        described = inspect.type_info(root)
        assert isinstance(described, inspect.StructType)
        self._root = described
        self.problems: list[str] = []

    def check(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The file as builtins. Keys that were refused are left out and are in `problems`."""
        return self._table(self._root, raw, "")

    def _table(self, kind: inspect.StructType, raw: Mapping[str, Any], path: str) -> dict[str, Any]:
        known = {field.encode_name: field for field in kind.fields}
        clean: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in known:
                self._unknown(key, known, path)
                continue
            result = self._value(known[key].type, value, path, key)
            if result is not _REFUSED:
                clean[key] = result
        for name, field in known.items():
            required = field.default is NODEFAULT and field.default_factory is NODEFAULT
            if required and name not in raw:
                self._say(path, name, "is missing")
        return clean

    def _unknown(self, key: str, known: Iterable[str], path: str) -> None:
        what = "key" if path else "section"
        near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
        lower = key.lower().replace("-", "_")
        if near or lower in known:
            self._say(path, key, f'unknown {what}; did you mean "{near[0] if near else lower}"?')
            return
        elsewhere = _sections_with(self._root, key)
        if elsewhere:
            self._say(path, key, f"unknown {what} here; it belongs into {elsewhere[0]}")
            return
        self._say(path, key, f"unknown {what}; known here: {', '.join(sorted(known))}")

    def _say(self, path: str, key: str, text: str) -> None:
        clean = key if re.fullmatch(r"[A-Za-z0-9._\[\]-]{1,80}", key) else show(key)
        self.problems.append(f"[{path}] {clean}: {text}" if path else f"[{clean}]: {text}")

    def _value(self, kind: inspect.Type, value: Any, path: str, key: str) -> Any:
        if isinstance(kind, inspect.StructType):
            if not isinstance(value, Mapping):
                self._say(path, key, f"expected a table, got {show(value)}")
                return _REFUSED
            return self._table(kind, value, f"{path}.{key}" if path else key)
        if isinstance(kind, inspect.DictType):
            return self._dict(kind, value, path, key)
        if isinstance(kind, inspect.VarTupleType):
            return self._list(kind, value, path, key)
        try:
            return _leaf(kind, value)
        except ValueError as error:
            self._say(path, key, str(error))
            return _REFUSED

    def _dict(self, kind: inspect.DictType, value: Any, path: str, key: str) -> Any:
        if not isinstance(value, Mapping):
            self._say(path, key, f"expected a table, got {show(value)}")
            return _REFUSED
        below = f"{path}.{key}" if path else key
        clean: dict[str, Any] = {}
        for name, item in value.items():
            try:
                _leaf(kind.key_type, name)
            except ValueError as error:
                self._say(below, name, f"not usable as a name: {error}")
                continue
            result = self._value(kind.value_type, item, below, name)
            if result is not _REFUSED:
                clean[name] = result
        return clean

    def _list(self, kind: inspect.VarTupleType, value: Any, path: str, key: str) -> Any:
        if not isinstance(value, list | tuple):
            self._say(path, key, f"expected {describe(kind)}, got {show(value)}")
            return _REFUSED
        before = len(self.problems)
        items = [self._value(kind.item_type, v, path, f"{key}[{i}]") for i, v in enumerate(value)]
        return items if len(self.problems) == before else _REFUSED


def _leaf(kind: inspect.Type, value: Any) -> Any:
    """`value` as `kind`. Raises ValueError with what was expected and what was found."""
    if isinstance(kind, inspect.Metadata):
        unit = (kind.extra or {}).get("unit")
        return _PARSE[unit](value) if unit in _PARSE else _leaf(kind.type, value)
    if isinstance(kind, inspect.AnyType):
        return value
    if isinstance(kind, inspect.UnionType):
        for one in kind.types:
            if isinstance(one, inspect.VarTupleType) and isinstance(value, list | tuple):
                return [_leaf(one.item_type, item) for item in value]
            try:
                return _leaf(one, value)
            except ValueError:
                continue
    elif isinstance(kind, inspect.LiteralType):
        if isinstance(value, str | int) and not isinstance(value, bool) and value in kind.values:
            return value
        if isinstance(value, str):
            near = difflib.get_close_matches(value, [str(v) for v in kind.values], n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            raise ValueError(f"expected {describe(kind)}, got {show(value)}{hint}")
    elif isinstance(kind, inspect.BoolType):
        if isinstance(value, bool):
            return value
    elif isinstance(kind, inspect.StrType):
        if isinstance(value, str) and _fits_text(kind, value):
            return value
    elif (
        isinstance(kind, inspect.IntType | inspect.FloatType)
        and isinstance(value, int if isinstance(kind, inspect.IntType) else int | float)
        and not isinstance(value, bool)
        and _fits_number(kind, value)
    ):
        return value
    raise ValueError(f"expected {describe(kind)}, got {show(value)}")


def _fits_text(kind: inspect.StrType, value: str) -> bool:
    return (
        "\0" not in value
        and (kind.min_length is None or len(value) >= kind.min_length)
        and (kind.max_length is None or len(value) <= kind.max_length)
        # fullmatch: `$` alone would let a closing newline through.
        and (kind.pattern is None or re.fullmatch(kind.pattern, value) is not None)
    )


def _fits_number(kind: inspect.IntType | inspect.FloatType, value: float) -> bool:
    return (
        math.isfinite(value)
        and abs(value) < 2**63
        and (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def describe(kind: inspect.Type) -> str:
    """What a value of `kind` looks like, for people."""
    if isinstance(kind, inspect.Metadata):
        unit = (kind.extra or {}).get("unit")
        names = {"size": "a size with its unit", "time": "a time with its unit", "share": "a share"}
        return names[unit] if unit in names else describe(kind.type)
    if isinstance(kind, inspect.UnionType):
        return " or ".join(describe(one) for one in kind.types)
    if isinstance(kind, inspect.LiteralType):
        values = [show(value) for value in kind.values]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if isinstance(kind, inspect.BoolType):
        return "true or false"
    if isinstance(kind, inspect.StrType):
        if kind.pattern == r"^[0-9]+$":
            return 'a string of digits, such as "1"'
        if kind.pattern:
            return "a name of at most 64 letters, digits, '.', '_' and '-'"
        return "a string"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        word = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
        return word if kind.ge is None else f"{word} of at least {kind.ge}"
    if isinstance(kind, inspect.VarTupleType):
        return f"a list (each {describe(kind.item_type)})"
    return "a table"


def _sections_with(kind: inspect.StructType, key: str, path: str = "") -> list[str]:
    """The tables that know `key`, shallow first."""
    found: list[str] = []
    for field in kind.fields:
        below = f"{path}.{field.encode_name}" if path else field.encode_name
        child: inspect.Type = field.type
        if isinstance(child, inspect.DictType):
            child, below = child.value_type, f"{below}.NAME"
        if isinstance(child, inspect.StructType):
            if any(inner.encode_name == key for inner in child.fields):
                found.append(f"[{below}]")
            found += _sections_with(child, key, below)
    return found

"""A configuration for a service of certify's own: the user's, on another port, in other folders."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpusup.conf.handlers import is_file, resolve_handler
from gpusup.conf.load import load_file

_BARE: Final = re.compile(r"^[A-Za-z0-9_-]+$")
_SERVER_PATHS: Final = ("tls_cert", "tls_key")
_MODEL_PATHS: Final = ("weights", "golden")

#: The handler that comes with gpusup.
DIGITS: Final = "gpusup.worker.digits:Digits"
BUNDLED: Final = {"digits": {"handler": DIGITS, "retry": "safe"}}


def derive(
    path: Path | None,
    folder: Path,
    *,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    server: Mapping[str, Any] | None = None,
) -> tuple[str, list[str]]:
    """The text of the configuration, and what is different from the original, in words.

    `folder` gets run and state directories. `models` are added, `server` keys are set.
    Raises ConfigError for what `gpusup run` would refuse.
    """
    load_file(path)  # says all that is wrong with it, in the usual words
    raw: dict[str, Any] = tomllib.loads(path.read_text()) if path else {}
    base = path.parent.absolute() if path else Path.cwd()
    notes = []
    own = dict(raw.get("server", {}))
    for key in _SERVER_PATHS:
        if own.pop(key, ""):
            notes.append(f"server.{key} is left out: measured without TLS")
    if own.pop("api_keys", ""):
        notes.append("server.api_keys is left out: no key is asked for")
    own.pop("dashboard", None)
    own.pop("control_group", None)
    own.update(listen="127.0.0.1:0", run_dir=str(folder / "run"), state_dir=str(folder / "state"))
    for key, value in (server or {}).items():
        notes.append(f"server.{key} = {value!r}" if key != "listen" else f"it listens on {value}")
        own[key] = value
    raw["server"] = own
    raw["log"] = {**raw.get("log", {}), "format": "json", "file": ""}
    raw["models"] = {
        name: _absolute(dict(model), base) for name, model in (raw.get("models") or BUNDLED).items()
    }
    for name, model in (models or {}).items():
        raw["models"][name] = dict(model)
    return to_toml(raw), notes


def _absolute(model: dict[str, Any], base: Path) -> dict[str, Any]:
    for key in _MODEL_PATHS:
        if model.get(key):
            model[key] = str(base / Path(model[key]).expanduser())
    if "/" in model.get("python", ""):
        model["python"] = str(base / Path(model["python"]).expanduser())
    handler = model.get("handler", "")
    place = handler.rpartition(":")[0]
    if is_file(place) or (base / (place.replace(".", "/") + ".py")).is_file():
        model["handler"] = resolve_handler(handler, base)
    return model


def to_toml(tables: Mapping[str, Any]) -> str:
    """Tables of builtins as TOML, nested ones inline. Raises TypeError for anything else."""
    lines = []
    for name, table in tables.items():
        if name == "models":
            for model, content in table.items():
                lines += [f"[models.{quoted(model)}]", *_pairs(content), ""]
        elif isinstance(table, Mapping):
            lines += [f"[{quoted(name)}]", *_pairs(table), ""]
        else:
            lines.insert(0, f"{quoted(name)} = {_value(table)}")
    return "\n".join(lines)


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{quoted(key)} = {_value(value)}" for key, value in table.items()]


def quoted(key: str) -> str:
    """As a key of TOML, in quotes where it needs them."""
    return key if _BARE.match(key) else json.dumps(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(_value(one) for one in value) + "]"
        case Mapping():
            return "{ " + ", ".join(_pairs(value)) + " }" if value else "{}"
        case _:
            raise TypeError(f"{value!r} has no form in TOML")

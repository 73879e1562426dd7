"""Read a gpusup.toml and say plainly all that is wrong with it.

    load(path)        -> Config, or ConfigError with one line per problem
    load_file(path)   -> the same with where it came from, for reload and for messages

Paths in the file are relative to its folder; in the Config they are absolute.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from .crosscheck import check_all
from .schema import Config, ModelConfig
from .typed import Checker


class ConfigError(Exception):
    """The file can't be used. `lines` are for the person who wrote it: file, key, cause."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """`path` is None for the built-in defaults; relative paths start at `base`."""

    config: Config
    path: Path | None
    base: Path


#: Served when nothing else is named: handwritten digits, shipped with the package.
BUNDLED_MODEL = "digits"


def bundled_model() -> ModelConfig:
    """Digits is a pure function of its input, so that repeating a request is safe."""
    return ModelConfig(
        handler="gpusup.worker.digits:Digits",
        retry="safe",
        golden=str(files("gpusup.conf") / "digits" / "golden-{version}.npz"),
    )


def _with_golden(model: ModelConfig) -> ModelConfig:
    """The bundled weights bring their golden example along, also where a file names the model."""
    ours = bundled_model()
    if model.handler != ours.handler or model.weights or model.golden:
        return model
    return msgspec.structs.replace(model, golden=ours.golden)


def load(path: Path | None) -> Config:
    """The configuration in `path`; without one, the defaults. Raises ConfigError."""
    return load_file(path).config


def load_file(path: Path | None) -> LoadedConfig:
    """As `load`, with where it came from. Raises ConfigError."""
    if path is None:
        config = Config(models={BUNDLED_MODEL: bundled_model()})
        return LoadedConfig(config=config, path=None, base=Path.cwd())
    config = parse(_read(path), path.parent.absolute(), str(path))
    return LoadedConfig(config=config, path=path.absolute(), base=path.parent.absolute())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot read {path}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"cannot read {path}: byte {error.start} is not UTF-8"]) from error


def parse(text: str, base: Path, name: str = "config") -> Config:
    """The configuration in `text`. `name` starts each line of a ConfigError."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError([f"{name}: not valid TOML: {str(error) or 'nested too deep'}"]) from error
    checker = Checker(Config)
    clean = checker.check(raw)
    if checker.problems:
        raise ConfigError([f"{name}: {line}" for line in checker.problems])
    config = msgspec.convert(clean, Config)
    models = {name: _with_golden(model) for name, model in config.models.items()}
    config = msgspec.structs.replace(config, models=models or {BUNDLED_MODEL: bundled_model()})
    config, problems = check_all(config, base)
    if problems:
        raise ConfigError([f"{name}: {line}" for line in problems])
    return config

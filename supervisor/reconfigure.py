"""A configuration read again: what changed becomes changes; a broken file is refused whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpusup.conf.load import ConfigError, load_file
from gpusup.conf.schema import Config, ModelConfig

from . import standby
from .actions import Action, Assignment
from .change import Change
from .commands import Conflict, Rejected
from .fleet import Fleet
from .rollout import Swap
from .verbs import ReloadWish

if TYPE_CHECKING:
    from .box import Box

#: Fields of a model that a swap carries over; others need slots to be laid out anew.
_LAYOUT_FIELDS = ("workers", "devices")


def resolve_wish(box: Box, wish: ReloadWish) -> ReloadWish:
    """Relative weights start at the configuration's folder, as in the file."""
    if wish.weights and not Path(wish.weights).is_absolute():
        return msgspec.structs.replace(wish, weights=str(box.loaded.base / wish.weights))
    return wish


def reconfigure(box: Box) -> list[str]:
    """Ids of the changes. Raises CommandError; then nothing was touched."""
    try:
        loaded = load_file(box.loaded.path)
    except ConfigError as error:
        raise Rejected("; ".join(error.lines)) from error
    fleet = box.runtime.fleet
    old, new = fleet.config, loaded.config
    busy = [c.id for c in fleet.changes.values() if c.is_active() and c.model]
    if busy:
        text = f"change {busy[0]} is under way; reload when it has ended"
        raise Conflict(text, change=busy[0])
    fixed = [
        name
        for name in Config.__struct_fields__
        if name != "models" and getattr(old, name) != getattr(new, name)
    ]
    if fixed:
        box.runtime.tell(
            "config", f"[{'], ['.join(fixed)}] changed: takes effect at the next restart", "warning"
        )
    ids = [
        box.runtime.change(partial(_change, fleet, new, model)).id for model in _touched(old, new)
    ]
    box.loaded = loaded
    return ids


def _touched(old: Config, new: Config) -> list[str]:
    names = {**old.models, **new.models}
    return [name for name in names if old.models.get(name) != new.models.get(name)]


def _change(fleet: Fleet, new: Config, name: str, now: float) -> tuple[Change, list[Action]]:
    before, after = fleet.config.models.get(name), new.models.get(name)
    if before is not None and after is not None and _only_standby(before, after):
        return standby.switch(fleet, name, after, now)
    if before is not None and after is not None and _same_layout(before, after):
        record = fleet.models[name]
        assignment = Assignment(model=name, version=after.version, config=after)
        todo = [s.name for s in fleet.slots_of(name)] if record.loaded else []
        swap = Swap(
            "reload", name, f"reload {name}, its configuration changed", fleet,
            new=assignment, old=record.current, todo=todo, configure=after,
        )  # fmt: skip
        return swap, fleet.start_change(swap, now)
    return fleet.replan(name, after, now)


def _only_standby(before: ModelConfig, after: ModelConfig) -> bool:
    return msgspec.structs.replace(before, standby=after.standby) == after


def _same_layout(a: ModelConfig, b: ModelConfig) -> bool:
    return all(getattr(a, field) == getattr(b, field) for field in _LAYOUT_FIELDS)

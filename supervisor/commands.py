"""What the control API can ask of the supervisor, as something that is handed in, and its errors.

The run loop implements `Commands` (operator.py); control.py only speaks HTTP. Answers are plain
builtins, ready for JSON. A long operation returns the id of its change at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

#: States of a change that will not move any more.
ENDED: frozenset[str] = frozenset({"done", "failed", "rolled-back", "aborted"})


class CommandError(Exception):
    """A wish that can't be granted. `status` is HTTP's; the text is one line for the operator."""

    status = 400
    code = "invalid"

    def __init__(self, text: str, *, change: str = "") -> None:
        super().__init__(text)
        self.change = change


class UnknownTarget(CommandError):
    status = 404
    code = "not_found"


class Conflict(CommandError):
    """`change`: the one that is in the way, if it is one."""

    status = 409
    code = "conflict"


class Rejected(CommandError):
    """The wish was understood, but what it needs is not as it should be, e.g. a file."""

    status = 422
    code = "rejected"


class NotAllowed(CommandError):
    status = 403
    code = "permission"


class NotNow(CommandError):
    """Can't be done at present, and nothing was changed."""

    status = 503
    code = "unavailable"


class Commands(Protocol):
    """All but `dump` return at once. Each raises CommandError."""

    def status(self) -> Mapping[str, Any]:
        """As `wire.StatusView`."""
        ...

    def cordon(self, target: str, why: str, by: str) -> None: ...

    def uncordon(self, target: str) -> None: ...

    def drain(self, target: str, limit_s: float | None, by: str) -> str: ...

    def restart(self, target: str) -> str:
        """A slot, a device, or a proxy."""
        ...

    def reset_failed(self, target: str) -> None: ...

    def reload_model(self, model: str, options: Mapping[str, Any]) -> str | Mapping[str, Any]:
        """`options` as verbs.ReloadWish. With dry_run the plan, else the change's id."""
        ...

    def rollback(self, model: str) -> str: ...

    def promote(self, model: str) -> str: ...

    def load(self, model: str) -> str: ...

    def unload(self, model: str) -> str: ...

    def changes(self) -> Sequence[Mapping[str, Any]]: ...

    def change(self, change: str) -> Mapping[str, Any]:
        """As `wire.ChangeView`."""
        ...

    def abort(self, change: str) -> None: ...

    def logs(self, target: str, lines: int, since: int) -> tuple[list[str], int]:
        """The last `lines` lines after number `since`, and the number reached."""
        ...

    async def dump(self, target: str) -> str:
        """The stacks of all threads of that slot's worker."""
        ...

    def events(self, since: int) -> Sequence[Mapping[str, Any]]:
        """Each with `serial`, rising; those above `since` that are still kept."""
        ...

    def stop(self) -> None: ...

    async def reexec(self) -> None: ...

    def reload_config(self) -> Sequence[str]:
        """Ids of the changes it became. A file that is broken is refused whole."""
        ...

    def metrics(self) -> str: ...

    def v2_stats(self, model: str = "", version: str = "") -> Mapping[str, Any]:
        """The statistics extension's answer; "" for all models, the served versions."""
        ...

    def buckets(self, model: str) -> Mapping[str, Any]: ...

    def plan(self) -> Mapping[str, Any]: ...

    def leases(self) -> Mapping[str, Any]: ...

    def support(self) -> Mapping[str, Any]:
        """Configuration (secrets taken out), environment facts: what a bundle needs besides."""
        ...

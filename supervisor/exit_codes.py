"""Exit codes of `gpusup` and `gpusupctl`. Imports nothing: the command line reads it first."""

from __future__ import annotations

from typing import Final

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2  # wrong arguments, unusable configuration, port or run directory in use
DEGRADED: Final = 3  # it works, but not all of it: `status`
NOT_FOUND: Final = 4  # no such slot, model or change
PERMISSION: Final = 5
ROLLED_BACK: Final = 6  # the new version was refused, the old one serves
UNREACHABLE: Final = 7  # no supervisor answers
TIMED_OUT: Final = 124  # gave up waiting; the change goes on
INTERRUPTED: Final = 130

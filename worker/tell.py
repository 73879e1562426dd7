"""A handler's exception, for those who mend it: the traceback goes to the worker's output.

The client is told one line without paths. A defect that every request meets must not flood the log,
so the same place is told again only after a while.
"""

from __future__ import annotations

import sys
import time
import traceback
from typing import Final

AGAIN_S: Final = 10.0
_PLACES: Final = 100

_told: dict[tuple[type[BaseException], str, int], float] = {}


def tell(error: BaseException) -> None:
    """Print the traceback, unless that of this place was printed a moment ago."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        frames = frames.tb_next
    file = frames.tb_frame.f_code.co_filename if frames else ""
    place = (type(error), file, frames.tb_lineno if frames else 0)
    now = time.monotonic()
    if now - _told.get(place, -AGAIN_S) < AGAIN_S:
        return
    if len(_told) >= _PLACES:
        _told.clear()
    _told[place] = now
    traceback.print_exception(error)
    sys.stderr.flush()

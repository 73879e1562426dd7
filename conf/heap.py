"""What glibc's heap does with memory that was freed.

By itself it takes larger blocks from the kernel one by one and gives each back at once, and every
page of the next one faults anew. A net of small layers on the CPU loses a fifth of its time so.
"""

from __future__ import annotations

import ctypes
from typing import Final

#: mallopt's names (malloc.h).
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

MIB: Final = 2**20


def keep(blocks: int, top: int) -> None:
    """Keep freed blocks of up to `blocks` bytes (glibc allows 32 MiB), and up to `top` bytes of
    free memory at the heap's end. For the whole process; quiet where the libc is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, blocks)
        mallopt(_M_TRIM_THRESHOLD, top)


def give_back() -> None:
    """All that is free, to the kernel. Some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

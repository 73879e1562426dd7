"""What a GPU fault calls for. Pure.

The driver knows best: since 565 it names a recovery action. The table of Xid numbers is for older
drivers and for what only the kernel log can still say when NVML has stopped answering.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

#: restart: a new process will do · reset: the GPU must be reset · node: the box needs a reboot, or
#: the GPU is off the bus · retire: the board is to be replaced · lost: NVML has lost it ·
#: back: it is there again · none: for the log only
Verdict = Literal["none", "restart", "reset", "node", "retire", "lost", "back"]

#: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
ACTIONS: Final[dict[int, tuple[Verdict, str]]] = {
    0: ("none", "the driver asks for no recovery"),
    1: ("reset", "the driver asks for a reset of the GPU"),
    2: ("node", "the driver asks for a reboot"),
    3: ("reset", "the driver asks to drain the GPU and its peers"),
    4: ("reset", "the driver asks to drain and reset the GPU"),
    5: ("reset", "the driver asks to recover the IMEX domain"),
    6: ("reset", "the driver asks for a reset of the bus"),
    7: ("node", "the driver asks for a reboot of the system"),
}


def _span(*parts: int | range) -> frozenset[int]:
    return frozenset(n for part in parts for n in ([part] if isinstance(part, int) else part))


RESET: Final = _span(46, 48, 62, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
NODE: Final = _span(79, 151)
RETIRE: Final = _span(64)
NVLINK: Final = _span(74, range(144, 151))
NOTE: Final = _span(
    37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 160, 161
)

#: What the commoner numbers mean, for the sentence in `status`.
NAMES: Final = {
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "memory page fault",
    32: "corrupted push buffer",
    43: "a channel was reset",
    45: "a process was torn down",
    46: "GPU stopped processing",
    48: "uncorrectable ECC error",
    62: "internal micro-controller halt",
    63: "a memory row is to be remapped at the next reset",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    119: "the GPU's firmware does not answer",
    120: "error in the GPU's firmware",
    140: "unrecovered ECC error",
    154: "the recovery action changed",
}


def verdict_of_xid(xid: int) -> Verdict:
    """By the table. A number it doesn't know may be anything: a new process, and ask the driver."""
    if xid in RETIRE:
        return "retire"
    if xid in NODE:
        return "node"
    if xid in RESET or xid in NVLINK:
        return "reset"
    if xid in NOTE:
        return "none"
    return "restart"


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    text: str


def judge(
    *, xid: int | None = None, action: int | None = None, remap_failed: bool = False
) -> Judgement:
    """What is to be done about a device with this fault and this recovery action.

    `action` is None where the driver can't say; then the table decides.
    """
    what = ""
    if xid is not None:
        name = NAMES.get(xid)
        what = f"Xid {xid}" + (f" ({name})" if name else "")
    if remap_failed:
        return Judgement("retire", _join(what, "a memory row could not be remapped; replace it"))
    if action is not None:
        verdict, sentence = ACTIONS.get(action, ("reset", f"the driver asks for action {action}"))
        if verdict == "none" and xid is not None:
            by_table = verdict_of_xid(xid)
            if by_table == "retire":
                return Judgement("retire", _join(what, "replace the board"))
            if by_table != "none":
                # The process that met the fault is done for; its GPU, says the driver, is not.
                return Judgement("restart", _join(what, "a new process may use the GPU at once"))
        return Judgement(verdict, _join(what, sentence))
    if xid is None:
        return Judgement("none", "")
    verdict = verdict_of_xid(xid)
    sentence = {
        "none": "nothing to do",
        "restart": "a new process may use the GPU at once",
        "reset": "the GPU must be reset (nvidia-smi -r)",
        "node": "the machine needs a reboot",
        "retire": "replace the board",
    }[verdict]
    return Judgement(verdict, _join(what, sentence))


def _join(what: str, sentence: str) -> str:
    return f"{what}: {sentence}" if what else sentence


# -- the kernel log -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelFault:
    """A line of the kernel log about a GPU. `bus` as the log has it, "0000:17:00"; `at`: seconds
    since boot; `sequence`: the log's own number, so a line is never taken twice."""

    sequence: int
    at: float
    bus: str
    xid: int
    text: str


_RECORD: Final = re.compile(r"^(\d+),(\d+),(\d+),[^;]*;(.*)", re.DOTALL)
_XID: Final = re.compile(
    r"NVRM: Xid \(PCI:([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})[^)]*\): (\d+)(?:, )?(.*)"
)
_OFF_BUS: Final = re.compile(
    r"NVRM: (?:The )?(?:NVIDIA )?GPU (?:at )?(?:PCI:)?"
    r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})"
    r"[^:]*:?.*fallen off the bus"
)


def parse_kmsg(record: str) -> KernelFault | None:
    """One record as /dev/kmsg gives it: "priority,sequence,microseconds,flags;text"."""
    found = _RECORD.match(record)
    if not found:
        return None
    sequence, at, text = int(found[2]), int(found[3]) / 1e6, found[4].split("\n", 1)[0]
    if match := _XID.search(text):
        return KernelFault(sequence, at, match[1].lower(), int(match[2]), match[3].strip())
    if match := _OFF_BUS.search(text):
        # The driver does not always give this one a number.
        return KernelFault(sequence, at, match[1].lower(), 79, "GPU has fallen off the bus")
    return None


def same_bus(a: str, b: str) -> bool:
    """NVML writes 00000000:17:00.0 where the log writes 0000:17:00."""
    return _short_bus(a) == _short_bus(b)


def _short_bus(bus: str) -> tuple[int, ...]:
    parts = bus.lower().removeprefix("pci:").split(".")[0].split(":")
    try:
        return tuple(int(part, 16) for part in parts)
    except ValueError:
        return ()

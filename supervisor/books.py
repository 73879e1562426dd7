"""The fleet's memory: what workers need, what is free where, and who may take how much. Pure.

Keeps the ledger in step with the workers there are, so that no path has to remember to give
something back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpusup.conf.schema import Config, ModelConfig

from .actions import Assignment
from .layout import DevicePlace
from .ledger import Ledger, OverCommitted
from .life import Life, State
from .placement import CONTEXT_BYTES

#: Of a device's memory, for all its workers together; the rest is the driver's.
CAP_SHARE: Final = 0.96


@dataclass(slots=True)
class Device:
    place: DevicePlace
    total: int
    known: bool = False
    lost: str = ""
    fault: str = ""


class Books:
    def __init__(
        self,
        config: Config,
        devices: Mapping[str, DevicePlace],
        size_of: Callable[[Assignment, str], int],
    ) -> None:
        """`size_of(assignment, kind)`: bytes a worker will take, guessed before it ever ran."""
        self.devices = {name: Device(place, place.total) for name, place in devices.items()}
        self.learned: dict[tuple[str, str, str], tuple[int, int]] = {}
        # With other weights or settings than these it may take something else.
        self._measured_as: dict[tuple[str, str, str], ModelConfig] = {}
        self.ledger = Ledger(share=config.watermark.shed)
        self._size_of = size_of
        for name, place in devices.items():
            self.ledger.add_device(name, place.total)

    def need(self, assignment: Assignment, device: str) -> tuple[int, int]:
        """(at rest, more at the peak of a batch): measured, declared, or guessed from the file."""
        kind = self.devices[device].place.kind
        key = (assignment.model, assignment.version, kind)
        learned = self.learned.get(key)
        if learned and self._measured_as.get(key, assignment.config) == assignment.config:
            return learned
        guess = assignment.config.static or self._size_of(assignment, kind)
        if assignment.config.static:
            return guess, assignment.config.peak
        # Another version of the same model says more than its file does.
        akin = [
            sizes
            for (model, _, where), sizes in self.learned.items()
            if (model, where) == (assignment.model, kind)
        ]
        rest = max([guess, *(rest for rest, _ in akin)])
        return rest, max([assignment.config.peak, *(peak for _, peak in akin)])

    def learn(self, life: Life) -> None:
        """A worker is ready: it has measured itself."""
        if life.info is None:
            return
        memory = life.info.memory
        kind = self.devices[life.device].place.kind
        key = (life.assignment.model, life.assignment.version, kind)
        peak = max([*life.peaks.values(), life.assignment.config.peak])
        self._measured_as[key] = life.assignment.config
        # torch does not count the context, and can't say how large it is. The driver may, but a
        # figure that changes with what is loaded later is no base for a plan.
        context = CONTEXT_BYTES if kind == "cuda" else 0
        self.learned[key] = (memory.static + context, peak)
        self.ledger.settle(life.slot, life.generation, *self.learned[key])

    def sampled(self, device: str, total: int, used: int, ours: int) -> None:
        self.devices[device].total = total
        self.devices[device].known = True
        self.ledger.add_device(device, total)
        self.ledger.sample(device, used, ours)

    def unknown(self, device: str) -> None:
        self.devices[device].known = False

    def room(self, device: str) -> int | None:
        """Bytes that could still be promised there. None: can't be told."""
        return self.ledger.free(device) if self.devices[device].known else None

    def has_room_for_context(self, device: str) -> bool:
        """Whether a worker that only prepares may open the device already."""
        room = self.room(device)
        return self.devices[device].place.kind != "cuda" or room is None or room >= CONTEXT_BYTES

    def shortage(self, assignment: Assignment, device: str, spare: int = 0) -> str:
        """ "" if a worker may start there, else what is missing, with both numbers. `spare`: bytes
        that are promised to what it starts from."""
        room = self.room(device)
        room = None if room is None else room + spare
        rest, peak = self.need(assignment, device)
        if room is None or rest + peak <= room:
            return ""
        return f"wants {rest + peak} bytes of {device}, {room} are free"

    def sync(self, lives: Iterable[Life]) -> None:
        """Enter who came, forget who is gone."""
        present = set()
        for life in lives:
            if life.state is State.GONE:
                continue
            present.add((life.slot, life.generation))
            held = self.ledger.holding(life.slot, life.generation)
            if held is not None and (held.settled or life.held or held.static > CONTEXT_BYTES):
                continue
            rest, peak = self.need(life.assignment, life.device)
            if life.held:
                on_gpu = self.devices[life.device].place.kind == "cuda"
                rest, peak = (CONTEXT_BYTES if on_gpu else 0), 0
            try:
                self.ledger.reserve(life.device, life.slot, life.generation, rest, peak)
            except OverCommitted:
                # It runs whether it fits or not (an in-place swap): enter what can be entered.
                free = self.ledger.free(life.device)
                self.ledger.reserve(life.device, life.slot, life.generation, min(rest, free), 0)
        for device in self.devices:
            for holding in self.ledger.holders(device):
                if (holding.slot, holding.generation) not in present:
                    self.ledger.release(holding.slot, holding.generation)

    def cap(self, life: Life, others: Iterable[Assignment], *, surge: bool) -> int:
        """Bytes the worker may take at most, so that its excess is its own. 0: no cap.

        `others`: what the device's other slots are to run. Each gets what it needs and an equal
        part of what is left; together they stay below the device, contexts included.
        """
        device = self.devices[life.device]
        if not device.total:
            return 0
        mine = sum(self.need(life.assignment, life.device))
        if surge:
            return max(mine, self.room(life.device) or 0)
        others = tuple(others)
        needs = [mine, *(sum(self.need(a, life.device)) for a in others)]
        pool = int(CAP_SHARE * device.total)
        if device.place.kind == "cuda":
            # torch's limit doesn't count the contexts.
            every = (life.assignment, *others)
            pool -= CONTEXT_BYTES * sum(2 if a.config.standby else 1 for a in every)
        left = pool - sum(needs)
        if left < 0:
            return max(1, pool * mine // max(1, sum(needs)))
        return mine + left // len(needs)

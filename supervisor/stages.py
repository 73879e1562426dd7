"""The stages of a swap. Pure."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    CHECK = "check"
    NEXT = "next"
    PLAIN = "start"
    SURGE = "surge"
    RETIRE = "retire"
    SPARE = "spare"
    PREPARE = "prepare"
    DRAIN = "drain"
    LOAD = "load"
    CANARY = "canary"
    UNDO = "undo"
    UNDO_WAIT = "undo-wait"

"""docs/errors.md explains whatever a client or an operator can be told."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from gpusup.proxy.errors import ProxyError
from gpusup.supervisor import exit_codes
from gpusup.supervisor.backoff import Cause
from gpusup.supervisor.slot import Standing

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "errors.md").read_text()


def kinds(kind: type[ProxyError]) -> set[type[ProxyError]]:
    return {kind}.union(*(kinds(below) for below in kind.__subclasses__()))


def test_every_code_of_an_answer_is_explained_with_its_status() -> None:
    for path in (ROOT / "proxy").glob("*.py"):
        if path.stem != "__main__":
            importlib.import_module(f"gpusup.proxy.{path.stem}")
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    ours = {kind for kind in kinds(ProxyError) if kind.__module__.startswith("gpusup.")}
    for kind in ours - {ProxyError}:
        found = [row for row in rows if f"| `{kind.code}` |" in row]
        assert found, f"{kind.code} is not explained"
        if kind.code != "HTTP_ERROR":
            assert any(row.startswith(f"| {kind.status} ") for row in found), kind.code


def test_every_exit_code_is_explained() -> None:
    for name, code in vars(exit_codes).items():
        if name.isupper():
            assert f"| {code} | `{name}` |" in TEXT, name


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_of_a_workers_end_is_explained(cause: Cause) -> None:
    assert f"| `{cause}` |" in TEXT


def test_every_standing_of_a_slot_is_explained() -> None:
    for standing in Standing:
        assert standing is Standing.SCHEDULABLE or f"| `{standing}` |" in TEXT

"""Who may import whom. Edit the tables here first, then the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("conf", "worker", "supervisor", "proxy")

#: What each part may import from the other parts. A part's `wire` is public, the rest is its own.
ACROSS = {
    "conf": set[str](),
    "worker": {"conf"},
    "supervisor": {"conf", "worker.wire", "worker.frame", "worker.progress"},
    "proxy": {"conf", "worker.wire", "worker.frame", "worker.progress", "supervisor.wire"},
}

#: Third-party packages, and the only places that may import them.
ONLY_IN = {
    "torch": {"worker/"},
    "pynvml": {"supervisor/nvml.py"},
    "aiohttp": {"proxy/", "supervisor/"},
}

#: The pure files: no clock, no process, no socket, no loop.
PURE = {
    "conf/schema.py",
    "conf/metrics.py",
    "worker/frame.py",
    "worker/wire.py",
    "worker/batcher.py",
    "worker/budgets.py",
    "supervisor/wire.py",
    "supervisor/events.py",
    "supervisor/actions.py",
    "supervisor/life.py",
    "supervisor/slot.py",
    "supervisor/fleet.py",
    "supervisor/rollout.py",
    "supervisor/undo.py",
    "supervisor/room.py",
    "supervisor/standby.py",
    "supervisor/stages.py",
    "supervisor/blame.py",
    "supervisor/backoff.py",
    "supervisor/certify_math.py",
    "supervisor/ledger.py",
    "supervisor/watermark.py",
    "supervisor/placement.py",
    "supervisor/devices.py",
    "supervisor/diagnostics.py",
    "supervisor/leak.py",
    "supervisor/probe_wire.py",
    "supervisor/reading.py",
    "supervisor/tally.py",
    "supervisor/xid.py",
    "proxy/admission.py",
    "proxy/routes.py",
    "proxy/queue.py",
    "proxy/v2.py",
    "proxy/v2_checks.py",
    "proxy/datatypes.py",
    "proxy/jsoncheck.py",
    "proxy/npy.py",
    "proxy/raw_codec.py",
    "proxy/accept.py",
    "proxy/openai.py",
    "proxy/images.py",
    "proxy/compression.py",
    "proxy/http_rules.py",
}
IMPURE = {"asyncio", "os", "signal", "socket", "subprocess", "threading", "time", "multiprocessing"}


def sources() -> list[str]:
    return [
        str(p.relative_to(ROOT)) for part in PARTS for p in sorted((ROOT / part).glob("**/*.py"))
    ]


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("source", sources())
def test_borders(source: str) -> None:
    part = source.split("/")[0]
    for name in imports(source):
        top, _, rest = name.partition(".")
        assert top not in PARTS, f"{name} is only there when run from the checkout"
        if top == "gpusup":
            allowed = {part} | ACROSS[part]
            assert any(rest == a or rest.startswith(a + ".") for a in allowed), name
        if top in ONLY_IN:
            assert any(source.startswith(place) for place in ONLY_IN[top]), name
        if source in PURE:
            assert top not in IMPURE, name


def test_parts_are_flat() -> None:
    """pyproject.toml lists the packages by name: a sub-package would be left out of the wheel."""
    assert [s for s in sources() if s.count("/") > 1] == []


@pytest.mark.parametrize("part", ["supervisor", "proxy"])
def test_torch_stays_out_of_the_process(part: str) -> None:
    modules = [
        "gpusup." + s.removesuffix(".py").replace("/", ".")
        for s in sources()
        if s.startswith(part + "/") and not s.endswith("__init__.py")
    ]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")

"""A running service for a module of tests.

Where the twelve acceptance tests of supervision are:

 1. GIL held: suspect within the budget, killed with its stacks beyond it: test_hangs.py
 2. stuck in C with the GIL free, the beat fine: test_hangs.py
 3. a late answer is nobody's: test_answers.py
 4. what fled into a session of its own is gone with its worker: test_deaths.py
 5. a stuck probe delays nobody: test_deaths.py, tests/supervisor/test_probe_link.py
 6. memory that is not back is waited for: tests/supervisor/test_reclaim.py, test_fleet.py
 7. a worker that can't be killed: tests/supervisor/test_fleet.py, test_saved.py, test_carry.py
 8. a reload whose golden example fails: test_swap.py
 9. an upgrade of the supervisor under load: test_reexec.py; of proxies: test_deaths.py
10. an orphan's exit code is nobody's: test_deaths.py, tests/supervisor/test_family.py
11. nothing outlives a killed supervisor: test_service.py
12. every Xid has its verdict: tests/supervisor/test_xid.py, test_gpu_faults.py
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", type=int, default=5, help="how many runs of chaos")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short, because the names of Unix sockets must be."""
    path = Path(tempfile.mkdtemp(prefix="gs-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_path() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="gs-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)

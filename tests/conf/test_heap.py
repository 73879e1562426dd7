"""The heap of a process as it is, so each test has a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

OPENING = """
import json, resource
from gpusup.conf import heap

def use(mib):
    blocks = [bytearray(2 * heap.MIB) for _ in range(mib // 2)]

def faults(mib, rounds=20):
    use(mib)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        use(mib)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds
"""


def said(program: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", OPENING + program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_blocks_that_are_kept_do_not_fault_again() -> None:
    by_itself, kept = said("""
by_itself = faults(16)
heap.keep(blocks=32 * heap.MIB, top=64 * heap.MIB)
print(json.dumps([by_itself, faults(16)]))
""")
    pages = 16 * 2**20 / 4096
    assert kept < pages / 20
    assert by_itself > 10 * kept


def test_what_is_kept_can_be_given_back_and_hides_no_peak() -> None:
    kept, given_back, peak = said("""
from gpusup.worker.device import Cpu
cpu = Cpu(0)
heap.keep(blocks=32 * heap.MIB, top=64 * heap.MIB)
start = cpu.allocated()
use(48)
kept = cpu.allocated() - start
heap.give_back()
given_back = cpu.allocated() - start
use(48)
cpu.begin_peak()
before = cpu.allocated()
use(32)
print(json.dumps([kept, given_back, cpu.peak() - before]))
""")
    assert kept > 40 * 2**20
    assert given_back < 4 * 2**20
    assert 28 * 2**20 < peak < 40 * 2**20


def test_the_cap_counts_nothing_that_is_only_kept() -> None:
    assert said("""
from gpusup.worker.device import CapReached, Cpu
heap.keep(blocks=32 * heap.MIB, top=64 * heap.MIB)
cpu = Cpu(0)
use(48)
cpu._cap = cpu.allocated() + 8 * heap.MIB
cpu.check_room(32 * heap.MIB)
try:
    cpu.check_room(80 * heap.MIB)
except CapReached as error:
    print(json.dumps(str(error)))
""").startswith(f"the batch takes {80 * 2**20} bytes above the ")

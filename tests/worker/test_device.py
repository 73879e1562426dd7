"""Which errors a worker survives, and what a CPU slot's memory limit does."""

from __future__ import annotations

import pytest
import torch

from gpusup.worker.device import CapReached, Cpu, is_oom, is_sticky, tried_bytes


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: misaligned address",
        "CUDA error: an illegal instruction was encountered",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error 719",
        "cuda runtime error (710)... cudaErrorAssert",
    ],
)
def test_errors_that_poison_the_context_are_sticky(text: str) -> None:
    assert is_sticky(RuntimeError(text))
    assert not is_oom(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: device-side assert triggered"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("the launch failure rate is 0.1"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: invalid argument"),
    ],
)
def test_other_errors_are_not(error: Exception) -> None:
    assert not is_sticky(error)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 2**31),
        (RuntimeError("CUDA error: out of memory"), 0),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. "
                      "Error code 12"), 64),
        (MemoryError("no"), 0),
        (CapReached("x"), 0),
    ],
)  # fmt: skip
def test_out_of_memory_is_recognised_with_its_size(error: Exception, asked: int) -> None:
    assert is_oom(error)
    assert tried_bytes(error) == asked


def test_the_cap_of_a_cpu_slot_refuses_one_allocation_and_not_the_process() -> None:
    cpu = Cpu(0)
    cap = cpu.allocated() + 2**28
    cpu.release()
    cpu = Cpu(cap)
    try:
        with pytest.raises(Exception, match="allocate") as caught:
            torch.ones(2**32, dtype=torch.uint8)
        assert is_oom(caught.value)
        assert tried_bytes(caught.value) == 2**32
        assert torch.ones(10).sum() == 10
        with pytest.raises(CapReached, match=str(cap)):
            cpu.check_room(2**29)
        cpu.check_room(0)
    finally:
        cpu.release()


def test_a_peak_is_seen_although_it_is_over() -> None:
    cpu = Cpu(0)
    try:
        before = cpu.allocated()
        cpu.begin_peak()
        block = torch.ones(2**27, dtype=torch.uint8)
        del block
        assert cpu.peak() - before > 2**26
    finally:
        cpu.release()


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: operation not permitted when stream is capturing",
        "CUDA error: operation failed due to a previous error during capture",
    ],
)
def test_a_graph_that_could_not_be_captured_costs_nobody_the_worker(text: str) -> None:
    assert not is_sticky(RuntimeError(text))

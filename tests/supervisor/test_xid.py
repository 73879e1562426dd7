from __future__ import annotations

import pytest

from gpusup.supervisor.xid import Verdict, judge, parse_kmsg, same_bus, verdict_of_xid


@pytest.mark.parametrize(
    ("xid", "verdict"),
    [
        (13, "restart"), (31, "restart"), (94, "restart"), (48, "reset"), (95, "reset"),
        (119, "reset"), (79, "node"), (151, "node"), (64, "retire"), (63, "none"), (45, "none"),
        (74, "reset"), (170, "restart"),
    ],
)  # fmt: skip
def test_the_table_decides_where_the_driver_cannot_say(xid: int, verdict: Verdict) -> None:
    assert verdict_of_xid(xid) == verdict
    assert judge(xid=xid).verdict == verdict


@pytest.mark.parametrize(
    ("action", "verdict"), [(1, "reset"), (2, "node"), (4, "reset"), (7, "node"), (99, "reset")]
)
def test_the_drivers_own_word_goes_before_the_table(action: int, verdict: Verdict) -> None:
    assert judge(xid=31, action=action).verdict == verdict


def test_a_gpu_that_the_driver_calls_usable_only_costs_the_process() -> None:
    assert judge(xid=109, action=0).verdict == "restart"
    assert judge(xid=63, action=0).verdict == "none"
    assert judge(action=0).verdict == "none"


def test_a_row_that_could_not_be_remapped_retires_the_board() -> None:
    assert judge(remap_failed=True, action=0).verdict == "retire"
    assert judge(xid=64, action=0).verdict == "retire"


def test_the_sentence_names_number_and_remedy() -> None:
    assert judge(xid=119).text == (
        "Xid 119 (the GPU's firmware does not answer): the GPU must be reset (nvidia-smi -r)"
    )


def test_the_kernel_log_is_understood() -> None:
    fault = parse_kmsg(
        "4,1234,98765432,-;NVRM: Xid (PCI:0000:C1:00): 13, pid=4711, name=python, Graphics SM\n"
        " SUBSYSTEM=pci\n"
    )
    assert fault is not None
    assert (fault.sequence, fault.xid, fault.bus) == (1234, 13, "0000:c1:00")
    assert fault.at == pytest.approx(98.765432)
    assert "pid=4711" in fault.text


def test_a_gpu_off_the_bus_is_seen_without_a_number() -> None:
    fault = parse_kmsg("3,9,5,-;NVRM: GPU 0000:17:00.0: GPU has fallen off the bus.")
    assert fault is not None
    assert (fault.xid, fault.bus) == (79, "0000:17:00")


@pytest.mark.parametrize("line", ["", "hello", "6,1,2,-;usb 1-1: new device", "x,y,z;NVRM: Xid"])
def test_other_lines_are_no_faults(line: str) -> None:
    assert parse_kmsg(line) is None


def test_nvml_and_kernel_write_the_same_bus_differently() -> None:
    assert same_bus("00000000:17:00.0", "0000:17:00")
    assert not same_bus("00000000:17:00.0", "0000:18:00")
    assert not same_bus("00000000:17:00.0", "nonsense")

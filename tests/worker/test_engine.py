"""What clients and the supervisor may rely on, asked of a whole engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusup.worker.handlers import from_file

engines: Any = from_file(str(Path(__file__).parent / "engines.py"))
raw, tensor, values = engines.raw, engines.tensor, engines.values

Make = Callable[..., Any]


def at_rest(served: Any) -> int:
    """Rows that would be taken, once nothing is there; -1 as long as something is. How many more
    than at first depends on how fast the batches were."""
    load = served.engine.load_now()
    return -1 if load.queued_rows or load.running_rows else load.free_rows


def test_tensors_come_back_by_their_declared_names(make: Make) -> None:
    served = make("Double").start()
    answer = served.one(tensor([[1.0], [2.5]]), rows=2)
    assert answer.status == "ok"
    assert answer.parts[0].name == "y"
    assert values(answer) == [[2.0], [5.0]]
    assert answer.batch_rows == 2


def test_a_raw_body_goes_through_decode_and_encode(make: Make) -> None:
    served = make("Double").start()
    answer = served.one(raw('{"value": 3}'))
    assert json.loads(answer.parts[0].data)["value"] == 6.0
    assert answer.parts[0].content_type == "application/json"


def test_several_inputs_and_outputs_go_by_name(make: Make) -> None:
    served = make("Two").start()
    answer = served.one(tensor([[1, 2]], "a"), tensor([[10, 20]], "b"))
    assert [part.name for part in answer.parts] == ["sum", "diff"]
    assert values(answer) == [[11.0, 22.0]]
    answer = served.one(tensor([[1, 2]], "a"))
    assert (answer.status, answer.text) == ("invalid", "input 'b' is missing")


def test_a_tensor_of_another_shape_is_refused_with_both(make: Make) -> None:
    served = make("Two").start()
    answer = served.one(tensor([[1, 2, 3]], "a"), tensor([[10, 20]], "b"))
    assert answer.status == "invalid"
    assert "[1, 3]" in answer.text
    assert "[-1, 2]" in answer.text


def test_one_bad_item_of_eight_fails_alone(make: Make, model: Any) -> None:
    served = make("Picky", wait=5.0).start()
    model().Picky.seen.clear()
    entries = served.offer(*[[tensor([[float(n)]])] for n in (1, 2, 13, 4, 5, 6, 7, 8)])
    answers = served.wait(8)
    statuses = [answers[entry.item.id].status for entry in entries]
    assert statuses == ["ok", "ok", "failed", "ok", "ok", "ok", "ok", "ok"]
    assert values(answers[entries[3].item.id]) == [[5.0]]
    assert answers[entries[2].item.id].text == "RuntimeError: unlucky"
    assert len(model().Picky.seen) <= 9
    assert served.one(tensor([[1.0]])).status == "ok"


def test_no_one_gets_anothers_answer_when_rows_are_missing(make: Make) -> None:
    served = make("WrongRows", wait=5.0).start()
    entries = served.offer(*[[tensor([[float(n)]])] for n in (1, 2, 3, 4, 5, 6, 7, 666)])
    answers = served.wait(8)
    assert {answers[entry.item.id].status for entry in entries} == {"failed"}
    assert "7 rows" in answers[1].text
    assert "8" in answers[1].text
    assert values(served.one(tensor([[3.0]]))) == [[3.0]]


def test_an_exception_while_the_bucket_is_chosen_fails_that_item_only(make: Make) -> None:
    served = make("BadBucket").start()
    entries = served.offer([tensor([[13.0]])], [tensor([[1.0]])])
    answers = served.wait(2)
    assert answers[entries[0].item.id].status == "failed"
    assert answers[entries[1].item.id].status == "ok"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ('"bad"', "invalid", "bad is not a number"),
        ('"bug"', "failed", "KeyError: 'bug'"),
        ("{", "invalid", "not JSON"),
        ("[" * 100_000, "invalid", "nested too deeply"),
        ("1", "failed", "NaN"),
        ("2", "failed", "can't be written as JSON"),
        ("3", "ok", ""),
        ("5", "ok", ""),
    ],
)
def test_faults_in_decode_and_encode_are_told_apart(
    make: Make, body: str, status: str, text: str
) -> None:
    served = make("BadEncode").start()
    entries = served.offer([raw(body)], [raw("4")])
    answers = served.wait(2)
    assert answers[entries[0].item.id].status == status
    assert text in answers[entries[0].item.id].text
    other = answers[entries[1].item.id].parts[0]
    assert (other.data, other.content_type) == (b"four", "text/x")


def test_opaque_bytes_of_the_declared_size_are_the_tensor(make: Make) -> None:
    served = make("Raw").start()
    answer = served.one(raw(bytes([1, 2, 3, 4]), "application/octet-stream"))
    assert json.loads(answer.parts[0].data) == {"sum": 10}
    answer = served.one(raw(b"12345", "application/octet-stream"))
    assert answer.status == "invalid"
    assert "5 bytes" in answer.text
    assert "takes 4" in answer.text


def test_more_rows_than_a_batch_takes_are_split_and_put_together(make: Make, model: Any) -> None:
    served = make("Picky").start()
    model().Picky.seen.clear()
    numbers = [[float(n)] for n in range(100, 119)]
    answer = served.one(tensor(numbers), rows=19)
    assert values(answer) == [[n + 1] for (n,) in numbers]
    assert sorted(shape[0] for shape in model().Picky.seen) == [3, 8, 8]


def test_a_split_item_fails_once_if_a_portion_fails(make: Make) -> None:
    served = make("Picky").start()
    answer = served.one(tensor([[13.0] for _ in range(20)]), rows=20)
    assert answer.status == "failed"
    assert served.one(tensor([[1.0]])).status == "ok"
    assert len(served.answers) == 2
    served.until(lambda: 16 <= at_rest(served) <= 16 + 3 * 8)


def test_rows_without_end_are_refused_with_both_numbers(make: Make) -> None:
    served = make("Double").start()
    answer = served.one(tensor([[1.0] for _ in range(257)]), rows=257)
    assert answer.status == "invalid"
    assert "257" in answer.text
    assert "256" in answer.text


def test_no_rows_are_answered_with_no_rows(make: Make) -> None:
    served = make("Double").start()
    import numpy as np

    answer = served.one(tensor(np.zeros((0, 1))))
    assert answer.status == "ok"
    assert answer.parts[0].shape[0] == 0


def test_four_clients_with_five_rows_each_never_share_more_than_eight(
    make: Make, model: Any
) -> None:
    served = make("Picky", max_rows=8, wait=0.05).start()
    model().Picky.seen.clear()
    entries = served.offer(*[[tensor([[n + k] for k in range(5)])] for n in (20, 30, 40)], rows=5)
    answers = served.wait(3)
    for entry, n in zip(entries, (20, 30, 40), strict=True):
        assert values(answers[entry.item.id]) == [[n + k + 1.0] for k in range(5)]
    assert max(shape[0] for shape in model().Picky.seen) <= 8


def test_lengths_are_never_mixed(make: Make) -> None:
    served = make("Lengths", wait=0.05).start()
    entries = served.offer([raw("[1, 2, 3]")], [raw("[1, 2]")], [raw("[5, 6, 7]")])
    answers = served.wait(3)
    found = [json.loads(answers[e.item.id].parts[0].data) for e in entries]
    assert [each["sum"] for each in found] == [6.0, 3.0, 18.0]
    assert [each["batch"][1] for each in found] == [3.0, 2.0, 3.0]


def test_beyond_the_row_budget_it_says_busy_and_calls_when_there_is_room(
    make: Make, model: Any
) -> None:
    served = make("Gate", max_rows=2)
    relieved = threading.Event()
    served.engine.on_relief = relieved.set
    served.start()
    gate = model().Gate
    gate.gate.clear()
    entries = served.offer(*[[tensor([[float(n)]])] for n in range(6)])
    answers = served.wait(2)
    assert [answers[e.item.id].status for e in entries[4:]] == ["busy", "busy"]
    assert not any(answers[e.item.id].started for e in entries[4:])
    assert served.engine.load_now().free_rows == 0
    gate.gate.set()
    served.wait(6)
    assert relieved.wait(engines.LIMIT_S)
    served.until(lambda: 4 <= at_rest(served) <= 4 + 3 * 2)


def test_what_has_not_begun_can_be_asked_back_while_a_batch_is_stuck(
    make: Make, model: Any
) -> None:
    served = make("Gate", max_rows=4).start()
    gate = model().Gate
    gate.gate.clear()
    gate.entered.clear()
    gate.rows.clear()
    (stuck,) = served.offer([tensor([[1.0]])])
    assert gate.entered.wait(engines.LIMIT_S)
    (waits,) = served.offer([tensor([[2.0]])])
    served.engine.recall(1, [stuck.item.id, waits.item.id])
    back = served.wait(1)[waits.item.id]  # from the caller's thread: the other one is stuck
    assert (back.status, back.started) == ("cancelled", False)
    gate.gate.set()
    assert served.wait(2)[stuck.item.id].status == "ok"
    served.until(lambda: served.engine.load_now().queued_rows == 0)
    assert gate.rows == [1]
    assert len(served.answers) == 2


def test_cancelled_and_expired_items_never_start(make: Make, model: Any) -> None:
    served = make("Gate", max_rows=4).start()
    gate = model().Gate
    gate.gate.clear()
    gate.entered.clear()
    gate.rows.clear()
    (first,) = served.offer([tensor([[1.0]])])
    assert gate.entered.wait(engines.LIMIT_S)
    (gone,) = served.offer([tensor([[2.0]])])
    (late,) = served.offer([tensor([[3.0]])], deadline=time.monotonic() + 0.01)
    (fine,) = served.offer([tensor([[4.0]])])
    served.engine.cancel(1, [gone.item.id])
    served.until(lambda: time.monotonic() > late.item.deadline)
    gate.gate.set()
    answers = served.wait(4)
    assert answers[first.item.id].status == "ok"
    assert (answers[gone.item.id].status, answers[gone.item.id].started) == ("cancelled", False)
    assert (answers[late.item.id].status, answers[late.item.id].started) == ("expired", False)
    assert answers[fine.item.id].status == "ok"
    assert gate.rows == [1, 1]


def test_a_dropped_connection_costs_nothing_more(make: Make, model: Any) -> None:
    served = make("Gate", max_rows=4).start()
    gate = model().Gate
    gate.gate.clear()
    gate.entered.clear()
    gate.rows.clear()
    served.offer([tensor([[1.0]])], connection=1)
    assert gate.entered.wait(engines.LIMIT_S)
    served.offer(*[[tensor([[2.0]])]] * 4, connection=2)
    served.offer([tensor([[3.0]])], connection=1)
    served.engine.drop(2)
    gate.gate.set()
    served.wait(6)
    assert gate.rows == [1, 1]


def test_the_page_shows_what_executes_and_when_it_began(make: Make, model: Any) -> None:
    served = make("Gate", budget=7.0).start()
    gate = model().Gate
    gate.gate.clear()
    gate.entered.clear()
    (entry,) = served.offer([tensor([[1.0]])], connection=5)
    assert gate.entered.wait(engines.LIMIT_S)
    page = served.reader.read()
    assert page.batch_started > 0
    assert page.batch_budget == 7.0
    assert served.reader.executing(5) == {entry.item.id}
    assert served.engine.pong(1).running == ["r1"]
    gate.gate.set()
    served.wait(1)
    served.until(lambda: served.reader.read().batch_started == 0)
    assert served.reader.executing(5) == frozenset()


def test_out_of_memory_halves_the_batch_until_it_fits(make: Make, model: Any) -> None:
    served = make("Hungry", settings={"fits": 2}, wait=5.0)
    with pytest.MonkeyPatch.context():
        served.load()
    model().Hungry.rows.clear()
    served.go()
    entries = served.offer(*[[tensor([[float(n)]])] for n in range(8)])
    answers = served.wait(8)
    assert [values(answers[e.item.id]) for e in entries] == [[[2.0 * n]] for n in range(8)]
    assert served.fences == []
    assert served.engine.pong(1).counters.ooms >= 1


def test_an_item_that_cannot_fit_alone_is_told_both_numbers(make: Make) -> None:
    served = make("Hungry", settings={"fits": 8}, memory_cap=2**34).start()
    entries = served.offer([tensor([[666.0]])], [tensor([[1.0]])])
    answers = served.wait(2)
    refused = answers[entries[0].item.id]
    assert refused.status == "oom"
    assert str(3 * 2**30) in refused.text
    assert "bytes are there" in refused.text
    assert answers[entries[1].item.id].status == "ok"
    assert served.fences == []


def test_a_cpu_slot_contains_what_passes_its_memory_limit(make: Make) -> None:
    """Each large one allocates far beyond the cap; the small ones between are always served."""
    served = make("Allocates", memory_cap=2**30).start()
    for _ in range(3):
        large = served.one(tensor([[4000.0]]))
        # More than the worker may ever have: no other time will do either.
        assert large.status == "too_large", large
        assert "bytes" in large.text
        assert served.one(tensor([[1.0]])).status == "ok"
    assert served.fences == []


def test_a_poisoned_device_fences_the_worker_after_its_batch_was_answered(make: Make) -> None:
    served = make("FakeCuda").start()
    answer = served.one(tensor([[666.0]]))
    assert answer.status == "failed"
    served.until(lambda: bool(served.fences))
    assert "device-side assert" in served.fences[0]


def test_an_ordinary_error_never_fences(make: Make) -> None:
    served = make("Faulty").start()
    for _ in range(5):
        assert served.one(tensor([[666.0]])).status == "failed"
    assert served.one(tensor([[1.0]])).status == "ok"
    assert served.fences == []


def test_an_idle_worker_asks_the_device_and_the_model(make: Make, tmp_path: Path) -> None:
    ill = tmp_path / "ill"
    served = make("Unhealthy", settings={"file": str(ill)}, canary_idle=0.05).start()
    before = served.reader.read().last_ok
    served.until(lambda: served.reader.read().last_ok > before)
    assert served.fences == []
    ill.write_text("")
    served.until(lambda: bool(served.fences))
    assert "not healthy" in served.fences[0]


def test_a_degrade_step_is_used_and_named(make: Make) -> None:
    served = make("Degradable").start()
    answer = served.one(raw("5"), degrade="skip_post_processing")
    assert answer.parts[0].data == b"0.0 skip_post_processing"
    assert answer.degraded == "skip_post_processing"
    assert served.one(raw("5")).degraded == ""


def test_drain_finishes_what_is_there_and_refuses_the_rest(make: Make, model: Any) -> None:
    served = make("Gate").start()
    gate = model().Gate
    gate.gate.clear()
    gate.entered.clear()
    (inside,) = served.offer([tensor([[1.0]])])
    assert gate.entered.wait(engines.LIMIT_S)
    empty: list[int] = []
    served.engine.drain(lambda: empty.append(1))
    (outside,) = served.offer([tensor([[1.0]])])
    assert served.wait(1)[outside.item.id].status == "draining"
    assert empty == []
    gate.gate.set()
    assert served.wait(2)[inside.item.id].status == "ok"
    served.until(lambda: empty == [1])


def test_drain_of_an_empty_worker_is_done_at_once(make: Make) -> None:
    served = make("Double").start()
    done = threading.Event()
    served.engine.drain(done.set)
    assert done.wait(engines.LIMIT_S)


def test_fifty_ordinary_requests_after_two_hundred_cancelled_ones(make: Make) -> None:
    served = make("Sleeper", settings={"seconds": 0.02}, max_rows=128).start()
    entries = served.offer(*[[tensor([[1.0]])]] * 200)
    served.engine.cancel(1, [entry.item.id for entry in entries])
    served.wait(200)
    before = time.monotonic()
    entries = served.offer(*[[tensor([[2.0]])]] * 50)
    answers = served.wait(250)
    assert {answers[e.item.id].status for e in entries} == {"ok"}
    assert time.monotonic() - before < 5.0
    assert 256 <= at_rest(served) <= 256 + 3 * 128


def test_a_method_that_the_model_has_not_is_unsupported(make: Make) -> None:
    served = make("Double").start()
    answer = served.one(raw('{"prompt": "x"}'), method="generate")
    assert (answer.status, answer.started) == ("unsupported", False)
    assert served.engine.pong(1).counters.unsupported == 1


def test_the_pong_has_a_histogram_of_sizes_since_the_last(make: Make) -> None:
    served = make("Double").start()
    served.offer([tensor([[1.0, 2.0]])], [tensor([[1.0]])], [tensor([[1.0]])])
    served.wait(3)
    assert served.engine.pong(1).sizes == {"2": 1, "1": 2}
    assert served.engine.pong(2).sizes == {}


def test_padding_gives_the_same_answer_alone_and_in_company(make: Make) -> None:
    served = make("Mean", buckets=[[8]], fit="pad", wait=0.05).start()
    short, long = tensor([[1.0, 2, 3, 4, 5]]), tensor([[7.0] * 8])
    alone = served.one(short)
    entries = served.offer([long], [short])
    together = served.wait(3)[entries[1].item.id]
    assert values(alone) == values(together) == [[3.0]]
    assert alone.parts[1].shape == together.parts[1].shape == (1, 5)
    assert alone.parts[1].data == short.data


def test_what_fits_no_bucket_is_refused_with_the_sizes(make: Make) -> None:
    served = make("Mean", buckets=[[8], [16]], fit="pad", no_bucket="refuse").start()
    answer = served.one(tensor([[0.0] * 17]))
    assert answer.status == "too_large"
    assert "17" in answer.text
    assert "16" in answer.text


def test_a_slab_shows_nothing_of_the_request_before(make: Make) -> None:
    served = make("Mean", buckets=[[8]], fit="pad", wait=0.02).start()
    for _ in range(3):
        served.offer([tensor([[9.0] * 8])], [tensor([[9.0] * 8])])
    served.wait(6)
    entries = served.offer([tensor([[1.0, 1.0]])], [tensor([[2.0]])])
    answers = served.wait(8)
    assert values(answers[entries[0].item.id]) == [[1.0]]
    assert values(answers[entries[1].item.id]) == [[2.0]]

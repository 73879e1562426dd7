"""Streams of results, and what is checked and learned at a load, asked of a whole engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpusup.worker import startup, wire
from gpusup.worker.entry import LoadProblem
from gpusup.worker.handlers import from_file

engines: Any = from_file(str(Path(__file__).parent / "engines.py"))
raw, tensor, values = engines.raw, engines.tensor, engines.values

Make = Callable[..., Any]


# -- streams ------------------------------------------------------------------------------------


def pieces(served: Any, item: int) -> list[str]:
    with served.changed:
        return [
            answer.parts[0].data.decode()
            for _, answer in served.answers
            if answer.id == item and answer.more
        ]


def test_a_stream_waits_for_credit(make: Make) -> None:
    served = make("TinyText").start()
    (entry,) = served.offer(
        [raw('{"prompt": "a b c d"}')], method="generate", stream=True, credit=2
    )
    served.wait(2)
    assert pieces(served, entry.item.id) == ["a", " b"]
    served.engine.credit(1, entry.item.id, 1)
    served.wait(3)
    assert pieces(served, entry.item.id) == ["a", " b", " c"]
    served.engine.credit(1, entry.item.id, 5)
    last = served.wait(5)[entry.item.id]
    assert (last.status, last.more) == ("ok", False)


def test_cancelling_a_stream_frees_its_thread(make: Make) -> None:
    served = make("TinyText").start()
    (entry,) = served.offer([raw('{"prompt": "a b"}')], method="generate", stream=True, credit=1)
    served.wait(1)
    served.engine.cancel(1, [entry.item.id])
    answer = served.wait(2)[entry.item.id]
    assert (answer.status, answer.more) == ("cancelled", False)
    served.until(lambda: served.engine.load_now().running_rows == 0)


def test_an_error_in_the_middle_of_a_stream_is_its_last_answer(make: Make) -> None:
    served = make("TinyText").start()
    (entry,) = served.offer(
        [raw('{"prompt": "a explode"}')], method="generate", stream=True, credit=9
    )
    last = served.wait(2)[entry.item.id]
    assert (last.status, last.text) == ("failed", "RuntimeError: the word was explode")


def test_without_a_stream_the_text_comes_in_one(make: Make) -> None:
    served = make("TinyText").start()
    answer = served.one(raw('{"prompt": "a b c", "max_tokens": 2}'), method="generate")
    assert answer.parts[0].data == b"a b"
    answer = served.one(raw('{"messages": [{"role": "user", "content": "hi"}]}'), method="chat")
    assert answer.parts[0].data == b"hi"
    answer = served.one(raw('{"input": ["ab", "c"]}'), method="embed")
    assert (answer.parts[0].datatype, answer.parts[0].shape) == ("FP32", (2, 26))


def test_a_stream_that_waits_for_a_thread_is_cancelled_at_once(make: Make) -> None:
    served = make("TinyText").start()
    served.offer(*[[raw('{"prompt": "a b"}')]] * 4, method="generate", stream=True, credit=1)
    served.wait(4)
    (fifth,) = served.offer([raw('{"prompt": "a"}')], method="generate", stream=True, credit=1)
    served.engine.cancel(1, [fifth.item.id])
    answer = served.wait(5)[fifth.item.id]
    assert (answer.status, answer.started) == ("cancelled", False)
    served.engine.drop(1)
    served.wait(9)


# -- load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("handler", "settings", "cause", "text"),
    [
        ("nowhere.nothing:Model", {}, "config", "nowhere"),
        ("RaisesInLoad", {"kind": "config"}, "config", "another architecture"),
        ("RaisesInLoad", {"kind": "oom"}, "oom", "does not fit"),
        ("RaisesInLoad", {"kind": "error"}, "error", "ValueError: shape mismatch:"),
    ],
)
def test_a_model_that_cannot_load_says_why_in_one_line(
    make: Make, handler: str, settings: dict[str, Any], cause: str, text: str
) -> None:
    served = make(handler, settings=settings)
    with pytest.raises(LoadProblem) as caught:
        served.load()
    assert caught.value.cause == cause
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_held_worker_says_what_it_has_prepared_and_waits(make: Make) -> None:
    served = make("Double", held=True)
    waited: list[int] = []
    served.engine.load(served.told.append, lambda: waited.append(len(served.told)))
    kinds = [type(message) for message in served.told]
    assert wire.Prepared in kinds
    assert waited == [kinds.index(wire.Prepared) + 1]


@pytest.mark.parametrize(
    ("beside", "known", "left"),
    [(True, True, 0), (True, False, 0), (False, True, 3), (False, False, 0)],
)
def test_who_is_waited_for_answers_first_and_captures_graphs_later(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    beside: bool,
    known: bool,
    left: int,
) -> None:
    """A swap that leaves the old worker at work is not waited for, its first answers are."""
    made: list[Any] = []

    def runner(*words: Any) -> Any:
        one: Any = startup_runner(*words)
        one.left = 3

        def step() -> bool:
            if not one.left:
                return False
            one.left -= 1
            return True

        one.idle_step = step
        made.append(one)
        return one

    startup_runner = startup.make_runner
    monkeypatch.setattr(startup, "make_runner", runner)
    path = str(tmp_path / "profile.json")
    if known:
        make("Double", profile_path=path).load()
    ready = make("Double", profile_path=path, beside=beside).load()
    assert made[-1].left == left
    assert ("graphs" in ready.seconds) == (left == 0)


def golden(tmp_path: Path, want: float) -> str:
    import numpy as np

    path = tmp_path / "golden.npz"
    arrays: Any = {"x": np.ones((20, 1), np.float32), "out.y": np.full((20, 1), want, np.float32)}
    np.savez(path, **arrays)
    return str(path)


def test_a_golden_example_that_agrees_lets_the_model_serve(make: Make, tmp_path: Path) -> None:
    ready = make("Double", golden=golden(tmp_path, 2.0)).load()
    assert "golden" in ready.seconds


def test_a_golden_example_that_is_off_says_by_how_much(make: Make, tmp_path: Path) -> None:
    with pytest.raises(LoadProblem, match=r"off by 0\.5, the limit is 0\.01") as caught:
        make("Double", golden=golden(tmp_path, 2.5)).load()
    assert caught.value.cause == "golden"


@pytest.mark.parametrize("kept", [0, 100])
def test_a_golden_example_that_was_cut_off_is_a_wrong_configuration(
    make: Make, tmp_path: Path, kept: int
) -> None:
    path = Path(golden(tmp_path, 2.0))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(LoadProblem, match=f"cannot read the golden example {path}") as caught:
        make("Double", golden=str(path)).load()
    assert caught.value.cause == "config"


def test_an_arena_that_was_registered_too_late_is_let_go(make: Make) -> None:
    from gpusup.worker.cuda_runner import Arenas

    registered = threading.Event()

    class Slow(Arenas):
        def register(self, connection: int, arena: memoryview) -> bool:
            """CUDA's part lasts until the loop has let go of what it knew of."""
            served.engine.drop(connection)
            served.until(lambda: not served.engine._loop.leaving)
            self._pointers[connection] = 1
            registered.set()
            return True

        def unregister(self, connection: int) -> None:
            self._pointers.pop(connection, None)

    served = make("Double").start()
    arenas = served.engine._loop.arenas = Slow()
    served.engine.map_arena(5, memoryview(b"x"))
    assert registered.wait(engines.LIMIT_S)
    served.until(lambda: not arenas.connections())


def test_peaks_are_measured_kept_and_used_again(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "state" / "m.json"
    settings = {"weights_mib": 0}
    ready = make("Allocates", settings=settings, profile_path=str(path)).load()
    assert {"1/FP32/1", "1/FP32/8"} <= set(ready.peaks)
    assert path.exists()
    again = make("Allocates", settings=settings, profile_path=str(path)).load()
    assert set(again.peaks) >= set(ready.peaks)

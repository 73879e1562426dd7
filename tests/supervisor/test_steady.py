from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from gpusup.supervisor.steady import Digit, Seen, held_out, judge, window

DIGIT = Digit(name="x.png", label=7, png=b"")


def seen(began: float, ended: float, problem: str = "") -> Seen:
    return Seen(began=began, ended=ended, problem=problem)


def test_there_are_two_images_of_each_digit() -> None:
    digits = held_out(Path(str(files("gpusup.conf") / "digits")))
    assert [digit.label for digit in digits] == [d for d in range(10) for _ in range(2)]
    assert all(digit.png.startswith(b"\x89PNG") for digit in digits)


def test_a_wrong_or_unreadable_answer_is_a_failure() -> None:
    def problem(body: bytes) -> str:
        return judge(body, DIGIT, 0, 1, "1").problem

    assert problem(b'{"digit": 7, "probability": 0.9}') == ""
    assert problem(b'{"digit": 1, "probability": 0.9}') == "x.png was taken for a 1"
    for body in (b"", b"[]", b'{"digit": null}', b"\xff"):
        assert problem(body).startswith("unreadable answer")


def test_a_window_holds_what_was_under_way_in_it() -> None:
    all_seen = [
        seen(0.0, 0.9),
        seen(0.9, 1.1),
        seen(1.2, 1.3),
        seen(1.3, 1.8, "502 gone"),
        seen(1.9, 2.4),
        seen(2.1, 2.2),
    ]
    found = window(all_seen, 1.0, 2.0)
    assert (found.requests, found.failed) == (4, 1)
    assert found.problems == ("502 gone",)
    assert abs(found.slowest_s - 0.5) < 1e-9
    assert abs(found.gap_s - 0.7) < 1e-9  # from the answer at 1.3 to the end


def test_a_window_without_answers_is_one_gap() -> None:
    found = window([], 3.0, 5.0)
    assert (found.requests, found.failed, found.gap_s, found.slowest_s) == (0, 0, 2.0, 0.0)

"""Measured peaks: kept, used again, and estimated from where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusup.worker.profile import MARGIN, MOST_KEYS, Profile, elements_of


def test_peaks_are_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.json"
    first = Profile(str(path), "cpu")
    first.learn("224x224x3/UINT8", 8, 1000)
    first.save()
    again = Profile(str(path), "cpu")
    assert again.known
    assert again.peaks() == {"224x224x3/UINT8/8": 1000}
    assert [p.name for p in path.parent.iterdir()] == ["m.json"]


def test_peaks_of_another_set_up_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    first = Profile(str(path), "cpu")
    first.learn("a/FP32", 1, 1)
    first.save()
    assert not Profile(str(path), "cuda").known


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1, "signature": "", "peaks": {"a": 1}}', "null"]
)
def test_a_broken_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    profile = Profile(str(path))
    assert not profile.known
    assert profile.peaks() == {}
    assert not profile.covers("a", 1)


def test_a_place_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    profile = Profile(str(tmp_path / "file" / "m.json"))
    profile.learn("a/FP32", 1, 1)
    profile.save()
    assert f"cannot keep in {tmp_path}/file/m.json what batches cost: " in caplog.text


def test_the_greatest_peak_counts() -> None:
    profile = Profile("")
    for peak in (5, 9, 7):
        profile.learn("a/FP32", 1, peak)
    assert profile.cost("a/FP32", 1) == 9


def test_rows_between_and_beyond_the_measured_ones_are_estimated() -> None:
    profile = Profile("")
    profile.learn("8/FP32", 4, 400)
    profile.learn("8/FP32", 8, 800)
    assert profile.cost("8/FP32", 4) == 400
    assert 600 <= profile.cost("8/FP32", 6) <= 800
    assert profile.cost("8/FP32", 16) == int(1600 * MARGIN)


def test_a_shape_never_seen_is_estimated_by_its_elements() -> None:
    profile = Profile("")
    profile.learn("10x10/FP32", 1, 1000)
    assert profile.cost("20x20/FP32", 2, 400) == int(8000 * MARGIN)
    assert profile.cost("20x20/FP32", 2) == 0  # nothing was measured: no guess


def test_what_clients_can_make_it_keep_is_bounded() -> None:
    profile = Profile("")
    for side in range(MOST_KEYS + 10):
        if not profile.covers(f"{side}/FP32", 1):
            profile.learn(f"{side}/FP32", 1, 1)
    assert len(profile.peaks()) == MOST_KEYS


@pytest.mark.parametrize(
    ("bucket", "count"),
    [("3x4/FP32", 12), ("scalar/FP32", 1), ("2/FP32+3/FP32", 2), ("?/FP32", 0)],
)
def test_elements_are_read_from_the_name(bucket: str, count: int) -> None:
    assert elements_of(bucket) == count


def test_a_version_that_was_never_measured_may_begin_with_what_its_kin_took(
    tmp_path: Path,
) -> None:
    old = Profile(str(tmp_path / "m@1.cuda.json"), "sig one", kin="sig")
    old.learn("8/FP32", 1, 100)
    old.learn("8/FP32", 4, 400)
    old.save()
    path = str(tmp_path / "m@2.cuda.json")
    assert not Profile(path, "sig two", kin="sig").known
    assert not Profile(path, "sig two", kin="other", borrow=True).known
    assert not Profile(str(tmp_path / "n@2.cuda.json"), "two", kin="sig", borrow=True).known
    new = Profile(path, "sig two", kin="sig", borrow=True)
    assert new.known
    assert new.cost("8/FP32", 4) == 400
    assert not new.covers("8/FP32", 1)  # it is measured when it runs
    new.learn("8/FP32", 1, 70)
    assert new.peaks() == {"8/FP32/1": 70, "8/FP32/4": 400}
    new.save()
    # What was only borrowed is not kept as its own.
    assert Profile(path, "sig two", kin="sig").peaks() == {"8/FP32/1": 70}

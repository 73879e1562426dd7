from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusup.conf import log
from gpusup.conf.schema import LogConfig


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A log file; logging is as before afterwards."""
    root = logging.getLogger()
    before = root.level
    yield tmp_path / "gpusup.log"
    for handler in list(root.handlers):
        if isinstance(handler, log.LineHandler):
            root.removeHandler(handler)
            handler.close()
    root.setLevel(before)
    logging.captureWarnings(False)


def start(path: Path, **settings: str) -> None:
    log.set_up(LogConfig(file=str(path), **settings), "supervisor")  # type: ignore[arg-type]


def test_an_event_is_one_json_line_with_its_fields(path: Path) -> None:
    start(path)
    log.event("worker-exited", slot="gpu0", generation=3, cause="exit -9", wait_s=2.123456789)
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry["event"] == "worker-exited"
    assert entry["process"] == "supervisor"
    assert entry["level"] == "info"
    assert (entry["slot"], entry["generation"], entry["cause"]) == ("gpu0", 3, "exit -9")
    assert entry["wait_s"] == 2.123457


def test_people_get_words_and_quotes_only_where_needed(path: Path) -> None:
    start(path, format="human")
    log.event("worker-exited", "warning", slot="gpu0", cause="exit -9", again=True)
    (line,) = path.read_text().splitlines()
    assert line.endswith('WARNING supervisor worker-exited slot=gpu0 cause="exit -9" again=true')


@pytest.mark.parametrize("form", ["human", "json"])
def test_no_line_is_longer_than_its_limit_or_breaks_into_two(path: Path, form: str) -> None:
    start(path, format=form)
    log.event("odd", **{f"field{i}": "é\n\x1b[31m" * 500 for i in range(20)})
    (line,) = path.read_bytes().splitlines()
    assert len(line) <= log.LINE_LIMIT
    assert b"\x1b" not in line
    if form == "json":
        assert json.loads(line)["truncated"] is True


def test_bodies_and_keys_never_get_in(path: Path) -> None:
    start(path)
    log.event("request", body="cGF5bG9hZA==", api_key="sesame", image=b"\x00" * 900)
    text = path.read_text()
    assert "cGF5" not in text
    assert "sesame" not in text
    assert "<900 bytes>" in text


def test_a_moved_file_is_left_and_a_new_one_begun(path: Path) -> None:
    start(path)
    log.event("before")
    path.rename(path.with_suffix(".1"))
    log.reopen()
    log.event("after")
    assert "before" in path.with_suffix(".1").read_text()
    assert json.loads(path.read_text())["event"] == "after"


def test_an_unusable_file_is_said_and_survived(
    tmp_path: Path, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path / "no" / "such" / "folder.log")
    log.event("goes-on")
    err = capfd.readouterr().err
    assert "log-file-unusable" in err
    assert "goes-on" in err


@pytest.mark.parametrize(("level", "traced"), [("info", False), ("debug", True)])
def test_tracebacks_are_for_debugging_only(path: Path, level: str, traced: bool) -> None:
    start(path, level=level)
    try:
        raise ValueError("b wants 400 bytes")
    except ValueError:
        logging.getLogger("gpusup").exception("cannot place")
    entry = json.loads(path.read_text())
    assert entry["error"] == "ValueError: b wants 400 bytes"
    assert entry["where"].startswith("test_log.py:")
    assert ("traceback" in entry) is traced


def test_libraries_come_out_in_the_same_form(path: Path) -> None:
    start(path)
    logging.getLogger("some.library").warning("50%% of %s", "it")
    entry = json.loads(path.read_text())
    assert (entry["event"], entry["logger"]) == ("50% of it", "some.library")


def test_nan_and_infinity_stay_valid_json(path: Path) -> None:
    start(path)
    log.event("odd", ratio=float("nan"), limit=float("inf"))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))


def test_the_journal_is_known_by_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "stream").open("w") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert log.goes_to_journal(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not log.goes_to_journal(file.fileno())


def test_the_journal_gets_priorities() -> None:
    record = logging.LogRecord("gpusup", logging.ERROR, __file__, 1, "x", None, None)
    record.created = time.time()
    assert log.JsonFormatter("supervisor", priorities=True).format(record).startswith("<3>{")

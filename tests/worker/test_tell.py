from __future__ import annotations

import pytest

from gpusup.worker.tell import tell


def fail() -> ValueError:
    try:
        raise ValueError("no such label")
    except ValueError as error:
        return error


def test_the_one_who_mends_the_handler_sees_where_it_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(100):
        tell(fail())
    told = capsys.readouterr().err
    assert told.count("ValueError: no such label") == 1
    assert 'raise ValueError("no such label")' in told

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpusup.supervisor.store import Store, StoreError


class Kept(msgspec.Struct):
    cordons: dict[str, str] = {}
    count: int = 0


def store(folder: Path, schema: int = 1) -> tuple[Store[Kept], list[str]]:
    warnings: list[str] = []
    return Store(folder / "deep" / "state.json", Kept, schema, warnings.append), warnings


def test_what_was_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    first, _ = store(tmp_path)
    assert first.load() is None
    first.save(Kept(cordons={"gpu0": "fan"}))
    again, warnings = store(tmp_path)
    assert again.load() == Kept(cordons={"gpu0": "fan"})
    assert warnings == []
    assert [p.name for p in first.path.parent.iterdir()] == ["state.json"]
    assert first.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "junk",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"schema":2,"data":{}}', b'{"schema":1,"data":{"count":"x"}}',
     b'{"schema":1,"data":' + b"[" * 100_000],
)  # fmt: skip
def test_a_file_that_can_not_be_used_is_put_aside_and_named(tmp_path: Path, junk: bytes) -> None:
    broken, warnings = store(tmp_path)
    broken.path.parent.mkdir()
    broken.path.write_bytes(junk)
    assert broken.load() is None
    assert len(warnings) == 1
    assert str(broken.path) in warnings[0]
    (aside,) = broken.path.parent.iterdir()
    assert aside.name.startswith("state.json.unusable-")
    assert aside.read_bytes() == junk
    broken.save(Kept(count=1))
    assert broken.load() == Kept(count=1)


def test_an_unwritable_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("a file")
    broken, _ = store(tmp_path)
    with pytest.raises(StoreError, match=r"cannot write .*state\.json: "):
        broken.save(Kept())


def test_the_same_value_is_not_written_twice(tmp_path: Path) -> None:
    kept, _ = store(tmp_path)
    kept.save(Kept())
    before = kept.path.stat().st_ino
    kept.save(Kept())
    assert kept.path.stat().st_ino == before
    kept.save(Kept(count=2))
    assert kept.path.stat().st_ino != before

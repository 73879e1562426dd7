"""The front door with fake workers: who gets an answer, and what is left behind when nobody does."""

from __future__ import annotations

from .conftest import World


async def test_a_request_is_answered_by_the_worker(world: World) -> None:
    await world.worker()
    await world.tell()
    outcome = await world.door.infer(world.call(b"hello"))
    assert outcome.answer.parts[0].data == b"hello"
    assert (outcome.version, outcome.slot) == ("1", "gpu0")
    world.clean()

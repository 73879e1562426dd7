from __future__ import annotations

import random

import pytest

from gpusup.conf.schema import Config, ModelConfig
from gpusup.supervisor.actions import Assignment
from gpusup.supervisor.books import Books
from gpusup.supervisor.layout import DevicePlace
from gpusup.supervisor.life import Life

GIB = 2**30


def assignment(model: str, static: int, peak: int = 0) -> Assignment:
    config = ModelConfig(handler="x:Y", static=static, peak=peak)
    return Assignment(model=model, version="1", config=config)


def books(total: int = 24 * GIB, kind: str = "cuda") -> Books:
    place = DevicePlace("gpu0", kind, "GPU-0", total)
    return Books(Config(), {"gpu0": place}, lambda a, k: GIB)


def life(a: Assignment) -> Life:
    return Life("gpu0", "gpu0", 1, a, Config().supervision, 0.0)


def test_a_large_model_beside_a_small_one_may_take_what_it_needs() -> None:
    large, small = assignment("large", 18 * GIB), assignment("small", GIB)
    b = books()
    assert b.cap(life(large), [small], surge=False) > 18 * GIB
    assert b.cap(life(small), [large], surge=False) > GIB


@pytest.mark.parametrize("seed", range(50))
def test_the_caps_of_a_devices_workers_stay_below_the_device(seed: int) -> None:
    rng = random.Random(seed)
    b = books(kind=rng.choice(("cuda", "cpu")))
    every = [
        assignment(str(n), rng.randrange(1, 9 * GIB), rng.randrange(GIB))
        for n in range(rng.randrange(1, 8))
    ]
    caps = [b.cap(life(a), [o for o in every if o is not a], surge=False) for a in every]
    assert sum(caps) < 24 * GIB
    assert min(caps) > 0

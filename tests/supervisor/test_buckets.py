from __future__ import annotations

import itertools
import random

from gpusup.supervisor.buckets import best, propose, waste


def test_each_number_of_buckets_is_the_best_there_is() -> None:
    rng = random.Random(1)
    sides = rng.sample(range(10, 200), 6)
    seen: dict[tuple[int, ...], int] = {(side,): rng.randrange(1, 50) for side in sides}
    found = best(seen, 8)
    assert [len(buckets) for buckets in found] == [1, 2, 3, 4, 5, 6]
    for buckets in found:
        # In one dimension a bucket is one of the shapes, so all choices can be tried.
        others = itertools.combinations(seen, len(buckets))
        paddings = [p for p in (waste(other, seen) for other in others) if p is not None]
        assert waste(buckets, seen) == min(paddings)


def test_few_shapes_make_few_proposals() -> None:
    told = propose("m", {"8x8/uint8": 3, "16x16/uint8": 1, "others": 9}, [])
    [only] = told["proposals"]
    assert only["buckets"] == [[8, 8], [16, 16]]
    assert only["padding"] == 0.0

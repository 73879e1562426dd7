"""Buckets are chosen by both sides; slabs are never shared and never show what was there before."""

from __future__ import annotations

import random

import pytest
import torch

from gpusup.worker.model import InvalidInput
from gpusup.worker.pool import Key, Pool, choose, place, resized, zero_rest

KEY = Key((("", (4,), "FP32"),), pooled=True)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "fit", "bucket"),
    [
        ((3, 224, 224), "exact", (3, 224, 224)),
        ((3, 200, 224), "exact", None),
        ((3, 200, 224), "pad", (3, 224, 224)),
        # By area alone the wide one would do; its height does not.
        ((3, 300, 100), "pad", (3, 512, 512)),
        ((3, 100, 500), "pad", (3, 128, 1024)),
        ((3, 600, 600), "pad", None),
        ((1, 200, 200), "pad", None),  # a grey image is no colour image with two sides of zeros
        ((200, 200), "pad", None),
        ((3, 600, 600), "resize", (3, 512, 512)),
        ((3, 10, 10), "resize", (3, 224, 224)),
    ],
)
def test_the_smallest_bucket_with_both_sides_large_enough(
    shape: tuple[int, ...], fit: str, bucket: tuple[int, ...] | None
) -> None:
    buckets = [(3, 512, 512), (3, 128, 1024), (3, 224, 224)]
    assert choose(shape, buckets, fit) == bucket  # type: ignore[arg-type]


def test_a_sequence_goes_into_the_next_longer_bucket() -> None:
    assert choose((5,), [(16,), (8,), (4,)], "pad") == (8,)
    assert choose((17,), [(16,), (8,)], "pad") is None


@pytest.mark.parametrize(
    ("shape", "bucket"), [((2, 3, 8, 6), (3, 4, 4)), ((2, 8, 6, 3), (4, 4, 3)), ((2, 8, 6), (4, 4))]
)
def test_resizing_keeps_kind_and_rows(shape: tuple[int, ...], bucket: tuple[int, ...]) -> None:
    image = torch.full(shape, 200, dtype=torch.uint8)
    small = resized(image, bucket)
    assert tuple(small.shape) == (2, *bucket)
    assert small.dtype is torch.uint8
    assert bool((small == 200).all())


def test_what_is_no_image_cannot_be_resized() -> None:
    with pytest.raises(InvalidInput, match=r"\[9\]"):
        resized(torch.zeros(1, 9), (4,))


def test_a_slab_is_leased_to_one_at_a_time() -> None:
    pool = Pool(CPU, 8, depth=2)
    first, second = pool.lease(KEY), pool.lease(KEY)
    assert first is not None
    assert second is not None
    assert first.device[""].data_ptr() != second.device[""].data_ptr()
    assert pool.lease(KEY) is None
    pool.give_back(first)
    assert pool.lease(KEY) is first


def test_giving_back_twice_is_an_error() -> None:
    pool = Pool(CPU, 8, depth=1)
    slab = pool.lease(KEY)
    assert slab is not None
    pool.give_back(slab)
    with pytest.raises(ValueError, match="twice"):
        pool.give_back(slab)


def test_only_buckets_get_slabs_and_only_so_many() -> None:
    pool = Pool(CPU, 8, depth=1, most_keys=1)
    assert pool.lease(KEY._replace(pooled=False)) is None
    assert pool.lease(KEY) is not None
    assert pool.lease(Key((("", (5,), "FP32"),), pooled=True)) is None


def test_leased_memory_cannot_be_given_up() -> None:
    pool = Pool(CPU, 8, depth=1)
    slab = pool.lease(KEY)
    assert slab is not None
    with pytest.raises(ValueError, match="leased"):
        pool.forget(KEY)
    pool.give_back(slab)
    pool.forget(KEY)
    assert pool.slabs(KEY) == []


def test_a_view_never_reaches_beyond_the_rows() -> None:
    pool = Pool(CPU, 8, depth=1)
    slab = pool.lease(KEY)
    assert slab is not None
    assert slab.batch(3).shape == (3, 4)
    assert len(slab.row_views("")) == 8


def test_random_walk_of_batches_shows_nothing_stale() -> None:
    """Batches of any rows and true sizes, each checked cell by cell."""
    chance = random.Random(7)
    pool = Pool(CPU, 8, depth=2)
    for turn in range(1, 300):
        slab = pool.lease(KEY)
        assert slab is not None
        rows = chance.randint(1, 8)
        whole = slab.device[""]
        zero_rest(whole, rows, slab.dirty)
        sizes = [chance.randint(1, 4) for _ in range(rows)]
        for row, size in enumerate(sizes):
            place(whole[row : row + 1], torch.full((1, size), float(turn)))
        slab.dirty = rows
        for row in range(8):
            filled = sizes[row] if row < rows else 0
            assert whole[row].tolist() == [float(turn)] * filled + [0.0] * (4 - filled)
        pool.give_back(slab)
    assert pool.leased() == 0

"""From the shapes a model was sent to the input shapes worth having. Pure.

A bucket is a shape that others are padded to. With k buckets the best choice is found by dynamic
programming over the shapes seen, in the order of their area; each bucket is the smallest shape in
which all that it serves fit on every side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

FEWEST: Final = 3
MOST: Final = 5
#: More shapes than this are first merged with their neighbours: the search is quadratic.
SHAPES: Final = 120

Shape = tuple[int, ...]


def parse(key: str) -> Shape | None:
    """ "3x224x224/uint8" or "224x224" -> (3, 224, 224)."""
    try:
        return tuple(int(side) for side in key.split("/")[0].split("x"))
    except ValueError:
        return None


def area(shape: Shape) -> int:
    size = 1
    for side in shape:
        size *= max(1, side)
    return size


def hull(a: Shape, b: Shape) -> Shape:
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


def waste(buckets: Sequence[Shape], seen: Mapping[Shape, int]) -> float | None:
    """Share of padding in all elements computed; None if a shape fits nowhere."""
    padded = true = 0
    for shape, count in seen.items():
        fitting = [area(b) for b in buckets if len(b) == len(shape) and _fits(shape, b)]
        if not fitting:
            return None
        padded += min(fitting) * count
        true += area(shape) * count
    return 1 - true / padded if padded else 0.0


def _fits(shape: Shape, bucket: Shape) -> bool:
    return all(s <= b for s, b in zip(shape, bucket, strict=True))


def best(seen: Mapping[Shape, int], most: int) -> list[list[Shape]]:
    """The buckets with the least padding for shapes of one rank: with one, two, ... up to `most`.

    The list ends earlier where there are not so many shapes.
    """
    shapes = _merged(seen)
    ordered = sorted(shapes, key=lambda s: (area(s), s))
    n = len(ordered)
    # cost[i][j]: elements computed if shapes i..j-1 share one bucket.
    cost = [[0.0] * (n + 1) for _ in range(n)]
    corner: list[list[Shape]] = [[()] * (n + 1) for _ in range(n)]
    for i in range(n):
        top, requests = ordered[i], 0
        for j in range(i, n):
            top = hull(top, ordered[j])
            requests += shapes[ordered[j]]
            cost[i][j + 1] = float(area(top) * requests)
            corner[i][j + 1] = top
    infinite = float("inf")
    table = [[0.0] + [infinite] * n]
    back: list[list[int]] = [[0] * (n + 1)]
    for _ in range(min(most, n)):
        row, pointers = [0.0] + [infinite] * n, [0] * (n + 1)
        for j in range(1, n + 1):
            for i in range(j):
                if (price := table[-1][i] + cost[i][j]) < row[j]:
                    row[j], pointers[j] = price, i
        table.append(row)
        back.append(pointers)
    return [_traced(corner, back[1 : count + 1]) for count in range(1, len(back))]


def _traced(corner: Sequence[Sequence[Shape]], back: Sequence[Sequence[int]]) -> list[Shape]:
    """The buckets that the last of the `back` pointers lead to."""
    buckets: set[Shape] = set()
    j = len(back[0]) - 1
    for pointers in reversed(back):
        if j == 0:
            break
        i = pointers[j]
        buckets.add(corner[i][j])
        j = i
    return sorted(buckets, key=area)


def _merged(seen: Mapping[Shape, int]) -> dict[Shape, int]:
    shapes = dict(seen)
    while len(shapes) > SHAPES:
        ordered = sorted(shapes, key=area)
        # The rarest one joins its larger neighbour.
        rare = min(range(len(ordered) - 1), key=lambda i: shapes[ordered[i]])
        a, b = ordered[rare], ordered[rare + 1]
        total = shapes.pop(a) + shapes.pop(b)
        joined = hull(a, b)
        shapes[joined] = shapes.get(joined, 0) + total
    return shapes


def propose(model: str, sizes: Mapping[str, int], current: Sequence[Shape]) -> dict[str, Any]:
    """What `gpusupctl buckets` shows. `sizes`: shape -> how often, as workers report them."""
    seen: dict[Shape, int] = {}
    for key, count in sizes.items():
        if (shape := parse(key)) is not None and shape:
            seen[shape] = seen.get(shape, 0) + count
    answer: dict[str, Any] = {
        "model": model,
        "requests": sum(seen.values()),
        "shapes": len(seen),
        "sizes": dict(sizes),
        "current": [list(b) for b in current],
        "proposals": [],
    }
    if not seen:
        answer["note"] = "no request has been seen yet"
        return answer
    ranks = {len(shape) for shape in seen}
    rank = max(ranks, key=lambda r: sum(c for s, c in seen.items() if len(s) == r))
    mine = {s: c for s, c in seen.items() if len(s) == rank}
    choices = best(mine, MOST)
    one = waste(choices[0], mine) or 0.0
    before = waste(list(current), mine) if current else None
    answer["padding_with_one_bucket"] = round(one, 4)
    answer["padding_now"] = None if before is None else round(before, 4)
    last: list[Shape] = []
    for count in range(FEWEST, MOST + 1):
        buckets = choices[min(count, len(choices)) - 1]
        if buckets == last:
            break
        last = buckets
        padding = waste(buckets, mine) or 0.0
        answer["proposals"].append(
            {
                "buckets": [list(b) for b in buckets],
                "padding": round(padding, 4),
                "saves": round((before if before is not None else one) - padding, 4),
            }
        )
    return answer

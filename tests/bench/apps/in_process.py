"""The conv net in a bare loop: prints {batch size: images per second}. argv: seconds for each."""

from __future__ import annotations

import json
import os
import sys
import time

import work

net = work.set_up()
item = os.urandom(work.CONV_BYTES)
rates: dict[int, float] = {}
for rows in (1, 2, 4, 8, 16, 32):
    batch = [item] * rows
    for _ in range(3):
        work.predict(net, batch)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < float(sys.argv[1]):
        work.predict(net, batch)
        done += rows
    rates[rows] = done / (time.perf_counter() - began)
print(json.dumps(rates))

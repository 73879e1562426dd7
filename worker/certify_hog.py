"""A foreign process on a GPU, for `gpusup certify`: takes memory and computes a little, for ever.

    python -m gpusup.worker.certify_hog 0.3       # takes 30 % of what is free, and says so

It knows nothing of gpusup and holds no lease, as a colleague's notebook would.
"""

from __future__ import annotations

import sys
import time

import torch

_SIDE = 2048
_WORK_S = 0.01
_PAUSE_S = 0.09


def main(share: float) -> None:
    device = torch.device("cuda:0")
    free, _ = torch.cuda.mem_get_info(device)
    size = int(free * share)
    held = torch.ones(size, dtype=torch.uint8, device=device)
    matrix = torch.ones(_SIDE, _SIDE, device=device)
    torch.cuda.synchronize(device)
    sys.stdout.write(f"holds {held.numel() / 2**30:.1f} GiB, computes a tenth of the time\n")
    sys.stdout.flush()
    while True:
        end = time.monotonic() + _WORK_S
        while time.monotonic() < end:
            matrix = torch.mm(matrix, matrix).clamp_(0, 1)
            torch.cuda.synchronize(device)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""`python -m gpusup.worker`: a worker in a fresh interpreter, for `spawn = "exec"`.

The supervisor gives it stdout and stderr, and inherits two descriptors to it: the spec (a memfd
or a pipe, read to its end) and the progress page.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import NoReturn

from . import boot


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m gpusup.worker", description=__doc__)
    parser.add_argument("--spec-fd", type=int, required=True)
    parser.add_argument("--progress-fd", type=int, required=True)
    parser.add_argument("--parent", type=int, default=0, help="pid that must be our parent")
    parser.add_argument("--engine", default=boot.ENGINE, help="another engine, for tests")
    given = parser.parse_args()
    os.set_inheritable(given.progress_fd, False)  # the model's child processes need not have it
    spec = read_all(given.spec_fd)
    boot.run(spec, given.progress_fd, engine=given.engine, parent=given.parent, forked=False)


def read_all(fd: int) -> bytes:
    """Closes it. A memfd's position is shared with whoever wrote it, so it is set first."""
    with contextlib.suppress(OSError):  # a pipe has none
        os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb") as file:
        return file.read()


if __name__ == "__main__":
    main()

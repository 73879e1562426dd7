"""Run `gpusup` as a person would, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def gpusup(
    *words: str | Path,
    limit_s: float = 120.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """What the command printed and how it ended. No traceback may reach a user, ever."""
    done = subprocess.run(
        [sys.executable, "-m", "gpusup.supervisor", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd or Path("/"),
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


class Ended:
    def __init__(self, returncode: int, out: str, err: str) -> None:
        self.returncode = returncode
        self.out = out
        self.err = err

    def __repr__(self) -> str:
        return f"exit {self.returncode}\n{self.out}\n{self.err}"

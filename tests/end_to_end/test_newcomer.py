from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from .service import free_port


def test_a_newcomer_serves_and_swaps_a_model_within_ten_minutes() -> None:
    """Without the installation, which is whoever runs this test's own."""
    done = subprocess.run(
        [str(Path(__file__).with_name("newcomer.sh")), str(free_port())],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in all" in done.stdout

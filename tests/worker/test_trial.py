"""The child of `gpusup try`, where it must be like a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from gpusup.worker import trial, wire

HANDLER = """
from only_in_its_environment import Base


class Mine(Base):
    pass
"""
BASE = "from gpusup.worker.model import Model as Base\n"


def test_the_folders_of_the_models_environment_are_searched(tmp_path: Path) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "only_in_its_environment.py").write_text(BASE)
    handler = tmp_path / "handler.py"
    handler.write_text(HANDLER)
    spec = wire.WorkerSpec(
        slot="cpu0",
        generation=1,
        model="m",
        version="1",
        device="cpu",
        device_uuid="",
        control_path="",
        data_path="",
        config={"handler": f"{handler}:Mine"},
        env={"PYTHONPATH": str(libraries)},
    )
    ours, theirs = os.pipe()
    with open(ours, "rb") as told:
        try:
            subprocess.run(
                [sys.executable, "-m", "gpusup.worker.trial", "--result-fd", str(theirs)],
                input=msgspec.json.encode(trial.Task(spec)),
                pass_fds=(theirs,),
                timeout=60,
                check=False,
            )
        finally:
            os.close(theirs)
        lines = [msgspec.json.decode(line) for line in told]
    assert [line for line in lines if line["kind"] == "problem"] == []
    assert lines[-1]["kind"] == "ready"

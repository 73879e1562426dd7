"""Writes MLServer's settings for this mode and becomes `mlserver start`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import work

folder = Path(tempfile.mkdtemp(prefix="mlserver-"))
settings = {
    "host": "127.0.0.1",
    "http_port": work.PORT,
    "grpc_port": work.PORT + 1,
    "metrics_port": work.PORT + 2,
    "parallel_workers": work.WORKERS,
    "debug": False,
    "use_structured_logging": False,
}
kind = {"length": "Length", "conv": "Images"}.get(work.MODE, "Op")
model: dict[str, Any] = {"name": "bench", "implementation": f"mlserver_model.{kind}"}
if work.MODE == "conv":
    model |= {"max_batch_size": work.BATCH, "max_batch_time": work.WINDOW_MS / 1000}
(folder / "settings.json").write_text(json.dumps(settings))
(folder / "model-settings.json").write_text(json.dumps(model))
os.environ["PYTHONPATH"] = str(Path(__file__).parent)
program = str(Path(sys.executable).parent / "mlserver")
os.execv(program, [program, "start", str(folder)])

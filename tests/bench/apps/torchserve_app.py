"""Archives the handler, writes TorchServe's settings for this mode and becomes its front end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import work

apps = Path(__file__).parent
programs = Path(sys.executable).parent
folder = Path(tempfile.mkdtemp(prefix="torchserve-"))
rows, delay_ms = (work.BATCH, work.WINDOW_MS) if work.MODE == "conv" else (1, 1)
(folder / "model.yaml").write_text(
    f"minWorkers: {work.WORKERS}\nmaxWorkers: {work.WORKERS}\nbatchSize: {rows}\n"
    f"maxBatchDelay: {delay_ms}\nresponseTimeout: {max(1, int(work.TIMEOUT_S))}\n"
)
archive = [
    "--model-name",
    "bench",
    "--version",
    "1.0",
    "--handler",
    str(apps / "torchserve_handler.py"),
]
archive += ["--config-file", str(folder / "model.yaml"), "--export-path", str(folder), "-f"]
subprocess.check_call([str(programs / "torch-model-archiver"), *archive], stdout=subprocess.DEVNULL)
(folder / "config.properties").write_text(
    f"""inference_address=http://127.0.0.1:{work.PORT}
management_address=http://127.0.0.1:{work.PORT + 1}
metrics_address=http://127.0.0.1:{work.PORT + 2}
grpc_inference_port={work.PORT + 3}
grpc_management_port={work.PORT + 4}
max_request_size=67108864
max_response_size=67108864
default_workers_per_model={work.WORKERS}
job_queue_size=1000
install_py_dep_per_model=false
disable_token_authorization=true
enable_envvars_config=false
"""
)
(folder / "log4j2.xml").write_text(
    '<?xml version="1.0" encoding="UTF-8"?><Configuration><Appenders><Console name="C">'
    '<PatternLayout pattern="%d %p %c - %m%n"/></Console></Appenders>'
    '<Loggers><Root level="warn"><AppenderRef ref="C"/></Root></Loggers></Configuration>'
)
os.environ["LOG_LOCATION"] = os.environ["METRIC_LOCATION"] = str(folder)
os.environ["BENCH_APPS"] = str(apps)
os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
os.chdir(folder)
program = str(programs / "torchserve")
arguments = [
    "--start",
    "--foreground",
    "--ncs",
    "--model-store",
    str(folder),
    "--models",
    "bench=bench.mar",
]
arguments += ["--ts-config", str(folder / "config.properties"), "--disable-token-auth"]
os.execv(program, [program, *arguments, "--log-config", str(folder / "log4j2.xml")])

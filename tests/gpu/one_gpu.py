"""All that is measured on one real GPU, in order, within nine minutes.

    python tests/gpu/one_gpu.py --wrk DIR [--out DIR] [--only serve,vram] [--skip swap] [--cpu]

Each part runs in processes of its own under a limit of its own. Prints one JSON object of less than
10 KB; DIR gets one_gpu.json with everything, and one_gpu.log, as they grow. --cpu tries the script
out on CPU slots, with the parts that can run there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
MOST_PRINTED = 9500


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    argv: Sequence[str]
    limit_s: float
    on_cpu: bool = False


def parts(given: argparse.Namespace) -> list[Part]:
    python, cpu = sys.executable, ["--cpu"] if given.cpu else []
    wrk = ["--wrk", str(Path(given.wrk).resolve())] if given.wrk else []
    quick = [] if given.long else ["--quick"]
    bench = [python, str(TESTS / "bench" / "run.py")]
    more = ["--json", "--peers", given.peers, *quick, *wrk]
    mix = ["--seconds", f"{given.seconds:g}", "--naive-seconds", f"{given.seconds / 2:g}"]
    pytest = ["-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(TESTS),
              "--import-mode=importlib", "-q", "-rfEs", "--tb=short"]  # fmt: skip
    sanitizer = shutil.which("compute-sanitizer") or ""
    found = [
        Part(name="serve", argv=[python, str(HERE / "serve.py"), "--only", "serve", *cpu],
             limit_s=120, on_cpu=True),
        Part(name="faults", argv=[python, str(HERE / "serve.py"), "--only", "faults", *cpu],
             limit_s=80, on_cpu=True),
        Part(name="latency", argv=[*bench, "gpu-latency", *more], limit_s=130),
        Part(name="images", argv=[*bench, "gpu-images", *more], limit_s=130),
        Part(name="vram", argv=[python, str(HERE / "vram_mix.py"), *mix, *cpu],
             limit_s=60 + 6 * given.seconds, on_cpu=True),
        Part(name="pytest", argv=[python, *pytest, str(HERE)], limit_s=100, on_cpu=True),
        Part(name="swap", argv=[python, str(HERE / "swap_5gb.py"), "--swaps", "4"], limit_s=110),
    ]  # fmt: skip
    if sanitizer or given.cpu:
        memcheck = [] if given.cpu else [sanitizer, "--tool", "memcheck"]
        argv = [*memcheck, python, str(HERE / "sanitize.py"), *cpu]
        found.append(Part(name="sanitize", argv=argv, limit_s=90, on_cpu=True))
    return [part for part in found if part.on_cpu or not given.cpu]


def run(part: Part, limit_s: float, log: Path) -> dict[str, Any]:
    """{"exit", "took_s", "found"}; what the part said besides goes to the log."""
    began = time.monotonic()
    env = dict(os.environ)
    links = str(TESTS / "links")
    env["PYTHONPATH"] = ":".join(p for p in (links, env.get("PYTHONPATH", "")) if p)
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # theirs may want packages that are not there
    env["PYTHONUNBUFFERED"] = "1"
    with log.open("ab") as said, tempfile.TemporaryFile() as out:
        said.write(f"\n===== {part.name}: {' '.join(part.argv)}\n".encode())
        said.flush()
        start = said.tell()
        process = subprocess.Popen(
            part.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=said, env=env,
            start_new_session=True, cwd=TESTS.parent,
        )  # fmt: skip
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
            end(process)
        out.seek(0)
        text = out.read().decode(errors="replace")
        stop = os.fstat(said.fileno()).st_size
        said.write(text.encode()[-200_000:])
    result: dict[str, Any] = {
        "exit": process.returncode,
        "took_s": round(time.monotonic() - began, 1),
    }
    if late:
        result["broken_off_after_s"] = round(limit_s, 1)
    result["found"] = parsed(text)
    if process.returncode or late:
        with log.open("rb") as told:
            told.seek(start)
            result["said"] = told.read(stop - start)[-1500:].decode(errors="replace")
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to clean up after itself, then see to it."""
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()
    process.wait()


def parsed(text: str) -> Any:
    """The JSON object in the output, or its last lines."""
    for piece in (text, *reversed(text.splitlines())):
        with contextlib.suppress(ValueError):
            found = json.loads(piece)
            if isinstance(found, dict):
                return found
    return text[-1500:]


#: Long and of interest only to who reads the whole file.
BULKY = {"steps", "log", "texts", "argv", "story", "rows", "notes", "where"}


def shorter(value: Any, strings: int, items: int) -> Any:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in BULKY}
        return {k: shorter(v, strings, items) for k, v in kept.items()}
    if isinstance(value, list):
        return [shorter(v, strings, items) for v in value[:items]]
    if isinstance(value, str) and len(value) > strings:
        return "..." + value[-strings:]
    return round(value, 4) if isinstance(value, float) else value


def printed(result: dict[str, Any]) -> str:
    """As much of it as the limit allows."""
    text = ""
    for strings, items in ((600, 20), (300, 10), (150, 6), (80, 4), (40, 3)):
        text = json.dumps(shorter(result, strings, items), separators=(",", ":"))
        if len(text) <= MOST_PRINTED:
            return text
    return text[:MOST_PRINTED]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrk", default="", help="folder filled by tests/bench/carry_wrk.sh")
    parser.add_argument("--out", type=Path, help="folder for one_gpu.json and one_gpu.log")
    parser.add_argument("--only", default="", help="these parts, in the usual order")
    parser.add_argument("--skip", default="")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="vram: for each number of clients"
    )
    parser.add_argument("--peers", default="", help="of the bench: naive,mosec,...")
    parser.add_argument("--long", action="store_true", help="the bench without --quick")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--cpu", action="store_true", help="try the script out")
    given = parser.parse_args()
    began = time.monotonic()
    out: Path = given.out or Path(tempfile.mkdtemp(prefix="one-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    only, skip = set(filter(None, given.only.split(","))), set(given.skip.split(","))
    chosen = [p for p in parts(given) if (not only or p.name in only) and p.name not in skip]
    if unknown := only - {p.name for p in chosen}:
        print(f"not here: {', '.join(sorted(unknown))}", file=sys.stderr)
    result: dict[str, Any] = {}
    for part in chosen:
        left = given.limit - (time.monotonic() - began) - 5
        if left < 15:
            result[part.name] = {"skipped": f"{left:.0f} s are left"}
            continue
        print(f"{time.monotonic() - began:6.1f} s: {part.name}", file=sys.stderr, flush=True)
        result[part.name] = run(part, min(part.limit_s, left), out / "one_gpu.log")
        (out / "one_gpu.json").write_text(json.dumps(result))
    result["took_s"] = round(time.monotonic() - began, 1)
    (out / "one_gpu.json").write_text(json.dumps(result))
    print(printed(result))
    return int(any(isinstance(p, dict) and p.get("exit") for p in result.values()))


if __name__ == "__main__":
    raise SystemExit(main())

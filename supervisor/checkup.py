"""What `gpusup doctor` looks at on a machine. Every function yields findings and raises nothing."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

from gpusup.conf.places import parse_listen, run_dir, state_dir
from gpusup.conf.schema import Config, ServerConfig
from gpusup.conf.units import format_size

from .doctor import Finding

#: How long the driver may take to answer; a healthy one needs a tenth of a second.
DRIVER_LIMIT_S: Final = 20.0
FILES_WANTED: Final = 16_384

#: Run in a child: any of these calls may hang for ever after a GPU fault.
_ASK_DRIVER: Final = """
import json
from gpusup.supervisor.nvml import Nvml
def text(value):
    return value.decode() if isinstance(value, bytes) else value
nvml = Nvml()
nvml.init()
driver, library = nvml.versions()
found = []
for handle in nvml.devices():
    if handle is None:
        found.append(None)
        continue
    one = {"uuid": text(nvml.uuid(handle)), "product": text(nvml.product(handle))}
    for name, ask in (
        ("memory", lambda: nvml.memory(handle, 1)),
        ("persistence", lambda: nvml.persistence(handle)),
        ("temperature", lambda: nvml.temperature(handle)),
        ("processes", lambda: len(nvml.processes(handle))),
        ("ecc", lambda: nvml.ecc_uncorrected(handle)),
    ):
        try:
            one[name] = ask()
        except Exception as error:
            one[name + "_error"] = str(error)
    found.append(one)
print(json.dumps({"driver": text(driver), "library": text(library), "devices": found}))
"""


def software() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "python", f"{python} at {sys.executable}")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        yield Finding("fail", "torch", "is not installed", "pip install torch")
        return
    if "+cpu" in torch and _device_files():
        remedy = "install a CUDA build of torch (https://pytorch.org/get-started/locally/)"
        yield Finding("fail", "torch", f"{torch} can't use the GPU that is here", remedy)
    else:
        yield Finding("ok", "torch", torch)


def gpu() -> Iterator[Finding]:
    files = _device_files()
    driver = Path("/proc/driver/nvidia/version")
    if not files and not driver.exists():
        yield Finding("note", "driver", "no NVIDIA driver and no GPU here: models run on CPU slots")
        return
    if not driver.exists():
        remedy = "load the kernel module: modprobe nvidia (dmesg says why it is not loaded)"
        yield Finding("fail", "driver", "there are /dev/nvidia* but no driver is loaded", remedy)
    else:
        line = driver.read_text(errors="replace").splitlines()[:1]
        yield Finding("ok", "driver", " ".join("".join(line).split()))
    yield from _permissions(files)
    yield from _nvml()
    yield from _clocks()


def _device_files() -> list[Path]:
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def _permissions(files: list[Path]) -> Iterator[Finding]:
    wanted = [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *files]
    for path in wanted:
        if not path.exists():
            remedy = "nvidia-modprobe -u -c=0 makes it (in a container: pass the device in)"
            yield Finding("fail", str(path), "is missing", remedy)
        elif not os.access(path, os.R_OK | os.W_OK):
            status = path.stat()
            who = f"mode {stat.S_IMODE(status.st_mode):04o}, group {status.st_gid}"
            remedy = f"add this user to group {status.st_gid}, or set NVreg_DeviceFileMode=0666"
            yield Finding("fail", str(path), f"may not be opened ({who})", remedy)
    if files and all(os.access(path, os.R_OK | os.W_OK) for path in wanted if path.exists()):
        yield Finding("ok", "/dev/nvidia*", f"{len(files)} devices, readable and writable")


def _nvml() -> Iterator[Finding]:
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_DRIVER],
            capture_output=True,
            text=True,
            timeout=DRIVER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"did not answer within {DRIVER_LIMIT_S:g} s: the driver hangs"
        yield Finding("fail", "NVML", text, "see dmesg for Xid messages; reset the GPU or reboot")
        return
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        remedy = "driver and library must be of one version: reboot after a driver update"
        yield Finding("fail", "NVML", last, remedy)
        return
    told: dict[str, Any] = json.loads(asked.stdout)
    yield Finding("ok", "NVML", f"driver {told['driver']}, library {told['library']}")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        yield Finding("note", "CUDA_VISIBLE_DEVICES", f'"{hidden}": only these are used')
    for index, device in enumerate(told["devices"]):
        yield from _device(f"gpu{index}", device)


def _device(name: str, device: dict[str, Any] | None) -> Iterator[Finding]:
    if device is None:
        remedy = "see dmesg for Xid messages; reset the GPU or reboot"
        yield Finding("fail", name, "can't be opened: it may have fallen off the bus", remedy)
        return
    if "memory" not in device:
        remedy = "without it admission counts requests; see dmesg for Xid messages"
        yield Finding("fail", name, f"memory can't be read: {device['memory_error']}", remedy)
    else:
        total, free = device["memory"]
        text = f"{device['product']}, {format_size(free)} of {format_size(total)} free"
        if free < total * 0.9:
            text += f", {device.get('processes', 0)} processes on it"
            remedy = "nvidia-smi names them; set devices.memory if they are to stay"
            yield Finding("note", name, text, remedy)
        else:
            yield Finding("ok", name, text)
    if device.get("persistence") is False:
        remedy = "nvidia-smi -pm 1, or run nvidia-persistenced: each first start costs seconds"
        yield Finding("note", f"{name} persistence", "is off", remedy)
    if device.get("ecc"):
        remedy = "reset the GPU when it is idle; have it replaced if they come back"
        yield Finding("fail", f"{name} ECC", f"{device['ecc']} uncorrected errors", remedy)


def _clocks() -> Iterator[Finding]:
    """Throttling shows as slow answers and nowhere else."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("note", "clocks", "not looked at: nvidia-smi is not here")
        return
    fields = "index,clocks.sm,clocks.max.sm,clocks_throttle_reasons.active"
    try:
        asked = subprocess.run(
            [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=DRIVER_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        yield Finding("note", "clocks", "nvidia-smi did not answer")
        return
    for line in asked.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4 or not parts[3].startswith("0x"):
            continue
        # Bits 0 and 1 are "idle" and "as set"; what is above means power, heat or hardware.
        reasons = int(parts[3], 16) & ~0x3
        text = f"{parts[1]} of {parts[2]} MHz"
        if reasons:
            remedy = "nvidia-smi -q -d PERFORMANCE names the cause: power cap, heat, or hardware"
            yield Finding("note", f"gpu{parts[0]} clocks", f"{text}, held down", remedy)
        else:
            yield Finding("ok", f"gpu{parts[0]} clocks", text)


def system(config: Config) -> Iterator[Finding]:
    yield from _cgroup(config)
    yield from _limits(config)
    yield from _shared_memory(config)


def _cgroup(config: Config) -> Iterator[Finding]:
    limit = memory_limit()
    total = psutil.virtual_memory().total
    room = min(limit, total)
    text = f"{format_size(room)} of memory"
    if limit < total:
        text += f" (limit of the control group; the machine has {format_size(total)})"
    wanted = config.devices.cpu_slots * config.devices.cpu_memory
    if not _device_files() and wanted > room:
        remedy = "lower devices.cpu_memory or devices.cpu_slots"
        text = f"{text}, the CPU slots may take {format_size(wanted)}"
        yield Finding("note", "memory", text, remedy)
    else:
        yield Finding("ok", "memory", text)
    cores = len(os.sched_getaffinity(0))
    yield Finding("ok", "cores", f"{cores} usable of {os.cpu_count()}")


def memory_limit(root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that our control group and those above it allow; 2**63 - 1 without a limit."""
    lowest = 2**63 - 1
    try:
        lines = me.read_text().splitlines()
    except OSError:
        return lowest
    for line in lines:
        if not line.startswith("0::"):
            continue
        group = root / line.removeprefix("0::").lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                lowest = min(lowest, int((folder / "memory.max").read_text()))
            if folder == root:
                break
    return lowest


def _limits(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(FILES_WANTED, 2 * config.server.connections)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        remedy = f"LimitNOFILE={wanted} in the unit, or /etc/security/limits.conf"
        yield Finding("note", "open files", f"at most {hard}, {wanted} are wanted", remedy)
    else:
        yield Finding("ok", "open files", f"{soft}, can be raised to {hard}")
    tasks, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if tasks != resource.RLIM_INFINITY and tasks < 4096 and os.geteuid() != 0:
        remedy = "LimitNPROC=infinity in the unit, or /etc/security/limits.conf"
        yield Finding("note", "processes", f"at most {tasks} for this user", remedy)


def _shared_memory(config: Config) -> Iterator[Finding]:
    """Arenas are memfds: they need memory, and the right to make them."""
    try:
        fd = os.memfd_create("gpusup-doctor", os.MFD_CLOEXEC)
        os.close(fd)
    except OSError as error:
        text = f"memfd_create: {error.strerror}"
        yield Finding("fail", "shared memory", text, "the sandbox forbids it; allow memfd_create")
        return
    arenas = 4 if config.server.proxies == "auto" else config.server.proxies
    wanted = arenas * config.server.arena
    free = psutil.virtual_memory().available
    if wanted > free // 2:
        text = f"{arenas} arenas of {format_size(config.server.arena)}, {format_size(free)} free"
        yield Finding("note", "shared memory", text, "lower server.arena or server.proxies")
    else:
        yield Finding("ok", "shared memory", f"arenas need at most {format_size(wanted)}")
    with contextlib.suppress(OSError):
        room = shutil.disk_usage("/dev/shm").total
        if room < 256 * 2**20:
            remedy = "docker run --shm-size=1g, if your handler uses torch's own worker processes"
            yield Finding("note", "/dev/shm", f"holds {format_size(room)} only", remedy)


def addresses(config: Config) -> Iterator[Finding]:
    running = _service_answers(run_dir(config.server) / "control.sock")
    yield from _port(config.server, running)
    for what, folder in (
        ("run_dir", run_dir(config.server)),
        ("state_dir", state_dir(config.server)),
    ):
        place = folder
        while not place.exists() and place != place.parent:
            place = place.parent
        if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
            yield Finding("ok", what, str(folder))
        else:
            remedy = f"run as another user, or set server.{what}"
            yield Finding("fail", what, f"{folder} can't be written: {place} is in the way", remedy)


def _port(server: ServerConfig, running: bool) -> Iterator[Finding]:
    try:
        host, port = parse_listen(server.listen)
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (ValueError, OSError) as error:
        yield Finding("fail", "port", f"{server.listen}: {error}", "correct server.listen")
        return
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            text = f"{server.listen}: {error.strerror}"
            holder = _holder(port)
            if running:
                yield Finding("ok", "port", f"{server.listen}: gpusup is running here")
            else:
                remedy = f"stop {holder or 'who has it'}, or choose another server.listen"
                yield Finding("fail", "port", text + (f" (by {holder})" if holder else ""), remedy)
            return
    yield Finding("ok", "port", f"{server.listen} is free")


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for link in psutil.net_connections("tcp"):
            local: Any = link.laddr
            if link.status == psutil.CONN_LISTEN and local and local.port == port and link.pid:
                return f"{psutil.Process(link.pid).name()} (pid {link.pid})"
    return ""


def _service_answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1.0)
        try:
            sock.connect(str(path))
        except OSError:
            return False
        return True

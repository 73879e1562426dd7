"""Every command in the documents is run: those of one document in one shell, in their order.

    ```sh                    run; every command must succeed
    ```sh background 8000    started, and waited for until its port answers
    ```sh no-run             not here: needs root, systemd, a GPU, or the network
    ```python file=NAME      written to NAME, as is ```toml file=NAME

Ports 8000 and 8001 are replaced by free ones. Where a document starts no service by itself, one
with the bundled model runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

from .service import Service, free_port

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
LIMIT_S = 180.0
#: Blocks that are left out, in all documents together.
NO_RUN_LIMIT = 8

_FENCE = re.compile(r"(<!-- \w+ -->\n)?^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    line: int
    language: str
    words: tuple[str, ...]
    text: str


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for found in _FENCE.finditer(text):
        if found[1]:
            continue  # the README's two commands, which CI itself and test_demo.py run
        yield Block(
            line=text.count("\n", 0, found.start()) + 1,
            language=found[2],
            words=tuple(found[3].split()),
            text=found[4],
        )


def script(path: Path, folder: Path, port: int, second: int) -> str:
    """What a reader would type. `folder`: where they stand at first."""
    lines = [
        "set -euo pipefail",
        f"cd {folder}",
        "trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT",
        # What they would do by hand where the usual port is taken.
        "gpusup() {",
        '  command gpusup "$@"',
        '  if [ "$1" = init ] && [ -n "${2:-}" ]; then',
        f'    sed -i s/127.0.0.1:8000/127.0.0.1:{port}/ "$2/gpusup.toml"',
        "  fi",
        "}",
    ]
    for block in blocks(path):
        text = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        text = text.replace("127.0.0.1:8001", f"127.0.0.1:{second}")
        file = next((w.removeprefix("file=") for w in block.words if w.startswith("file=")), "")
        lines.append(f"echo '--- {path.name}:{block.line}' >&2")
        if file:
            lines.append(f"cat > {file} <<'END OF FILE'\n{text}END OF FILE")
        elif block.language != "sh" or "no-run" in block.words:
            lines.pop()
        elif "background" in block.words:
            target = f"{port}/readyz" if block.words[-1] == "8000" else f"{second}/"
            # `exec`, or the signal at the end would reach a shell and not the service.
            command = text.partition("#")[0].strip()
            if command == "gpusup run":
                command += f" {folder}/gpusup.toml"
            if command == "gpusup dashboard":
                command += f" --listen 127.0.0.1:{second}"
            lines.append(f"( exec {command} ) &")
            lines.append(
                f"for i in $(seq 600); do curl -sf -o /dev/null 127.0.0.1:{target} && break; "
                f"kill -0 $! || exit 1; sleep 0.1; done; curl -sf -o /dev/null 127.0.0.1:{target}"
            )
        else:
            lines.append(text)
    return "\n".join(lines) + "\n"


def starts_its_own(path: Path) -> bool:
    return any("background" in b.words and b.words[-1] == "8000" for b in blocks(path))


def commands(path: Path) -> bool:
    return any(b.language == "sh" and "no-run" not in b.words for b in blocks(path))


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if commands(p)], ids=lambda path: path.stem)
def test_every_command_does_what_the_document_says(path: Path, short_path: Path) -> None:
    model = '[models.digits]\nhandler = "gpusup.worker.digits:Digits"\nretry = "safe"\n'
    service = Service(short_path, f'[devices]\ncpu_slots = 2\ncpu_memory = "1GiB"\n\n{model}')
    image = files("gpusup.conf") / "digits" / "held-out-000-is-7.png"
    (short_path / "seven.png").write_bytes(image.read_bytes())
    os.symlink(ROOT / "docs", short_path / "docs")
    own = starts_its_own(path)
    port = service.port
    out = short_path / "out"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUNTIME_DIRECTORY": str(short_path / "run"),
        "STATE_DIRECTORY": str(short_path / "state"),
    }
    try:
        # doctor asks whether the port is free, so what it is asked in is not running.
        if not own and path.stem != "install":
            service.start()
        with out.open("wb") as log:
            shell = subprocess.Popen(
                ["bash", "-c", script(path, short_path, port, free_port())],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                code = shell.wait(LIMIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()
    finally:
        service.end()
    assert code == 0, out.read_text(errors="replace")[-6000:]


def test_commands_are_found_where_there_are_some() -> None:
    for path in DOCUMENTS:
        fences = re.findall(r"^```sh\b(?!.* no-run)", path.read_text(), re.MULTILINE)
        assert commands(path) == bool(fences), path.name
    found = {path.stem for path in DOCUMENTS if commands(path)}
    assert found >= {"README", "install", "first-model", "hot-swap"}


def test_few_commands_are_left_out() -> None:
    left = [
        f"{path.name}:{block.line}"
        for path in DOCUMENTS
        for block in blocks(path)
        if block.language == "sh" and "no-run" in block.words
    ]
    assert len(left) <= NO_RUN_LIMIT, left


def test_every_link_between_the_documents_leads_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name}: {target}"

"""What is installed is what runs: the wheel, its contents, the pins, and the README's commands."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PARTS = ("conf", "worker", "supervisor", "proxy")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ \[;]", text)[0].lower().replace("_", "-") for text in requirements}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "gpusup"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *PARTS):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_every_file_of_the_parts(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"gpusup/{path.relative_to(ROOT)}"
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert wanted - inside == set()


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[1] for name in inside} == set(PARTS)
    assert not any(name.startswith("gpusup/__init__") for name in inside)
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    # A file that only its owner may read is of no use once root has installed it.
    assert all(entry.external_attr >> 16 & 0o044 == 0o044 for entry in archive.infolist())


def test_it_installs_in_an_empty_venv_and_runs_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # The dependencies are those of this run; an editable gpusup among them is not seen, since a
    # path file's own folder is searched for modules and not for further path files.
    (site / "dependencies.pth").write_text("\n".join(p for p in sys.path if "-packages" in p))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps",
         "--no-index", str(wheel)],
        check=True,
    )  # fmt: skip
    code = (
        "import gpusup.worker.model, pathlib; from gpusup.conf.load import load; "
        "print(gpusup.worker.model.__file__); print(load(None).models['digits'].golden)"
    )
    shown = subprocess.run(
        [python, "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert all(line.startswith(str(site)) for line in shown.stdout.splitlines())
    for tool in ("gpusup", "gpusupctl"):
        helped = subprocess.run(
            [folder / "bin" / tool, "--help"], cwd="/", capture_output=True, text=True, check=True
        )
        assert tool in helped.stdout
    made = subprocess.run(
        [folder / "bin" / "gpusup", "init", tmp_path / "mine"], cwd="/", check=False
    )
    assert made.returncode == 0


def test_every_dependency_is_pinned_for_the_tests() -> None:
    project = PROJECT["project"]
    pinned = names((ROOT / "conf/constraints.txt").read_text().splitlines())
    extras = project["optional-dependencies"]
    wanted = names(project["dependencies"]) | names(extras["test"])
    # Whoever builds has setuptools already, in whatever version; build isolation picks its own.
    assert wanted - pinned - {"setuptools"} == set()


def test_pins_are_exact_and_sorted() -> None:
    lines = (ROOT / "conf/constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    keys = [pin.partition("==")[0].lower().replace("_", "-") for pin in pins]
    assert keys == sorted(keys)


def command_after(marker: str) -> str:
    """The code block that follows `<!-- marker -->` in the README."""
    found = re.search(
        rf"^<!-- {marker} -->\n```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert found, marker
    return found.group(1)


@pytest.mark.parametrize("marker", ["demo", "tests"])
def test_each_readme_command_is_one_and_complete(marker: str) -> None:
    command = command_after(marker)
    assert "python3 -m venv" in command
    assert "pip install -c conf/constraints.txt" in command
    # One copy-and-paste: the first failure ends it.
    *lines, last = command.splitlines()
    assert all(line.endswith(("&&", "\\")) for line in lines)
    assert not last.endswith("&&")
    subprocess.run(["bash", "-n", "-c", command], check=True)


def test_ci_runs_the_readmes_own_words() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert "<!-- tests -->" in script
    found = subprocess.run(
        ["bash", "-c", "sed -n '/^<!-- tests -->$/,/^```$/p' README.md | sed '1,2d;$d'"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == command_after("tests")
    assert "sed -n '/^<!-- tests -->$/,/^```$/p' README.md | sed '1,2d;$d'" in script
    subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], check=True)


def test_the_scripts_exist() -> None:
    assert set(PROJECT["project"]["scripts"]) == {"gpusup", "gpusupctl"}
    for place in PROJECT["project"]["scripts"].values():
        module, _, function = place.partition(":")
        assert function == "main"
        assert (ROOT / (module.removeprefix("gpusup.").replace(".", "/") + ".py")).is_file()

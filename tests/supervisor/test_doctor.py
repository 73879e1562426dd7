from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from gpusup.conf.schema import Config, ServerConfig
from gpusup.supervisor import checkup
from gpusup.supervisor.doctor import Finding

from .commands import gpusup


def text_for(tmp_path: Path, port: int = 0) -> str:
    return (
        f'[server]\nlisten = "127.0.0.1:{port}"\nrun_dir = "{tmp_path}"\nstate_dir = "{tmp_path}"\n'
    )


def test_a_good_machine_passes_and_the_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "gpusup.toml"
    path.write_text(text_for(tmp_path))
    done = gpusup("doctor", path, "--json")
    report = json.loads(done.out)
    by_name = {finding["what"]: finding for finding in report["findings"]}
    assert by_name["model digits"]["level"] == "ok", by_name
    assert by_name["port"]["level"] == "ok"
    assert done.returncode == (0 if report["ok"] else 1)


def test_each_failure_comes_with_its_remedy_and_code_1(tmp_path: Path) -> None:
    path = tmp_path / "gpusup.toml"
    (tmp_path / "handler.py").write_text("class Mine: ...\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(text_for(tmp_path, port) + '[models.a]\nhandler = "handler.py:Mine"\n')
        done = gpusup("doctor", path)
    assert done.returncode == 1, done
    lines = done.out.splitlines()
    for start in (f"fail  port: 127.0.0.1:{port}: Address already in use", "fail  model a: "):
        at = next(i for i, line in enumerate(lines) if line.startswith(start))
        assert lines[at + 1].startswith("      -> ")


def test_a_broken_configuration_is_a_finding_too(tmp_path: Path) -> None:
    path = tmp_path / "gpusup.toml"
    path.write_text("[server]\nlisen = 1\n")
    done = gpusup("doctor", path, "--no-models")
    assert done.returncode == 1
    assert 'did you mean "listen"?' in done.out


def findings(config: Config) -> dict[str, Finding]:
    return {finding.what: finding for finding in checkup.addresses(config)}


def test_a_folder_nobody_can_make_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server = ServerConfig(run_dir=str(tmp_path / "file" / "run"), state_dir=str(tmp_path))
    found = findings(Config(server=server))
    assert found["run_dir"].level == "fail"
    assert found["state_dir"].level == "ok"


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "me").write_text("0::/system.slice/gpusup.service\n")
    group = tmp_path / "root" / "system.slice" / "gpusup.service"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group.parent / "memory.max").write_text("1000\n")
    assert checkup.memory_limit(tmp_path / "root", tmp_path / "me") == 1000
    (group / "memory.max").write_text("900\n")
    assert checkup.memory_limit(tmp_path / "root", tmp_path / "me") == 900
    assert checkup.memory_limit(tmp_path, tmp_path / "gone") > 2**62


def test_an_old_driver_with_a_new_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_ASK_DRIVER", "raise SystemExit('Driver/library mismatch')")
    (finding,) = checkup._nvml()
    assert finding.level == "fail"
    assert finding.text == "Driver/library mismatch"
    assert "reboot" in finding.remedy


def test_a_driver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "_ASK_DRIVER", "import time; time.sleep(60)")
    monkeypatch.setattr(checkup, "DRIVER_LIMIT_S", 0.2)
    (finding,) = checkup._nvml()
    assert "did not answer within 0.2 s" in finding.text

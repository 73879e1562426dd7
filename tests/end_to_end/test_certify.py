"""`gpusup certify` as an operator runs it; and that it fails what it should fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from .service import HANDLERS, Service, running


def certify(folder: Path, *words: str, timeout: float = 420.0) -> tuple[int, dict[str, Any], str]:
    """(exit code, report.json, output)."""
    report = folder / "report"
    done = subprocess.run(
        [sys.executable, "-m", "gpusup.supervisor", "certify", *words, "--report", str(report)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    path = report / "report.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else {}, output


def failed(report: dict[str, Any]) -> dict[str, list[str]]:
    """Test -> names of the checks that failed."""
    return {
        test["name"]: [c["name"] for c in test["checks"] if c["verdict"] == "failed"]
        for test in report["tests"]
        if test["verdict"] == "failed"
    }


def config(folder: Path, text: str) -> str:
    path = folder / "gpusup.toml"
    path.write_text(text)
    return str(path)


def test_load_and_hostile_input_pass_with_the_bundled_model(short_path: Path) -> None:
    words = ("--profile", "quick", "--only", "load,hostile", "--scale", "0.1")
    code, report, output = certify(short_path, *words)
    assert code == 0, output
    assert report["counts"] == {"passed": 2, "failed": 0, "skipped": 0}
    load, hostile = report["tests"]
    assert load["figures"]["highest_rate"] > 0
    assert load["figures"]["held"]["good"] == load["figures"]["held"]["requests"] > 0
    assert hostile["figures"]["refused"] == hostile["figures"]["sent"] > 20
    page = (short_path / "report" / "report.html").read_text()
    assert "<h1>passed: load, hostile</h1>" in page
    assert ("<svg" in page) is (_has_matplotlib())
    suites = ET.parse(short_path / "report" / "junit.xml").getroot()
    assert [suite.get("failures") for suite in suites] == ["0", "0"]


def _has_matplotlib() -> bool:
    from gpusup.supervisor.certify_plots import available

    return available()


@pytest.fixture(scope="module")
def service(folder: Path) -> Any:
    with running(folder, '[models.digits]\nhandler = "gpusup.worker.digits:Digits"\n') as service:
        yield service


def test_a_running_service_without_its_control_socket_is_not_certified(
    service: Service, short_path: Path
) -> None:
    url = f"http://127.0.0.1:{service.port}"
    words = ("--url", url, "--only", "stability,swap,faults", "--rate", "50")
    code, report, output = certify(short_path, *words)
    assert code == 3, output
    assert report["counts"]["skipped"] == 3
    assert all("control socket" in test["skipped"] for test in report["tests"])


def test_a_running_service_is_not_hurt_unasked(service: Service, short_path: Path) -> None:
    url, before = f"http://127.0.0.1:{service.port}", service.pids()
    words = ("--url", url, "--control", str(service.run_dir), "--only", "faults,swap,mixed")
    code, report, output = certify(short_path, *words, "--rate", "50")
    assert code == 3, output
    assert all("--allow-faults" in test["skipped"] for test in report["tests"])
    assert service.pids() == before


@pytest.mark.slow
def test_what_was_found_before_an_interruption_is_reported(short_path: Path) -> None:
    words = ("--profile", "quick", "--only", "load,stability", "--rate", "50", "--scale", "0.1")
    argv = [sys.executable, "-m", "gpusup.supervisor", "certify", *words, "--report", "report"]
    output = ""
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=short_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as command:  # fmt: skip
        assert command.stdout is not None
        for line in command.stdout:
            output += line
            if line.startswith("[2/2]"):
                command.send_signal(signal.SIGINT)
    assert command.returncode == 130, output
    assert "gpusup certify: interrupted\n" in output
    assert "Traceback" not in output
    report = json.loads((short_path / "report" / "report.json").read_text())
    load, stability = report["tests"]
    assert load["figures"]["highest_rate"] > 0
    assert stability["skipped"] == "interrupted before its end"


def test_nobody_there_is_one_clear_line(short_path: Path) -> None:
    code, report, output = certify(short_path, "--url", "http://127.0.0.1:9")
    assert code == 1
    assert not report
    assert output.startswith("gpusup certify: no gpusup answers at http://127.0.0.1:9")


@pytest.mark.slow
def test_a_leaky_model_fails_stability(short_path: Path) -> None:
    text = f'[models.leaky]\nhandler = "{HANDLERS}:Leaky"\n'
    words = ("--profile", "quick", "--only", "stability", "--stability", "25s", "--rate", "300")
    code, report, output = certify(short_path, config(short_path, text), *words)
    assert code == 1, output
    assert "allocated memory does not grow" in failed(report)["stability"]


@pytest.mark.slow
def test_a_handler_that_ignores_limits_fails_hostile_input(short_path: Path) -> None:
    text = f'[models.boundless]\nhandler = "{HANDLERS}:Boundless"\n'
    words = ("--profile", "quick", "--only", "hostile", "--rate", "100")
    code, report, output = certify(short_path, config(short_path, text), *words)
    assert code == 1, output
    wrong = failed(report)["hostile"]
    assert "half an image" in wrong
    assert "device memory untouched" in wrong


@pytest.mark.slow
def test_a_service_with_a_tiny_queue_fails_load(short_path: Path) -> None:
    text = (
        "[watermark]\nqueue = 0.01\nshed = 0.99\nhysteresis = 0.0\nqueue_per_slot = 1\n"
        f'[models.slow]\nhandler = "{HANDLERS}:Sleeper"\nmax_rows = 1\n'
        "settings = { seconds = 0.02 }\n"
    )
    words = ("--profile", "quick", "--only", "load", "--rate", "80", "--scale", "0.5")
    code, report, output = certify(short_path, config(short_path, text), *words)
    assert code == 1, output
    assert "all answered at the stated rate" in failed(report)["load"]
    codes = report["tests"][0]["figures"]["held"]["codes"]
    assert any(code.startswith("429") for code in codes), codes


@pytest.mark.slow
def test_the_rate_of_a_slow_model_is_found_below_the_first_one_that_is_tried(
    short_path: Path,
) -> None:
    text = (
        f'[models.slow]\nhandler = "{HANDLERS}:Sleeper"\nmax_rows = 1\n'
        "settings = { seconds = 0.3 }\n"
    )
    words = ("--profile", "quick", "--only", "load", "--scale", "0.5", "--sla", "p99=900ms")
    code, report, output = certify(short_path, config(short_path, text), *words)
    figures = report["tests"][0]["figures"]
    assert code == 0, output
    assert 2 <= figures["highest_rate"] < figures["first_rate_that_failed"] <= 20


@pytest.mark.slow
def test_the_quick_profile_passes_with_the_bundled_model(short_path: Path) -> None:
    code, report, output = certify(short_path, "--profile", "quick", timeout=600.0)
    assert code == 0, output
    assert report["headline"] == "CERTIFIED: all seven passed"
    assert report["took_s"] < 360

"""The log of a running service: one line an event, no secret, no body, and it can be rotated."""

from __future__ import annotations

import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusup.proxy.security import hash_key

from .service import HANDLERS, Service, running

KEY = "k3y-of-a-client-4711"
WRONG_KEY = "k3y-that-is-wrong-0815"
SETTING = "s3cret-of-a-handler"
VARIABLE = "s3cret-of-the-environment"
BODY = "marked-b0dy-of-a-client"


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    keys = folder / "keys.toml"
    keys.write_text(f'[keys.tester]\nhash = "{hash_key(KEY)}"\n')
    keys.chmod(0o600)
    config = f"""
[server]
api_keys = "{keys}"

[log]
file = "{folder / "gpusup.log"}"
level = "debug"
requests = 1.0

[models.double]
handler = "{HANDLERS}:Double"
settings = {{ api_token = "{SETTING}" }}
env = {{ HF_TOKEN = "{VARIABLE}" }}

[models.faulty]
handler = "{HANDLERS}:Faulty"
devices = ["cpu0"]
required = false

[models.die]
handler = "{HANDLERS}:Die"
devices = ["cpu1"]
required = false
"""
    with running(folder, config, wait_ready=False) as service:
        service.until(lambda: service.try_status().get("state") == "ready")
        yield service


def ask(service: Service, path: str, body: bytes, key: str = KEY, **headers: str) -> int:
    given = {"Authorization": f"Bearer {key}", **headers}
    return service.request("POST", path, body, given).status


def log_file(service: Service) -> Path:
    return service.folder / "gpusup.log"


def entries(path: Path) -> list[dict[str, Any]]:
    """Every line is a whole JSON object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests(path: Path) -> list[dict[str, Any]]:
    return [entry for entry in entries(path) if entry["event"] == "request"]


def ids(service: Service) -> dict[str, int]:
    proxies = {p["name"]: p["pid"] for p in service.status()["proxies"]}
    return service.pids() | proxies


def test_every_event_is_one_line_with_its_fields(service: Service) -> None:
    assert ask(service, "/predictions/double", b"21") == 200
    found = service.until(lambda: requests(log_file(service)))
    assert found[-1]["path"] == "/predictions/double"
    assert found[-1]["status"] == 200
    assert {"request_id", "seconds", "bytes", "remote"} <= set(found[-1])
    for entry in entries(log_file(service)):
        assert {"time", "level", "process", "pid", "event"} <= set(entry)
    processes = {entry["process"] for entry in entries(log_file(service))}
    assert processes == {"supervisor", "proxy0"}


def test_neither_body_nor_key_nor_setting_is_ever_in_it(service: Service) -> None:
    before = ids(service)["cpu1.1"]
    body = BODY.encode()
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [BODY]}
    assert ask(service, "/predictions/double", body) == 400
    assert ask(service, "/predictions/double", json.dumps({"value": BODY}).encode()) == 400
    assert ask(service, "/predictions/double", b"1", WRONG_KEY) == 401
    assert ask(service, "/v2/models/double/infer", json.dumps({"inputs": [tensor]}).encode()) == 400
    assert ask(service, "/v2/models/double/infer", body) == 400
    assert ask(service, "/v1/chat/completions", json.dumps({"model": BODY}).encode()) >= 400
    assert ask(service, "/predictions/faulty", b"666") >= 400
    assert ask(service, "/predictions/die", b"666") == 502
    service.until(lambda: ids(service).get("cpu1.1", before) != before)
    service.until(lambda: any(r["status"] == 502 for r in requests(log_file(service))))
    bundle = service.folder / "bundle.tar.gz"
    assert service.ctl("support-bundle", str(bundle)).returncode == 0
    texts = {"log": log_file(service).read_text(), "output": service.log()}
    for verb in (("events",), ("status", "-o", "json"), ("metrics",), ("logs", "cpu0.0")):
        texts[verb[0]] = service.ctl(*verb).stdout
    with tarfile.open(bundle) as tar:
        for member in tar.getmembers():
            file = tar.extractfile(member)
            texts[member.name] = file.read().decode() if file else ""
    for where, text in texts.items():
        for secret in (KEY, WRONG_KEY, SETTING, VARIABLE, BODY):
            assert secret not in text, f"{secret} is in {where}"
    assert len(texts) > 8
    assert any(name.endswith("/service.log") and text for name, text in texts.items())


def test_what_was_to_be_expected_makes_no_traceback(service: Service) -> None:
    # A handler's own mistake does show its traceback; what was before is not looked at.
    before = len(log_file(service).read_text())
    for path, body in (
        ("/predictions/double", b"no number"),
        ("/predictions/none", b"1"),
        ("/v2/models/double/infer", b"{"),
        ("/predictions/die", b"666"),
    ):
        assert ask(service, path, body) >= 400
    service.until(lambda: service.status()["state"] == "ready")
    assert service.ctl("reload-model", "none").returncode == 4
    assert "Traceback" not in log_file(service).read_text()[before:]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])
def test_a_renamed_log_is_opened_anew_and_nothing_is_restarted(
    service: Service, number: signal.Signals
) -> None:
    assert service.process
    before = ids(service)
    path = log_file(service)
    old = path.with_suffix(f".{number}")
    path.rename(old)
    assert ask(service, "/predictions/double", b"1") == 200
    service.until(lambda: requests(old))  # until it is told, the old file goes on
    os.kill(service.process.pid, number)
    service.until(path.exists)

    def both_write() -> bool:
        assert ask(service, "/predictions/double", b"1") == 200
        service.ctl("cordon", "cpu0.0")
        service.ctl("uncordon", "cpu0.0")
        return {"supervisor", "proxy0"} <= {entry["process"] for entry in entries(path)}

    service.until(both_write)
    length = old.stat().st_size
    assert ask(service, "/predictions/double", b"1") == 200
    assert old.stat().st_size == length
    assert ids(service) == before


def test_a_log_whose_folder_is_gone_stops_nothing(service: Service) -> None:
    assert service.process
    before = ids(service)
    path = log_file(service)
    path.unlink()
    path.mkdir()  # nothing can be opened there
    os.kill(service.process.pid, signal.SIGUSR1)
    assert ask(service, "/predictions/double", b"1") == 200
    path.rmdir()
    os.kill(service.process.pid, signal.SIGUSR1)
    service.until(path.exists)
    service.until(
        lambda: ask(service, "/predictions/double", b"1") == 200 and requests(log_file(service))
    )
    assert ids(service) == before


def test_ordinary_requests_are_sampled_and_failed_ones_are_not(short_path: Path) -> None:
    path = short_path / "gpusup.log"
    config = f"""
[log]
file = "{path}"
requests = 0.0

[models.double]
handler = "{HANDLERS}:Double"
"""
    with running(short_path, config) as service:
        for _ in range(50):
            assert service.predict("double", b"1").status == 200
        assert service.predict("double", b"no number").status == 400
        found = service.until(lambda: requests(path))
        assert [(r["status"], r["code"], r["level"]) for r in found] == [
            (400, "INVALID_INPUT", "warning")
        ]

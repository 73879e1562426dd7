"""The main job: a service, started as an operator would, answers and heals."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .service import HANDLERS, Service, running

DIGITS = Path(__file__).parents[2] / "conf" / "digits"

CONFIG = f"""
[models.digits]
handler = "gpusup.worker.digits:Digits"
retry = "safe"

[models.double]
handler = "{HANDLERS}:Double"
devices = ["cpu0"]
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    with running(folder, CONFIG) as service:
        yield service


def pictures() -> list[Path]:
    return sorted(DIGITS.glob("*.png"))


def test_held_out_digits_are_read_right_over_http(service: Service) -> None:
    right = 0
    for picture in pictures():
        reply = service.predict("digits", picture.read_bytes(), **{"Content-Type": "image/png"})
        assert reply.status == 200, reply.body
        assert reply.headers["Content-Type"] == "application/json"
        label = re.search(r"-(\d)\D*$|^(\d)", picture.stem)
        assert label, picture.stem
        right += str(reply.json()["digit"]) == (label[1] or label[2])
    assert right >= 19


def test_the_processes_are_called_what_they_are(service: Service) -> None:
    titles = {" ".join(p.cmdline()).strip() for p in service.processes()}
    for wanted in (
        r"gpusup: proxy 0",
        r"gpusup: zygote .*python.*",
        r"gpusup: worker cpu0\.0 digits@1 \(generation 1\)",
        r"gpusup: worker cpu1 digits@1 \(generation 1\)",
    ):
        assert any(re.fullmatch(wanted, title) for title in titles), titles
    assert service.process
    assert psutil.Process(service.process.pid).cmdline()[0].startswith("gpusup: supervisor")


def test_workers_hold_no_listener_and_no_clients_socket(service: Service) -> None:
    client = socket.create_connection(("127.0.0.1", service.port))
    client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    client.recv(100)
    before = service.slot("cpu1")["generation"]
    os.kill(service.pids()["cpu1"], signal.SIGKILL)
    service.until(
        lambda: (s := service.slot("cpu1"))["state"] == "ready" and s["generation"] > before
    )
    for pid in service.pids().values():
        tcp = [c for c in psutil.Process(pid).net_connections(kind="inet")]
        assert tcp == []
    client.close()


def test_a_killed_worker_is_back_soon_and_others_answer_meanwhile(service: Service) -> None:
    picture = pictures()[0].read_bytes()
    generation = service.slot("cpu1")["generation"]
    os.kill(service.pids()["cpu1"], signal.SIGKILL)
    began = time.monotonic()
    while (slot := service.slot("cpu1"))["generation"] == generation or slot["state"] != "ready":
        assert service.predict("digits", picture).status == 200
        assert time.monotonic() - began < 20
    assert "signal 9" in slot["last_exit"]


def test_drain_leaves_the_slot_empty_until_uncordon(service: Service) -> None:
    done = service.ctl("drain", "cpu1")
    assert (done.returncode, service.slot("cpu1")["state"]) == (0, "empty"), done.stderr
    assert service.slot("cpu1")["slot_state"] == "cordoned"
    assert service.ctl("status").returncode == 3
    assert service.predict("digits", pictures()[0].read_bytes()).status == 200
    assert service.ctl("uncordon", "cpu1").returncode == 0
    service.wait_ready()


def test_a_reload_changes_the_version_that_answers(service: Service) -> None:
    done = service.ctl("reload-model", "digits", "--version", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    reply = service.predict("digits", pictures()[0].read_bytes())
    assert reply.headers["Gpusup-Model-Version"] == "2"
    assert service.ctl("rollback", "digits").returncode == 0
    reply = service.predict("digits", pictures()[0].read_bytes())
    assert reply.headers["Gpusup-Model-Version"] == "1"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("drain", "gpu7"), 4),
        (("reload-model", "nobody"), 4),
        (("drain",), 2),
        (("change", "99"), 4),
        (("promote", "digits"), 1),
    ],
)
def test_what_cannot_be_done_has_its_exit_code_and_one_line(
    service: Service, words: tuple[str, ...], code: int
) -> None:
    done = service.ctl(*words)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if code != 2:
        assert len(done.stderr.strip().splitlines()) == 1


def test_bad_requests_are_told_so(service: Service) -> None:
    no_image = service.predict("digits", b"this is no image")
    assert (no_image.status, no_image.json()["code"]) == (400, "INVALID_INPUT")
    unknown = service.predict("nobody", b"x")
    assert (unknown.status, unknown.json()["code"]) == (404, "MODEL_NOT_FOUND")
    large = service.request(
        "POST", "/predictions/digits", headers={"Content-Length": str(65 * 2**20)}
    )
    assert large.status == 413
    assert str(65 * 2**20) in large.json()["error"]
    assert str(64 * 2**20) in large.json()["error"]
    for reply in (no_image, unknown, large):
        assert reply.headers["Content-Type"] == "application/json"
        assert set(reply.json()) >= {"error", "code", "request_id"}


def test_a_second_instance_ends_before_it_starts_anything(service: Service) -> None:
    began = time.monotonic()
    second = Service(service.folder, CONFIG)
    second.config_path = service.config_path
    second.log_path = service.folder / "second.log"
    second.start(wait_ready=False)
    assert second.process
    assert second.process.wait(15) == 2
    assert time.monotonic() - began < 10
    words = second.log_path.read_text().strip().splitlines()
    assert len(words) == 1
    assert "another gpusup" in words[0]
    assert service.ctl("status", "-o", "json").returncode == 0


def test_health_and_metrics_tell_the_same(service: Service) -> None:
    for path in ("/livez", "/readyz", "/healthz", "/v2/health/live", "/v2/health/ready"):
        assert service.get(path).status == 200, path
    assert service.predict("digits", pictures()[0].read_bytes()).status == 200
    # Proxies report a few times a second.
    counted = 'gpusup_requests_total{code="ok",model="digits"}'
    text = service.until(lambda: counted in (t := service.get("/metrics").body.decode()) and t, 5)
    assert 'gpusup_slot_state{slot="cpu1",state="ready"} 1.0' in text


def test_sigterm_ends_everything_and_exits_with_0(service: Service) -> None:
    left = service.processes()
    assert service.stop() == 0
    _, alive = psutil.wait_procs(left, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not list(service.run_dir.glob("*.sock"))


@pytest.mark.parametrize("moment", ["ready", "loading"])
def test_nothing_outlives_a_killed_supervisor(short_path: Path, moment: str) -> None:
    slow = f'[models.slow]\nhandler = "{HANDLERS}:SlowLoad"\nsettings = {{ seconds = 60 }}\n'
    config = CONFIG if moment == "ready" else slow
    with running(short_path, config, wait_ready=moment == "ready") as service:
        if moment == "loading":
            service.until(
                lambda: (
                    any(s["state"] == "loading" for s in service.status()["slots"])
                    if service.try_status()
                    else False
                )
            )
        family = service.processes()
        assert len(family) >= 3
        assert service.process
        service.process.kill()
        service.process.wait()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        # A new one finds a clean place.
        service.start(wait_ready=moment == "ready")


def test_workers_by_exec_serve_as_well(short_path: Path) -> None:
    config = CONFIG + '\n[supervision]\nspawn = "exec"\n'
    with running(short_path, config) as service:
        assert service.predict("double", b"21").json()["value"] == 42
        os.kill(service.pids()["cpu1"], signal.SIGKILL)
        service.until(lambda: service.slot("cpu1")["generation"] == 2)
        service.wait_ready()
        assert service.stop() == 0

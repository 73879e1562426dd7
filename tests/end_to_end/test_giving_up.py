"""What can't work is not tried for ever, says why, and harms nobody else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from .load import figure
from .service import HANDLERS, Service, running

CONFIG = f"""
[devices]
cpu_slots = 1

[supervision]
load_stall = "4s"

[supervision.backoff]
initial = "100ms"
limit = "400ms"
jitter = 0

[models.good]
handler = "{HANDLERS}:Double"

[models.import]
handler = "FOLDER/broken.py:Broken"
required = false

[models.config]
handler = "{HANDLERS}:RaisesInLoad"
required = false
settings = {{ kind = "config" }}

[models.error]
handler = "{HANDLERS}:RaisesInLoad"
required = false

[models.oom]
handler = "{HANDLERS}:RaisesInLoad"
required = false
settings = {{ kind = "oom" }}

[models.dies]
handler = "{HANDLERS}:DiesInLoad"
required = false
settings = {{ file = "FOLDER/works" }}

[models.hangs]
handler = "{HANDLERS}:HangsInLoad"
required = false

[models.slow]
handler = "{HANDLERS}:SlowLoad"
required = false
settings = {{ seconds = 2 }}

[models.weights]
handler = "{HANDLERS}:Scaled"
required = false
weights = "FOLDER/weights"
"""


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    (folder / "weights").write_text("3")
    (folder / "broken.py").write_text("import imaginary_ops\n\n\nclass Broken:\n    pass\n")
    config = CONFIG.replace("FOLDER", str(folder))
    with running(folder, config, wait_ready=False) as service:
        service.until(lambda: up(service) and slot_of(service, "good")["state"] == "ready")
        yield service


def up(service: Service) -> bool:
    assert service.process
    assert service.process.poll() is None, service.log()
    return bool(service.try_status())


def slot_of(service: Service, model: str) -> dict[str, Any]:
    return next(s for s in service.status()["slots"] if s["model"] == model)


def failed(service: Service, model: str) -> dict[str, Any]:
    service.until(lambda: slot_of(service, model)["state"] == "failed", 30)
    return slot_of(service, model)


@pytest.mark.parametrize(
    ("model", "starts", "words"),
    [
        ("import", 1, "No module named 'imaginary_ops'"),
        ("config", 1, "weights.pt is of another architecture"),
        ("oom", 2, "did not fit into the device's memory, twice"),
        ("error", 5, "shape mismatch"),
        ("dies", 5, "5 failures within 600 s"),
    ],
)
def test_each_cause_has_its_own_patience(
    service: Service, model: str, starts: int, words: str
) -> None:
    slot = failed(service, model)
    assert slot["generation"] == starts
    assert words in slot["why"]
    view = next(m for m in service.status()["models"] if m["name"] == model)
    assert view["state"] == "failed"
    assert words in view["reason"]
    reply = service.predict(model, b"1")
    assert (reply.status, reply.json()["code"]) == (503, "NO_WORKER"), reply.body
    assert service.predict("good", b"2").json()["value"] == 4


def test_the_waits_between_crashes_grow(service: Service) -> None:
    failed(service, "dies")
    events = service.control("GET", "/events")[1]["events"]
    slot = slot_of(service, "dies")["slot"]
    starts = [e["time"] for e in events if e.get("slot") == slot and e.get("before") == "spawned"]
    waits = [b - a for a, b in pairwise(starts)]
    figure("between starts: " + ", ".join(f"{w:.2f} s" for w in waits))
    assert len(waits) == 4
    assert [w >= least for w, least in zip(waits[1:], (0.1, 0.2, 0.4), strict=True)] == [True] * 3


def test_a_load_that_moves_nothing_is_ended_with_its_stack(service: Service) -> None:
    service.until(lambda: "moved nothing for 4 s" in slot_of(service, "hangs")["last_exit"], 30)
    log = service.ctl("logs", slot_of(service, "hangs")["slot"]).stdout
    assert re.search(r"in load$", log, re.MULTILINE), log


def test_a_load_slower_than_the_keep_alive_is_no_hang(service: Service) -> None:
    service.until(lambda: slot_of(service, "slow")["state"] == "ready", 30)
    assert slot_of(service, "slow")["generation"] == 1


def test_weights_that_went_away_are_named_and_not_looked_for_again(service: Service) -> None:
    service.until(lambda: slot_of(service, "weights")["state"] == "ready", 30)
    assert service.predict("weights", b"2").json()["value"] == 6
    (service.folder / "weights").rename(service.folder / "elsewhere")
    assert service.ctl("restart", slot_of(service, "weights")["slot"]).returncode != 0
    slot = slot_of(service, "weights")
    if slot["state"] == "ready":  # the successor failed beside it: the old one never stopped
        assert service.predict("weights", b"2").json()["value"] == 6
    else:
        assert "cannot read weights" in failed(service, "weights")["why"]
    (service.folder / "elsewhere").rename(service.folder / "weights")


def test_what_was_decided_is_still_so_after_a_restart_until_somebody_resets_it(
    service: Service,
) -> None:
    names = ("import", "config", "oom", "error", "dies")
    before = {name: failed(service, name) for name in names}
    good = slot_of(service, "good")["slot"]
    done = service.ctl("cordon", good, "--why", "a new fan")
    assert done.returncode == 0, done.stderr
    for how in ("stop", "kill"):
        if how == "stop":
            assert service.stop() == 0
        else:
            assert service.process
            service.until(lambda: slot_of(service, "slow")["state"] == "ready", 30)
            service.end()
        service.start(wait_ready=False)
        service.until(lambda: up(service))
        slot = slot_of(service, "good")
        assert (slot["slot_state"], slot["pid"]) == ("cordoned", 0)
        assert "a new fan" in slot["why"]
        for name in names:
            now = slot_of(service, name)
            assert (now["state"], now["generation"]) == ("failed", before[name]["generation"])
    assert service.ctl("uncordon", good).returncode == 0
    service.until(lambda: slot_of(service, "good")["state"] == "ready")
    (service.folder / "works").touch()
    assert service.ctl("reset-failed", slot_of(service, "dies")["slot"]).returncode == 0
    service.until(lambda: slot_of(service, "dies")["state"] == "ready")
    assert service.ctl("reset-failed", "import").returncode == 0
    service.until(lambda: slot_of(service, "import")["generation"] == 2)
    failed(service, "import")

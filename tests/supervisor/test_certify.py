"""`gpusup certify`: what it is told, what it says in the end, and what it sends."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import random
import tomllib
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gpusup.conf.load import ConfigError, load
from gpusup.conf.schema import ServerConfig
from gpusup.supervisor.__main__ import main
from gpusup.supervisor.certify import parse_only, parse_sla
from gpusup.supervisor.certify_attacks import Attack, attacks, gzip_bomb, png_bomb, png_head
from gpusup.supervisor.certify_bodies import image, read_sizes, sizes_seen, tensor_body
from gpusup.supervisor.certify_hostile import count_records
from gpusup.supervisor.certify_load import Body
from gpusup.supervisor.certify_math import Sample
from gpusup.supervisor.certify_report import as_html, as_junit
from gpusup.supervisor.certify_result import Result
from gpusup.supervisor.certify_run import TESTS, exit_code, headline
from gpusup.supervisor.certify_service import CertifyError
from gpusup.supervisor.certify_toml import derive, to_toml

# -- what it is told ------------------------------------------------------------------------------


def test_an_sla_is_a_percentile_and_a_time() -> None:
    sla = parse_sla("p99.9=250ms")
    assert sla.share == pytest.approx(0.999)
    assert sla.limit_s == 0.25
    assert str(parse_sla("p99=2s")) == "p99=2s"


@pytest.mark.parametrize("text", ["99=2s", "p99", "p0=1s", "p100=1s", "p99=2", "p99=0s", "pp=1s"])
def test_an_sla_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_sla(text)


def test_tests_are_named_in_any_order_and_run_in_ours() -> None:
    assert parse_only("") == TESTS
    assert parse_only("hostile, load") == ("load", "hostile")
    with pytest.raises(ValueError, match="there are load"):
        parse_only("loud")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sla", "fast"], "--sla"),
        (["--only", "everything"], "everything"),
        (["x.toml", "--url", "http://h:1"], "exclude"),
        (["--url", "h:1"], "http://host:port"),
        (["--control", "/run"], "goes with --url"),
        (["missing.toml"], "cannot read missing.toml"),
    ],
)
def test_wrong_words_end_with_2_and_a_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", *words]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


def test_a_report_that_can_not_be_written_is_said_before_anything_is_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["certify", "--report", str(tmp_path / "file" / "report")]) == 1
    assert capsys.readouterr().err.startswith("gpusup certify: cannot write to ")


# -- what it says in the end ----------------------------------------------------------------------


def result(name: str, *verdicts: str) -> Result:
    found = Result(name, f"Test of {name}")
    for number, verdict in enumerate(verdicts):
        if verdict == "skipped":
            found.skip(f"part {number}", "there is no GPU here")
        else:
            found.check(f"part {number}", verdict == "passed", "3 of <3> & more")
    return found


def test_skipped_parts_do_not_fail_a_test_but_a_skipped_test_is_not_passed() -> None:
    passed = result("load", "passed", "skipped")
    assert passed.verdict == "passed"
    nothing = result("faults", "skipped")
    assert nothing.verdict == "skipped"
    assert exit_code([passed]) == 0
    assert exit_code([passed, nothing]) == 3
    assert exit_code([passed, nothing, result("swap", "passed", "failed")]) == 1
    assert exit_code([]) == 3


def test_the_headline_claims_no_more_than_was_shown() -> None:
    every = [result(name, "passed") for name in TESTS]
    assert headline(every) == "CERTIFIED: all seven passed"
    assert headline(every[:2]) == "passed: load, mixed"
    assert "not certified" in headline([*every[:6], result("hostile", "skipped")])
    assert headline([*every, result("x", "failed")]) == "NOT CERTIFIED: x failed"


def test_junit_has_a_case_for_each_check_and_one_for_a_skipped_test() -> None:
    skipped = Result("faults", "Faults", skipped="no control socket")
    top = ET.fromstring(as_junit([result("load", "passed", "failed", "skipped"), skipped]))
    suite, other = top.findall("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    failure = suite.find(".//failure")
    assert failure is not None
    assert failure.get("message") == "3 of <3> & more"
    assert other.find("testcase/skipped") is not None


def test_the_page_escapes_what_servers_said_and_loads_nothing() -> None:
    told: dict[str, Any] = {
        "headline": "NOT CERTIFIED: <b>",
        "counts": {"passed": 1, "failed": 1, "skipped": 0},
        "machine": {"machine": "<script>alert(1)</script>"},
        "facts": {"notes": ["a & b"]},
        "profile": "quick",
        "sla": "p99=2s",
        "began": "2026-01-01T00:00:00Z",
        "took_s": 3.0,
        "tests": [
            {
                "name": "load",
                "title": "Load",
                "verdict": "failed",
                "skipped": "",
                "took_s": 1.0,
                "checks": [{"name": "n", "verdict": "failed", "text": "<img src=x>"}],
                "figures": {},
                "notes": [],
            }
        ],
    }
    page = as_html(told, {})
    assert "<script" not in page
    assert "<img" not in page
    assert "src=" not in page.replace("&lt;img src=x&gt;", "")
    assert "gpusup[report]" in page


def test_plots_are_drawn_of_what_was_seen() -> None:
    pytest.importorskip("matplotlib", reason="plots need gpusup[report]")
    from gpusup.supervisor.certify_plots import draw_all
    from gpusup.supervisor.certify_result import Mark

    load = Result("load", "Load", began=100.0, took_s=10.0)
    load.samples = [Sample(100 + n / 10, 100 + n / 10, 100.02 + n / 10, 200) for n in range(100)]
    load.samples.append(Sample(105.0, 105.0, 106.0, 0, "timeout"))
    load.marks = [Mark(100.0, "20/s"), Mark(104.0, "stated")]
    load.rates = [
        {"offered": 20.0, "p50": 0.02, "p95": 0.03, "p99": 0.04, "kept": True},
        {"offered": 40.0, "p50": 0.02, "p95": 0.03, "p99": float("inf"), "kept": False},
    ]
    series = {"cpu0 watermark": [(100.0, 0.1), (110.0, 0.2)], "cpu0 total": [(100.0, 2.0**31)]}
    plots = draw_all([load], series, {"queue": 0.85, "shed": 0.92}, (0.99, 2.0))
    assert set(plots) == {"rates", "distribution", "latency", "memory"}
    for svg in plots.values():
        ET.fromstring(svg)


# -- what it sends --------------------------------------------------------------------------------


def test_a_made_up_image_has_the_size_asked_for() -> None:
    body = image(64, 32, 0.5, random.Random(1))
    assert Image.open(io.BytesIO(body.data)).size == (64, 32)


def test_sizes_come_from_a_file_or_from_what_the_model_was_sent(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    file.write_text('{"256": 0.4, "640x480": 0.6}')
    assert read_sizes(file) == {(256, 256): 0.4, (640, 480): 0.6}
    seen = sizes_seen({"3x480x640/uint8": 3, "224x224x3/uint8": 1, "77/int64": 5, "others": 2})
    assert seen == {(640, 480): 0.75, (224, 224): 0.25}
    file.write_text('{"huge": 1}')
    with pytest.raises(CertifyError, match=r"sizes\.json"):
        read_sizes(file)


def test_declared_inputs_become_one_row_of_binary_tensors() -> None:
    body = tensor_body([{"name": "x", "datatype": "FP32", "shape": [-1, 3, -1]}])
    assert body is not None
    length = int(body.headers["Inference-Header-Content-Length"])
    told = json.loads(body.data[:length])["inputs"][0]
    assert told["shape"] == [1, 3, 16]
    assert len(body.data) - length == told["parameters"]["binary_data_size"] == 3 * 16 * 4
    assert tensor_body([{"name": "t", "datatype": "BYTES", "shape": [-1, 1]}]) is None


def test_bombs_are_what_they_claim() -> None:
    assert Image.open(io.BytesIO(png_bomb(3000, 20))).convert("L").getextrema() == (0, 0)
    assert len(gzip.decompress(gzip_bomb(2**23))) == 2**23
    assert b"IHDR" in png_head(99_999_999, 1)
    assert zlib.crc32(b"") == 0


def test_each_attack_has_an_id_of_its_own_and_a_head_that_ends() -> None:
    good = Body(data=b"x" * 100, headers={"Content-Type": "image/png"})
    found = attacks("h", "m", "/predictions/m", good, ServerConfig())
    named = [a.id for a in found if a.named]
    assert len(set(named)) == len(named) >= 15
    assert all(a.head.endswith(b"\r\n\r\n") for a in found if a.named)
    assert len({a.name for a in found}) == len(found)
    with_images = {a.name for a in found}
    tensors = Body(data=b"x", headers={"Content-Type": "application/octet-stream"})
    without = {a.name for a in attacks("h", "m", "/v2/models/m/infer", tensors, ServerConfig())}
    assert with_images - without == {"half an image", "noise that says it is an image"}


async def test_an_endless_body_ends_with_its_reader() -> None:
    attack = Attack(name="a", head=b"h", endless=True, chunked=True)
    pieces = attack.pieces()
    assert await anext(pieces) == b"h"
    assert (await anext(pieces)).startswith(b"40000\r\n")
    await asyncio.wait_for(anext(pieces), 5)


def test_only_whole_records_count() -> None:
    line = {"event": "request", "request_id": "certify-1", "path": "/", "status": 400}
    whole = {**line, "code": "X", "bytes": 1, "remote": "r"}
    log = "\n".join([json.dumps(line), json.dumps(whole), "certify- no json"])
    assert count_records(log, {"certify-1"}) == {"certify-1": 1}


# -- the service it starts ------------------------------------------------------------------------


def test_the_derived_configuration_is_the_users_on_another_port(tmp_path: Path) -> None:
    handler = tmp_path / "h.py"
    handler.write_text("class H: pass\n")
    file = tmp_path / "gpusup.toml"
    file.write_text(
        '[server]\nlisten = ":80"\ntls_cert = ""\nbody_limit = "1MiB"\n'
        '[log]\nformat = "human"\n'
        '[models."a.b"]\nhandler = "h.py:H"\n'
        'settings = { k = [1, "two", true], deep = { x = 1.5 } }\n'
    )
    folder = tmp_path / "f"
    text, notes = derive(
        file, folder, models={"extra": {"handler": "h.py:H"}}, server={"body_timeout": "3s"}
    )
    raw = tomllib.loads(text)
    assert raw["server"]["listen"] == "127.0.0.1:0"
    assert raw["server"]["body_limit"] == "1MiB"
    assert raw["models"]["a.b"]["handler"] == f"{handler}:H"
    assert raw["models"]["a.b"]["settings"] == {"k": [1, "two", True], "deep": {"x": 1.5}}
    assert "extra" in raw["models"]
    assert any("body_timeout" in note for note in notes)


def test_a_broken_configuration_is_refused_in_the_usual_words(tmp_path: Path) -> None:
    file = tmp_path / "gpusup.toml"
    file.write_text('[server]\nlissten = ":80"\n')
    with pytest.raises(ConfigError, match="lissten"):
        derive(file, tmp_path)


def test_without_a_file_the_bundled_model_is_served(tmp_path: Path) -> None:
    text, _ = derive(None, tmp_path)
    file = tmp_path / "g.toml"
    file.write_text(text)
    assert list(load(file).models) == ["digits"]


def test_what_has_no_form_in_toml_is_an_error() -> None:
    with pytest.raises(TypeError, match="no form"):
        to_toml({"a": {"b": object()}})

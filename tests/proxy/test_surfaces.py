"""The surfaces over HTTP: repository, keys, CORS, documents, compression, metrics."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpusup.proxy.security import hash_key
from gpusup.supervisor import wire as swire

from .front import Front, front, identity


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Front]:
    models = {"m": {"methods": ("predict",), "max_rows": 4}, "x": identity("FP32")}
    async with front(tmp_path, models=models) as made:
        yield made


def tensor(**change: Any) -> dict[str, Any]:
    return {
        "inputs": [{"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **change}]
    }


async def said(answer: aiohttp.ClientResponse, status: int = 200) -> Any:
    text = await answer.text()
    assert answer.status == status, text
    assert answer.headers["Content-Type"] == "application/json"
    return json.loads(text)


async def test_a_shape_that_would_explode_is_told_to_the_supervisor(
    door: Front, http: aiohttp.ClientSession
) -> None:
    url = f"{door.url}/v2/models/x/infer"
    found: dict[str, Any] = {}
    for _ in range(20):
        found = await said(await http.post(url, json=tensor(shape=[2**32, 2**32], data=[])), 400)
    assert str(2**66) in found["error"]
    notices = [t for t in door.world.told if isinstance(t, swire.Notice)]
    assert 1 <= len(notices) <= 10  # a few a second, however many there are
    fields = notices[0].fields
    assert notices[0].kind == "shape-refused"
    assert fields["client"] == "127.0.0.1"
    assert fields["shape"] == "4294967296x4294967296"
    assert {"model", "bytes", "limit", "ratio", "request_id", "body_bytes"} <= set(fields)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }"
    body = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
    await said(
        await http.post(
            f"{door.url}/predictions/x", data=body, headers={"Content-Type": "application/x-npy"}
        ),
        400,
    )


async def test_more_rows_than_a_batch_are_refused_with_both_numbers(
    door: Front, http: aiohttp.ClientSession
) -> None:
    body = tensor(shape=[5, 1], data=[0] * 5)
    found = await said(await http.post(f"{door.url}/v2/models/m/infer", json=body), 400)
    assert "5 rows" in found["error"]
    assert "at most 4" in found["error"]


async def test_no_rows_are_answered_without_a_worker(
    door: Front, http: aiohttp.ClientSession
) -> None:
    door.world.workers[1].answer = None
    body = tensor(shape=[0, 3], data=[])
    found = await said(await http.post(f"{door.url}/v2/models/x/infer", json=body))
    assert found["outputs"] == [{"name": "O", "datatype": "FP32", "shape": [0, 3], "data": []}]
    door.world.clean()


async def test_the_repository_is_closed_unless_it_is_opened(
    door: Front, http: aiohttp.ClientSession
) -> None:
    load = f"{door.url}/v2/repository/models/m/load"
    found = await said(await http.post(load), 403)
    assert "repository_control" in found["error"]
    await said(await http.post(f"{door.url}/v2/repository/models/none/load"), 404)
    assert door.asked == []


async def test_the_repository_goes_the_way_of_the_control_api(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with front(tmp_path, repository_control=True) as door:
        base = f"{door.url}/v2/repository/models"
        for verb in ("load", "unload"):
            answer = await http.post(f"{base}/m/{verb}", data=b"")
            assert (answer.status, await answer.read()) == (200, b"")
        assert door.asked == [("POST", "/models/m/load"), ("POST", "/models/m/unload")]
        door.replies["/models/m/load"] = swire.Reply(0, 409, b'{"error": "a change is under way"}')
        found = await said(await http.post(f"{base}/m/load", data=b"{}"), 429)
        assert found["error"] == "a change is under way"
        config = {"parameters": {"config": "{}"}}
        await said(await http.post(f"{base}/m/load", json=config), 400)


async def test_the_index_says_what_is_not_ready_and_why(
    door: Front, http: aiohttp.ClientSession
) -> None:
    door.world.model("lost", state="failed", reason="no such file", versions=())
    await door.world.tell()
    url = f"{door.url}/v2/repository/index"
    found = {m["name"]: m for m in await said(await http.post(url))}
    assert found["lost"]["state"] == "UNAVAILABLE"
    assert found["lost"]["reason"] == "no such file"
    found = {m["name"]: m for m in await said(await http.post(url, json={"ready": True}))}
    assert "lost" not in found
    await said(await http.post(url, json={"ready": 1}), 400)
    found = await said(await http.get(f"{door.url}/v2/models/lost/ready"), 503)
    assert (found["ready"], found["reason"]) == (False, "no such file")


async def test_a_large_answer_is_compressed_for_those_who_ask(
    door: Front, http: aiohttp.ClientSession
) -> None:
    body = tensor(shape=[1, 2000], data=[0] * 2000)
    url = f"{door.url}/v2/models/x/infer"
    answer = await http.post(url, json=body)
    assert answer.headers["Content-Encoding"] == "gzip"  # aiohttp's client accepts it
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert (await said(answer))["outputs"][0]["data"] == [0] * 2000
    plain = await http.post(url, json=body, headers={"Accept-Encoding": "identity"})
    assert "Content-Encoding" not in plain.headers
    body["parameters"] = {"binary_data_output": True}
    binary = await http.post(url, json=body)
    assert "Content-Encoding" not in binary.headers
    split = int(binary.headers["Inference-Header-Content-Length"])
    assert (await binary.read())[split:] == bytes(8000)


async def test_a_large_tensor_goes_out_in_pieces(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with front(tmp_path, body_limit=8 * 2**20, arena=32 * 2**20) as door:
        count = 2**20
        head = json.dumps(
            {
                "inputs": [
                    {"name": "X", "shape": [1, count], "datatype": "FP32",
                     "parameters": {"binary_data_size": 4 * count}}
                ],
                "parameters": {"binary_data_output": True},
            }
        ).encode()  # fmt: skip
        data = bytes(range(256)) * (count // 64)
        answer = await http.post(
            f"{door.url}/v2/models/identity_fp32/infer",
            data=io.BytesIO(head + data),
            headers={"Inference-Header-Content-Length": str(len(head))},
        )
        body = await answer.read()
        assert answer.status == 200
        assert body[int(answer.headers["Inference-Header-Content-Length"]) :] == data
        door.world.clean()


async def test_metrics_and_statistics_come_from_the_supervisor(
    door: Front, http: aiohttp.ClientSession
) -> None:
    answer = await http.get(f"{door.url}/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert await answer.text() == "gpusup_build_info 1\n"
    for path in ("/v2/models/stats", "/v2/models/m/stats", "/v2/models/m/versions/1/stats"):
        await said(await http.get(door.url + path))
    assert [path for _, path in door.asked] == [
        "/metrics", "/v2stats", "/v2stats/m", "/v2stats/m/1",
    ]  # fmt: skip


async def test_metrics_and_documents_can_be_kept_off_the_port(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with front(tmp_path, metrics="control", docs="control") as door:
        for path in ("/metrics", "/openapi.json", "/"):
            await said(await http.get(door.url + path), 404)


async def test_the_document_has_each_model_and_the_page_says_how_to_call_it(
    door: Front, http: aiohttp.ClientSession
) -> None:
    found = await said(await http.get(f"{door.url}/openapi.json"))
    assert found["openapi"] == "3.1.0"
    assert {"/v2/models/x/infer", "/predictions/m", "/livez"} <= set(found["paths"])
    body = found["paths"]["/v2/models/x/infer"]["post"]["requestBody"]
    example = body["content"]["application/json"]["example"]
    await said(await http.post(f"{door.url}/v2/models/x/infer", json=example))
    door.world.model("odd", state="failed", reason="<script>alert(1)</script>")
    await door.world.tell()
    page = await http.get(f"{door.url}/", headers={"Host": 'x"><script>'})
    text = await page.text()
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "<script>" not in text
    assert "/v2/models/x/infer" in text


KEYS = f"""
[keys.plain]
hash = "{hash_key("one")}"
models = ["m"]
concurrent = 1
[keys.boss]
hash = "{hash_key("two")}"
admin = true
rate = 3
"""


async def test_keys_guard_everything_but_health(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    async with front(tmp_path, api_keys=str(keys), repository_control=True) as door:
        one = {"Authorization": "Bearer one"}
        two = {"Authorization": "Bearer two"}
        for path in ("/livez", "/readyz", "/v2/health/live"):
            await said(await http.get(door.url + path))
        for path in ("/v2", "/metrics", "/", "/v2/models/m", "/nowhere"):
            answer = await http.get(door.url + path)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        refused = await said(await http.get(f"{door.url}/v1/models"), 401)
        assert refused["error"]["type"] == "authentication_error"
        await said(await http.get(f"{door.url}/v2", headers=one))
        await said(await http.get(f"{door.url}/v2/models/identity_fp32", headers=one), 403)
        await said(await http.post(f"{door.url}/infer", data=b"x", headers=one))
        chat = {"model": "text", "messages": [{"role": "user", "content": "hi"}]}
        url = f"{door.url}/v1/chat/completions"
        refused = await said(await http.post(url, json=chat, headers=one), 403)
        assert refused["error"]["type"] == "permission_error"
        load = f"{door.url}/v2/repository/models/m/load"
        await said(await http.post(load, headers=one), 403)
        assert (await http.post(load, headers=two)).status == 200
        # A refusal comes before 100 Continue, and so before the body.
        answer = await http.post(f"{door.url}/predictions/m", data=b"x", expect100=True)
        assert answer.status == 401
        for _ in range(2):
            await said(await http.get(f"{door.url}/v2", headers=two))
        limited = await http.get(f"{door.url}/v2", headers=two)
        assert limited.status == 429
        assert limited.headers["Retry-After"] == "1"
        keys.write_text(KEYS.replace(hash_key("one"), hash_key("three")))
        for reread in door.world.door.rereads:
            reread()
        await said(await http.get(f"{door.url}/v2", headers=one), 401)
        await said(await http.get(f"{door.url}/v2", headers={"X-Api-Key": "three"}))


async def test_options_tells_the_methods_and_cors_is_off(
    door: Front, http: aiohttp.ClientSession
) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = await http.options(f"{door.url}/v2/models/m/infer", headers=asked)
    assert answer.status == 204
    assert answer.headers["Allow"] == "OPTIONS, POST"
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    answer = await http.options(f"{door.url}/predictions/m")
    assert answer.headers["Allow"] == "OPTIONS, POST, PUT"


async def test_configured_origins_may_call(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with front(tmp_path, cors_origins=("https://a.example",)) as door:
        origin = {"Origin": "https://a.example"}
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        answer = await http.options(f"{door.url}/v2/models/m/infer", headers=asked)
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        answer = await http.get(f"{door.url}/v2", headers=origin)
        assert "Retry-After" in answer.headers["Access-Control-Expose-Headers"]
        answer = await http.get(f"{door.url}/v2/none", headers=origin)  # errors are readable too
        assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        answer = await http.get(f"{door.url}/v2", headers={"Origin": "https://b.example"})
        assert "Access-Control-Allow-Origin" not in answer.headers

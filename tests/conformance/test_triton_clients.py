"""NVIDIA's Triton clients, sync and asyncio, against our server: every call that needs no shared
memory."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

WHY = "tritonclient is not installed (tests/conformance/requirements.txt)"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    triton = pytest.importorskip("tritonclient.http", reason=WHY)
    triton_aio = pytest.importorskip("tritonclient.http.aio", reason=WHY)
    utils = pytest.importorskip("tritonclient.utils", reason=WHY)

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "INT64": np.int64, "UINT64": np.uint64,
    "FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip


def array(datatype: str) -> Any:
    if datatype == "BYTES":
        return np.array([[b"a\0", "é".encode()], [b"", b"x" * 300]], dtype=np.object_)
    return np.array([[0, 1], [1, 0]]).astype(DTYPES[datatype])


def inputs(module: Any, datatype: str, *, binary: bool = True) -> list[Any]:
    made = module.InferInput("X", [2, 2], datatype)
    made.set_data_from_numpy(array(datatype), binary_data=binary)
    return [made]


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    made = triton.InferenceServerClient(urlsplit(url).netloc, concurrency=4)
    yield made
    made.close()


def test_what_is_here(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("identity_fp32")
    assert not client.is_model_ready("no_such_model")
    assert client.get_server_metadata()["name"] == "gpusup"
    metadata = client.get_model_metadata("identity_fp32", "1")
    assert metadata["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [-1, -1]}]
    assert client.get_model_config("identity_fp32")["max_batch_size"] == 64
    assert client.get_inference_statistics("identity_fp32")["model_stats"][0]["version"] == "1"
    assert client.get_inference_statistics()["model_stats"]
    assert any(m["name"] == "identity_fp32" for m in client.get_model_repository_index())


def test_an_unknown_model_is_a_clean_exception(client: Any) -> None:
    with pytest.raises(utils.InferenceServerException, match="unknown model") as caught:
        client.get_model_metadata("no_such_model")
    assert caught.value.status() == "404"


@pytest.mark.parametrize("datatype", sorted(DTYPES))
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tensors_come_back(client: Any, datatype: str, binary_in: bool, binary_out: bool) -> None:
    outputs = [triton.InferRequestedOutput("O", binary_data=binary_out)]
    given = inputs(triton, datatype, binary=binary_in)
    result = client.infer(f"identity_{datatype.lower()}", given, outputs=outputs, request_id="7")
    assert result.get_response()["id"] == "7"
    got, want = result.as_numpy("O"), array(datatype)
    if datatype == "BYTES":
        got = np.array([g if isinstance(g, bytes) else g.encode() for g in got.flat], np.object_)
        got = got.reshape(want.shape)
    assert got.shape == want.shape
    assert (got == want).all()


def test_bfloat16_comes_back_exactly(client: Any) -> None:
    types = pytest.importorskip("ml_dtypes", reason=WHY)
    want = np.array([[1.5, -2.0]], dtype=types.bfloat16)
    given = triton.InferInput("X", [1, 2], "BF16")
    given.set_data_from_numpy(want)
    got = client.infer("identity_bf16", [given]).as_numpy("O")
    assert (np.asarray(got, np.float32) == np.asarray(want, np.float32)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_version": "1"},
        {"priority": 1, "timeout": 5_000_000},
        {"parameters": {"k": "v", "n": 3, "b": True}},
        {"request_compression_algorithm": "gzip"},
        {"request_compression_algorithm": "deflate"},
        {"response_compression_algorithm": "gzip"},
        {"response_compression_algorithm": "deflate"},
    ],
    ids=str,
)
def test_options(client: Any, options: dict[str, Any]) -> None:
    result = client.infer("identity_fp32", inputs(triton, "FP32"), **options)
    assert (result.as_numpy("O") == array("FP32")).all()


def test_a_large_compressed_answer(client: Any) -> None:
    want = np.zeros((8, 4096), np.float32)
    given = triton.InferInput("X", [8, 4096], "FP32")
    given.set_data_from_numpy(want)
    result = client.infer("identity_fp32", [given], response_compression_algorithm="gzip")
    assert (result.as_numpy("O") == want).all()


def test_many_at_once(client: Any) -> None:
    pending = [
        client.async_infer("identity_fp32", inputs(triton, "FP32"), request_id=str(i))
        for i in range(8)
    ]
    assert [p.get_result().get_response()["id"] for p in pending] == list(map(str, range(8)))


def test_what_does_not_fit_is_400(client: Any) -> None:
    wrong = inputs(triton, "FP64")
    named = triton.InferInput("nope", [2, 2], "FP32")
    named.set_data_from_numpy(array("FP32"))
    for given in (wrong, [named]):
        with pytest.raises(utils.InferenceServerException) as caught:
            client.infer("identity_fp32", given)
        assert caught.value.status() == "400"


async def _with_aio(url: str, work: Callable[[Any], Awaitable[None]]) -> None:
    async with triton_aio.InferenceServerClient(urlsplit(url).netloc) as client:
        await work(client)


def test_the_asyncio_client(url: str) -> None:
    async def work(client: Any) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("identity_fp32")
        assert (await client.get_server_metadata())["name"] == "gpusup"
        assert (await client.get_model_config("identity_fp32"))["name"] == "identity_fp32"
        assert (await client.get_inference_statistics("identity_fp32"))["model_stats"]
        assert await client.get_model_repository_index()

        async def one(number: int) -> None:
            result = await client.infer(
                "identity_fp32",
                inputs(triton_aio, "FP32"),
                request_id=str(number),
                request_compression_algorithm="gzip" if number % 2 else None,
                response_compression_algorithm="gzip" if number % 3 else None,
            )
            assert result.get_response()["id"] == str(number)
            assert (result.as_numpy("O") == array("FP32")).all()

        await asyncio.gather(*map(one, range(64)))
        with pytest.raises(utils.InferenceServerException, match="unknown model"):
            await client.infer("no_such_model", inputs(triton_aio, "FP32"))

    asyncio.run(_with_aio(url, work))

"""What a user writes: a class with `load`, `decode`, `forward`, `encode`. Imports no torch.

    class Classifier(Model):
        inputs = (Tensor("image", "FP32", (3, 224, 224)),)
        outputs = (Tensor("scores", "FP32", (1000,)),)

        def load(self, device, version): self.net = ...
        def decode(self, request): return image_to_tensor(request.body)      # CPU, one item
        def forward(self, batch): return self.net(batch)                     # device, one batch
        def encode(self, row, request): return {"class": int(row.argmax())}  # CPU, one row

Any method may raise `InvalidInput`: the client is told its text with a 400. A request that comes
as tensors (Open Inference Protocol) skips `decode` and `encode` unless `tensors_through_decode`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import torch


class InvalidInput(ValueError):
    """The client's fault. The text goes to the client, so it names the thing and the numbers."""


class ConfigProblem(Exception):
    """Raised by `load`: this model can't work as configured, and trying again would not help."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A declared input or output. `shape` is without the rows; -1 is variable."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Upload:
    """One opaque input: a raw body, or a field of a form.

    Bulk lies in memory shared with the proxy. `data` copies it into `bytes` when first asked for;
    `view` looks at it where it lies, and only until the request is answered.
    """

    __slots__ = ("_data", "content_type", "filename")

    def __init__(
        self, data: bytes | memoryview, content_type: str = "", filename: str = ""
    ) -> None:
        self._data = data
        self.content_type = content_type
        self.filename = filename

    @property
    def data(self) -> bytes:
        data = self._data
        if not isinstance(data, bytes):
            data = self._data = bytes(data)
        return data

    @property
    def view(self) -> memoryview:
        return memoryview(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return f"Upload({len(self)} bytes, {self.content_type!r}, {self.filename!r})"


_NO_UPLOAD = Upload(b"")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Request:
    """One request as the handler sees it.

    `body`: the bytes of a raw request (the first file of a form); `view`: the same without a copy
    (see Upload). `fields`: all parts by name. `tensors`: arrays by name, if it came as tensors.
    `json`: the parsed object, if it came as JSON. `true_size`: with `fit = "pad"`, the item's shape
    before it was padded to the bucket.
    """

    __slots__ = (
        "content_type", "degrade", "fields", "json", "params", "request_id", "tensors",
        "true_size", "upload",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str = "",
        params: Mapping[str, Any] = _NOTHING,
        body: bytes | memoryview = b"",
        content_type: str = "",
        fields: Mapping[str, Upload] = _NOTHING,
        tensors: Mapping[str, np.ndarray[Any, Any]] = _NOTHING,
        json: Any = None,
        degrade: str = "",
        true_size: tuple[int, ...] | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.upload = Upload(body, content_type) if body else _NO_UPLOAD
        self.content_type = content_type
        self.fields = fields
        self.tensors = tensors
        self.json = json
        self.degrade = degrade
        self.true_size = true_size

    @property
    def body(self) -> bytes:
        return self.upload.data

    @property
    def view(self) -> memoryview:
        return self.upload.view

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {len(self.upload)} bytes, {self.content_type!r})"


@dataclass(frozen=True, slots=True)
class Response:
    """What `encode` may return when it is not JSON: bytes with their media type."""

    data: bytes
    content_type: str = "application/octet-stream"


class Model:
    """The base class. Override `load` and `forward`; the rest has working defaults."""

    #: Declared tensors; v2 metadata, request checks and the warm-up's default example use them.
    inputs: ClassVar[tuple[Tensor, ...]] = ()
    outputs: ClassVar[tuple[Tensor, ...]] = ()
    platform: ClassVar[str] = "pytorch_eager"
    #: A cheap decode may run where the batch is formed instead of in the thread pool.
    decode_inline: ClassVar[bool] = False
    tensors_through_decode: ClassVar[bool] = False
    #: False: `forward` is called once per batch but never captured as a CUDA graph.
    capturable: ClassVar[bool] = True
    #: Degrade steps the model understands: "skip_post_processing", "lower_precision".
    degrade_steps: ClassVar[tuple[str, ...]] = ()

    #: Set by the worker before `load`.
    settings: Mapping[str, Any]
    weights: str
    dtype: str  # "model", "fp32", "fp16", "bf16"

    def load(self, device: torch.device, version: str) -> None:
        """Put the weights on `device`. Raise `ConfigProblem` if they can't be used at all."""

    def prepare(self, version: str) -> None:
        """Optional, before `load` and without a device: read weights into host memory.

        A swap runs it while the old worker still serves, so the gap is only the copy.
        """

    def state_dict(self) -> Mapping[str, torch.Tensor] | None:
        """Optional: the tensors `load` put on the device."""
        return None

    def decode(self, request: Request) -> torch.Tensor:
        """One request to one CPU tensor without a row dimension. Runs in the thread pool."""
        raise InvalidInput("this model takes tensors only (POST /v2/models/<name>/infer)")

    def forward(self, batch: Any) -> Any:
        """(rows, ...) on the device -> tensor, tuple or dict of tensors, each with the same rows.

        With more than one declared input `batch` is a dict by name. Pure tensor code: it may be
        captured as a CUDA graph.
        """
        raise NotImplementedError

    def encode(self, row: Any, request: Request) -> Any:
        """One row of the output, on the CPU -> JSON-able, or `Response`. Runs in the thread pool.

        Default: the row as nested lists.
        """
        if isinstance(row, Mapping):
            return {name: value.tolist() for name, value in row.items()}
        return row.tolist()

    def warm_up(self) -> Sequence[torch.Tensor]:
        """Example items (without rows) that cover the shapes that matter. Default: per bucket."""
        return ()

    def forward_degraded(self, batch: Any, step: str) -> Any:
        """`forward` under a degrade step. Default: the same as `forward`."""
        return self.forward(batch)

    def bucket_of(self, item: torch.Tensor) -> str:
        """More than the shape that must not be mixed in one batch. Default: nothing more."""
        return ""

    def is_healthy(self) -> bool:
        """Asked by the canary, in the serving thread, when idle."""
        return True

    # -- text: override these to appear under /v1 and /v2/.../generate ---------------------------

    def generate(self, prompt: str, params: Mapping[str, Any]) -> Iterator[str]:
        """Pieces of text, one after the other. Closing the iterator stops the work."""
        raise NotImplementedError

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: Mapping[str, Any]
    ) -> Iterator[str]:
        """Default: the messages as "role: content" lines, then `generate`."""
        lines = [f"{m.get('role', 'user')}: {m.get('content', '')}" for m in messages]
        return self.generate("\n".join([*lines, "assistant:"]), params)

    def embed(self, texts: Sequence[str], params: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        """(len(texts), size) float32."""
        raise NotImplementedError


def overrides(model: Any, name: str) -> bool:
    """Whether the handler's class has a `name` of its own instead of the base class's."""
    return getattr(type(model), name) is not getattr(Model, name)

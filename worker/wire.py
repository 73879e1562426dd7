"""The words spoken on a worker's sockets. The worker owns them; everyone may import them.

Two conversations, both length-prefixed msgpack frames (frame.py):

- *data*, proxy <-> worker, on the worker's own Unix socket. `ToWorker` / `FromWorker`. One frame
  carries many requests. Structs here are arrays on the wire, because they are sent by the
  hundred thousand.
- *control*, supervisor <-> worker, on the supervisor's Unix socket. `ToWorkerControl` /
  `FromWorkerControl`.

Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share. Tags are spelt out:
a renamed class must not change what is said.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, msgpack

# -- data: proxy <-> worker ---------------------------------------------------------------------


class Block(Struct, frozen=True, array_like=True, tag="b"):
    """Bytes that lie in the sending proxy's arena and not in the frame."""

    offset: int
    length: int


class Part(Struct, frozen=True, array_like=True):
    """One input or output: a tensor (`datatype` and `shape` set) or opaque bytes.

    `datatype` is the Open Inference Protocol's name ("FP32"), "" for opaque bytes whose media
    type is `content_type`. Tensor data is little-endian and row-major; each element of a BYTES
    tensor is a 4-byte little-endian length and its bytes. `shape` includes the rows.
    """

    name: str
    data: bytes | Block
    datatype: str = ""
    shape: tuple[int, ...] = ()
    content_type: str = ""
    filename: str = ""


#: predict: batched. embed: one call, texts in, one array out. generate, chat: many answers.
Method = Literal["predict", "embed", "generate", "chat"]


class Item(Struct, frozen=True, array_like=True):
    """One request. `id` is the proxy's, unique for the life of its connection."""

    id: int
    parts: tuple[Part, ...]
    method: Method = "predict"
    rows: int = 1
    deadline: float = 0.0  # 0: none
    priority: int = 0  # 1 is highest; 0 is the default, which ranks as 2
    degrade: str = ""  # the degrade step to serve it with
    params: dict[str, Any] = {}
    request_id: str = ""
    credit: int = 0  # streams: how many answers may be sent before more Credit comes
    stream: bool = False  # answer with many `more=True` answers and one last
    received: float = 0.0  # when the proxy had it whole


class DataHello(Struct, frozen=True, tag="data-hello", tag_field="t"):
    """First word of a proxy. If `arena_bytes`, the arena's memfd comes with it (SCM_RIGHTS)."""

    proxy: str
    generation: int  # of the worker the proxy means; another worker hangs up
    arena_bytes: int = 0


class Work(Struct, frozen=True, tag="work", tag_field="t"):
    items: list[Item]


class Cancel(Struct, frozen=True, tag="cancel", tag_field="t"):
    """The clients of these are gone. Each is still answered once (its blocks hang on that).

    `recall`: their clients wait, but the worker is suspect: what has not begun is answered at
    once, "cancelled", and goes elsewhere; what has begun goes on.
    """

    ids: list[int]
    recall: bool = False


class Credit(Struct, frozen=True, tag="credit", tag_field="t"):
    id: int
    count: int


#: ok · invalid (400) · too_large (413) · busy: not taken, give it to another worker · expired (504)
#: · cancelled: never started, client gone · oom (413/503) · failed (500) · draining: not taken
Status = Literal[
    "ok", "invalid", "too_large", "busy", "expired", "cancelled", "oom", "failed", "draining",
    "unsupported",
]  # fmt: skip


class Answer(Struct, frozen=True, array_like=True):
    """The answer to one item; for a stream, one of several: all but the last have `more`."""

    id: int
    status: Status
    parts: tuple[Part, ...] = ()
    text: str = ""  # of a failure; for the client
    more: bool = False
    degraded: str = ""
    queue_s: float = 0.0  # in the worker, before its batch started
    compute_s: float = 0.0  # the batch on the device
    batch_rows: int = 0
    started: bool = True  # False: it never ran, so it may run elsewhere
    decode_s: float = 0.0
    encode_s: float = 0.0


class Load(Struct, frozen=True, array_like=True):
    """How much the worker has to do; with every frame of answers, and when it changes by itself."""

    queued_rows: int
    running_rows: int
    free_rows: int  # rows it would still take before it says busy
    oldest_s: float
    allocated: int = 0  # bytes, torch's allocator (CPU slots: resident memory above idle)
    reserved: int = 0


class DataWelcome(Struct, frozen=True, tag="data-welcome", tag_field="t"):
    """The worker's first word. The progress page's memfd comes with it (progress.py): what had
    begun to execute is read there after a death, under this `connection` number."""

    connection: int
    slot: str
    generation: int
    model: str
    version: str
    load: Load


class Answers(Struct, frozen=True, tag="answers", tag_field="t"):
    answers: list[Answer]
    load: Load


ToWorker = DataHello | Work | Cancel | Credit
FromWorker = DataWelcome | Answers


# -- control: supervisor <-> worker -------------------------------------------------------------


class TensorSpec(Struct, frozen=True, kw_only=True):
    """A declared input or output; `shape` without the rows, -1 is variable."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """All a worker is told at its start. To the zygote, or into a file for `spawn = "exec"`."""

    slot: str
    generation: int
    model: str
    version: str
    device: str  # "cuda" or "cpu"
    device_uuid: str  # "GPU-...", "MIG-...", "" for cpu
    control_path: str  # the supervisor's socket, to connect back to
    data_path: str  # where it is to listen for proxies
    config: dict[str, Any]  # the model's section as builtins, sizes in bytes, times in seconds
    memory_cap: int = 0  # bytes this worker may take at most on its device; 0: no cap
    device_total: int = 0
    profile_path: str = ""  # where measured peaks are kept for this model version
    held: bool = False  # prepare (imports, context, weights to host memory), then wait for Go
    held_context: bool = True  # whether there is room for a context while held
    env: dict[str, str] = {}
    beside: bool = False  # an older one serves meanwhile: nobody waits for this one
    place: int = 0  # which of `workers` it is, for cores of its own
    workers: int = 0  # slots of this machine; 0: not known
    keep_alive: float = 0.25
    canary_idle: float = 30.0
    canary_limit: float = 10.0


class Memory(Struct, frozen=True, kw_only=True):
    """Bytes. For cpu slots: allocated = reserved = resident memory of the worker's session."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    context: int = 0
    static: int = 0  # allocated at rest after warm-up (weights, graphs, pool)
    device_total: int = 0  # as the CUDA runtime says; used where NVML can't tell. 0: not asked
    device_free: int = 0


class Counters(Struct, frozen=True, kw_only=True):
    """Totals since the worker's start."""

    batches: int = 0
    rows: int = 0
    ooms: int = 0
    failures: int = 0
    busy_s: float = 0.0
    unsupported: int = 0


class WorkerHello(Struct, frozen=True, tag="hello", tag_field="t"):
    slot: str
    generation: int
    pid: int


class Loading(Struct, frozen=True, tag="loading", tag_field="t"):
    phase: str  # import, weights, device, warm-up, golden, graphs
    done: int = 0  # bytes
    total: int = 0


class Prepared(Struct, frozen=True, tag="prepared", tag_field="t"):
    """Held: all is in host memory; waits for Go."""

    host_bytes: int


class WorkerReady(Struct, frozen=True, tag="ready", tag_field="t", kw_only=True):
    """Weights are on the device, warm-up ran, the golden example agreed."""

    device_uuid: str  # what it really got
    device_name: str
    memory: Memory
    max_rows: int
    budget_s: float
    peaks: dict[str, int]  # "224x224x3/uint8/8" (bucket/datatype/rows) -> bytes above static
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    methods: list[Method] = []
    graphs: dict[str, str] = {}  # bucket/rows -> "captured" or why it runs eagerly
    degrade: list[str] = []
    platform: str = "pytorch"
    seconds: dict[str, float] = {}  # phase -> how long it took


class LoadFailed(Struct, frozen=True, tag="load-failed", tag_field="t"):
    cause: Literal["config", "oom", "golden", "device", "error"]
    text: str


class Pong(Struct, frozen=True, tag="pong", tag_field="t"):
    serial: int
    memory: Memory
    counters: Counters
    load: Load
    graphs: dict[str, str] = {}  # as in WorkerReady; changes while captured in the gaps
    peaks: dict[str, int] = {}
    sizes: dict[str, int] = {}  # histogram of input shapes seen since the last pong
    running: list[str] = []  # request ids executing now


class Fenced(Struct, frozen=True, tag="fenced", tag_field="t"):
    """The CUDA context is poisoned; the worker answers no more and exits with 70."""

    text: str


class Drained(Struct, frozen=True, tag="drained", tag_field="t"):
    pass


class Report(Struct, frozen=True, tag="report", tag_field="t"):
    """Asked-for evidence: memory_summary, or why an allocation failed."""

    kind: str
    text: str


class Ping(Struct, frozen=True, tag="ping", tag_field="t"):
    serial: int


class Go(Struct, frozen=True, tag="go", tag_field="t"):
    """To a held worker: the device is yours now."""


class Drain(Struct, frozen=True, tag="drain", tag_field="t"):
    """Take nothing new, finish what is there, say Drained, and wait for TERM."""


class Trim(Struct, frozen=True, tag="trim", tag_field="t"):
    """Give the allocator's cache back to the device."""


class AskReport(Struct, frozen=True, tag="ask-report", tag_field="t"):
    kind: Literal["memory_summary"]


ToWorkerControl = Ping | Go | Drain | Trim | AskReport
FromWorkerControl = (
    WorkerHello | Loading | Prepared | WorkerReady | LoadFailed | Pong | Fenced | Drained | Report
)

# -- spawning: supervisor <-> zygote -------------------------------------------------------------


class Spawn(Struct, frozen=True, tag="spawn", tag_field="t"):
    """Fork a worker. Two descriptors come with the frame's first byte (SCM_RIGHTS): the progress
    page, and the write end of the pipe that becomes the worker's stdout and stderr."""

    serial: int  # the supervisor's, to tell the answers apart
    spec: bytes  # a WorkerSpec; only the worker itself decodes it
    #: Not a worker but a look at a model (precheck.py): `spec` is its question, and the answer goes
    #: to the second descriptor.
    check: bool = False


class Spawned(Struct, frozen=True, tag="spawned", tag_field="t"):
    """The worker is a child of the supervisor by now."""

    serial: int
    pid: int


class SpawnRefused(Struct, frozen=True, tag="spawn-refused", tag_field="t"):
    """Nothing was started. `text` says why, for the log and the slot's status."""

    serial: int
    text: str


class ZygoteReady(Struct, frozen=True, tag="zygote-ready", tag_field="t"):
    pid: int
    python: str = ""
    torch: str = ""  # its version; "" when it could not be imported
    problems: tuple[str, ...] = ()  # modules that could not be preloaded, and why


ToZygote = Spawn
FromZygote = ZygoteReady | Spawned | SpawnRefused

#: Exit codes of a worker with a meaning (others are crashes).
EXIT_CONFIG = 78  # the handler or its files can't be used; restarting would not help (EX_CONFIG)
EXIT_FENCED = 70  # poisoned CUDA context (EX_SOFTWARE)
EXIT_LOAD_OOM = 71  # the model does not fit into what is free
EXIT_WRONG_DEVICE = 72  # the UUID it got is not the one it was pinned to

_encoder = msgpack.Encoder()
_to_worker = msgpack.Decoder(ToWorker)
_from_worker = msgpack.Decoder(FromWorker)
_to_worker_control = msgpack.Decoder(ToWorkerControl)
_from_worker_control = msgpack.Decoder(FromWorkerControl)
_to_zygote = msgpack.Decoder(ToZygote)
_from_zygote = msgpack.Decoder(FromZygote)
_spec = msgpack.Decoder(WorkerSpec)

encode = _encoder.encode
decode_to_worker = _to_worker.decode
decode_from_worker = _from_worker.decode
decode_to_worker_control = _to_worker_control.decode
decode_from_worker_control = _from_worker_control.decode
decode_to_zygote = _to_zygote.decode
decode_from_zygote = _from_zygote.decode
decode_spec = _spec.decode

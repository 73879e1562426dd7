"""The words spoken between supervisor and proxies, and the shape of what `status` shows.

Length-prefixed msgpack frames (worker/frame.py) on a socket pair that the proxy inherits. The
supervisor always sends whole tables, so that a missed message heals at the next one.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, msgpack

from gpusup.worker.wire import TensorSpec

Band = Literal["normal", "queue", "shed", "unknown"]

#: open: takes work · suspect: takes none for now · closing: finishes what it has
RouteState = Literal["open", "suspect", "closing"]


class Route(Struct, frozen=True, kw_only=True):
    slot: str
    generation: int
    model: str
    version: str
    device: str  # name of the device, as in DeviceInfo
    path: str  # Unix socket of the worker
    state: RouteState
    max_rows: int
    budget_s: float
    degrade: tuple[str, ...] = ()
    fallback: bool = False  # a CPU slot that serves only degraded requests
    pid: int = 0


ModelState = Literal["ready", "loading", "swapping", "failed", "unloaded"]


class ModelInfo(Struct, frozen=True, kw_only=True):
    name: str
    state: ModelState
    reason: str  # why it is not ready, for people
    version: str  # the default one
    versions: tuple[str, ...]  # that have a ready worker
    canary_version: str = ""
    canary_share: float = 0.0
    mixed: bool = False  # some slots were given another version: unbound requests go to either
    holding: bool = False  # no worker for now by intent (swap, on-demand load): queue, don't refuse
    hold_s: float = 10.0
    hold_requests: int = 256
    max_rows: int = 1
    wait_s: float = 0.0
    budget_s: float = 30.0
    request_timeout_s: float = 60.0
    retry: Literal["never", "safe"] = "never"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    methods: tuple[str, ...] = ()
    platform: str = ""
    degrade: tuple[tuple[str, int], ...] = ()  # (step, limit), in order
    peaks: dict[str, int] = {}  # "shape/dtype/rows" -> bytes; see worker.wire.WorkerReady
    required: bool = True
    on_demand: bool = False
    slots: int = 0  # that hold or should hold it
    created: int = 0  # seconds since the epoch


class DeviceInfo(Struct, frozen=True, kw_only=True):
    """Bytes. `watermark` is DESIGN's: 1 - (free + reclaimable) / total, without leases."""

    name: str
    uuid: str
    kind: Literal["cuda", "cpu"]
    total: int
    free: int
    reclaimable: int
    dynamic: int  # what our workers hold above their static use
    watermark: float
    known: bool  # False: too old or unreadable; admission counts requests instead
    age_s: float
    leased: dict[str, int] = {}  # proxy -> bytes leased there, as last reported
    foreign: int = 0  # held by processes that are none of ours
    source: Literal["nvml", "worker", "resident", "none"] = "none"  # of the memory figures


class Snapshot(Struct, frozen=True, tag="snapshot", tag_field="t", kw_only=True):
    """All that a proxy knows of the world."""

    serial: int
    routes: tuple[Route, ...]
    models: tuple[ModelInfo, ...]
    devices: tuple[DeviceInfo, ...]
    ready: bool
    draining: bool
    reason: str = ""  # why not ready
    poisoned: tuple[str, ...] = ()  # hashes of inputs that ran at two deaths
    suspects: tuple[tuple[str, float], ...] = ()  # those that ran at one, and when that was
    proxies: int = 1


class DeviceUpdate(Struct, frozen=True, tag="devices", tag_field="t"):
    """10 to 20 times a second."""

    devices: tuple[DeviceInfo, ...]


class Reply(Struct, frozen=True, tag="reply", tag_field="t"):
    id: int
    status: int
    body: bytes
    content_type: str = "application/json"


class StopProxy(Struct, frozen=True, tag="stop", tag_field="t"):
    """Answer what is there, say `Connection: close`, take nothing new, end within the limit."""

    limit_s: float


class Reread(Struct, frozen=True, tag="reread", tag_field="t"):
    """Read certificates and API keys again; reopen logs."""


class ProxyHello(Struct, frozen=True, tag="proxy-hello", tag_field="t"):
    proxy: str
    pid: int


class Listening(Struct, frozen=True, tag="listening", tag_field="t"):
    address: str


class Sample(Struct, frozen=True, array_like=True):
    """An increment of a counter. `name` is a key of conf/metrics.py, labels in its order."""

    name: str
    labels: tuple[str, ...]
    value: float


class Observed(Struct, frozen=True, array_like=True):
    """An increment of a histogram: counts per bucket (not cumulative, +Inf last) and the sum."""

    name: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    sum: float


class ModelStats(Struct, frozen=True, array_like=True):
    """Increments of the v2 statistics of one model version. Times: seconds, over all requests.

    `batches`: rows of the batch -> (share of that batch, its seconds on the device times that
    share). An item of 2 rows in a batch of 8 adds a quarter, so that the items of a batch add up
    to one, whichever proxies they came through.
    """

    model: str
    version: str
    success: int = 0
    success_s: float = 0.0  # whole time in the server
    fail: int = 0
    fail_s: float = 0.0
    rows: int = 0
    queue_s: float = 0.0  # in the proxy and in the worker, before its batch
    decode_s: float = 0.0
    compute_s: float = 0.0
    encode_s: float = 0.0
    last: float = 0.0  # seconds since the epoch
    batches: dict[int, tuple[float, float]] = {}


class ProxyReport(Struct, frozen=True, tag="report", tag_field="t", kw_only=True):
    """Ten times a second while there is something new, and on leaving."""

    counters: list[Sample] = []
    histograms: list[Observed] = []
    queued: dict[str, int] = {}  # model -> requests waiting here
    in_flight: dict[str, int] = {}  # slot -> requests
    leased: dict[str, int] = {}  # device -> bytes
    connections: int = 0
    arena_free: int = 0
    arena_total: int = 0
    bands: dict[str, Band] = {}  # device -> band as this proxy sees it, leases included
    latency: dict[str, tuple[float, float]] = {}  # model -> (p50, p99) of the last minute, seconds
    stats: list[ModelStats] = []


class InputDied(Struct, frozen=True, tag="input-died", tag_field="t"):
    """This input was executing when its worker died."""

    input_hash: str
    model: str
    slot: str
    generation: int
    sent_at: float = 0.0  # to that worker, CLOCK_MONOTONIC
    died_at: float = 0.0


class InputSurvived(Struct, frozen=True, tag="input-survived", tag_field="t"):
    """An input that had been executing at a death has been computed since."""

    input_hash: str


class WantModel(Struct, frozen=True, tag="want-model", tag_field="t"):
    """A request has come for a model that is unloaded and may be loaded on demand."""

    model: str


class Used(Struct, frozen=True, tag="used", tag_field="t"):
    """Models that had requests since the last word; for idle unload."""

    models: tuple[str, ...]


class Shed(Struct, frozen=True, tag="shed", tag_field="t", kw_only=True):
    """A band changed or a request was shed or degraded; the supervisor writes the record."""

    device: str
    before: Band
    after: Band
    watermark: float
    projected: float
    model: str = ""
    request_id: str = ""
    cost: int = 0
    leased: int = 0
    in_flight: int = 0


class Notice(Struct, frozen=True, tag="notice", tag_field="t"):
    """Something for the log and the event stream: a refused explosive shape, a broken worker."""

    kind: str
    fields: dict[str, Any]


class Ask(Struct, frozen=True, tag="ask", tag_field="t"):
    """A call of the control API on a client's behalf: /metrics, statistics, repository verbs."""

    id: int
    method: str
    path: str
    body: bytes = b""


# -- what `status` and `changes` show --------------------------------------------------------------


class SlotView(Struct, frozen=True, kw_only=True):
    """One slot with its worker. Times are seconds, ages count from now."""

    slot: str
    device: str
    state: str  # of the worker: life.State, or "empty"
    since_s: float
    slot_state: str  # schedulable, cordoned, quarantined, lost
    why: str = ""  # of either state, for people
    model: str = ""
    version: str = ""
    generation: int = 0
    pid: int = 0
    restarts: int = 0
    last_exit: str = ""
    next_retry_s: float | None = None
    in_flight: int = 0
    queued: int = 0
    beat_age_s: float | None = None
    progress_age_s: float | None = None
    phase: str = ""
    memory: dict[str, int] = {}  # bytes: allocated, reserved, peak, static, context
    graphs: dict[str, str] = {}  # bucket/rows -> "captured", or why it runs eagerly
    seconds: dict[str, float] = {}  # phases of the start
    successor: str = ""  # a second worker in the slot: the next version, or a canary
    standby: str = ""  # "ready", how far it is, "none: why"; "" where none is configured
    standby_pid: int = 0
    story: tuple[str, ...] = ()


class ModelView(Struct, frozen=True, kw_only=True):
    name: str
    state: str  # ModelState
    version: str
    versions: tuple[str, ...] = ()
    ready: int = 0
    slots: int = 0
    reason: str = ""
    queued: int = 0
    p50_s: float | None = None
    p99_s: float | None = None
    requests: int = 0
    canary_version: str = ""
    canary_share: float = 0.0
    required: bool = True


class DeviceView(Struct, frozen=True, kw_only=True):
    """Bytes."""

    name: str
    uuid: str
    kind: str
    total: int
    free: int
    watermark: float
    band: str
    known: bool
    age_s: float
    reclaimable: int = 0
    leased: int = 0
    foreign: int = 0
    title: str = ""  # "NVIDIA H200"
    fault: str = ""
    source: str = "none"  # of the figures: nvml, worker (its own CUDA call), resident, none
    release: str = ""  # how the memory of the last worker that ended here came back


class ProxyView(Struct, frozen=True, kw_only=True):
    name: str
    pid: int
    state: str  # starting, serving, leaving, down
    restarts: int = 0
    connections: int = 0
    queued: int = 0


class ChangeView(Struct, frozen=True, kw_only=True):
    """A long operation. `state`: running, waiting (canary), done, failed, rolled-back, aborted."""

    id: str
    kind: str
    title: str
    state: str
    model: str = ""
    text: str = ""
    age_s: float = 0.0  # since it began
    took_s: float | None = None  # once it has ended
    steps: tuple[tuple[float, str], ...] = ()  # (seconds after its beginning, what was done)
    numbers: dict[str, Any] = {}
    progress: dict[str, Any] = {}  # of a swap: stage, slots_done, slots, slot, phase, bytes


class StatusView(Struct, frozen=True, kw_only=True):
    """GET /status. `state`: starting, ready, degraded, down, draining."""

    schema: int = 1
    state: str
    version: str
    pid: int
    uptime_s: float
    listen: str
    reason: str = ""
    models: tuple[ModelView, ...] = ()
    slots: tuple[SlotView, ...] = ()
    devices: tuple[DeviceView, ...] = ()
    proxies: tuple[ProxyView, ...] = ()
    changes: tuple[ChangeView, ...] = ()  # those that are under way
    queue_mark: float = 0.85  # the two watermarks as configured
    shed_mark: float = 0.92


ToProxy = Snapshot | DeviceUpdate | Reply | StopProxy | Reread
FromProxy = (
    ProxyHello
    | Listening
    | ProxyReport
    | InputDied
    | InputSurvived
    | WantModel
    | Used
    | Shed
    | Notice
    | Ask
)

_encoder = msgpack.Encoder()
_to_proxy = msgpack.Decoder(ToProxy)
_from_proxy = msgpack.Decoder(FromProxy)

encode = _encoder.encode
decode_to_proxy = _to_proxy.decode
decode_from_proxy = _from_proxy.decode

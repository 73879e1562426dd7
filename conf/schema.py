"""What a gpusup.toml may say. Nothing here knows how the file is found or read.

Unknown keys are refused, so a typo can't pass for a default. Sizes and times are written with
their unit in the file ("24GiB", "250ms"); here they are plain bytes and seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

#: The loader turns "10s" into 10.0 and "24GiB" into bytes by these marks (`extra["unit"]`).
Seconds = Annotated[float, Meta(ge=0, extra={"unit": "time"})]
Bytes = Annotated[int, Meta(ge=0, extra={"unit": "size"})]
Share = Annotated[float, Meta(ge=0, le=1, extra={"unit": "share"})]
Count = Annotated[int, Meta(ge=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$", min_length=1, max_length=64)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class ServerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    listen: str = "127.0.0.1:8000"
    proxies: Count | Literal["auto"] = "auto"
    backlog: Count = 1024
    run_dir: str = "auto"
    state_dir: str = "auto"
    control_group: str = ""
    default_model: str = ""
    body_limit: Bytes = 64 * 2**20
    body_timeout: Seconds = 30.0
    body_min_rate: Bytes = 1024
    idle_timeout: Seconds = 75.0
    header_limit: Bytes = 8190
    request_timeout: Seconds = 60.0
    write_timeout: Seconds = 30.0
    connections: Count = 4096
    arena: Bytes = 256 * 2**20
    drain_limit: Seconds = 30.0
    drain_notice: Seconds = 0.5
    json_depth: Count = 64
    pixels: Count = 100_000_000
    compress: bool = True
    cors_origins: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    api_keys: str = ""
    metrics: Literal["server", "control"] = "server"
    docs: Literal["server", "control"] = "server"
    repository_control: bool = False
    dashboard: str = ""


class DevicesConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    use: tuple[str, ...] | Literal["auto"] = "auto"
    cpu_slots: Count = 2
    cpu_memory: Bytes = 2 * 2**30
    memory: dict[str, Bytes] = {}
    safety: Bytes = 2**30


class WatermarkConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    queue: Share = 0.85
    shed: Share = 0.92
    hysteresis: Share = 0.02
    queue_per_slot: Count = 5
    stale_after: Seconds = 3.0


class ProbeConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    interval: Seconds = 0.1
    call_limit: Seconds = 2.0
    library: str = ""


class BackoffConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    initial: Seconds = 0.5
    factor: Annotated[float, Meta(ge=1)] = 2.0
    limit: Seconds = 30.0
    jitter: Share = 0.1
    reset_after: Seconds = 120.0
    crashes: Count = 5
    window: Seconds = 600.0


class SupervisionConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    spawn: Literal["zygote", "exec"] = "zygote"
    preload: tuple[str, ...] = ()
    hello_limit: Seconds = 60.0
    load_stall: Seconds = 60.0
    warm_up_limit: Seconds = 120.0
    keep_alive: Seconds = 0.25
    suspect_after: Seconds = 3.0
    beat_limit: Seconds = 20.0
    proxy_limit: Seconds = 15.0
    drain_limit: Seconds = 30.0
    term_limit: Seconds = 5.0
    dump_wait: Seconds = 0.1
    kill_limit: Seconds = 30.0
    reclaim_limit: Seconds = 10.0
    canary_idle: Seconds = 30.0
    canary_limit: Seconds = 10.0
    log_lines: Count = 200
    backoff: BackoffConfig = BackoffConfig()


class LogConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["auto", "human", "json"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"
    file: str = ""
    requests: Share = 0.01


class LeakConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slope_limit: Bytes = 2**20
    recycle: bool = False


class TensorConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A declared input or output. `shape` is without the batch dimension; -1 is variable."""

    name: Name
    datatype: Literal[
        "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
        "FP16", "BF16", "FP32", "FP64", "BYTES",
    ]  # fmt: skip
    shape: tuple[int, ...]


class DegradeConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rung of the ladder: what is done instead of a refusal when the device is in shed."""

    step: Literal["skip_post_processing", "lower_precision", "cpu_fallback"]
    limit: Count = 4


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    handler: str
    weights: str = ""
    version: Annotated[str, Meta(pattern=r"^[0-9]+$")] = "1"
    workers: Count | Literal["auto"] = "auto"
    devices: tuple[str, ...] | Literal["all"] = "all"
    python: str = ""
    settings: dict[str, Any] = {}
    dtype: Literal["model", "fp32", "fp16", "bf16"] = "model"
    max_rows: Count = 32
    wait: Seconds = 0.002
    buckets: tuple[tuple[int, ...], ...] = ()
    fit: Literal["exact", "pad", "resize"] = "exact"
    no_bucket: Literal["eager", "refuse"] = "eager"
    graphs: bool = True
    compile: bool = False
    decode_threads: Annotated[int, Meta(ge=0)] = 2
    torch_threads: Annotated[int, Meta(ge=0)] = 1
    budget: Seconds = 30.0
    budget_p99: Annotated[float, Meta(ge=0)] = 0.0
    retry: Literal["never", "safe"] = "never"
    request_timeout: Seconds = 0.0
    starvation: Seconds = 5.0
    static: Bytes = 0
    peak: Bytes = 0
    reserve: Bytes = 0
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    golden: str = ""
    golden_tolerance: float = 1e-2
    degrade: tuple[DegradeConfig, ...] = ()
    idle_unload: Seconds = 0.0
    on_demand: bool = False
    standby: bool = False
    hold: Seconds = 10.0
    hold_requests: Count = 256
    required: bool = True
    env: dict[str, str] = {}


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    devices: DevicesConfig = DevicesConfig()
    watermark: WatermarkConfig = WatermarkConfig()
    probe: ProbeConfig = ProbeConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    log: LogConfig = LogConfig()
    leak: LeakConfig = LeakConfig()
    models: dict[Name, ModelConfig] = {}

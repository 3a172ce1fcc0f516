"""The settings of `purefill serve`: what each one means, its default and its limits."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from graphs.buckets import default_token_ladder
from scheduler.errors import ConfigError
from scheduler.journal.settings import MEMORY, check_journal_url
from scheduler.models import LoadFormat

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

_SIZE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _parse_size(value: object) -> object:
    """Return bytes for a text such as ``4GiB``; anything else is left to the type check."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("must be a size such as 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


def _parse_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be JSON ({error})") from None


Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=1, le=1024)]
Size = Annotated[int, Field(ge=1), BeforeValidator(_parse_size)]
WorkerResources = Annotated[
    dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(gt=0)]], BeforeValidator(_parse_json)
]
CaptureSizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class GraphConfig(BaseModel):
    """Which prefill graphs are captured."""

    model_config = _FROZEN

    use_cudagraph: bool = True
    """False computes every batch eagerly."""
    capture_tokens: CaptureSizes | None = None
    """Token buckets. None: a ladder up to `max_capture_tokens`."""
    capture_slots: CaptureSizes | None = None
    """Sequences per graph. None: chosen from `max_batch_requests`."""


class GraphOptimizationConfig(BaseModel):
    """FastDeploy's names for the same settings."""

    model_config = _FROZEN

    use_cudagraph: bool = True
    cudagraph_only_prefill: Literal[True] = True
    """FastDeploy's other choice, graphs for decode instead of prefill, does not exist here."""
    cudagraph_capture_sizes_prefill: CaptureSizes | None = None
    max_capture_shape_prefill: Annotated[int, Field(ge=1)] | None = None

    def to_graph_config(self) -> GraphConfig:
        """Return the same settings in our names. Sizes above `max_capture_shape_prefill` are left out."""
        sizes, most = self.cudagraph_capture_sizes_prefill, self.max_capture_shape_prefill
        if most is not None:
            kept = tuple(size for size in sizes or () if size <= most)
            sizes = kept or default_token_ladder(most)
        return GraphConfig(use_cudagraph=self.use_cudagraph, capture_tokens=sizes)


class ServeConfig(BaseModel):
    """All settings of one service. Raises `ConfigError`, in one line, if one is wrong.

    The options of the command line, the keys of the YAML file and the PUREFILL_ variables are these fields.
    """

    model_config = _FROZEN

    model: str = Field("smollm2-135m", min_length=1, description="a folder, a hub id or smollm2-135m")
    host: str = Field(
        "127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all interfaces"
    )
    port: Port = Field(8000, description="port of the API; 0 takes a free one")
    metrics_port: Port | None = Field(
        None, description="port of /metrics, if not the API's own; 0 takes a free one"
    )
    max_batch_requests: Count = Field(8, description="prompts of a full prefill batch")
    batch_timeout_ms: float = Field(
        20.0, ge=0, le=60_000, description="longest that a prompt is held for others to join its batch"
    )
    batch_policy: Literal["fixed", "adaptive"] = Field("fixed", description="how long prompts are held")
    max_batch_tokens: int | None = Field(
        None, ge=1, description="tokens of waiting prompts that make a batch full, besides their number"
    )
    prefill_workers: Count = Field(1, description="prefill worker processes")
    decode_workers: Count = Field(1, description="decode worker processes")
    api_servers: Count = Field(1, description="API server processes")
    tensor_parallel_size: Count = Field(
        1, description="GPUs, or processes on a CPU, that share one copy of the model in each worker"
    )
    prefill_tensor_parallel_size: Count | None = Field(
        None, description="the same of prefill workers, if they differ"
    )
    decode_tensor_parallel_size: Count | None = Field(
        None, description="the same of decode workers, if they differ"
    )
    max_num_seqs: int = Field(
        64, ge=1, le=65_536, description="sequences that one decode worker runs at once"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt and answer together, in tokens, if less than the model's own"
    )
    max_capture_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of the largest prefill graph; unset: 512 on a CPU, up to 8192 on a GPU",
    )
    graph_optimization_config: Annotated[GraphOptimizationConfig | None, BeforeValidator(_parse_json)] = (
        Field(None, description="the same in FastDeploy's keys")
    )
    graph_config: Annotated[GraphConfig, BeforeValidator(_parse_json)] = Field(
        GraphConfig(),
        validate_default=True,
        description='JSON such as {"use_cudagraph": true, "capture_tokens": [64, 512], "capture_slots": [8]}',
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of weights and KV pages; auto: the model's own"
    )
    load_format: LoadFormat = Field("auto", description="dummy fills the model with random weights")
    kv_memory: Size | None = Field(
        None,
        description="memory for KV pages of each decode worker, such as 4GiB; unset: at most 1GiB on a CPU, what is "
        "free on a GPU",
    )
    prefix_cache: bool = Field(
        True, description="keep the KV of prompts and answers for requests that begin alike"
    )
    handoff_transport: Literal["auto", "shm", "cuda_ipc", "gloo", "nccl"] = Field(
        "auto",
        description="how KV pages reach decode workers; auto: shared memory on one host, messages between hosts",
    )
    decode_share: float = Field(
        0.0,
        ge=0,
        le=0.95,
        description="share of the time in which prefill pauses while sequences decode on the same device",
    )
    journal: str = Field(
        MEMORY, repr=False, description="where accepted requests are kept: memory, or redis://HOST:PORT"
    )
    journal_ttl_s: float = Field(
        86_400.0, ge=1, le=31_536_000, description="how long a result can be asked for again by its key"
    )
    journal_on_failure: Literal["refuse", "continue"] = Field(
        "refuse", description="what happens to new requests while the journal cannot be reached"
    )
    api_key: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        repr=False,
        description="key that clients must send; may be repeated (PUREFILL_API_KEYS: comma separated)",
    )
    max_body_size: Size = Field(16 * 2**20, description="largest body of a request, such as 16MiB; else 413")
    max_header_size: Size = Field(
        65_536, le=2**20, description="largest request line with its headers, such as 64KiB; else 431"
    )
    max_connections: int = Field(
        4096, ge=1, le=1_000_000, description="open connections of one API server; more get 503"
    )
    max_concurrent_requests: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="completions, chats and the like in one API server; more get 429",
    )
    client_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="longest that a client may take to send headers, or a body, else 408, or leave an answer unread",
    )
    request_timeout_s: float | None = Field(
        None, gt=0, le=86_400, description="longest that a request may take; else 504"
    )
    cors_origin: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="origin whose web pages may call the API, or *; may be repeated"
    )
    tls_cert_file: str | None = Field(
        None, min_length=1, description="certificate to serve HTTPS with, in PEM form"
    )
    tls_key_file: str | None = Field(None, min_length=1, description="its private key, if in another file")
    max_queued_requests: int = Field(1024, ge=1, description="waiting requests beyond which new ones get 429")
    max_queued_tokens: int = Field(
        1_048_576, ge=1, description="tokens of waiting prompts beyond which new ones get 429"
    )
    drain_timeout_s: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="longest wait for running requests when the service stops; a second signal ends it",
    )
    watchdog_timeout_s: float = Field(
        300.0,
        ge=1,
        le=86_400,
        description="a worker that finishes nothing for so long while it has work is started again",
    )
    ray_address: str | None = Field(None, min_length=1, description="Ray cluster to join, HOST:PORT or auto")
    prefill_resources: WorkerResources = Field(
        {},
        description='custom resources of Ray that a prefill worker takes up, JSON such as {"prefill": 1}; with '
        "decode_resources, there are as many workers as the cluster's nodes have places for",
    )
    decode_resources: WorkerResources = Field({}, description="the same of a decode worker")
    request_log: str | None = Field(
        None,
        min_length=1,
        description="file to which each request's time and lengths are appended, for purefill simulate and plan",
    )
    write_cost_model: str | None = Field(
        None, min_length=1, description="file for what the idle service takes, for purefill simulate and plan"
    )
    usage_stats: bool = Field(False, description="let Ray report usage statistics to its makers")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["text", "json"] = Field("text", description="form of each line of the log")
    log_prompts: bool = Field(False, description="write prompts to the log")
    otlp_endpoint: str | None = Field(
        None,
        pattern="https?://.+",
        description="where OpenTelemetry spans of requests are sent, such as http://127.0.0.1:4318; "
        "needs purefill[otel] (OTEL_EXPORTER_OTLP_ENDPOINT)",
    )
    dashboard_port: Port = Field(0, description="port of the Ray dashboard; 0: 8265 or the next free one")

    @field_validator("api_key", "cors_origin", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        return [item.strip() for item in value.split(",")] if isinstance(value, str) else value

    @field_validator("journal")
    @classmethod
    def _check_journal(cls, value: str) -> str:
        if value != MEMORY:
            check_journal_url(value)
        return value

    @field_validator("graph_config")
    @classmethod
    def _take_fastdeploy_keys(cls, value: GraphConfig, info: ValidationInfo) -> GraphConfig:
        other = info.data.get("graph_optimization_config")
        if other is None:
            return value
        if value != GraphConfig():
            raise ConfigError("graph_config and graph_optimization_config cannot both be set")
        mapped: GraphConfig = other.to_graph_config()
        return mapped

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_batch_requests > self.max_num_seqs:
            raise ConfigError(
                f"max_batch_requests must be <= max_num_seqs, which is {self.max_num_seqs}, "
                f"got {self.max_batch_requests}"
            )
        if bool(self.prefill_resources) != bool(self.decode_resources):
            raise ConfigError("prefill_resources and decode_resources must both be set, or none")
        if self.prefill_resources and self.ray_address is None:
            raise ConfigError("prefill_resources and decode_resources need ray_address")
        for name in ("CPU", "GPU", "memory", "object_store_memory"):
            if name in self.prefill_resources or name in self.decode_resources:
                raise ConfigError(
                    f"prefill_resources and decode_resources must be custom resources, got {name}"
                )
        if self.tls_key_file is not None and self.tls_cert_file is None:
            raise ConfigError("tls_key_file needs tls_cert_file")
        if self.max_capture_tokens is not None and self.graph_config.capture_tokens is not None:
            raise ConfigError("max_capture_tokens and graph_config.capture_tokens cannot both be set")
        if self.max_model_len is not None and self.max_queued_tokens < self.max_model_len:
            raise ConfigError(
                f"max_queued_tokens must be >= max_model_len, which is {self.max_model_len}, "
                f"got {self.max_queued_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        """Ranks hand pages over within one host."""
        if max(self.num_ranks.values()) == 1:
            return self
        if self.handoff_transport in ("gloo", "nccl"):
            raise ConfigError(
                "handoff_transport must be auto, shm or cuda_ipc with tensor_parallel_size > 1, "
                f"got {self.handoff_transport}"
            )
        if self.prefill_resources:
            raise ConfigError(
                "prefill_resources and decode_resources cannot be set with tensor_parallel_size > 1: all workers are "
                "on one host then"
            )
        return self

    @property
    def num_ranks(self) -> dict[Literal["prefill", "decode"], int]:
        """Processes of each worker of a kind."""
        return {
            "prefill": self.prefill_tensor_parallel_size or self.tensor_parallel_size,
            "decode": self.decode_tensor_parallel_size or self.tensor_parallel_size,
        }

    @model_validator(mode="wrap")
    @classmethod
    def _fail_in_one_line(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        sources = info.context or {}
        if isinstance(data, Mapping):
            for name, value in data.items():
                # pydantic would take true for 1
                if isinstance(value, bool) and name in cls.model_fields and not _is_switch(cls, name):
                    raise ConfigError(f"{name} must not be true or false, got {value}{_from(sources, name)}")
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(_explain(error, sources)) from None


def _is_switch(config: type[BaseModel], name: str) -> bool:
    return config.model_fields[name].annotation is bool


_LIMITS = {
    "greater_than": "must be > {gt:g}",
    "greater_than_equal": "must be >= {ge:g}",
    "less_than_equal": "must be <= {le:g}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must not be empty",
    "value_error": "{error}",
}
_TYPES = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text",
    "tuple": "must be a list",
    "model": "must be a JSON object",
    "dict": "must be a JSON object",
}


_SECTIONS: dict[tuple[str, ...], type[BaseModel]] = {
    (): ServeConfig,
    ("graph_config",): GraphConfig,
    ("graph_optimization_config",): GraphOptimizationConfig,
}
_SECRET = ("api_key", "journal")
"""Fields that may hold a password: no message shows their value."""


def _from(sources: Mapping[str, str], field: str) -> str:
    return f" ({sources[field]})" if field in sources else ""


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    """Return one line for the first thing that is wrong: the field, its limit, the value, and who set it."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    field, origin = ".".join(path), _from(sources, path[0])
    if first["type"] == "extra_forbidden":
        kind = f"key in {path[0]}:" if path[1:] else "setting"
        return unknown_name(kind, path[-1], _SECTIONS[tuple(path[:-1])].model_fields) + origin
    if first["type"] in _LIMITS:
        limit = _LIMITS[first["type"]].format(**first.get("ctx", {}))
    else:
        limit = _TYPES.get(first["type"].split("_")[0], first["msg"])
    value = first["input"]
    is_number = first["type"] in ("greater_than_equal", "less_than_equal")
    got = "" if path[0] in _SECRET else f", got {value}" if is_number else f", got {value!r}"
    return f"{field} {limit}{got}{origin}"


def unknown_name(kind: str, name: str, known: Collection[str]) -> str:
    """Return the message for a name that nothing has, and which of the `known` ones may have been meant."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown {kind} {name}" + (f"; did you mean {close[0]}?" if close else "")

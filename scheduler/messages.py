"""Messages between purefill's actors. Every one is a frozen dataclass; times are in seconds, sizes in bytes.

ApiServer  ──SubmitRequests──► Scheduler ──PrefillBatch──► PrefillWorker ──TokenEvents──► ApiServer
ApiServer  ──cancel(ids)─────► Scheduler ◄─PrefillResult── PrefillWorker
ApiServer  ──resume(Requests)► Scheduler
                               Scheduler ──DecodeStart───► DecodeWorker  ──TokenEvents──► ApiServer
                               Scheduler ──PageGrant─────► DecodeWorker
                               Scheduler ◄─StepReport───── DecodeWorker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]

RAY_NAMESPACE = "purefill"
"""Ray namespace of all actors."""
SCHEDULER_NAME = "scheduler"
"""Name of the Scheduler actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an output must match, from its first token to its last."""

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    text: str = ""
    """The JSON schema, the regular expression, or a JSON list of choices; empty for ``json_object``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """How likely a token was: natural logarithms under the model's own softmax, before any sampling setting."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one sequence's tokens are chosen. Validated by whoever makes it.

    The random stream belongs to the request: a token depends on `seed` and its own position, never on the batch.
    """

    max_tokens: int
    """Most tokens to produce, >= 1."""
    min_tokens: int = 0
    """No stop token is produced before this many tokens."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int = 0
    """0 <= seed < 2**63."""
    stop_token_ids: tuple[int, ...] = ()
    """The sequence ends after any of these: the model's EOS tokens (unless ignore_eos) and the request's own."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are never drawn."""
    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the output holds."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens that the output holds, once for each time."""
    repetition_penalty: float = 1.0
    """> 0. Logits of tokens that prompt or output holds are divided by it if positive, else multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens are reported with each token's logprob; None reports no logprobs."""
    prompt_logprobs: bool = False
    """Report the prompt's tokens too, with `num_logprobs` of the likeliest each."""
    grammar: Grammar | None = None
    """What the output must match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to compute, as an ApiServer submits it."""

    request_id: str
    """Never used again, so that a late message about it means nothing to another."""
    api_server: str
    """Name of the ApiServer actor to which the tokens go."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    """Tokens already produced, when the request is computed again after a failure."""
    priority: int = 0
    """Smaller is served first."""
    ttft_slo_s: float | None = None
    """Wished time from arrival to first token."""
    tenant: str = ""
    """Whose request it is, for fairness: a digest of the API key, a slash, and the `user` field."""
    completion_id: str = ""
    """What the client knows it by: the sequences of one completion share it."""
    prefix: bytes = b""
    """Digests of the prompt's complete blocks of tokens, and before them that of the model and the `cache_salt`
    (`scheduler.prefix.hashing`). Empty: it neither uses cached KV nor leaves any."""

    @property
    def reports_prompt(self) -> bool:
        """Whether its prefill reports the prompt's tokens, for which it must compute all of them."""
        return self.sampling.prompt_logprobs and not self.output_token_ids

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that a prefill of this request computes: prompt plus what was already produced."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens that the sequence can ever hold in KV pages."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a submitted request was not accepted."""

    request_id: str
    label: str
    """Label of the error class (`scheduler.errors`)."""
    message: str
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """What the owner of a queue says of it."""

    num_requests: int = 0
    num_tokens: int = 0
    requests_per_s: float | None = None
    """How fast requests left the queue of late, while any waited. None: not known yet."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReply:
    """What the scheduler ended on somebody's wish."""

    num_sequences: int
    num_foreign: int
    """Sequences of that completion id which it left alone, as they belong to another API key."""
    queue: QueueState
    """What waits now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """How much the service has to do."""

    num_live: int
    """Sequences that have not ended, those in the queue included."""
    num_waiting: int
    """Sequences in the queue."""
    num_waiting_tokens: int
    """Tokens of the sequences in the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """What is known of an actor."""

    name: str
    pool: str
    """``scheduler``, ``api``, ``prefill`` or ``decode``."""
    state: str
    """``ready``, ``draining`` or ``dead``."""
    start_time: float
    """When it began to serve, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """What a service does, in one look."""

    problem: str | None
    """Why it is not ready; None if it is."""
    load: ServiceLoad
    actors: tuple[ActorStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitReply:
    """What the scheduler says to submitted groups of requests."""

    rejections: tuple[Rejection | None, ...]
    """Why not, one entry a group; None where all of the group were accepted."""
    queue: QueueState
    """The queue with them in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Values of metrics: by name, then by the values of the metric's labels. Names are those of the catalogue."""

    counters: Mapping[str, Mapping[tuple[str, ...], float]] = field(default_factory=dict)
    gauges: Mapping[str, Mapping[tuple[str, ...], float]] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[tuple[str, ...], Sequence[float]]] = field(default_factory=dict)
    """Of each series: the sum of its values, then how many fell into each bucket and above the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStatus:
    """How an ApiServer gets on with its journal."""

    is_up: bool
    """Whether the journal could be reached the last time."""
    lag_s: float
    """How long the oldest token waits that is to be written; 0 if none does."""
    num_unjournaled: int
    """Requests so far that went on without the journal, as it was away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What an ApiServer tells the scheduler about once a second."""

    api_server: str
    """Who says so."""
    figures: Figures
    """What it counted since the last one."""
    life: int = 0
    """Another number in each process that has had this name."""
    journal: JournalStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """The scheduler's answer to a heartbeat. When it differs from the last one, tokens may have been lost."""

    life: int
    """Another one for each process of the Scheduler."""
    num_deaths: int
    """Workers that died in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one request to a set of KV pages of one decode worker, until the scheduler ends it.

    Epochs only grow. A page remembers the newest epoch that wrote it; an older one is refused.
    """

    decode_worker: str
    epoch: int
    page_ids: tuple[int, ...]
    shared_epochs: tuple[int, ...] = ()
    """The first so many pages hold cached KV that others may use too, each written under its epoch here. They are
    read only."""

    @property
    def own_page_ids(self) -> tuple[int, ...]:
        """The pages that are written under this lease."""
        return self.page_ids[len(self.shared_epochs) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRef:
    """A sequence at a decode worker, under one lease."""

    request_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillItem:
    """One request of a prefill batch."""

    request: Request
    lease: Lease
    queued_s: float = 0.0
    """How long it waited because all prefill workers were busy, or no decode worker had room."""
    held_s: float = 0.0
    """How long it was held besides, for others to join its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Requests to prefill together, all into the pages of one decode worker."""

    batch_id: int
    decode_worker: str
    items: tuple[PrefillItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillOutcome:
    """What prefill made of one request: its next token, or an error."""

    request_id: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One entry a prompt token; None for the first, which nothing predicts."""
    num_cached_tokens: int = 0
    """Tokens whose KV was in the pages already, so that they were not computed."""
    error_label: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFailure:
    """A prefilled request whose pages did not reach its decode worker."""

    request_id: str
    error_label: str
    error_message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffResult:
    """What a prefill worker reports of the pages of one batch."""

    batch_id: int
    worker: str
    transport: str
    """``shm``, ``cuda_ipc``, ``gloo`` or ``nccl``."""
    failures: tuple[HandoffFailure, ...]
    num_bytes: int
    """Of the pages that arrived."""
    seconds: float
    """Spent for the handoff alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """What a prefill worker reports of one batch."""

    batch_id: int
    worker: str
    outcomes: tuple[PrefillOutcome, ...]
    num_tokens: int
    """Tokens computed, padding not counted."""
    padding_tokens: int
    replays: Mapping[str, int]
    """Graph replays by bucket name, such as ``512x8``."""
    eager_steps: Mapping[str, int] = field(default_factory=dict)
    """Forward passes without a graph, by reason."""
    seconds: float = 0.0
    flops: float = 0.0
    """Floating point operations that the model's definition needs for these tokens; none for padding."""
    handoff: HandoffResult | None = None
    """What became of the pages, if that is known already."""
    handoff_pending: bool = False
    """The pages are still on their way: the worker says later what became of them."""
    num_query_tokens: int = 0
    """Tokens of the items that may use cached KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStart:
    """A prefilled sequence that a decode worker goes on with."""

    request: Request
    lease: Lease
    first_token_id: int
    """The token that prefill chose; its KV is not in the pages yet."""
    handoff_s: float = 0.0
    """What it took to bring its pages to the decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGrant:
    """More pages for a running sequence, before it needs them."""

    ref: SequenceRef
    epoch: int
    """Under which the worker claims these pages: newer than all that held them before, and than the lease."""
    first_page: int
    """How many pages the sequence has without these: grants may overtake each other."""
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where a sequence's time went, in durations: clocks of different hosts need not agree."""

    queued_s: float = 0.0
    """It waited because all prefill workers were busy, or no decode worker had room; also at the prefill worker, behind
    the batch before its own."""
    held_s: float = 0.0
    """It was held besides, for others to join its batch."""
    prefill_s: float = 0.0
    """Its batch was at the prefill worker, with none before it."""
    handoff_s: float = 0.0
    """Its pages were on their way to the decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One new token of one request, or its end, or both.

    `index` counts the request's output tokens from 0, so that a receiver can order them and drop repeats.
    """

    request_id: str
    index: int
    epoch: int = 0
    """Of the lease under which the token was made; 0 for what a worker did not make."""
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """With the first token only; one entry a prompt token, None for the first."""
    num_cached_tokens: int = 0
    """With the first token of each prefill: tokens whose KV was cached."""
    error_label: str | None = None
    error_message: str | None = None
    timing: Timing | None = None
    """With the first token of each prefill, and with the first of each decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvents:
    """All events of one step for one ApiServer: one message a step, never one a token."""

    source: str
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTokens:
    """Tokens of one sequence, in order, from steps before the last that nobody has reported yet."""

    ref: SequenceRef
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a decode worker tells the scheduler after a step, or after several if nothing else came of the others."""

    worker: str
    seconds: float
    events: tuple[TokenEvent, ...]
    """Tokens of the step, of all requests."""
    released: tuple[SequenceRef, ...]
    """Sequences whose pages the worker touches no more, and of which it has reported all tokens.

    One that has not ended is computed again: it was cancelled for that, or its lease was refused.
    """
    num_stalled: int = 0
    """Sequences that sat the step out, for want of a page."""
    earlier: tuple[EarlierTokens, ...] = ()
    """Before `events`: only workers that do not report every step, as the simulated ones, have any."""
    bucket: str = ""
    """In which the step ran, such as ``8x8``; empty if nothing was computed."""
    eager_reason: str | None = None
    """Why it ran without a graph, if it did."""
    number: int = 1
    """Counts the reports of a run from 1: calls of an actor may overtake each other."""
    run_id: int = 0
    """Given to the worker by the scheduler that had it run: reports of an earlier run come to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What a prefill or decode worker is started with."""

    name: str
    model_name: str
    model_folder: str
    dtype: str
    device: str
    load_format: str
    max_model_len: int | None
    max_num_seqs: int
    kv_memory_bytes: int | None
    """Size of the KV pool; None lets the decode worker choose."""
    capture_tokens: tuple[int, ...] | None
    """Token buckets of prefill; None lets the prefill worker choose, up to `max_capture_tokens`."""
    max_capture_tokens: int | None
    """Tokens of the largest bucket, if `capture_tokens` does not say; None: what the device is good for."""
    capture_slots: tuple[int, ...]
    use_graphs: bool
    """False computes every pass without a graph, also on a device that has them."""
    compile_cache_folder: str
    """Where compiled code is kept from one start to the next."""
    num_threads: int
    """CPU threads of torch."""
    workers_per_device: int = 1
    """Workers, this one included, that share its GPU: each holds the weights."""
    pools_per_device: int = 1
    """KV pools that share its GPU."""
    handoff_transport: str = "auto"
    """How pages travel: ``auto``, ``shm``, ``cuda_ipc``, ``gloo`` or ``nccl``."""
    takes_remote_pages: Literal["no", "loopback", "node"] = "no"
    """Where a decode worker listens for prefill workers that send pages: nowhere, at 127.0.0.1, at its node's
    address."""
    decode_share: float = 0.0
    """Share of the time that a prefill worker leaves to decode on the same device."""
    tensor_parallel_size: int = 1
    """Processes that hold a part of the model each, this one, which is rank 0, included."""
    rank_bundles: tuple[int, ...] = ()
    """Of each rank, the bundle of the worker's placement group that it runs in; empty: anywhere on the host."""
    gpus_per_rank: float = 0.0
    """What Ray counts each rank's share of its GPU as."""
    prefill_tensor_parallel_size: int = 1
    """Ranks of the prefill workers, for a decode worker that leaves them memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the other actors need to know of the served model."""

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHandle:
    """How another process reaches a decode worker's KV pages."""

    decode_worker: str
    transport: str
    """What a worker on the same host takes unless told otherwise: ``shm`` or ``cuda_ipc``."""
    address: str
    """Where the pool's shared host memory is: ``/proc/PID/fd/N``. With ``cuda_ipc`` only the epochs lie there."""
    incarnation: int
    """Changes each time the worker's process starts: its pool is another one then."""
    num_pages: int
    """Pages that can be leased, and the scratch page 0 besides."""
    page_size: int
    """Tokens per page."""
    size_bytes: int
    device_memory: str = ""
    """What ``cuda_ipc`` needs to open the pages."""
    device_type: str = "cpu"
    """``cpu`` or ``cuda``: where the pages are."""
    node_id: str = ""
    """Ray's id of the host."""
    endpoint: str = ""
    """``HOST:PORT`` for ``gloo`` and ``nccl``; empty if the worker takes no pages from other hosts."""
    shards: tuple[PoolHandle, ...] = ()
    """Pools of the worker's other ranks, if it has any: each holds equally many KV heads, those of rank 0 first. The
    pages of one id are leased together, and rank 0's pool has their epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkerInfo:
    """What a decode worker says once it is ready."""

    name: str
    model: ModelInfo
    pool: PoolHandle
    max_num_seqs: int
    device: str
    load_seconds: float
    weights_bytes: int
    bucket_seconds: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds of one step over hardly any context, by bucket name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWorkerInfo:
    """What a prefill worker says once it is ready."""

    name: str
    model: ModelInfo
    buckets: tuple[str, ...]
    graph_bytes: int
    """Memory of the static buffers and captured graphs."""
    uses_cuda_graphs: bool
    bucket_seconds: Mapping[str, float]
    """Measured seconds of one replay, by bucket name."""
    device: str
    load_seconds: float
    warmup_seconds: float
    transports: Mapping[str, str] = field(default_factory=dict)
    """How its pages reach each decode worker, by name."""
    node_id: str = ""
    """Ray's id of the host."""
    peak_flops: float | None = None
    """Dense matrix operations per second that its device is good for in its dtype; None: not known."""

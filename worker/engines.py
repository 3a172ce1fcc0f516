"""The engines of a worker: of one process, or of all ranks of a group at once, told by rank 0."""

from __future__ import annotations

from dataclasses import replace

from graphs.buckets import BucketLadder
from graphs.runner import BucketReport
from scheduler.messages import PoolHandle, WorkerConfig
from worker import startup
from worker.decode import DecodeEngine
from worker.kv_pool import KVPool
from worker.model import Model
from worker.parallel.link import ChooseNumPages, Leader, MakePool, MakePrefill, PrepareSteps, together
from worker.prefill import PrefillEngine


def make_prefill(model: Model, config: WorkerConfig, *, node_id: str) -> PrefillEngine:
    """Return the engine of a prefill worker, which has no pool open yet."""
    ladder = startup.choose_ladder(model, config)
    leader = _leader(model)
    if leader is not None:
        # A rank that dropped a bucket would not follow the others.
        ladder = BucketLadder(ladder.capture_tokens, ladder.capture_slots, may_shrink=False)
    command = MakePrefill(
        capture_tokens=ladder.capture_tokens, capture_slots=ladder.capture_slots, node_id=node_id
    )
    with together(leader, command):
        return PrefillEngine(
            config.name,
            model,
            ladder,
            use_graphs=config.use_graphs,
            node_id=node_id,
            handoff_transport=config.handoff_transport,
        )


def make_pool(model: Model, config: WorkerConfig) -> tuple[KVPool, PoolHandle]:
    """Allocate the pages of a decode worker. Raises `ConfigError` if the memory is not there."""
    leader = _leader(model)
    with together(leader, ChooseNumPages()) as others:
        num_pages = startup.choose_num_pages(model, config)
    num_pages = min([num_pages, *others])
    with together(leader, MakePool(num_pages=num_pages)) as shards:
        pool, handle = KVPool.create(
            model.kv_spec,
            name=config.name,
            num_pages=num_pages,
            page_size=startup.page_size(model),
            device=model.device,
        )
    return pool, replace(handle, shards=tuple(shards))


def make_decode(
    model: Model, pool: KVPool, config: WorkerConfig, *, looks_ahead: bool | None = None
) -> tuple[DecodeEngine, tuple[BucketReport, ...]]:
    """Return the engine of a decode worker with every bucket captured, and what each took.

    `looks_ahead` is as for `DecodeEngine`.
    """
    with together(_leader(model), PrepareSteps()):
        engine = DecodeEngine(
            model,
            pool,
            max_num_seqs=config.max_num_seqs,
            use_graphs=config.use_graphs,
            looks_ahead=looks_ahead,
        )
        reports = engine.prepare()
    return engine, reports


def _leader(model: Model) -> Leader | None:
    return None if model.group is None else model.group.leader

"""`purefill serve`: starts Ray and all actors, says what it started, and stops everything again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import psutil

from scheduler.actor import Scheduler, SchedulerConfig
from scheduler.api.app import AppSettings
from scheduler.api.auth import key_digest
from scheduler.api.connections import ConnectionLimits
from scheduler.api.server import ApiServer, ApiServerConfig
from scheduler.cluster import end_orphans, living_nodes, on_this_node, wait_for_places
from scheduler.config import ServeConfig
from scheduler.core import QueueLimits
from scheduler.errors import ConfigError
from scheduler.gpus import plan_gpus
from scheduler.groups import RankPlan, place_groups, plan_groups
from scheduler.host import StopSignal, reserved_port, signals_held, stop_on_signals
from scheduler.journal.settings import JournalConfig
from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    DecodeWorkerInfo,
    PrefillWorkerInfo,
    WorkerConfig,
)
from scheduler.models import ModelFolder, cache_folder, resolve_model
from scheduler.observe.logs import relay_actor_logs, say_on_stderr
from scheduler.observe.traces import check_installed
from scheduler.simulate.calibrate import Client
from scheduler.simulate.measured import measure, write_costs
from scheduler.supervisor import Supervisor
from scheduler.workers import WorkerKind, WorkerTemplate, create_actor, create_worker, place_workers

_LOG = logging.getLogger("purefill")

_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least that Ray takes: tokens travel in messages, KV in the workers' own memory."""

_STOP_TIMEOUT_S = 5.0
"""After this long, processes that should have ended by themselves are killed."""

_SIGNAL_CHECK_S = 0.2
"""A signal waits at most this long for its handler to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningService:
    """A service that is up."""

    url: str
    dashboard_url: str | None
    decode: tuple[DecodeWorkerInfo, ...]
    prefill: tuple[PrefillWorkerInfo, ...]
    scheduler: Any
    """Its actor."""
    api_servers: tuple[Any, ...]
    """Their actors."""


def run_service(config: ServeConfig) -> int:
    """Serve until Ctrl-C or SIGTERM, and finish what runs; return the exit code.

    A second signal ends the wait for that. Raises `ConfigError` if it cannot start.
    """
    say_on_stderr(_LOG, config.log_format)
    with stop_on_signals():
        try:
            started = time.perf_counter()
            _check_files(config)
            if config.otlp_endpoint is not None:
                check_installed()
            with (
                reserved_port(config.host, config.port) as port,
                _reserved_metrics_port(config, port) as other,
            ):
                config = config.model_copy(update={"port": port, "metrics_port": other})
                folder = resolve_model(config.model, load_format=config.load_format, progress=_say)
                with start_service(config, folder) as service:
                    if config.write_cost_model is not None:
                        _write_cost_model(Path(config.write_cost_model), config, service)
                    _print_summary(config, folder, service, time.perf_counter() - started)
                    supervisor = Supervisor(
                        service.scheduler, service.api_servers, hang_s=config.watchdog_timeout_s, say=_say
                    )
                    try:
                        # Not signal.pause(): it sleeps on if the signal came just before, or to another thread.
                        while True:
                            time.sleep(_SIGNAL_CHECK_S)
                            with signals_held():
                                supervisor.look(time.monotonic())
                    except StopSignal:
                        _drain(service, config.drain_timeout_s)
                        raise
        except StopSignal:
            _say("stopped")
            return 0


def _check_files(config: ServeConfig) -> None:
    """Raise `ConfigError` if a file cannot be written, rather than after the model is loaded."""
    for name in ("request_log", "write_cost_model"):
        file = getattr(config, name)
        try:
            if file is not None:
                Path(file).open("a").close()
        except OSError as error:
            raise ConfigError(
                f"{name} must be a file that can be written, got {file}: {error.strerror}"
            ) from error


def _write_cost_model(path: Path, config: ServeConfig, service: RunningService) -> None:
    decode, prefill = service.decode[0], service.prefill[0]
    ranks = config.num_ranks
    num_ranks = len(service.decode) * ranks["decode"] + len(service.prefill) * ranks["prefill"]
    client = Client(
        service.url,
        model=prefill.model.name,
        vocab_size=prefill.model.vocab_size,
        api_key=next(iter(config.api_key), None),
    )
    _say("measuring what requests take, for the cost model")
    costs = measure(
        client.ask,
        prefill,
        decode,
        max_batch_requests=config.max_batch_requests,
        max_batch_tokens=config.max_batch_tokens,
        takes_whole_groups=config.batch_policy == "fixed",
        is_device_shared=decode.device == "cpu" or num_ranks > _num_gpus(),
    )
    write_costs(path, costs)
    _say(f"wrote the cost model to {path}")


def _num_gpus() -> int:
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get("GPU", 0))


@contextmanager
def _reserved_metrics_port(config: ServeConfig, port: int) -> Iterator[int | None]:
    """Keep a port for the metrics, and yield it; None if they are at the API's own."""
    if config.metrics_port is None or config.metrics_port == port:
        yield None
    else:
        with reserved_port(config.host, config.metrics_port) as reserved:
            yield reserved


def _drain(service: RunningService, timeout_s: float) -> None:
    """Let what runs come to its end, for `timeout_s` at most, or until a signal."""
    import ray

    if timeout_s == 0:
        return
    _say(f"stopping; what runs has {timeout_s:g} s to finish, or until another signal")
    pending = [server.drain.remote(timeout_s) for server in service.api_servers]
    ends_at = time.monotonic() + timeout_s + _SIGNAL_CHECK_S
    with signals_held() as came:
        while pending and not came and time.monotonic() < ends_at:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=_SIGNAL_CHECK_S)


@contextmanager
def start_service(config: ServeConfig, folder: ModelFolder) -> Iterator[RunningService]:
    """Start Ray (or join a cluster) and all actors; stop them all on the way out."""
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    actors: list[Any] = []
    try:
        context = _init_ray(config)
        # Ray puts a handler of SIGTERM in place that prints a stack and aborts.
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield _start_actors(config, folder, context.dashboard_url, actors)
    finally:
        # The dashboard's own children outlive it for a moment: they must not outlive the service.
        processes = psutil.Process().children(recursive=True)
        _stop_actors(actors)
        ray.shutdown()
        _, alive = psutil.wait_procs(processes, timeout=_STOP_TIMEOUT_S)
        for process in alive:
            process.kill()


def _init_ray(config: ServeConfig) -> Any:
    import ray

    if config.ray_address is None:
        _say("starting Ray")
        options: dict[str, Any] = {
            # "local" never joins a cluster that happens to run here.
            "address": "local",
            "include_dashboard": True,
            "dashboard_port": config.dashboard_port or None,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
    else:
        _say(f"joining Ray at {config.ray_address}")
        options = {"address": config.ray_address}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(namespace=RAY_NAMESPACE, logging_level=logging.ERROR, **options)
        if config.log_format == "json":
            relay_actor_logs()
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has put its own in place.
        return context
    except (ConnectionError, ValueError, RuntimeError) as error:
        hint = "; a cluster that wants a token needs RAY_AUTH_MODE=token here" if config.ray_address else ""
        raise ConfigError(f"Ray cannot be started or joined: {error}{hint}") from error


def _start_actors(
    config: ServeConfig, folder: ModelFolder, dashboard_url: str | None, actors: list[Any]
) -> RunningService:
    """Start every actor, in the order in which they need each other; append each to `actors` at once."""
    pinned: dict[str, Any] = {}
    if config.ray_address is not None:
        end_orphans()
        pinned = on_this_node()
    num_gpus = _num_usable_gpus(config)
    ranks = plan_groups(config, num_gpus, num_nodes=len(living_nodes()))
    template = _worker_template(config, folder, num_gpus, ranks)
    places = _places(config, template, ranks)
    decode_actors = _create_workers("decode", config.decode_workers, template, places, actors)
    prefill_actors = _create_workers("prefill", config.prefill_workers, template, places, actors)
    _say(f"loading {folder.name} into {len(decode_actors)} decode and {len(prefill_actors)} prefill workers")
    if not 0 < template.num_gpus < 1:
        # Workers that share a GPU load in turn, since a pool takes what the others leave. What this raises, the
        # calls of `load` below raise again.
        for actor in prefill_actors:
            actor.load_model.remote()
    pools = tuple(_get([actor.make_pool.remote() for actor in decode_actors]))
    _say("warming up the prefill buckets and decode steps")
    loading = [actor.load.remote() for actor in decode_actors]
    loading += [actor.load.remote(pools) for actor in prefill_actors]
    infos = _get(loading)
    decode, prefill = tuple(infos[: len(decode_actors)]), tuple(infos[len(decode_actors) :])
    scheduler = _create(
        Scheduler,
        SCHEDULER_NAME,
        actors,
        SchedulerConfig(
            batch_policy=config.batch_policy,
            max_batch_requests=config.max_batch_requests,
            batch_timeout_s=config.batch_timeout_ms / 1000,
            max_batch_tokens=config.max_batch_tokens,
            queue_limits=QueueLimits(
                max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens
            ),
            worker_template=template,
            watchdog_timeout_s=config.watchdog_timeout_s,
            # Actors may have another working directory.
            request_log=config.request_log and str(Path(config.request_log).resolve()),
            log_level=config.log_level,
            log_format=config.log_format,
            model=decode[0].model.name,
        ),
        max_restarts=-1,
        **pinned,
    )
    _get([scheduler.start.remote(decode, prefill)])
    servers = [
        _create(
            ApiServer,
            f"api-{i}",
            actors,
            _api_config(config, folder, decode[0], f"api-{i}"),
            max_restarts=-1,
            **pinned,
        )
        for i in range(config.api_servers)
    ]
    urls = _get([server.start.remote() for server in servers])
    return RunningService(
        url=urls[0],
        dashboard_url=f"http://{dashboard_url}" if dashboard_url else None,
        decode=decode,
        prefill=prefill,
        scheduler=scheduler,
        api_servers=tuple(servers),
    )


def _num_usable_gpus(config: ServeConfig) -> int:
    """Return how many GPUs the workers share, 0 if they run on CPUs.

    Raises `ConfigError` if GPUs are asked for and there are none.
    """
    num_gpus = 0 if config.device == "cpu" else _num_free_gpus()
    if num_gpus == 0 and config.device == "cuda":
        raise ConfigError("device must be cpu or auto, Ray sees no free GPU here, got cuda")
    return num_gpus


def _num_free_gpus() -> int:
    import ray

    resources: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return int(resources.get("GPU", 0))


def _create(actor_class: type, name: str, actors: list[Any], config: Any, **options: Any) -> Any:
    actor = create_actor(actor_class, name, config, **options)
    actors.append(actor)
    return actor


def _create_workers(
    kind: WorkerKind,
    count: int,
    template: WorkerTemplate,
    places: Mapping[str, Mapping[str, Any]],
    actors: list[Any],
) -> list[Any]:
    workers = []
    for name in [f"{kind}-{i}" for i in range(count)]:
        actor = create_worker(kind, name, template, **places.get(name, {}))
        actors.append(actor)
        workers.append(actor)
    return workers


def _places(
    config: ServeConfig, template: WorkerTemplate, ranks: RankPlan | None
) -> dict[str, dict[str, Any]]:
    """Reserve places for workers where that is of use; return the options of each worker's `create_worker`."""
    if ranks is not None:
        return place_groups(ranks, has_gpus=template.num_gpus > 0)
    if template.resources or max(config.num_ranks.values()) > 1:
        return {}
    strategies = place_workers(config.prefill_workers, config.decode_workers, template.num_gpus)
    return {name: {"scheduling_strategy": strategy} for name, strategy in strategies.items()}


def _worker_template(
    config: ServeConfig, folder: ModelFolder, num_gpus: int, ranks: RankPlan | None
) -> WorkerTemplate:
    resources: dict[WorkerKind, dict[str, float]] = {}
    if config.prefill_resources:
        resources = {"prefill": config.prefill_resources, "decode": config.decode_resources}
        wait_for_places({"prefill": config.prefill_workers, "decode": config.decode_workers}, resources, _say)
    graphs, gpus = config.graph_config, None
    if num_gpus:
        gpus = plan_gpus(
            num_gpus, prefill_workers=config.prefill_workers, decode_workers=config.decode_workers
        )
        gpus = gpus if ranks is None else ranks.gpus
    worker = WorkerConfig(
        name="",
        model_name=folder.name,
        model_folder=str(folder.path),
        dtype=config.dtype,
        device="cpu" if gpus is None else "cuda",
        load_format=config.load_format,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_memory_bytes=config.kv_memory,
        capture_tokens=graphs.capture_tokens,
        max_capture_tokens=config.max_capture_tokens,
        capture_slots=graphs.capture_slots or (config.max_batch_requests,),
        use_graphs=graphs.use_cudagraph,
        compile_cache_folder=str(cache_folder() / "compiled"),
        num_threads=os.cpu_count() or 1,
        workers_per_device=1 if gpus is None else gpus.workers_per_gpu,
        pools_per_device=1 if gpus is None else gpus.pools_per_gpu,
        handoff_transport=config.handoff_transport,
        takes_remote_pages=_takes_remote_pages(config),
        # With a GPU each, prefill is in nobody's way.
        decode_share=config.decode_share if gpus is None or gpus.workers_per_gpu > 1 else 0.0,
        prefill_tensor_parallel_size=config.num_ranks["prefill"],
    )
    return WorkerTemplate(
        config=worker,
        num_gpus=0.0 if gpus is None else gpus.gpus_per_worker,
        num_ranks=config.num_ranks,
        resources=resources,
    )


def _takes_remote_pages(config: ServeConfig) -> Literal["no", "loopback", "node"]:
    if max(config.num_ranks.values()) > 1:
        return "no"
    if config.ray_address:
        return "node"  # A cluster may get further hosts at any time.
    return "loopback" if config.handoff_transport in ("gloo", "nccl") else "no"


def _api_config(
    config: ServeConfig, folder: ModelFolder, decode: DecodeWorkerInfo, name: str
) -> ApiServerConfig:
    return ApiServerConfig(
        name=name,
        host=config.host,
        port=config.port,
        model_folder=str(folder.path),
        model=decode.model,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        settings=AppSettings(
            model_names=(decode.model.name,),
            # What goes to actors, Ray keeps: no key is in it.
            api_keys=tuple(map(key_digest, config.api_key)),
            max_body_bytes=config.max_body_size,
            client_timeout_s=config.client_timeout_s,
            max_concurrent_requests=config.max_concurrent_requests,
            request_timeout_s=config.request_timeout_s,
            cors_origins=config.cors_origin,
            log_prompts=config.log_prompts,
            prefix_cache=config.prefix_cache,
            serves_metrics=config.metrics_port is None,
        ),
        connections=ConnectionLimits(
            max_connections=config.max_connections,
            max_head_bytes=config.max_header_size,
            client_timeout_s=config.client_timeout_s,
        ),
        # Actors may have another working directory.
        tls_cert_file=config.tls_cert_file and str(Path(config.tls_cert_file).resolve()),
        tls_key_file=config.tls_key_file and str(Path(config.tls_key_file).resolve()),
        journal=JournalConfig(
            url=config.journal, ttl_s=config.journal_ttl_s, on_failure=config.journal_on_failure
        ),
        log_level=config.log_level,
        log_format=config.log_format,
        metrics_port=config.metrics_port,
        otlp_endpoint=config.otlp_endpoint,
    )


def _get(refs: list[Any]) -> list[Any]:
    """Wait for actors' answers. Raises the `ConfigError` of the first that refuses, without Ray's traceback."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        with signals_held() as came:
            pending = refs
            while pending and not came:
                done, pending = ray.wait(pending, num_returns=1, timeout=_SIGNAL_CHECK_S)
                ray.get(done)
        return list(ray.get(refs))
    except RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise ConfigError(str(error.cause)) from error
        raise
    except RayActorError as error:
        raise ConfigError(f"a process died while it started: {error}") from error


def _stop_actors(actors: list[Any]) -> None:
    """End all actors: those that can, in their own way first, so that open connections get an answer."""
    import ray
    from ray.exceptions import RayError

    if not actors:
        return
    stopping = [actor.stop.remote() for actor in reversed(actors) if hasattr(actor, "stop")]
    with suppress(RayError):
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_TIMEOUT_S)
    for actor in reversed(actors):
        ray.kill(actor)


def _say(line: str) -> None:
    _LOG.info(line)


def _graphs(info: PrefillWorkerInfo) -> str:
    return "CUDA graphs and static buffers" if info.uses_cuda_graphs else "static buffers"


def _transports(service: RunningService) -> str:
    """Return how pages travel, and where more ways than one, how many pairs of workers use each."""
    ways = Counter(way for info in service.prefill for way in info.transports.values())
    return next(iter(ways)) if len(ways) == 1 else ", ".join(f"{way} ({n} pairs)" for way, n in ways.items())


def _of_ranks(num_ranks: int) -> str:
    return f" of {num_ranks} ranks" if num_ranks > 1 else ""


def _with_port(url: str, port: int | None) -> str:
    return url if port is None else f"{url.rpartition(':')[0]}:{port}"


def _print_summary(config: ServeConfig, folder: ModelFolder, service: RunningService, seconds: float) -> None:
    """Print what runs, in a few lines."""
    decode, prefill = service.decode[0], service.prefill[0]
    model, pool = decode.model, decode.pool
    pool_bytes = pool.size_bytes * (1 + len(pool.shards))
    tokens = sorted({int(name.split("x")[0]) for name in prefill.buckets})
    slots = sorted({int(name.split("x")[1]) for name in prefill.buckets})
    mib, ranks = 1024 * 1024, config.num_ranks
    unit = "rank" if ranks["decode"] > 1 else "worker"
    rows = {
        "model": f"{model.name}, {model.num_parameters / 1e6:.0f} M parameters, {model.dtype} on "
        f"{decode.device}, {decode.weights_bytes / mib:.0f} MiB per decode {unit}, context {model.max_model_len}",
        "batches": f"{config.batch_policy}, {config.max_batch_requests} requests or {config.batch_timeout_ms:g} ms",
        "buckets": f"{' '.join(map(str, tokens))} tokens x {' '.join(map(str, slots))} slots, "
        f"{prefill.graph_bytes / mib:.1f} MiB of {_graphs(prefill)}, warm in {prefill.warmup_seconds:.1f} s",
        "KV pages": f"{pool.num_pages - 1} of {pool.page_size} tokens per decode worker, "
        f"{pool_bytes / mib:.0f} MiB by {_transports(service)}, at most {decode.max_num_seqs} sequences",
        "actors": f"{config.api_servers} ApiServer, 1 Scheduler, {len(service.prefill)} PrefillWorker"
        f"{_of_ranks(ranks['prefill'])}, {len(service.decode)} DecodeWorker{_of_ranks(ranks['decode'])}",
        "API": f"{service.url}/v1/completions",
        "metrics": f"{_with_port(service.url, config.metrics_port)}/metrics",
        # Ray asks for the token of its cluster, which a browser does not have yet.
        "dashboard": f"{service.dashboard_url} (token: ray get-auth-token)"
        if service.dashboard_url
        else "none",
    }
    ready = f"version {version('purefill')} is ready after {seconds:.1f} s"
    if config.log_format == "json":
        _LOG.info(ready, extra={"fields": rows})
        return
    _say(ready)
    for name, value in rows.items():
        print(f"  {name:<10}{value}", file=sys.stderr, flush=True)

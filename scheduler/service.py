"""`purefill serve`: starts Ray and all actors, says what it started, and stops everything again."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from scheduler.actor import Scheduler
from scheduler.actor_settings import api_server_config, scheduler_config, worker_template
from scheduler.api.server import ApiServer
from scheduler.cluster import end_orphans, living_nodes, on_this_node, wait_for_places
from scheduler.config import ServeConfig
from scheduler.errors import ConfigError
from scheduler.gpus import GpuPlan, plan_gpus
from scheduler.groups import RankPlan, place_groups, plan_groups
from scheduler.host import StopSignal, reserved_port, signals_held, stop_on_signals
from scheduler.messages import RAY_NAMESPACE, SCHEDULER_NAME
from scheduler.models import ModelFolder, resolve_model
from scheduler.observe.logs import relay_actor_logs, say_on_stderr
from scheduler.observe.traces import check_installed
from scheduler.running import RunningService, print_summary
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
                    print_summary(config, service, time.perf_counter() - started)
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
    resources: dict[WorkerKind, dict[str, float]] = {}
    if config.prefill_resources:
        resources = {"prefill": config.prefill_resources, "decode": config.decode_resources}
        wait_for_places({"prefill": config.prefill_workers, "decode": config.decode_workers}, resources, _say)
    template = worker_template(config, folder, resources, _plan_gpus(config, num_gpus, ranks))
    places = _places(config, template, ranks)
    decode_actors = _create_workers("decode", config.decode_workers, template, places, actors)
    prefill_actors = _create_workers("prefill", config.prefill_workers, template, places, actors)
    _say(f"loading {folder.name} into {len(decode_actors)} decode and {len(prefill_actors)} prefill workers")
    # Workers that share a GPU load in turn, since a pool takes what the others leave. What is raised here, the calls
    # of `load` below raise again.
    share_gpu = 0 < template.num_gpus < 1
    for actor in prefill_actors:
        (actor.import_modules if share_gpu else actor.load_model).remote()
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
        scheduler_config(config, template, decode[0].model.name),
        max_restarts=-1,
        **pinned,
    )
    _get([scheduler.start.remote(decode, prefill)])
    servers = [
        _create(
            ApiServer,
            f"api-{i}",
            actors,
            api_server_config(config, folder, decode[0].model, f"api-{i}"),
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
    num_gpus = 0 if config.device == "cpu" else _num_gpus(free=True)
    if num_gpus == 0 and config.device == "cuda":
        raise ConfigError("device must be cpu or auto, Ray sees no free GPU here, got cuda")
    return num_gpus


def _plan_gpus(config: ServeConfig, num_gpus: int, ranks: RankPlan | None) -> GpuPlan | None:
    """Return how the workers share the GPUs, None if they run on CPUs."""
    if num_gpus == 0:
        return None
    if ranks is not None:
        return ranks.gpus
    return plan_gpus(num_gpus, prefill_workers=config.prefill_workers, decode_workers=config.decode_workers)


def _num_gpus(*, free: bool = False) -> int:
    """Return how many GPUs the cluster has, or has `free`."""
    import ray

    ask = ray.available_resources if free else ray.cluster_resources
    resources: dict[str, float] = ask()  # type: ignore[no-untyped-call]
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

"""What the actors of a service are started with, made of the service's options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from scheduler.actor import SchedulerConfig
from scheduler.api.app import AppSettings
from scheduler.api.auth import key_digest
from scheduler.api.connections import ConnectionLimits
from scheduler.api.server import ApiServerConfig
from scheduler.config import ServeConfig
from scheduler.core import QueueLimits
from scheduler.gpus import GpuPlan
from scheduler.journal.settings import JournalConfig
from scheduler.messages import ModelInfo, WorkerConfig
from scheduler.models import ModelFolder, cache_folder
from scheduler.workers import WorkerKind, WorkerTemplate


def worker_template(
    config: ServeConfig,
    folder: ModelFolder,
    resources: Mapping[WorkerKind, Mapping[str, float]],
    gpus: GpuPlan | None,
) -> WorkerTemplate:
    """Return what workers are started with. `resources` are those that say where they run; `gpus`: None on CPUs."""
    graphs = config.graph_config
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


def scheduler_config(config: ServeConfig, template: WorkerTemplate, model_name: str) -> SchedulerConfig:
    """Return what the Scheduler is started with. `template`: what it starts further workers with."""
    return SchedulerConfig(
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
        model=model_name,
    )


def api_server_config(
    config: ServeConfig, folder: ModelFolder, model: ModelInfo, name: str
) -> ApiServerConfig:
    """Return what the ApiServer `name` is started with."""
    return ApiServerConfig(
        name=name,
        host=config.host,
        port=config.port,
        model_folder=str(folder.path),
        model=model,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        settings=AppSettings(
            model_names=(model.name,),
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

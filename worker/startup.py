"""What both kinds of worker do when they start: threads, device, model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from graphs.buckets import BucketLadder, default_token_ladder
from graphs.runner import BucketReport
from scheduler.errors import ConfigError
from scheduler.messages import WorkerConfig
from worker.model import Model, ModelSource, load_model

_LOG = logging.getLogger(__name__)
CPU_PAGE_SIZE = 32
"""Tokens per KV page on the CPU: small pages waste little of a small memory."""
CUDA_PAGE_SIZE = 256
"""Tokens per KV page on a GPU: the size that torch's paged attention takes."""
_MAX_CAPTURE_TOKENS = {"cpu": 512, "cuda": 8192}
_LEAST_CUDA_CAPTURE_TOKENS = 512


def load(config: WorkerConfig) -> Model:
    """Set up this process and load the model. Raises `ConfigError` if the model cannot be served."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    # Progress bars of several workers would overwrite each other.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(config.num_threads)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", config.compile_cache_folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(config.compile_cache_folder) / "triton"))
    return load_model(
        ModelSource(
            name=config.model_name,
            folder=Path(config.model_folder),
            dtype=config.dtype,
            load_format=config.load_format,
            device=choose_device(config.device),
            max_model_len=config.max_model_len,
        )
    )


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for a configured device.

    Raises `ConfigError` for CUDA: prefill runs there, but its pages cannot be handed to a decode worker yet.
    """
    if device == "cuda":
        raise ConfigError("device cuda is not supported yet: this version serves from the CPU")
    return "cpu"


def choose_ladder(model: Model, config: WorkerConfig) -> BucketLadder:
    """Return the prefill buckets: the configured ones, or a ladder that suits the device and its free memory."""
    if config.capture_tokens is not None:
        return BucketLadder(config.capture_tokens, config.capture_slots)
    max_tokens = config.max_capture_tokens
    if max_tokens is None:
        device = model.device.type
        # One pass never holds more than a whole context in every slot.
        max_tokens = min(_MAX_CAPTURE_TOKENS[device], max(config.capture_slots) * model.info.max_model_len)
        if device == "cuda":
            free, _ = torch.cuda.mem_get_info(model.device)
            while max_tokens > _LEAST_CUDA_CAPTURE_TOKENS and max_tokens * model.activation_bytes > free // 2:
                max_tokens //= 2
    return BucketLadder(default_token_ladder(max_tokens), config.capture_slots)


def log_buckets(name: str, reports: Sequence[BucketReport]) -> None:
    """Log what each bucket took."""
    for report in reports:
        _LOG.info(
            "%s: bucket %s ready in %.2f s, %.1f MiB, %.2f ms a full batch",
            name,
            report.bucket,
            report.prepare_seconds,
            report.size_bytes / 2**20,
            report.batch_seconds * 1000,
        )


def choose_num_pages(model: Model, config: WorkerConfig) -> int:
    """Return how many pages fit the configured KV memory, the scratch page included.

    Without a setting: what `max_num_seqs` sequences of full length need, at most 1 GiB and at most a quarter of
    the memory that is free. Raises `ConfigError` if not even one sequence of one page fits.
    """
    page_bytes = model.kv_spec.pool_bytes(1, CPU_PAGE_SIZE)
    size_bytes = config.kv_memory_bytes
    if size_bytes is None:
        wanted = page_bytes * (1 + config.max_num_seqs * -(-model.info.max_model_len // CPU_PAGE_SIZE))
        size_bytes = min(wanted, 1 << 30, _available_memory() // 4)
    num_pages = size_bytes // page_bytes
    if num_pages < 2:
        raise ConfigError(f"kv_memory must be >= {2 * page_bytes} bytes, two pages, got {size_bytes}")
    return num_pages


def _available_memory() -> int:
    """Return the bytes of memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("kv_memory: cannot tell how much memory is free; give a size")

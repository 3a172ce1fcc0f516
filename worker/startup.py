"""What both kinds of worker do when they start: threads, device, model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging as transformers_logging

from graphs.buckets import BucketLadder, default_token_ladder
from graphs.runner import BucketReport
from scheduler.errors import ConfigError
from scheduler.messages import WorkerConfig
from worker.model import Model, ModelSource, load_model

if TYPE_CHECKING:
    from worker.parallel.group import ShardGroup

_LOG = logging.getLogger(__name__)
CPU_PAGE_SIZE = 32
"""Tokens per KV page on the CPU: small pages waste little of a small memory."""
CUDA_PAGE_SIZE = 64
"""Tokens per KV page on a GPU: what the decode kernel reads at once, so that a page is looked up once."""
_MAX_CAPTURE_TOKENS = {"cpu": 512, "cuda": 8192}
_LEAST_CUDA_CAPTURE_TOKENS = 512
_CUDA_CONTEXT_BYTES = 1 << 30
"""What a process takes of a GPU besides tensors: its context, kernels, cuBLAS' workspace, graphs' nodes."""
_CUDA_SPARE_SHARE = 0.04
"""Share of a GPU's memory that nobody plans with."""
_LOGITS_COPIES = 8
"""Tensors of the logits' size in float32 that choosing a token may need at once; sorting takes the most."""


def load(config: WorkerConfig, group: ShardGroup | None = None) -> Model:
    """Set up this process and load the model, or its part of it. Raises `ConfigError` if it cannot be served."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    # Progress bars of several workers would overwrite each other.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(max(1, config.num_threads // config.tensor_parallel_size))
    _set_caches(config)
    model = load_model(
        ModelSource(
            name=config.model_name,
            folder=Path(config.model_folder),
            dtype=config.dtype,
            load_format=config.load_format,
            device=choose_device(config.device),
            max_model_len=config.max_model_len,
        ),
        group,
    )
    if model.device.type == "cuda":
        # What loading took and left is not this process's to keep: the workers share the GPU.
        torch.cuda.empty_cache()
    return model


def import_compiler(config: WorkerConfig) -> None:
    """Import what compiling a model for a GPU needs, and have the processes started that compile its kernels."""
    # They are told of the caches when they start.
    _set_caches(config)
    import torch._inductor.compile_fx  # noqa: F401

    import worker.compiled
    import worker.triton_decode
    import worker.triton_kernels  # noqa: F401


def _set_caches(config: WorkerConfig) -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", config.compile_cache_folder)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(config.compile_cache_folder) / "triton"))


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda`` for a configured device; ``auto`` is what the machine has.

    Raises `ConfigError` for CUDA where torch finds none.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        kind = "a torch without CUDA" if torch.version.cuda is None else "no GPU that torch can use"
        raise ConfigError(f"device must be cpu, this machine has {kind}, got cuda")
    return device


def choose_ladder(model: Model, config: WorkerConfig) -> BucketLadder:
    """Return the prefill buckets: the configured ones, or a ladder that suits the device and its free memory."""
    if config.capture_tokens is not None:
        return BucketLadder(config.capture_tokens, config.capture_slots)
    max_tokens = config.max_capture_tokens
    if max_tokens is None:
        device = model.device.type
        # One pass never holds more than a whole context in every slot.
        max_tokens = _max_capture_tokens(model, config)
        if device == "cuda":
            free, _ = torch.cuda.mem_get_info(model.device)
            while max_tokens > _LEAST_CUDA_CAPTURE_TOKENS and max_tokens * model.activation_bytes > free // 2:
                max_tokens //= 2
    return BucketLadder(default_token_ladder(max_tokens), config.capture_slots)


def _max_capture_tokens(model: Model, config: WorkerConfig) -> int:
    """Return the tokens of the largest prefill bucket, if memory is no object."""
    if config.capture_tokens is not None:
        return max(config.capture_tokens)
    whole_contexts = max(config.capture_slots) * model.info.max_model_len
    return config.max_capture_tokens or min(_MAX_CAPTURE_TOKENS[model.device.type], whole_contexts)


def log_buckets(name: str, model: Model, reports: Sequence[BucketReport]) -> None:
    """Log what each bucket of a worker took on a GPU; on the CPU there is little to say."""
    for report in reports if model.device.type == "cuda" else ():
        _LOG.info(
            "%s: bucket %s ready in %.2f s, %.1f MiB, %.2f ms a full batch",
            name,
            report.bucket,
            report.prepare_seconds,
            report.size_bytes / 2**20,
            report.batch_seconds * 1000,
        )


def page_size(model: Model) -> int:
    """Return the tokens per KV page that suit the model's device."""
    return CUDA_PAGE_SIZE if model.device.type == "cuda" else CPU_PAGE_SIZE


def choose_num_pages(model: Model, config: WorkerConfig) -> int:
    """Return how many pages fit the configured KV memory, the scratch page included.

    Without a setting: what `max_num_seqs` sequences of full length need, and at most, on a CPU, 1 GiB and a quarter
    of the memory that is free; on a GPU, about what the workers that share it leave. Raises `ConfigError` if not even
    one sequence of one page fits.
    """
    tokens = page_size(model)
    page_bytes = model.kv_spec.pool_bytes(1, tokens)
    size_bytes = config.kv_memory_bytes
    if size_bytes is not None:
        size_bytes //= config.tensor_parallel_size  # It is that of all ranks.
    else:
        wanted = page_bytes * (1 + config.max_num_seqs * -(-model.info.max_model_len // tokens))
        if model.device.type == "cuda":
            fitting = page_bytes * steady_count(choose_cuda_kv_bytes(model, config) // page_bytes)
            size_bytes = min(wanted, fitting)
        else:
            size_bytes = min(wanted, 1 << 30, _available_memory() // 4)
    num_pages = size_bytes // page_bytes
    if num_pages < 2:
        ranks = config.tensor_parallel_size
        raise ConfigError(
            f"kv_memory must be >= {2 * page_bytes * ranks} bytes, two pages"
            f"{f' of {ranks} ranks' if ranks > 1 else ''}, got {config.kv_memory_bytes or size_bytes * ranks}"
        )
    return num_pages


def steady_count(num_pages: int) -> int:
    """Return `num_pages` rounded down to seven significant bits.

    A compiled pass holds the pool's size, and the next start finds it in the cache if the size is the same then. The
    memory that is free differs by a little from start to start.
    """
    spare_bits = max(num_pages.bit_length() - 7, 0)
    return num_pages >> spare_bits << spare_bits


def choose_cuda_kv_bytes(model: Model, config: WorkerConfig) -> int:
    """Return the bytes of a GPU that a pool may take once this worker has loaded the model.

    The weights of the workers that come later, what their passes and this one's need, and a little to spare are
    left. Raises `ConfigError` if nothing would be.
    """
    free, total = torch.cuda.mem_get_info(model.device)
    logits_bytes = 4 * _LOGITS_COPIES * model.info.vocab_size
    decode_bytes = config.max_num_seqs * (logits_bytes + model.activation_bytes)
    # A prefill worker plans with half of what it finds.
    prefill_bytes = 2 * _max_capture_tokens(model, config) * model.activation_bytes
    prefill_bytes = min(prefill_bytes, total // 8) + max(config.capture_slots) * logits_bytes
    others = config.workers_per_device - config.pools_per_device
    weights_bytes = model.weights_bytes * model.num_ranks // config.prefill_tensor_parallel_size
    later_bytes = others * (weights_bytes + prefill_bytes + _CUDA_CONTEXT_BYTES)
    own_bytes = config.pools_per_device * decode_bytes
    left = free - later_bytes - own_bytes - int(_CUDA_SPARE_SHARE * total)
    if config.pools_per_device > 1:
        # The other pools' workers load at the same time: plan as if none of them had taken anything yet.
        each = model.weights_bytes + decode_bytes + _CUDA_CONTEXT_BYTES
        spare = int(_CUDA_SPARE_SHARE * total)
        left = min(left, (total - later_bytes - spare) // config.pools_per_device - each)
    if left <= 0:
        raise ConfigError(
            f"kv_memory: {free} of {total} bytes of the GPU are free, and {config.workers_per_device} workers "
            f"on it need {free - left}: give a smaller model, or more GPUs"
        )
    return left


def _available_memory() -> int:
    """Return the bytes of memory that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("kv_memory: cannot tell how much memory is free; give a size")

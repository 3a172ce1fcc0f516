"""What both kinds of worker do when they start: threads, device, model."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from scheduler.errors import ConfigError
from scheduler.messages import WorkerConfig
from worker.model import Model, ModelSource, load_model

CPU_PAGE_SIZE = 32
"""Tokens per KV page on the CPU: small pages waste little of a small memory."""


def load(config: WorkerConfig) -> Model:
    """Set up this process and load the model. Raises `ConfigError` if the model cannot be served."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    # Progress bars of several workers would overwrite each other.
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(config.num_threads)
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

    Raises `ConfigError` for CUDA: its graphs are not captured yet, and it must not run eagerly in silence.
    """
    if device == "cuda":
        raise ConfigError("device cuda is not supported yet: this version runs on the CPU")
    return "cpu"


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

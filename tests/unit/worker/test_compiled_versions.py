"""How often a model is compiled. Its graphs are made, but neither compiled nor run."""

from __future__ import annotations

import pytest
import torch

import worker.compiled
from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch
from tests.unit.worker.tiny_models import FAMILIES, LoadTiny
from worker.kv_pool import KVPool

# What inductor imports uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")


@pytest.mark.usefixtures("unfused")
def test_one_version_serves_buckets_of_all_sizes(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        versions.append(graph)
        return lambda *_: (torch.zeros(1),)

    monkeypatch.setattr(
        worker.compiled,
        "compile_forward",
        lambda function: torch.compile(function, fullgraph=True, backend=backend),
    )
    model, _ = load_tiny(FAMILIES["qwen3"])
    # A pool that is not on the CPU, so that the pass is the one that is captured.
    pool = KVPool.on_device(model.kv_spec, num_pages=4, page_size=16, device=torch.device("meta"))
    for bucket in (Bucket(64, 8), Bucket(32, 8), Bucket(64, 4), Bucket(8, 8), Bucket(2, 2)):
        layout = BatchLayout(bucket=bucket, pages_per_slot=4, page_size=16)
        with torch.inference_mode():
            model.compiled_logits(BatchInputs.of(layout, HostBatch(layout).tensor), pool)
    assert len(versions) == 1

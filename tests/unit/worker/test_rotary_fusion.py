"""Which families' rotary embeddings become one kernel. Their graphs are made, but not compiled."""

from __future__ import annotations

import pytest
import torch

import worker.compiled
from graphs.buckets import Bucket
from graphs.layout import BatchInputs, BatchLayout, HostBatch
from tests.unit.worker.tiny_models import FAMILIES, LoadTiny
from worker.kv_pool import KVPool
from worker.rotary_fusion import fuse_rotations

# What inductor imports uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")


class FusedError(Exception):
    """Ends the compilation: carries how many rotations were fused."""


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen2", "qwen3", "mistral_window", "phi3", "gemma", "gemma2", "gemma3"],
)
def test_the_rotations_of_all_layers_are_fused(
    family: str, load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fuse_and_stop(graph: torch.fx.Graph) -> int:
        raise FusedError(fuse_rotations(graph))

    monkeypatch.setattr(worker.compiled, "fuse_rotations", fuse_and_stop)
    model, _ = load_tiny(FAMILIES[family])
    # A pool that is not on the CPU, so that the pass is the one that is captured.
    pool = KVPool.on_device(model.kv_spec, num_pages=4, page_size=16, device=torch.device("meta"))
    layout = BatchLayout(bucket=Bucket(32, 2), pages_per_slot=4, page_size=16)
    inputs = BatchInputs.of(layout, HostBatch(layout).tensor)
    with torch.inference_mode(), pytest.raises(Exception, match="FusedError: 3"):
        model.compiled_logits(inputs, pool)

"""How often a model is compiled. Its graphs are made, but neither compiled nor run."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from graphs.buckets import BucketLadder, Ladder, StepLadder, default_token_ladder
from graphs.layout import BatchInputs, BatchLayout, HostBatch
from tests.unit.worker.tiny_models import FAMILIES, VOCAB_SIZE, LoadTiny
from worker.compiled import compile_choice
from worker.kv_pool import KVPool
from worker.sampling import CHOICES, COMPILABLE_CHOICES

# What inductor imports uses torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows with each version: whether garbage is collected while it is compiled."""
    compiled: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(gc.isenabled())
        return lambda *_: (torch.zeros(1),)

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: real(function, fullgraph=True, backend=backend)
    )
    return compiled


def inputs_of(ladder: Ladder) -> list[BatchInputs]:
    layouts = [BatchLayout(bucket=bucket, pages_per_slot=4, page_size=16) for bucket in ladder.buckets]
    return [BatchInputs.of(layout, HostBatch(layout).tensor) for layout in layouts]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    ("ladder", "is_step"),
    [
        (StepLadder(64), True),
        (BucketLadder(default_token_ladder(512), (8,)), False),
        (BucketLadder((32, 64), (2, 4, 8)), False),
    ],
    ids=["steps", "prefill", "prefill-slots"],
)
def test_one_version_serves_buckets_of_all_sizes(
    load_tiny: LoadTiny, versions: list[bool], ladder: Ladder, is_step: bool
) -> None:
    model, _ = load_tiny(FAMILIES["qwen3"])
    # A pool that is not on the CPU, so that the pass is the one that is captured.
    pool = KVPool.on_device(model.kv_spec, num_pages=4, page_size=16, device=torch.device("meta"))
    for inputs in inputs_of(ladder):
        with torch.inference_mode():
            # To warm up, and to capture.
            model.compiled_logits(inputs, pool, is_step=is_step)
            model.compiled_logits(inputs, pool, is_step=is_step)
    assert versions == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("name", sorted(COMPILABLE_CHOICES))
def test_one_version_chooses_for_steps_of_all_sizes(name: str, versions: list[bool]) -> None:
    choose = compile_choice(CHOICES[name], any_slots=True)
    for inputs in inputs_of(StepLadder(64)):
        with torch.inference_mode():
            choose(torch.zeros(inputs.num_cached.shape[0], VOCAB_SIZE), inputs)
    assert len(versions) == 1

"""Decode steps on a GPU, with tiny models in float32, so that tokens can be compared exactly.

Their tokens are compared with those of `generate`, for many families, in test_prefill_graphs.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from graphs.buckets import BucketLadder
from scheduler.messages import (
    DecodeStart,
    Lease,
    PoolHandle,
    PrefillBatch,
    PrefillItem,
    PrefillResult,
    Request,
    SamplingParams,
)
from tests.gpu.test_prefill_graphs import load
from tests.unit.worker.tiny_models import MAX_MODEL_LEN, Engines, own_tokens, prompts_of
from worker.decode import DecodeEngine
from worker.kv_pool import KVPool
from worker.model import Model, ModelSource, load_model
from worker.prefill import PrefillEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # torch and inductor warn of much that is not ours.
    pytest.mark.filterwarnings("default"),
]
SAMPLING = SamplingParams(max_tokens=9, temperature=0.0)
PAGE_SIZE = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def qwen(folder: Path) -> tuple[Model, PreTrainedModel]:
    return load("qwen3", folder)


def test_steps_launched_ahead_give_the_same_tokens(qwen: tuple[Model, PreTrainedModel]) -> None:
    prompts = prompts_of(5, 17, 2, 30, 9, 12)
    for sampling in (SAMPLING, replace(SAMPLING, temperature=1.3, seed=4, top_p=0.9)):
        ahead, one_by_one = (Engines(qwen[0], looks_ahead=looks_ahead) for looks_ahead in (True, False))
        assert ahead.generate(prompts, sampling) == one_by_one.generate(prompts, sampling)


def test_another_process_prefills_into_the_pages_with_a_graph(
    qwen: tuple[Model, PreTrainedModel], folder: Path
) -> None:
    model, own = qwen
    pool, handle = KVPool.create(
        model.kv_spec, name="decode-0", num_pages=50, page_size=PAGE_SIZE, device=model.device
    )
    engine = DecodeEngine(model, pool, max_num_seqs=4)
    engine.prepare()
    prompts = prompts_of(5, 17, 2)
    items = [
        PrefillItem(
            request=Request(
                request_id=str(i), api_server="api-0", prompt_token_ids=tuple(prompt), sampling=SAMPLING
            ),
            lease=Lease(decode_worker="decode-0", epoch=1 + i, page_ids=(7 * i + 3,)),
        )
        for i, prompt in enumerate(prompts)
    ]
    job = pickle.dumps((folder, handle, items))
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=job, stdout=subprocess.PIPE, check=True, timeout=300
    )
    result: PrefillResult = pickle.loads(done.stdout)
    assert result.replays == {"32x4": 1}
    tokens: dict[str, list[int | None]] = {}
    for item, outcome in zip(items, result.outcomes, strict=True):
        tokens[outcome.request_id] = [outcome.token_id]
        assert outcome.token_id is not None
        engine.add(DecodeStart(request=item.request, lease=item.lease, first_token_id=outcome.token_id))
    while engine.has_work:
        for _, event in engine.step().events:
            tokens[event.request_id].append(event.token_id)
    assert list(tokens.values()) == [own_tokens(own, prompt, 9) for prompt in prompts]


def prefill(folder: Path, handle: PoolHandle, items: list[PrefillItem]) -> PrefillResult:
    """What the other process does."""
    source = ModelSource(
        name="qwen3", folder=folder, dtype="float32", device="cuda", max_model_len=MAX_MODEL_LEN
    )
    engine = PrefillEngine("prefill-0", load_model(source), BucketLadder((8, 32), (4,)))
    engine.attach(handle)
    return engine.run(PrefillBatch(batch_id=1, decode_worker="decode-0", items=tuple(items)))


if __name__ == "__main__":
    # What a library prints must not get into the answer.
    answer, sys.stdout = sys.stdout.buffer, sys.stderr
    answer.write(pickle.dumps(prefill(*pickle.load(sys.stdin.buffer))))
    answer.flush()

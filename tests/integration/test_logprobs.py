"""Logprobs over HTTP are transformers' log-softmax, of echoed prompts and of what is generated."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.models import resolve_model
from tests.support.service import Service

PROMPTS = ["The capital of France is", "def add(a, b):\n    return", "x"]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model() -> Any:
    folder = resolve_model("smollm2-135m", progress=print).path
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def test_logprobs_equal_the_log_softmax(service: Service, model: Any) -> None:
    body = {
        "model": service.model,
        "prompt": PROMPTS,
        "max_tokens": 6,
        "temperature": 0.7,
        "seed": 1,
        "ignore_eos": True,
        "echo": True,
        "logprobs": 5,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    for choice in answer["choices"]:
        token_ids = choice["prompt_token_ids"] + choice["token_ids"]
        expected = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        reported = choice["logprobs"]
        assert reported["tokens"] == [f"token_id:{token_id}" for token_id in token_ids]
        assert reported["token_logprobs"][0] is None
        for place in range(1, len(token_ids)):
            row = expected[place - 1]
            assert reported["token_logprobs"][place] == pytest.approx(
                row[token_ids[place]].item(), abs=TOLERANCE
            )
            top = reported["top_logprobs"][place]
            assert sorted(top.values(), reverse=True)[:5] == pytest.approx(
                row.topk(5).values.tolist(), abs=TOLERANCE
            )
            for name, logprob in top.items():
                assert logprob == pytest.approx(row[int(name.split(":")[1])].item(), abs=TOLERANCE)

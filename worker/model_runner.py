"""Runs passes of a model over sequences in KV pages: the part that prefill and decode share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graphs.buckets import Bucket, Ladder
from graphs.layout import BatchInputs, SlotInput
from graphs.runner import GraphRunner
from scheduler.messages import Request
from worker.kv_pool import KVPool
from worker.model import Model
from worker.sampling import choose_tokens


class ModelRunner:
    """Owns the static buffers of one ladder over one KV pool, and chooses each sequence's next token."""

    def __init__(self, model: Model, pool: KVPool, ladder: Ladder) -> None:
        self._model = model
        self._pool = pool
        self.graphs = GraphRunner(
            self._forward,
            ladder,
            pages_per_slot=-(-model.info.max_model_len // pool.page_size),
            page_size=pool.page_size,
        )

    def _forward(self, inputs: BatchInputs) -> torch.Tensor:
        return choose_tokens(self._model.logits(inputs, self._pool), inputs)

    @torch.inference_mode()
    def warm_up(self) -> Mapping[Bucket, float]:
        """Run every bucket once; return the seconds of each."""
        return self.graphs.warm_up()

    @torch.inference_mode()
    def run(self, slots: Sequence[SlotInput]) -> tuple[list[int], Bucket]:
        """Compute the tokens of `slots` in one replay; return the next token after each, and the bucket."""
        tokens, bucket = self.graphs.run(slots)
        return tokens.tolist(), bucket


def slot_input(
    request: Request, token_ids: Sequence[int], *, num_cached: int, page_ids: Sequence[int], output_index: int
) -> SlotInput:
    """Make the input of one sequence: `token_ids` after `num_cached` tokens, choosing output `output_index`."""
    sampling = request.sampling
    return SlotInput(
        token_ids=token_ids,
        num_cached=num_cached,
        page_ids=page_ids,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        output_index=output_index,
        banned_ids=sampling.stop_token_ids if output_index < sampling.min_tokens else (),
    )

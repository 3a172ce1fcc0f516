"""The reference that we did not write: transformers' own generate, greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE_LOGITS = 1e-3
"""Two tokens whose logits are this close may be chosen either way."""


@dataclass(frozen=True)
class Reference:
    """What generate makes of one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]
    gaps: list[float]
    """At each token, how far the best logit is above the second."""


class Model:
    """The reference model of one folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @cache  # noqa: B019 - lives as long as the test run
    def generate(self, prompt: str, max_tokens: int) -> Reference:
        """Return `max_tokens` greedy tokens after the prompt; fewer if the model ends the text."""
        prompt_ids = self._tokenizer(prompt).input_ids
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.int64),
                max_new_tokens=max_tokens,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        best_two = torch.cat(output.logits).topk(2).values
        return Reference(
            prompt_ids=prompt_ids,
            token_ids=output.sequences[0, len(prompt_ids) :].tolist(),
            gaps=(best_two[:, 0] - best_two[:, 1]).tolist(),
        )


def first_difference(reference: Reference, token_ids: Sequence[int]) -> int | None:
    """Return the place of the first token that differs, or None."""
    pairs = zip(reference.token_ids, token_ids, strict=False)
    for place, (expected, got) in enumerate(pairs):
        if expected != got:
            return place
    if len(reference.token_ids) != len(token_ids):
        return min(len(reference.token_ids), len(token_ids))
    return None

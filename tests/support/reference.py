"""The reference that we did not write: transformers' own generate, greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE_LOGITS = 1e-3
"""Two tokens whose logits are this close may be chosen either way."""

_BATCH = 8


@dataclass(frozen=True)
class Reference:
    """What generate makes of one prompt."""

    token_ids: list[int]
    gaps: list[float]
    """At each token, how far the best logit is above the second."""


class Model:
    """The reference model of one folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompts: Sequence[str], max_tokens: int) -> list[Reference]:
        """Return `max_tokens` greedy tokens after each prompt; fewer where the model ends the text.

        Prompts of about the same length are given to generate together, which takes a fifth of the time.
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        references: dict[int, Reference] = {}
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            made = self._generate_batch([prompts[i] for i in chosen], max_tokens)
            references.update(zip(chosen, made, strict=True))
        return [references[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _generate_batch(self, prompts: Sequence[str], max_tokens: int) -> list[Reference]:
        padded = self._tokenizer(list(prompts), return_tensors="pt", padding=True)
        output = self._model.generate(
            **padded,
            max_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new_tokens = output.sequences[:, padded.input_ids.shape[1] :].tolist()
        best_two = torch.stack(output.logits, dim=1).topk(2).values
        gaps = (best_two[..., 0] - best_two[..., 1]).tolist()
        eos = self._model.generation_config.eos_token_id
        references: list[Reference] = []
        for tokens, row in zip(new_tokens, gaps, strict=True):
            length = tokens.index(eos) + 1 if eos in tokens else len(tokens)
            references.append(Reference(token_ids=tokens[:length], gaps=row[:length]))
        return references


def first_difference(reference: Reference, token_ids: Sequence[int]) -> int | None:
    """Return the place of the first token that differs, or None."""
    pairs = zip(reference.token_ids, token_ids, strict=False)
    for place, (expected, got) in enumerate(pairs):
        if expected != got:
            return place
    if len(reference.token_ids) != len(token_ids):
        return min(len(reference.token_ids), len(token_ids))
    return None

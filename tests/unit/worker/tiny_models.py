"""Tiny random models of many families, and a prefill and a decode engine around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from graphs.buckets import BucketLadder
from scheduler.messages import (
    DecodeStart,
    Lease,
    PrefillBatch,
    PrefillItem,
    PrefillResult,
    Request,
    SamplingParams,
)
from worker.attention import ATTENTION_NAME
from worker.decode import DecodeEngine
from worker.kv_pool import KVPool
from worker.model import Model
from worker.prefill import PrefillEngine
from worker.prefill_pipeline import PrefillPipeline
from worker.prefill_plan import Started

VOCAB_SIZE = 128
MAX_MODEL_LEN = 96
PAGE_SIZE = 8

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    # Larger than usual, so that the best token changes with the text and does not win by a hair.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 6
"""Less than most of the prompts."""

FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "llama_one_kv_head_tied": LlamaConfig(**{**SHAPE, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "phi3": Phi3Config(**SHAPE),
    "phi3_window": Phi3Config(**SHAPE, sliding_window=WINDOW),
    "gemma": GemmaConfig(**SHAPE, head_dim=16),
    # Tied and scaled by sqrt(hidden_size), the embedding of the last token would decide the next one alone.
    "gemma2": Gemma2Config(
        **SHAPE, tie_word_embeddings=False, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=0.5
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        tie_word_embeddings=False,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

LoadTiny = Callable[[PreTrainedConfig], tuple[Model, PreTrainedModel]]


def paged_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a family's own random model, of which only the attention is ours."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()


def prompts_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def own_tokens(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


class _Steps:
    """What a worker does with a batch, as far as the engine does it."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine

    def pause_s(self) -> float | None:
        return None

    def begin(self, batch: PrefillBatch) -> Started:
        return self._engine.start(batch)

    def recover(self, batch: PrefillBatch, error: Exception) -> PrefillResult:
        return self._engine.recover(batch, error)

    def finish(
        self, batch: PrefillBatch, result: PrefillResult, *, waited_s: float, prefill_s: float
    ) -> PrefillResult:
        return result


def _must_go_on(error: Exception) -> None:
    raise error


class Pair:
    """A prefill and a decode engine on one pool. Prompts are leased pages that lie scattered in the pool."""

    def __init__(self, prefill: PrefillEngine, decode: DecodeEngine, pool: KVPool) -> None:
        self.prefill = prefill
        self.decode = decode
        self.pool = pool
        order = torch.randperm(pool.num_pages - 1, generator=torch.Generator().manual_seed(3))
        self._free = order.add(1).tolist()
        self._epoch = 0

    def item(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> PrefillItem:
        """Lease pages for a prompt."""
        num_pages = -(-(len(prompt) + sampling.max_tokens) // self.pool.page_size)
        self._epoch += 1
        pages = tuple(self._free.pop() for _ in range(num_pages))
        return PrefillItem(
            request=Request(
                request_id=name, api_server="api-0", prompt_token_ids=tuple(prompt), sampling=sampling
            ),
            lease=Lease(decode_worker="decode-0", epoch=self._epoch, page_ids=pages),
        )

    def batch(self, items: Sequence[PrefillItem]) -> PrefillBatch:
        """Return a batch of these items."""
        return PrefillBatch(batch_id=1, decode_worker="decode-0", items=tuple(items))

    def run_prefill(self, items: Sequence[PrefillItem]) -> PrefillResult:
        """Prefill items as one batch."""
        return self.prefill.run(self.batch(items))

    def pipeline(self) -> PrefillPipeline:
        """Return what a worker has around its prefill engine."""
        return PrefillPipeline(_Steps(self.prefill), fail=_must_go_on)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
        """Prefill all prompts as one batch, then decode them together; return the tokens of each."""
        items = [self.item(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
        result = self.run_prefill(items)
        tokens: dict[str, list[int]] = {}
        for item, outcome in zip(items, result.outcomes, strict=True):
            assert outcome.token_id is not None, outcome.error_message
            tokens[outcome.request_id] = [outcome.token_id]
            if outcome.finish_reason is None:
                self.decode.add(
                    DecodeStart(request=item.request, lease=item.lease, first_token_id=outcome.token_id)
                )
        while self.decode.has_work:
            for _, event in self.decode.step().events:
                if event.token_id is not None:
                    assert event.index == len(tokens[event.request_id])
                    tokens[event.request_id].append(event.token_id)
        return list(tokens.values())


class Engines(Pair):
    """Both engines of one model in this process."""

    def __init__(
        self,
        model: Model,
        *,
        capture_tokens: Sequence[int] = (8, 32),
        capture_slots: Sequence[int] = (2, 4),
        num_pages: int = 160,
        use_graphs: bool = True,
        looks_ahead: bool | None = None,
    ) -> None:
        ladder = BucketLadder(capture_tokens, capture_slots)
        prefill = PrefillEngine("prefill-0", model, ladder, use_graphs=use_graphs)
        if model.device.type == "cpu":
            pool, handle = KVPool.create(
                model.kv_spec, name="decode-0", num_pages=num_pages, page_size=PAGE_SIZE
            )
            prefill.attach(handle)
        else:
            pool = KVPool.on_device(
                model.kv_spec, num_pages=num_pages, page_size=PAGE_SIZE, device=model.device
            )
            prefill.attach_pool("decode-0", pool)
        decode = DecodeEngine(model, pool, max_num_seqs=4, use_graphs=use_graphs, looks_ahead=looks_ahead)
        decode.prepare()
        super().__init__(prefill, decode, pool)

"""Engines of groups make the tokens of one process: by pages of their own size, and of another."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.errors import ConfigError
from scheduler.messages import Lease, PoolHandle, SamplingParams, WorkerConfig
from tests.support.ranks import exits_of_followers, run_leader
from tests.unit.worker.tiny_models import FAMILIES, MAX_MODEL_LEN, Pair, prompts_of
from worker import startup
from worker.engines import make_decode, make_pool, make_prefill
from worker.model import Model
from worker.parallel.group import ShardGroup
from worker.parallel.link import MakePool, PrepareSteps

PROMPTS = prompts_of(3, 30, 17, 50, 9)
"""The fourth is cut into chunks, and five do not fit into one pass."""
Split = Literal["none", "both", "prefill", "decode"]
"""Which engines are groups of two."""


def worker_config(folder: Path, tensor_parallel_size: int) -> WorkerConfig:
    return WorkerConfig(
        name="decode-0",
        model_name="tiny",
        model_folder=str(folder),
        dtype="float32",
        device="cpu",
        load_format="auto",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        kv_memory_bytes=1 << 20,
        capture_tokens=(8, 32),
        max_capture_tokens=None,
        capture_slots=(4,),
        use_graphs=True,
        compile_cache_folder=str(folder),
        num_threads=1,
        tensor_parallel_size=tensor_parallel_size,
    )


@dataclass(frozen=True, kw_only=True)
class Made:
    """What engines made of the prompts."""

    greedy: list[list[int]]
    drawn: list[list[int]]
    shaped: list[list[int]]
    attached_again: list[list[int]]
    behind_cached: int | None
    prompt_logprobs: list[float]
    refused: list[str | None]
    num_bytes: int


def make_pair(group: ShardGroup | None, config: WorkerConfig, split: Split) -> tuple[Pair, PoolHandle]:
    """Make both engines in this process; those that are no group have the whole model."""
    alone = replace(config, tensor_parallel_size=1)
    parts = None if group is None else startup.load(config, group)
    whole = startup.load(alone) if split != "both" else None

    def choose(kind: Split) -> tuple[Model, WorkerConfig]:
        model = parts if split in (kind, "both") else whole
        assert model is not None
        return model, config if model is parts else alone

    prefill_model, prefill_config = choose("prefill")
    decode_model, decode_config = choose("decode")
    pool, handle = make_pool(decode_model, decode_config)
    prefill = make_prefill(prefill_model, replace(prefill_config, name="prefill-0"), node_id="")
    prefill.attach(handle)
    # As on a GPU, where a step begins with tokens that only the device knows.
    decode, _ = make_decode(decode_model, pool, decode_config, looks_ahead=True)
    return Pair(prefill, decode, pool), handle


def make_all(group: ShardGroup | None, config: WorkerConfig, split: Split) -> Made:
    pair, handle = make_pair(group, config, split)
    reported = pair.item(
        "reported",
        PROMPTS[1],
        SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=2, prompt_logprobs=True),
    )
    result = pair.run_prefill([reported])
    assert result.handoff is not None
    (outcome,) = result.outcomes
    assert outcome.prompt_logprobs is not None
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    stale = pair.item("stale", PROMPTS[0], greedy)
    newer = Lease(decode_worker="decode-0", epoch=stale.lease.epoch + 1, page_ids=stale.lease.page_ids)
    assert not pair.pool.claim([newer])
    good = pair.item("good", PROMPTS[2], greedy)
    refused = [o.error_label for o in pair.run_prefill([stale, good]).outcomes]
    tokens = pair.generate(PROMPTS, greedy)
    drawn = pair.generate(PROMPTS, SamplingParams(max_tokens=8, seed=3, top_k=20))
    shaped = SamplingParams(max_tokens=8, temperature=0.0, frequency_penalty=1.5)
    penalised = pair.generate(PROMPTS[:3], shaped)
    behind_cached = token_behind_cached(pair, greedy)
    pair.prefill.detach("decode-0")
    pair.prefill.attach(handle)
    return Made(
        greedy=tokens,
        drawn=drawn,
        shaped=penalised,
        attached_again=pair.generate(PROMPTS[:2], greedy),
        behind_cached=behind_cached,
        prompt_logprobs=[entry.logprob for entry in outcome.prompt_logprobs if entry is not None],
        refused=refused,
        num_bytes=result.handoff.num_bytes,
    )


def token_behind_cached(pair: Pair, sampling: SamplingParams) -> int | None:
    """Return the token after a prompt whose first page another prompt has filled."""
    first = pair.item("first", PROMPTS[3], sampling)
    pair.run_prefill([first])
    size = pair.pool.page_size
    second = pair.item("second", [*PROMPTS[3][:size], *PROMPTS[4]], sampling)
    lease = replace(
        second.lease,
        page_ids=(first.lease.page_ids[0], *second.lease.page_ids[1:]),
        shared_epochs=(first.lease.epoch,),
    )
    (outcome,) = pair.run_prefill([replace(second, lease=lease)]).outcomes
    assert outcome.error_message is None
    return outcome.token_id


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES["qwen3"], dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Made:
    """What one process makes."""
    return make_all(None, worker_config(folder, 1), "none")


@pytest.mark.parametrize("split", ["both", "prefill", "decode"])
def test_groups_make_the_tokens_of_one_process(split: Split, folder: Path, alone: Made) -> None:
    made = run_leader(make_all, worker_config(folder, 2), split)
    assert made.greedy == alone.greedy
    assert made.drawn == alone.drawn
    assert made.shaped == alone.shaped
    assert made.attached_again == alone.attached_again
    assert made.behind_cached == alone.behind_cached
    assert made.prompt_logprobs == pytest.approx(alone.prompt_logprobs, abs=1e-4)
    assert made.refused == alone.refused == ["stale_lease", None]
    assert made.num_bytes == alone.num_bytes > 0


def die(group: ShardGroup, config: WorkerConfig) -> None:
    """Leave the other rank alone in a step in which it waits for this one."""
    startup.load(config, group)
    assert group.leader is not None
    group.leader.tell(MakePool(num_pages=4))
    group.leader.replies()
    group.leader.tell(PrepareSteps())
    os._exit(1)


def test_a_rank_ends_with_rank_0_whatever_it_waits_for(folder: Path) -> None:
    (exit_code,) = exits_of_followers(die, worker_config(folder, 2))
    assert exit_code is not None


def refuse(group: ShardGroup, config: WorkerConfig) -> None:
    """Do as a worker does: say why, and let the other ranks go."""
    with pytest.raises(ConfigError, match="must divide the 2 KV heads"):
        startup.load(config, group)
    group.close()


def test_all_ranks_end_quietly_when_a_model_is_refused(folder: Path) -> None:
    assert exits_of_followers(refuse, worker_config(folder, 4)) == [0, 0, 0]

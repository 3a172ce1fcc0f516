"""Pages of running sequences: granted later, refused when stale; on a tiny random model."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from scheduler.messages import DecodeStart, Lease, PageGrant, SamplingParams, SequenceRef
from tests.unit.worker.tiny_models import SHAPE, Engines, LoadTiny, prompts_of
from worker.model import Model

SAMPLING = SamplingParams(max_tokens=20, temperature=0.0)


@pytest.fixture
def model(load_tiny: LoadTiny) -> Model:
    return load_tiny(Qwen3Config(**SHAPE, head_dim=16))[0]


class Growing:
    """One sequence that begins with just the pages of its prompt."""

    def __init__(self, model: Model) -> None:
        self.engines = Engines(model)
        self.page_size = self.engines.pool.page_size
        self.prompt = prompts_of(2 * self.page_size)[0]
        self.expected = Engines(model).generate([self.prompt], SAMPLING)[0]
        whole = self.engines.item("r", self.prompt, SAMPLING)
        self.pages = whole.lease.page_ids
        self.lease = Lease(decode_worker=whole.lease.decode_worker, epoch=5, page_ids=self.pages[:2])
        item = type(whole)(request=whole.request, lease=self.lease)
        (outcome,) = self.engines.run_prefill([item]).outcomes
        assert outcome.token_id is not None
        self.tokens = [outcome.token_id]
        self.start = DecodeStart(request=whole.request, lease=self.lease, first_token_id=outcome.token_id)
        self.ref = SequenceRef(request_id="r", epoch=5)

    def grant(self, first_page: int, epoch: int = 6) -> PageGrant:
        return PageGrant(
            ref=self.ref, epoch=epoch, first_page=first_page, page_ids=self.pages[first_page : first_page + 1]
        )

    def step_until_stuck(self) -> list[SequenceRef]:
        """Step while there is work; return what was released."""
        released: list[SequenceRef] = []
        while self.engines.decode.has_work:
            outcome = self.engines.decode.step()
            for _, event in outcome.events:
                assert (event.index, event.epoch) == (len(self.tokens), 5)
                self.tokens.append(event.token_id)
            released += outcome.released
        return released


def test_a_sequence_without_room_waits_and_loses_nothing(model: Model) -> None:
    growing = Growing(model)
    decode = growing.engines.decode
    decode.add(growing.start)
    assert growing.step_until_stuck() == []
    assert growing.tokens == growing.expected[:1], "its pages are full: the prompt filled them"
    assert decode.num_running == 1
    decode.grow(growing.grant(2))
    growing.step_until_stuck()
    assert len(growing.tokens) == min(1 + growing.page_size, SAMPLING.max_tokens)
    for page in range(3, len(growing.pages)):
        decode.grow(growing.grant(page))
    assert growing.step_until_stuck() == [growing.ref]
    assert growing.tokens == growing.expected


def test_grants_may_overtake_the_start_and_each_other(model: Model) -> None:
    growing = Growing(model)
    for page in reversed(range(2, len(growing.pages))):
        growing.engines.decode.grow(growing.grant(page))
    growing.engines.decode.add(growing.start)
    assert growing.step_until_stuck() == [growing.ref]
    assert growing.tokens == growing.expected


def test_a_grant_older_than_its_page_releases_the_sequence(model: Model) -> None:
    """It has lost a page to somebody newer, so it is to be computed again."""
    growing = Growing(model)
    newer = Lease(decode_worker="decode-0", epoch=9, page_ids=growing.pages[2:3])
    growing.engines.pool.claim([newer])
    growing.engines.decode.add(growing.start)
    growing.engines.decode.grow(growing.grant(2))
    assert growing.step_until_stuck() == [growing.ref]
    assert growing.tokens == growing.expected[:1]


def test_a_stale_start_is_released_without_an_event(model: Model) -> None:
    growing = Growing(model)
    growing.engines.pool.claim([Lease(decode_worker="decode-0", epoch=9, page_ids=growing.pages[:1])])
    growing.engines.decode.add(growing.start)
    outcome = growing.engines.decode.step()
    assert outcome.released == [growing.ref]
    assert outcome.events == []
    assert growing.engines.decode.num_running == 0

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphs.buckets import BucketLadder
from graphs.layout import BatchInputs, BatchLayout, SlotInput
from graphs.programs import Computation
from graphs.runner import GraphRunner


def last_tokens(inputs: BatchInputs) -> torch.Tensor:
    """A forward pass whose rows are each slot's last token."""
    return inputs.token_ids[inputs.derive().last_token].long()


def runner_of(forward: Callable[[BatchInputs], torch.Tensor] = last_tokens) -> GraphRunner:
    """Return a runner that gives a slot's last token, negative if a slot of the batch has a temperature."""
    runner = GraphRunner(
        Computation(
            forward=forward,
            finishes={"plain": lambda rows, _: rows, "negative": lambda rows, _: -rows},
            choose_finish=lambda slots: "negative" if any(slot.temperature for slot in slots) else "plain",
        ),
        BucketLadder([4, 16], [2, 4]),
        pages_per_slot=8,
        page_size=4,
        device=torch.device("cpu"),
    )
    runner.prepare()
    return runner


def slots_of(*lengths: int, temperature: float = 0.0) -> list[SlotInput]:
    return [
        SlotInput(
            token_ids=range(10 * i, 10 * i + length),
            num_cached=0,
            page_ids=range(1, 5),
            temperature=temperature,
        )
        for i, length in enumerate(lengths, start=1)
    ]


def test_numbers_of_the_batch_come_back_in_order_without_the_padding() -> None:
    ticket = runner_of().submit(slots_of(3, 2, 4))
    assert ticket.result() == [12, 21, 33]
    assert str(ticket.bucket) == "16x4"


def test_the_batch_chooses_how_it_is_finished() -> None:
    runner = runner_of()
    assert runner.submit(slots_of(3, 2, temperature=1.0)).result() == [-12, -21]
    assert runner.submit(slots_of(3, 2)).result() == [12, 21]


def test_batches_of_one_bucket_share_its_buffer() -> None:
    addresses: dict[tuple[int, ...], set[int]] = {}

    def forward(inputs: BatchInputs) -> torch.Tensor:
        shape = (inputs.token_ids.shape[0], inputs.num_cached.shape[0])
        addresses.setdefault(shape, set()).add(inputs.token_ids.data_ptr())
        return last_tokens(inputs)

    runner = runner_of(forward)
    assert set(addresses) == {(4, 2), (4, 4), (16, 2), (16, 4)}
    for lengths in ((1,), (2, 2), (3, 8), (1, 1, 1)):
        runner.submit(slots_of(*lengths))
    assert all(len(used) == 1 for used in addresses.values())


def test_an_early_ticket_keeps_its_result_when_later_batches_use_the_buffer() -> None:
    runner = runner_of()
    tickets = [runner.submit(slots_of(length)) for length in (1, 2, 3, 4)]
    assert [ticket.result() for ticket in reversed(tickets)] == [[13], [12], [11], [10]]


def test_every_bucket_is_reported_with_the_size_of_its_buffer() -> None:
    runner = runner_of()
    reports = runner.prepare()
    assert [str(report.bucket) for report in reports] == ["16x4", "16x2", "4x4", "4x2"]
    for report in reports:
        layout = BatchLayout(bucket=report.bucket, pages_per_slot=8, page_size=4)
        assert report.size_bytes == layout.size_bytes
        assert report.batch_seconds > 0
    assert runner.size_bytes == sum(report.size_bytes for report in reports)


def test_a_batch_beyond_the_ladder_is_refused() -> None:
    with pytest.raises(ValueError, match="largest bucket"):
        runner_of().submit(slots_of(17))

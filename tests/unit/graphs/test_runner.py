from __future__ import annotations

import pytest
import torch

from graphs.buckets import BucketLadder
from graphs.layout import BatchInputs, SlotInput
from graphs.runner import GraphRunner


def last_tokens(inputs: BatchInputs) -> torch.Tensor:
    """A forward pass that returns each slot's last token."""
    return inputs.token_ids[inputs.derive().last_token]


def runner_of(forward=last_tokens) -> GraphRunner:
    return GraphRunner(forward, BucketLadder([4, 16], [2, 4]), pages_per_slot=8, page_size=4)


def slots_of(*lengths: int) -> list[SlotInput]:
    return [
        SlotInput(token_ids=range(10 * i, 10 * i + length), num_cached=0, page_ids=range(1, 5))
        for i, length in enumerate(lengths, start=1)
    ]


def test_rows_of_the_batch_come_back_in_order_without_the_padding() -> None:
    rows, bucket = runner_of().run(slots_of(3, 2, 4))
    assert rows.tolist() == [12, 21, 33]
    assert str(bucket) == "16x4"


def test_batches_of_one_bucket_share_its_buffer() -> None:
    addresses: dict[tuple[int, ...], set[int]] = {}

    def forward(inputs: BatchInputs) -> torch.Tensor:
        shape = (inputs.token_ids.shape[0], inputs.num_cached.shape[0])
        addresses.setdefault(shape, set()).add(inputs.token_ids.data_ptr())
        return last_tokens(inputs)

    runner = runner_of(forward)
    runner.warm_up()
    assert set(addresses) == {(4, 2), (4, 4), (16, 2), (16, 4)}
    for lengths in ((1,), (2, 2), (3, 8), (1, 1, 1)):
        runner.run(slots_of(*lengths))
    assert all(len(used) == 1 for used in addresses.values())


def test_size_is_that_of_the_buffers() -> None:
    runner = runner_of()
    # One buffer per bucket: tokens + slots * (pages + banned ids + 8) + 1 words of 4 bytes.
    words = sum(t + s * (8 + 16 + 8) + 1 for t in (4, 16) for s in (2, 4))
    assert runner.size_bytes == 4 * words


def test_a_batch_beyond_the_ladder_is_refused() -> None:
    with pytest.raises(ValueError, match="largest bucket"):
        runner_of().run(slots_of(17))

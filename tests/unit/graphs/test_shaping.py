from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.shaping import ShapingBuffers, ShapingLayout, SlotShaping


@given(st.integers(1, 64), st.integers(1, 200_000), st.integers(1, 100_000))
def test_buffer_holds_its_fields_exactly(num_slots: int, vocab_size: int, history: int) -> None:
    layout = ShapingLayout(num_slots=num_slots, vocab_size=vocab_size, history_tokens=history)
    end = 0
    for field in layout.fields.values():
        assert field.offset % 4 == 0
        assert end <= field.offset < end + 4
        end = field.end
    assert end <= layout.num_words < end + 4


def test_buffer_size_is_the_documented_formula() -> None:
    layout = ShapingLayout(num_slots=5, vocab_size=1000, history_tokens=333)
    # six times S -> 8, S + 1 -> 8, twice S B, H -> 336, S W -> 5 * 32
    assert layout.num_words == 6 * 8 + 8 + 2 * 5 * 300 + 336 + 160


def test_every_field_is_read_as_it_was_written_and_nothing_of_an_earlier_batch() -> None:
    buffers = ShapingBuffers(max_slots=4, vocab_size=40, history_tokens=20, device=torch.device("cpu"))
    full = SlotShaping(
        min_p=0.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        bias_ids=(7, 9),
        bias_values=(1.5, -2.5),
        num_prompt=2,
        history=np.array([4, 5, 6], np.int32),
        allowed=np.array([-1, 255], np.int32),
    )
    buffers.upload([full, full, full], 3)
    buffers.upload([None, full], 3)
    inputs = buffers.inputs(3)
    assert inputs.min_p.tolist() == [0, 0.25, 0]
    assert inputs.presence.tolist() == [0, 0.5, 0]
    assert inputs.frequency.tolist() == [0, -0.5, 0]
    assert inputs.repetition.tolist() == [1, 1.5, 1]
    assert inputs.num_prompt.tolist() == [0, 2, 0]
    assert inputs.starts.tolist() == [0, 0, 3, 3]
    assert inputs.history[:3].tolist() == [4, 5, 6]
    assert inputs.is_masked.tolist() == [0, 1, 0]
    assert inputs.mask[1].tolist() == [-1, 255]
    assert inputs.bias_ids[1, :2].tolist() == [7, 9]
    assert inputs.bias_values[1, :2].tolist() == [1.5, -2.5]
    assert set(inputs.bias_ids[[0, 2]].flatten().tolist()) | set(inputs.bias_ids[1, 2:].tolist()) == {-1}

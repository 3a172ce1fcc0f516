"""Settings that few requests have, in static buffers of their own: penalties, logit bias, min-p, grammars.

A batch without them neither packs nor copies any of this. All buckets of a runner share one buffer. With S slots,
B = `MAX_LOGIT_BIAS` biases per slot, H tokens of history and W = ceil(vocabulary / 32) mask words per slot, it
holds, in words of 4 bytes, each field at a multiple of 16 bytes::

    min_p       S (f32)    presence    S (f32)    frequency   S (f32)    repetition  S (f32)
    num_prompt  S          is_masked   S          starts      S + 1      bias_ids    S B
    bias_values S B (f32)  history     H          mask        S W

The tokens of a batch itself are no part of the history: they are in `BatchInputs`, also where the last of them was
chosen on the device and is not on the host yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

MAX_LOGIT_BIAS = 300
"""Most tokens of one sequence with a logit bias."""
_ALIGNED_WORDS = 4
_FLOATS = frozenset({"min_p", "presence", "frequency", "repetition", "bias_values"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Place and shape of one field in a buffer, in 4-byte words."""

    offset: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The word after its last."""
        return self.offset + prod(self.shape)


def aligned(num_words: int) -> int:
    """Return the multiple of 16 bytes that follows, in words."""
    return -(-num_words // _ALIGNED_WORDS) * _ALIGNED_WORDS


def place_fields(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Field]:
    """Place fields of these shapes one after the other."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, shape in shapes.items():
        fields[name] = Field(offset=offset, shape=shape)
        offset += aligned(prod(shape))
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotShaping:
    """How one sequence's logits are changed before a token is chosen."""

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_ids: Sequence[int] | NDArray[np.int32] = ()
    """Distinct tokens, at most `MAX_LOGIT_BIAS`."""
    bias_values: Sequence[float] | NDArray[np.float32] = ()
    num_prompt: int = 0
    """Tokens of the prompt; those after it are output."""
    history: NDArray[np.int32] | None = None
    """All tokens before those of the pass, if they are penalised."""
    allowed: NDArray[np.int32] | None = None
    """``[W]``: bit i % 32 of word i // 32 says whether token i may be chosen. None: all may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingLayout:
    """Where each field lies in the buffer, for batches of `num_slots`."""

    num_slots: int
    vocab_size: int
    history_tokens: int
    """Most tokens of history in a batch."""

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name, in the order in which they lie in the buffer."""
        slots = self.num_slots
        return place_fields(
            {
                "min_p": (slots,),
                "presence": (slots,),
                "frequency": (slots,),
                "repetition": (slots,),
                "num_prompt": (slots,),
                "is_masked": (slots,),
                "starts": (slots + 1,),
                "bias_ids": (slots, MAX_LOGIT_BIAS),
                "bias_values": (slots, MAX_LOGIT_BIAS),
                "history": (self.history_tokens,),
                "mask": (slots, -(-self.vocab_size // 32)),
            }
        )

    @property
    def num_words(self) -> int:
        """Words of 4 bytes in the buffer."""
        return aligned(self.fields["mask"].end)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingInputs:
    """Shapings as a computation sees them: views of one static buffer. int32 unless said otherwise."""

    min_p: torch.Tensor  # [S] float32
    presence: torch.Tensor  # [S] float32
    frequency: torch.Tensor  # [S] float32
    repetition: torch.Tensor  # [S] float32, 1 in slots without
    num_prompt: torch.Tensor  # [S]
    is_masked: torch.Tensor  # [S], 0 where the mask's row means nothing
    starts: torch.Tensor  # [S + 1], where each slot's history begins; what lies behind the last means nothing
    bias_ids: torch.Tensor  # [S, B], -1 where there is none
    bias_values: torch.Tensor  # [S, B] float32
    history: torch.Tensor  # [H]
    mask: torch.Tensor  # [S, W]

    @classmethod
    def of(cls, layout: ShapingLayout, buffer: torch.Tensor) -> ShapingInputs:
        """Make the views of `buffer`, int32, at least ``[layout.num_words]``."""
        return cls(
            **{
                name: buffer[field.offset : field.end]
                .view(torch.float32 if name in _FLOATS else torch.int32)
                .view(field.shape)
                for name, field in layout.fields.items()
            }
        )


class HostShaping:
    """Writes the shapings of batches of one layout into a host buffer."""

    def __init__(self, layout: ShapingLayout, tensor: torch.Tensor) -> None:
        """`tensor` is int32, at least ``[layout.num_words]``."""
        words = tensor.numpy()
        fields = layout.fields
        self._layout = layout
        self._history, self._mask = fields["history"], fields["mask"]
        self._settings = words[: fields["history"].offset]
        self._views = {
            name: words[field.offset : field.end]
            .view(np.float32 if name in _FLOATS else np.int32)
            .reshape(field.shape)
            for name, field in fields.items()
        }

    def pack(self, shapings: Sequence[SlotShaping | None]) -> list[tuple[int, int]]:
        """Write a batch. Return the ranges of words that it needs; the rest is of earlier batches.

        Raises `ValueError` if the histories do not fit.
        """
        views = self._views
        self._settings.fill(0)
        views["repetition"].fill(1.0)
        views["bias_ids"].fill(-1)
        lengths = [0 if s is None or s.history is None else len(s.history) for s in shapings]
        starts = [0, *accumulate(lengths)]
        num_history = starts[-1]
        if num_history > self._layout.history_tokens:
            raise ValueError(
                f"history must be <= {self._layout.history_tokens} tokens a batch, got {num_history}"
            )
        views["starts"][: len(starts)] = starts
        views["starts"][len(starts) :] = num_history
        num_masks = 0
        for i, shaping in enumerate(shapings):
            if shaping is None:
                continue
            self._pack_settings(i, shaping)
            if shaping.history is not None:
                views["history"][starts[i] : starts[i + 1]] = shaping.history
            if shaping.allowed is not None:
                views["mask"][i] = shaping.allowed
                num_masks = i + 1
        ranges = [(0, self._history.offset + num_history)]
        if num_masks:
            row = self._mask.shape[1]
            ranges.append((self._mask.offset, self._mask.offset + num_masks * row))
        return ranges

    def _pack_settings(self, i: int, shaping: SlotShaping) -> None:
        views = self._views
        views["min_p"][i] = shaping.min_p
        views["presence"][i] = shaping.presence_penalty
        views["frequency"][i] = shaping.frequency_penalty
        views["repetition"][i] = shaping.repetition_penalty
        views["num_prompt"][i] = shaping.num_prompt
        views["is_masked"][i] = shaping.allowed is not None
        count = len(shaping.bias_ids)
        views["bias_ids"][i, :count] = shaping.bias_ids
        views["bias_values"][i, :count] = shaping.bias_values


class ShapingBuffers:
    """Owns the static buffer that all programs of a runner share, and the host memory that it is filled from."""

    _NUM_STAGES = 2

    def __init__(self, *, max_slots: int, vocab_size: int, history_tokens: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._history_tokens = history_tokens
        num_words = self._layout(max_slots).num_words
        self._buffer = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._stages = [_Stage(self._buffer)] if device.type == "cpu" else []
        if device.type == "cuda":
            self._stages = [
                _Stage(torch.zeros(num_words, dtype=torch.int32, pin_memory=True), torch.cuda.Event())
                for _ in range(self._NUM_STAGES)
            ]

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer on the device."""
        return self._buffer.nbytes

    def inputs(self, num_slots: int) -> ShapingInputs:
        """Return the buffer as batches of so many slots see it."""
        return ShapingInputs.of(self._layout(num_slots), self._buffer)

    def upload(self, shapings: Sequence[SlotShaping | None], num_slots: int) -> None:
        """Bring the shapings of a batch into the buffer, on the current stream where there is a device."""
        stage = self._stages.pop(0)
        self._stages.append(stage)
        if stage.copied is not None:
            stage.copied.synchronize()
        ranges = stage.writer(self._layout(num_slots)).pack(shapings)
        if stage.copied is not None:
            for start, end in ranges:
                self._buffer[start:end].copy_(stage.tensor[start:end], non_blocking=True)
            stage.copied.record()

    def _layout(self, num_slots: int) -> ShapingLayout:
        return ShapingLayout(
            num_slots=num_slots, vocab_size=self._vocab_size, history_tokens=self._history_tokens
        )


class _Stage:
    """Host memory of one batch. `copied` says when the device has it; None where it is the buffer itself."""

    def __init__(self, tensor: torch.Tensor, copied: torch.cuda.Event | None = None) -> None:
        self.tensor = tensor
        self.copied = copied
        self._writers: dict[ShapingLayout, HostShaping] = {}

    def writer(self, layout: ShapingLayout) -> HostShaping:
        if layout not in self._writers:
            self._writers[layout] = HostShaping(layout, self.tensor)
        return self._writers[layout]

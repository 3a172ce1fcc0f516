"""How much arithmetic a prefill needs by the model's definition, and how much a device is good for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from graphs.buckets import Segment
from worker.model import Model

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""By a part of the device's name, of several that fit the first that is a whole word: dense bfloat16 and float16
matrix operations per second from NVIDIA's data sheets, without sparsity."""


_MOST_OTHERS = 1.05
"""Norms and biases are far less than a twentieth of a model. More that is no linear layer is its experts."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the matrix operations per second that the maker states for a device, or None if not known here."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_by_name(torch.cuda.get_device_name(device))


def peak_by_name(name: str) -> float | None:
    """Return the same for a CUDA device of this name, such as ``NVIDIA H100 80GB HBM3``."""
    words = f" {name.replace('-', ' ')} "
    return next((peak for part, peak in _PEAKS.items() if f" {part} " in words), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """Floating point operations of a dense decoder-only model; a multiplication and an addition are two.

    Of attention it counts full causal attention, also where a layer looks back less far.
    """

    per_token: float
    """Of the linear layers, without the LM head."""
    per_sequence: float
    """Of the LM head, for the one token of a sequence whose logits are computed."""
    per_pair: float
    """Of attention, for a token and one that it looks at, itself included."""

    @classmethod
    def of(cls, model: Model) -> PrefillCost:
        """Return what the whole model needs; nothing if it has experts, of which a token needs only some."""
        if model.info.num_parameters > _MOST_OTHERS * model.num_ranks * _num_known(model):
            return cls(per_token=0.0, per_sequence=0.0, per_pair=0.0)
        sizes = [
            (layer.in_features * layer.out_features, is_head) for layer, is_head in model.linear_layers()
        ]
        return cls(
            per_token=2.0 * model.num_ranks * sum(size for size, is_head in sizes if not is_head),
            per_sequence=2.0 * model.num_ranks * sum(size for size, is_head in sizes if is_head),
            per_pair=4.0 * model.num_query_heads * sum(layer.head_dim for layer in model.kv_spec.layers),
        )

    def flops(self, passes: Iterable[Sequence[Segment]]) -> float:
        """Return what these parts of prompts need."""
        total = 0.0
        for segments in passes:
            for segment in segments:
                start, end = segment.start, segment.end
                pairs = (end * (end + 1) - start * (start + 1)) / 2
                total += (end - start) * self.per_token + self.per_sequence + pairs * self.per_pair
        return total


def _num_known(model: Model) -> int:
    """Return how many parameters are in linear layers and in the embedding."""
    linear = sum(layer.in_features * layer.out_features for layer, _ in model.linear_layers())
    return linear + model.embedding.numel()

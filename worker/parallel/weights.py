"""Filling a model's parameters, which have no memory yet: with a checkpoint's tensors or with random numbers.

Each rank of a group reads only its own part of a tensor. Random numbers are drawn for a whole tensor at a time and
then cut, so that all ranks, and a process that holds the whole model, have the same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from scheduler.errors import ConfigError
from worker.parallel.plan import Cut, ShardPlan, shard_layers

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SEED = 20_240_817
"""All workers of a service must make the same random weights."""


def fill_model(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    attention: str,
    device: str,
    folder: Path | None,
    name: str,
    rank: int,
    size: int,
) -> tuple[PreTrainedModel, int]:
    """Make the part of a model that one of `size` ranks has, without memory for more, with the weights in a folder.

    Without a folder they are random. Returns how many parameters the whole model has, too. Raises `ConfigError` if it
    cannot be cut, or if the folder lacks a tensor.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    num_parameters = model.num_parameters()
    plan = shard_layers(model, size, name)
    checkpoint = None
    if folder is not None:
        checkpoint = Checkpoint(folder, name)
        with suppress(OSError):  # A folder need not have one.
            model.generation_config = GenerationConfig.from_pretrained(folder)
    torch.manual_seed(_SEED)
    Filler(model, plan, rank=rank, device=device, checkpoint=checkpoint).fill()
    return model, num_parameters


class Checkpoint:
    """The tensors of a Hugging Face folder, read part by part."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises `ConfigError` if the folder of model `name` has no safetensors."""
        self._name = name
        self._files: dict[Path, Any] = {}
        index, single = folder / _INDEX, folder / _SINGLE
        try:
            if index.exists():
                weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
                self._paths = {tensor: folder / file for tensor, file in weight_map.items()}
            else:
                self._paths = dict.fromkeys(self._open(single).keys(), single)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(
                f"model {name} cannot be loaded: {folder} has no readable {_SINGLE}: {error}"
            ) from error

    def read(self, tensor: str) -> Any:
        """Return a tensor that is read as it is indexed. Raises `ConfigError` if it is not there."""
        if tensor not in self._paths:
            raise ConfigError(f"model {self._name} cannot be loaded in parts: its files have no {tensor}")
        return self._open(self._paths[tensor]).get_slice(tensor)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


class Filler:
    """Fills the model of one rank on one device."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: ShardPlan,
        *,
        rank: int,
        device: str,
        checkpoint: Checkpoint | None,
    ) -> None:
        """Without a checkpoint, weights are drawn from torch's generator of the device."""
        self._model = model
        self._plan = plan
        self._rank = rank
        self._device = torch.device(device)
        self._checkpoint = checkpoint
        self._tied: dict[str, str] = model.all_tied_weights_keys
        self._filled: dict[str, nn.Parameter] = {}
        """By the name in the whole model."""

    @torch.no_grad()
    def fill(self) -> None:
        """Fill everything. Raises `ConfigError` if a tensor is missing in the checkpoint."""
        with guard_torch_init_functions():
            for name, module, owner in _walk("", self._model, self._model):
                self._fill_module(name, module, owner)

    def _fill_module(self, prefix: str, module: nn.Module, owner: PreTrainedModel) -> None:
        drawn: list[tuple[str, Cut]] = []
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = self._plan.cut(prefix + name)
            known = self._filled.get(self._tied.get(cut.source, cut.source))
            if known is not None:
                made = known if cut.dim is None else _parameter(self._own_part(known.data, cut))
            elif self._checkpoint is not None:
                content = self._own_part(self._checkpoint.read(cut.source), cut)
                made = _parameter(content.to(self._device, parameter.dtype))
            else:
                made = _parameter(_whole_zeros(parameter, cut, self._device))
                drawn.append((name, cut))
            if not (drawn and drawn[-1][0] == name):
                made._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it alone then
            if cut.dim is None:
                self._filled[cut.source] = made
            setattr(module, name, made)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=self._device)
        # It makes what no checkpoint has, such as the frequencies of a rotary embedding, and random weights.
        owner._init_weights(module)
        for name, cut in drawn:
            if cut.dim is not None:
                setattr(module, name, _parameter(self._own_part(getattr(module, name).data, cut).clone()))

    def _own_part(self, whole: Any, cut: Cut) -> torch.Tensor:
        """Return this rank's part of a tensor, or of a tensor in a file."""
        if cut.dim is None:
            content: torch.Tensor = whole[:]
            return content
        size = -(-cut.whole_size // self._plan.size)
        part = slice(self._rank * size, min((self._rank + 1) * size, cut.whole_size))
        content = whole[:, part] if cut.dim == 1 else whole[part]
        num_missing = size - content.shape[cut.dim]
        if num_missing:
            assert cut.dim == 0
            content = torch.cat((content, content.new_zeros(num_missing, *content.shape[1:])))
        return content


def _walk(
    prefix: str, module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield all modules, children first, with the model within the model that each belongs to."""
    for name, child in module.named_children():
        yield from _walk(f"{prefix}{name}.", child, child if isinstance(child, PreTrainedModel) else owner)
    yield prefix, module, owner


def _parameter(content: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(content, requires_grad=False)


def _whole_zeros(parameter: nn.Parameter, cut: Cut, device: torch.device) -> torch.Tensor:
    shape = list(parameter.shape)
    if cut.dim is not None:
        shape[cut.dim] = cut.whole_size
    return torch.zeros(shape, dtype=parameter.dtype, device=device)

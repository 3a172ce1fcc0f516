"""Loading a transformers model and making sure that it works with paged attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphs.buckets import Bucket
from graphs.layout import MAX_BANNED_IDS, BatchInputs, BatchLayout, DerivedInputs, HostBatch, SlotInput
from scheduler.errors import ConfigError
from scheduler.garbage import collections_put_off
from scheduler.messages import ModelInfo
from worker.attention import ATTENTION_NAME, CudaPass, CudaStep, PagedPass
from worker.fused_layers import fuse_layers
from worker.gated_mlp import compile_gated_ahead, fuse_gated_mlps
from worker.grammar import Grammars
from worker.host_attention import HostPass, HostStep, flush_denormals
from worker.host_memory import keep_freed_memory, use_huge_pages
from worker.kv_pool import KVLayerSpec, KVPool, KVSpec
from worker.last_layer import cut_last_layer
from worker.merge import merge_projections
from worker.packed import PackedLinear, pack_linears, packed_memory
from worker.parallel.weights import fill_model

if TYPE_CHECKING:
    from worker.parallel.group import ShardGroup

_LOG = logging.getLogger(__name__)
_RECORDING_NAME = "purefill_recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from and how it is loaded."""

    name: str
    """The name under which it is served."""
    folder: Path
    dtype: str = "auto"
    """``auto``, ``float32``, ``bfloat16`` or ``float16``."""
    load_format: str = "auto"
    """``dummy`` fills the configuration with random weights."""
    device: str = "cpu"
    max_model_len: int | None = None


class Model:
    """A decoder-only transformers model whose attention reads and writes KV pages."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv_spec: KVSpec,
        info: ModelInfo,
        folder: Path,
        *,
        cuts_rows: bool = False,
        group: ShardGroup | None = None,
    ) -> None:
        """`cuts_rows` says that the last layer goes on with those rows only of which logits are wanted.

        With a `group` this is one rank's part: all ranks must compute the same batches in the same order, and all get
        all logits.
        """
        self._model = model
        self.group = group
        self._cuts_rows = cuts_rows
        self._compiled: Callable[..., torch.Tensor] | None = None
        self.kv_spec = kv_spec
        self.info = info
        self.grammars = Grammars(folder, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        """What requests with a grammar need of the model's tokenizer."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return int(self._model.get_memory_footprint())

    @property
    def embedding(self) -> torch.Tensor:
        """The embeddings of all tokens, ``[vocab, hidden]``."""
        weight: torch.Tensor = self._model.get_input_embeddings().weight  # type: ignore[assignment]
        return weight

    def linear_layers(self) -> list[tuple[torch.nn.Linear | PackedLinear, bool]]:
        """Return all linear layers, and whether each is the LM head."""
        head = self._model.get_output_embeddings()
        of_head = set() if head is None else set(head.modules())
        return [
            (module, module in of_head)
            for module in self._model.modules()
            if isinstance(module, torch.nn.Linear | PackedLinear)
        ]

    @property
    def num_ranks(self) -> int:
        """Processes that hold a part of the model each."""
        return 1 if self.group is None else self.group.size

    @property
    def num_query_heads(self) -> int:
        """Attention heads of a layer, those of other ranks included."""
        return int(self._model.config.get_text_config().num_attention_heads)

    @property
    def activation_bytes(self) -> int:
        """About how many bytes a forward pass needs per token position, besides weights and KV."""
        text = self._model.config.get_text_config()
        widest = max(
            (layer.out_features for layer, is_head in self.linear_layers() if not is_head), default=0
        )
        return int(self.kv_spec.dtype.itemsize * (2 * widest + 8 * text.hidden_size))

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._model.device

    def logits(self, inputs: BatchInputs, pool: KVPool, *, is_step: bool = False) -> torch.Tensor:
        """Run a padded batch, writing its KV to `pool`; return the logits after each slot's last token, [S, V].

        `is_step` says that slot i has token i or none, and that those without come last: a decode step. Rows of
        unused slots hold nothing of meaning. Must be called in inference mode.
        """
        derived = inputs.derive()
        return self._logits(inputs, derived, pool, kept=derived.last_token, is_step=is_step)

    def all_logits(self, inputs: BatchInputs, pool: KVPool) -> torch.Tensor:
        """Do the same as `logits`, but return the logits after every token position, ``[T, V]``."""
        return self._logits(inputs, inputs.derive(), pool, kept=0)

    def _logits(
        self,
        inputs: BatchInputs,
        derived: DerivedInputs,
        pool: KVPool,
        *,
        kept: torch.Tensor | int,
        is_step: bool = False,
    ) -> torch.Tensor:
        """`kept` are the positions of which logits are wanted; 0 stands for all, as in transformers."""
        cut = {}
        if self._cuts_rows and isinstance(kept, torch.Tensor):
            if not is_step:
                # oneDNN adds up a single row in another order than one of many.
                cut["kept"] = kept if len(kept) > 1 else kept.expand(2)
            kept = 0
        output = self._model(
            input_ids=inputs.token_ids.unsqueeze(0),
            position_ids=derived.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=kept,
            paged=_make_pass(inputs, derived, pool, is_step=is_step),
            **cut,
        )
        logits: torch.Tensor = output.logits[0]
        return logits[: inputs.num_cached.shape[0]] if cut else logits

    def compiled_logits(self, inputs: BatchInputs, pool: KVPool, *, is_step: bool = False) -> torch.Tensor:
        """Do the same as `logits` in code compiled for any number of token positions and of slots, of each two or more.

        The first call compiles, for a minute or so if the code is not in the cache.
        """
        if self._compiled is None:
            # Importing inductor takes seconds, and on the CPU it is not needed.
            from worker.compiled import compile_forward

            self._compiled = compile_forward(self.logits)
            if not is_step:
                compile_gated_ahead(self._model)
            with collections_put_off():
                return self._run_compiled(inputs, pool, is_step=is_step)
        return self._run_compiled(inputs, pool, is_step=is_step)

    def _run_compiled(self, inputs: BatchInputs, pool: KVPool, *, is_step: bool) -> torch.Tensor:
        assert self._compiled is not None
        num_tokens, num_slots = inputs.token_ids.shape[0], inputs.num_cached.shape[0]
        if num_tokens > 1:
            torch._dynamo.mark_dynamic(inputs.token_ids, 0)
        if num_slots > 1:
            for tensor in (inputs.query_starts, inputs.num_cached, inputs.page_table):
                torch._dynamo.mark_dynamic(tensor, 0)
        return self._compiled(inputs, pool, is_step=is_step)


def _make_pass(inputs: BatchInputs, derived: DerivedInputs, pool: KVPool, *, is_step: bool) -> PagedPass:
    if pool.device.type == "cpu":
        flush_denormals()
        return HostStep(inputs, derived, pool) if is_step else HostPass(inputs, derived, pool)
    return CudaStep(inputs, pool) if is_step else CudaPass(inputs, pool)


def load_model(source: ModelSource, group: ShardGroup | None = None) -> Model:
    """Load a model for serving, or one rank's part of it, as all ranks of the group do.

    Raises `ConfigError`, with the reason, if its family cannot be served: not a decoder-only language model, an
    attention that does not go through transformers' interface, code that needs more of its parts than they have here,
    or logits that differ from its own attention's.
    """
    config = _read_config(source)
    dtype = _choose_dtype(source, config)
    model, num_parameters = _load(source, config, dtype, group)
    kv_spec = _discover_kv_spec(model, dtype, source.name)
    info = ModelInfo(
        name=source.name,
        max_model_len=_choose_max_model_len(source, config),
        vocab_size=config.get_text_config().vocab_size,
        eos_token_ids=_eos_token_ids(model),
        dtype=str(dtype).removeprefix("torch."),
        num_parameters=num_parameters,
    )
    generator = torch.Generator().manual_seed(0)
    sequence = torch.randint(info.vocab_size, (min(24, info.max_model_len),), generator=generator)
    trial = sequence.unsqueeze(0).to(model.device)
    own = _run_with_attention(model, "eager", trial)[0, -1].float()
    try:
        cuts_rows = _adapt(model, trial, num_layers=len(kv_spec.layers), is_part=group is not None)
        loaded = Model(model, kv_spec, info, source.folder, cuts_rows=cuts_rows, group=group)
        _check_against_own(loaded, sequence.tolist(), own)
    except (AttributeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"model {source.name}: {config.model_type} needs something that is not supported: "
            f"{type(error).__name__}: {error}"
        ) from error
    return loaded


def _adapt(model: PreTrainedModel, trial: torch.Tensor, *, num_layers: int, is_part: bool) -> bool:
    """Give a model the parts that compute faster here; return whether its last layer can go on with some rows alone.

    `trial` is a sequence ``[1, T]`` to try them with; `is_part` says that this is one rank's part of a model.
    """
    fused_layers: frozenset[int] = frozenset()
    if model.device.type == "cpu" and not is_part:
        # A fused layer adds the residual within a product that ranks have yet to sum.
        fused_layers = fuse_layers(model, trial)
    cuts_rows = num_layers - 1 in fused_layers or cut_last_layer(model, trial)
    merge_projections(model)
    if model.device.type == "cuda":
        fuse_gated_mlps(model, trial)
    else:
        pack_linears(model)
        keep_freed_memory()
        use_huge_pages(packed_memory(model))
    return cuts_rows


def load_reference(source: ModelSource, *, attention: str) -> PreTrainedModel:
    """Load the same weights as `load_model` into transformers' own model, with its attention of this name.

    Nothing is merged or compiled: benchmarks and tests compare with it.
    """
    config = _read_config(source)
    model, _ = _load(source, config, _choose_dtype(source, config), None)
    model.set_attn_implementation(attention)
    return model


def _read_config(source: ModelSource) -> PreTrainedConfig:
    try:
        # Said, because transformers would ask at a terminal whether the folder's code may run.
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model {source.name}: transformers cannot read its config: {error}") from error
    if config.is_encoder_decoder:
        raise ConfigError(f"model {source.name}: {config.model_type} is not decoder-only")
    return config


def _choose_dtype(source: ModelSource, config: PreTrainedConfig) -> torch.dtype:
    """Return the type to compute in: the asked one, else the config's own where the device is good at it."""
    if source.dtype != "auto":
        return getattr(torch, source.dtype)  # type: ignore[no-any-return]
    own: torch.dtype = config.get_text_config().dtype or torch.float32  # type: ignore[assignment]
    if source.device == "cpu" and own is not torch.float32:
        # float16 has no fast path on CPUs, and bfloat16 one only where the instructions for it exist.
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if fast else torch.float32
    return own


def _choose_max_model_len(source: ModelSource, config: PreTrainedConfig) -> int:
    text = config.get_text_config()
    limit, reason = getattr(text, "max_position_embeddings", None), "the model's context"
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # It turns every sequence of a batch by other angles once one of them is longer than this.
        limit, reason = rope["original_max_position_embeddings"], "up to which its rotary embedding is one"
    if source.max_model_len is None:
        if limit is None:
            raise ConfigError(f"model {source.name} names no context length: give max_model_len")
        return int(limit)
    if limit is not None and source.max_model_len > limit:
        raise ConfigError(f"max_model_len must be <= {limit}, {reason}, got {source.max_model_len}")
    return source.max_model_len


def _load(
    source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, group: ShardGroup | None
) -> tuple[PreTrainedModel, int]:
    """Return the model, or one rank's part, and how many parameters the whole model has."""
    model: PreTrainedModel
    try:
        if source.load_format == "dummy" or group is not None:
            model, num_parameters = fill_model(
                config,
                dtype,
                attention=ATTENTION_NAME,
                device=source.device,
                folder=None if source.load_format == "dummy" else source.folder,
                name=source.name,
                rank=0 if group is None else group.rank,
                size=1 if group is None else group.size,
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=dtype,
                device_map=source.device,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=False,
            )
            num_parameters = model.num_parameters()
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model {source.name} cannot be loaded: {reason}") from error
    model.eval()
    model.requires_grad_(False)
    return model, num_parameters


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    own = model.config.get_text_config().eos_token_id
    eos = model.generation_config.eos_token_id if model.generation_config else own
    eos = own if eos is None else eos
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
    if len(eos_token_ids) > MAX_BANNED_IDS:
        raise ConfigError(f"a model must have at most {MAX_BANNED_IDS} EOS tokens, got {len(eos_token_ids)}")
    return eos_token_ids


def _discover_kv_spec(model: PreTrainedModel, dtype: torch.dtype, name: str) -> KVSpec:
    """Learn the KV shape of every layer from what attention is called with, whatever the family calls it."""
    seen: dict[int, KVLayerSpec] = {}

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if key.shape[-1] != value.shape[-1]:
            raise ConfigError(f"model {name}: keys and values of different size are not supported")
        if kwargs.get("s_aux") is not None:
            raise ConfigError(f"model {name}: attention sinks are not supported")
        if not getattr(module, "is_causal", True):
            raise ConfigError(f"model {name}: attention is not causal")
        seen[int(module.layer_idx)] = KVLayerSpec(  # type: ignore[arg-type]
            num_kv_heads=key.shape[1], head_dim=key.shape[-1]
        )
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS.register(_RECORDING_NAME, record)
    _run_with_attention(model, _RECORDING_NAME, torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(seen) != list(range(num_layers)):
        raise ConfigError(
            f"model {name}: {model.config.model_type} has layers whose attention does not go through "
            f"transformers' attention interface ({num_layers} layers, {len(seen)} seen), so it has no KV to page"
        )
    return KVSpec(layers=tuple(seen[i] for i in range(num_layers)), dtype=dtype)


@torch.inference_mode()
def _run_with_attention(model: PreTrainedModel, attention: str, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of whole sequences ``[B, T]`` under another attention implementation, ``[B, T, V]``."""
    model.set_attn_implementation(attention)
    try:
        logits: torch.Tensor = model(input_ids=token_ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits


@torch.inference_mode()
def _check_against_own(loaded: Model, tokens: list[int], own: torch.Tensor) -> None:
    """Compare a sequence, in two padded passes, with the logits `own` ``[V]`` of the model as it was loaded.

    This is what lets a family work because transformers has it: nothing is assumed of it, it is tried.
    """
    # Page 0 is scratch; the sequence's pages are given in reverse, so that page order matters.
    page_size = 16
    pool = KVPool.on_device(loaded.kv_spec, num_pages=3, page_size=page_size, device=loaded.device)
    layout = BatchLayout(bucket=Bucket(32, 2), pages_per_slot=2, page_size=page_size)
    host = HostBatch(layout)
    cut = len(tokens) // 2
    for start, end in ((0, cut), (cut, len(tokens))):
        host.pack([SlotInput(token_ids=tokens[start:end], num_cached=start, page_ids=(2, 1))])
        logits = loaded.logits(BatchInputs.of(layout, host.tensor.to(loaded.device)), pool)[0].float()
    error = float((logits - own).norm() / own.norm())
    # In 16 bits two right ways to compute a deep model differ by several percent: 0.056 was seen after 36 layers.
    limit = 1e-3 if loaded.kv_spec.dtype is torch.float32 else 0.2
    if not error <= limit:
        raise ConfigError(
            f"model {loaded.info.name}: its logits with paged attention and merged projections differ from its own "
            f"by {error:.2g} (at most {limit:g} is right): {loaded.info.name} needs something that is not supported"
        )

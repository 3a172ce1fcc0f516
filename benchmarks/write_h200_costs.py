"""Write the cost models of an H200 that come with purefill (scheduler/simulate/costs) from the measured figures.

The figures are those of docs/prefill-graphs.md and docs/decode.md. Whoever measures anew puts the new ones here and
runs `python -m benchmarks.write_h200_costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from graphs.buckets import StepLadder, default_token_ladder
from scheduler.batching.cost_model import CostModel
from scheduler.simulate.fleet_costs import FleetCosts

DATE = "2026-11-30"
FOLDER = Path(__file__).resolve().parents[1] / "scheduler" / "simulate" / "costs"
SLOTS = 8
PREFILL_8B = {128: 5.56, 256: 7.42, 512: 12.38, 1024: 23.96, 2048: 46.64, 4096: 93.76, 8192: 187.66}
"""Milliseconds of 8 prompts by their tokens together."""
PREFILL_06B = {128: 1.47, 256: 1.59, 512: 1.84, 1024: 2.58, 2048: 4.38, 4096: 8.41, 8192: 17.80}
STEP_8B = {(64, 1024): 7.50, (8, 1024): 5.44}
"""Milliseconds of a decode step by sequences and context."""
ATTENTION_FLOPS = 430e12
"""Of our attention kernel at 8,192 tokens a sequence."""
COPY_BYTES_PER_S = 4.14e12
PAGE_SIZE = 64
MAX_NUM_SEQS = 256


def prefill_seconds(measured_ms: Mapping[int, float]) -> tuple[dict[str, float], str]:
    """Return the seconds of each bucket of the default ladder, and which of them were measured."""
    table = CostModel.interpolated(
        default_token_ladder(max(measured_ms)), {n: ms / 1000 for n, ms in measured_ms.items()}
    ).table()
    buckets = ", ".join(f"{n}x{SLOTS}" for n in measured_ms)
    source = (
        f"measured: {buckets}: benchmarks/prefill_graphs.py, {DATE}, one H200, bf16, torch 2.11, {SLOTS} equal "
        "prompts. The other buckets are interpolated by tokens; those below 128 are extrapolated."
    )
    return {f"{n}x{SLOTS}": round(seconds, 7) for n, seconds in table.items()}, source


def attention_pair_s(num_layers: int, num_heads: int) -> float:
    """Return seconds per pair of tokens: 4 FLOPs per pair, layer and element of a head, of 128 elements."""
    return 4 * num_layers * num_heads * 128 / ATTENTION_FLOPS


def pages(weights_gib: float, kv_bytes_per_token: int) -> int:
    """Return the pages that one GPU of 139 GiB has room for beside the weights, with 10 GiB left."""
    return int((139 - 10 - weights_gib) * 2**30 / (kv_bytes_per_token * PAGE_SIZE))


def qwen3_8b() -> FleetCosts:
    """Return the cost model of the Qwen3-8B shape."""
    table, source = prefill_seconds(PREFILL_8B)
    small, large = STEP_8B[8, 1024], STEP_8B[64, 1024]
    per_token = (large - small) / 1000 / (56 * 1024)
    step_s = small / 1000 - 8 * 1024 * per_token
    steps = {f"{n}": round(_step(n, step_s, PREFILL_8B), 7) for n in sizes()}
    return FleetCosts(
        name="h200-qwen3-8b",
        prefill_seconds=table,
        decode_seconds=steps,
        decode_seconds_per_context_token=float(f"{per_token:.4g}"),
        attention_seconds_per_pair=float(f"{attention_pair_s(36, 32):.4g}"),
        page_size=PAGE_SIZE,
        num_pages=pages(15.3, 2 * 36 * 8 * 128 * 2),
        max_model_len=40_960,
        message_s=MESSAGE_S,
        http_s=HTTP_S,
        sources={
            "prefill_seconds": source,
            "decode_seconds": f"64 and 8 sequences x 1024: measured: benchmarks/decode_step.py, {DATE}, one H200, "
            "bf16, torch 2.11; a step is taken as one constant and a part per context token, which these two fix. "
            "Above 64 sequences: not measured, the seconds of a prefill of as many tokens where those are more.",
            **_COMMON_SOURCES,
        },
    )


def qwen3_06b() -> FleetCosts:
    """Return the cost model of the Qwen3-0.6B shape."""
    table, source = prefill_seconds(PREFILL_06B)
    kv_bytes = 2 * 28 * 8 * 128 * 2
    return FleetCosts(
        name="h200-qwen3-0.6b",
        prefill_seconds=table,
        decode_seconds={f"{n}": round(_step(n, 1.1e-3, PREFILL_06B), 7) for n in sizes()},
        decode_seconds_per_context_token=float(f"{kv_bytes / COPY_BYTES_PER_S:.4g}"),
        attention_seconds_per_pair=float(f"{attention_pair_s(28, 16):.4g}"),
        page_size=PAGE_SIZE,
        num_pages=pages(1.2, kv_bytes),
        max_model_len=40_960,
        message_s=MESSAGE_S,
        http_s=HTTP_S,
        sources={
            "prefill_seconds": source,
            "decode_seconds": f"not measured as steps: the inter-token p50 over HTTP with few sequences, "
            f"benchmarks/serve_http.py, {DATE}. The part per context token is its KV bytes over the copy rate.",
            **_COMMON_SOURCES,
        },
    )


MESSAGE_S = 0.0005
HTTP_S = 0.0044
_COMMON_SOURCES = {
    "attention_seconds_per_pair": f"derived: FLOPs over the 430 TFLOP/s of the attention kernel at 8192 tokens "
    f"a sequence (docs/prefill-graphs.md, {DATE}); counted for what exceeds the measured batches",
    "num_pages": "computed: a GPU of 139 GiB less weights and 10 GiB",
    "message_s": f"measured on two cores of a CPU, by sockets, benchmarks/hops.py: docs/latency.md, {DATE}",
    "http_s": f"likewise with eight requests at once: to the first token 5.5 ms, of which the batch's forming and "
    f"message are 1.1; {DATE}",
}


def sizes() -> list[int]:
    """Return the sequences of each step's bucket."""
    return sorted(bucket.num_slots for bucket in StepLadder(MAX_NUM_SEQS).buckets)


def _step(num_sequences: int, measured_s: float, prefill_ms: Mapping[int, float]) -> float:
    if num_sequences <= 64:
        return measured_s
    points = {n: ms / 1000 for n, ms in prefill_ms.items()}
    return max(measured_s, CostModel.interpolated([num_sequences], points).seconds(num_sequences))


def main() -> None:
    """Write both files."""
    for costs in (qwen3_8b(), qwen3_06b()):
        (FOLDER / f"{costs.name}.json").write_text(costs.to_json())


if __name__ == "__main__":
    main()

"""Attention of one decode step over KV pages: checked against float32, then timed next to what else there is.

    python benchmarks/decode_attention.py
    python benchmarks/decode_attention.py --tilings --sizes 64x2048

A time is that of one layer in a CUDA graph, the new token's KV written to its page included where a kernel does that.
The rate is that of the keys and values read; the copy rate counts bytes read and written. Takes under a minute.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from decode_step import copy_rate
from prefill_checks import relative_error

from worker.triton_decode import TILING, Tiling, launch_decode, launch_plan

SHAPES = {"qwen3-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128), "llama-3.2-1b": (32, 8, 64)}
"""(query heads, KV heads, head dimension)"""
MAX_ERROR = 1e-2
REPEATS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A step's inputs. Pages lie scattered, keys and values as the server has them."""

    query: torch.Tensor  # [S, heads, head_dim]
    key: torch.Tensor  # [S, kv_heads, head_dim]
    value: torch.Tensor
    pool: torch.Tensor
    values_offset: int
    lengths: torch.Tensor  # [S] int32: cached tokens
    starts: torch.Tensor  # [S + 1] int32
    table: torch.Tensor  # [S, P] int32
    page_size: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cached keys and values."""
        return int(self.lengths.sum()) * 2 * self.key[0].numel() * self.key.element_size()

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, ``[pages, page_size, kv_heads, head_dim]``."""
        shape = (-1, self.page_size, *self.key.shape[1:])
        return self.pool[: self.values_offset].view(shape), self.pool[self.values_offset :].view(shape)


def make_problem(shape: str, lengths: list[int], page_size: int) -> Problem:
    """Return random inputs for sequences of these lengths."""
    heads, kv_heads, head_dim = SHAPES[shape]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    num_pages = [length // page_size + 1 for length in lengths]
    pages = torch.randperm(sum(num_pages)).int() + 1
    table = torch.zeros(len(lengths), max(num_pages), dtype=torch.int32)
    for row, own in zip(table, pages.split(num_pages), strict=True):
        row[: len(own)] = own
    layer = (sum(num_pages) + 1) * page_size * kv_heads * head_dim
    return Problem(
        query=torch.randn(len(lengths), heads, head_dim, **options),
        key=torch.randn(len(lengths), kv_heads, head_dim, **options),
        value=torch.randn(len(lengths), kv_heads, head_dim, **options),
        pool=torch.randn(2 * layer, **options),
        values_offset=layer,
        lengths=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        starts=torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
        table=table.cuda(),
        page_size=page_size,
    )


def reference(problem: Problem) -> torch.Tensor:
    """Return the attention of every sequence in float32, the new token's own key included."""
    keys, values = problem.pages()
    group = problem.query.shape[1] // problem.key.shape[1]
    rows = []
    for i, length in enumerate(problem.lengths.tolist()):
        own = problem.table[i].long()
        k = torch.cat([keys[own].flatten(0, 1)[:length], problem.key[i : i + 1]]).float()
        v = torch.cat([values[own].flatten(0, 1)[:length], problem.value[i : i + 1]]).float()
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("hd,khd->hk", problem.query[i].float(), k) * problem.query.shape[2] ** -0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(dim=-1), v))
    return torch.stack(rows)


def purefill(problem: Problem, tiling: Tiling = TILING) -> Callable[[], torch.Tensor]:
    """Return our kernels. The plan is made once a step, not once a layer, so it is not timed."""
    plan = launch_plan(problem.starts, problem.lengths, 0, tiling)
    scaling = problem.query.shape[2] ** -0.5
    p = problem
    return lambda: launch_decode(
        p.query, p.key, p.value, p.pool, plan, p.lengths, p.table, 0, p.values_offset, p.page_size, scaling, 0, 0.0,
        tiling,
    )  # fmt: skip


def write_new(problem: Problem) -> None:
    """Write the new tokens' KV to their pages, for kernels that do not."""
    position = problem.lengths.long()
    page = problem.table.gather(1, (position // problem.page_size).unsqueeze(1)).squeeze(1).long()
    for pages, new in zip(problem.pages(), (problem.key, problem.value), strict=True):
        pages[page, position % problem.page_size] = new


def torch_varlen(problem: Problem) -> Callable[[], torch.Tensor]:
    """Return torch's varlen attention with a page table; raises where there is none or it refuses the pages."""
    from torch.nn.attention.varlen import varlen_attn

    write_new(problem)
    keys, values = problem.pages()
    lengths = (problem.lengths + 1).int()
    key_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    max_keys = problem.table.shape[1] * problem.page_size
    arguments: dict[str, object] = {
        "window_size": (-1, -1),
        "seqused_k": lengths,
        "block_table": problem.table,
    }
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        arguments["enable_gqa"] = True
    return lambda: varlen_attn(
        problem.query, keys, values, problem.starts, key_starts, 1, max_keys, **arguments
    )  # fmt: skip


def flashinfer(problem: Problem) -> Callable[[], torch.Tensor]:
    """Return FlashInfer's decode with tensor cores; raises where it is not installed or cannot compile."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    write_new(problem)
    lengths = (problem.lengths + 1).cpu()
    counts = -(-lengths // problem.page_size)
    ids = torch.cat([row[:n] for row, n in zip(problem.table.cpu(), counts.tolist(), strict=True)]).cuda()
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().cuda()
    last = ((lengths - 1) % problem.page_size + 1).int().cuda()
    size = len(lengths)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=torch.empty(size + 1, dtype=torch.int32, device="cuda"),
        paged_kv_indices_buffer=torch.empty(len(ids), dtype=torch.int32, device="cuda"),
        paged_kv_last_page_len_buffer=torch.empty(size, dtype=torch.int32, device="cuda"),
    )
    heads, kv_heads, head_dim = problem.query.shape[1], problem.key.shape[1], problem.key.shape[2]
    wrapper.plan(
        starts, ids, last, heads, kv_heads, head_dim, problem.page_size,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(problem.query, problem.pages())


def graph_us(function: Callable[[], object], *, repeats: int = REPEATS, rest_s: float = 0.0) -> float:
    """Return the median microseconds of a function in a CUDA graph; the GPU rests before each replay."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats + 3):
        time.sleep(rest_s)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:]) * 1e3


def measure(
    name: str,
    make: Callable[[], Callable[[], torch.Tensor]],
    problem: Problem,
    exact: torch.Tensor,
    rate: float,
) -> dict[str, object]:
    """Check and time one way to compute the problem; a way that fails is reported as such."""
    try:
        function = make()
        error = relative_error(function().float(), exact)
        microseconds = graph_us(function)
    except Exception as problem_found:  # whatever another library raises is its result
        torch.cuda.synchronize()
        return {"name": name, "error": f"{type(problem_found).__name__}: {str(problem_found)[:90]}"}
    kv_rate = problem.kv_bytes / (microseconds * 1e-6)
    return {
        "name": name, "us": microseconds, "tb_per_s": kv_rate / 1e12, "of_copy": kv_rate / rate,
        "relative_error": error, "ok": math.isfinite(error) and error < MAX_ERROR,
    }  # fmt: skip


def all_tilings() -> Iterator[Tiling]:
    """Yield tilings worth trying."""
    for block_keys, programs, warps, stages in itertools.product(
        (32, 64, 128), (1, 2, 3, 4), (2, 4, 8), (2, 3, 4, 5)
    ):
        # Keys and values of head dimension 128 take half a KiB a key, and an SM has 228 KiB of shared memory.
        shared_kib = programs * stages * block_keys / 2
        if 128 <= shared_kib <= 220 and 16 <= block_keys // warps <= 32:
            yield Tiling(block_keys=block_keys, programs_per_sm=programs, num_warps=warps, num_stages=stages)


def lengths_of(size: str) -> list[int]:
    """Return the lengths of ``64x2048``, or of ``64~2048``: from a few tokens to twice as many on average."""
    if "~" in size:
        count, mean = map(int, size.split("~"))
        return [1 + 2 * mean * i // count for i in range(count)]
    count, mean = map(int, size.split("x"))
    return [mean] * count


def main() -> int:
    """Check, time, print the table. Returns 1 if a check of ours failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--sizes", nargs="+", default=["64x2048", "64x1024", "64~2048", "8x1024", "1x8192"])
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--tilings", action="store_true", help="time all tilings of our kernel instead")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    rate = copy_rate(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rate / 1e12:.2f} TB/s")
    rows: list[dict[str, object]] = []
    for shape, size, page_size in itertools.product(args.shapes, args.sizes, args.page_sizes):
        problem = make_problem(shape, lengths_of(size), page_size)
        exact = reference(problem)
        ways: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
            "purefill": lambda p=problem: purefill(p),  # type: ignore[misc]
            "torch varlen": lambda p=problem: torch_varlen(p),  # type: ignore[misc]
            "FlashInfer": lambda p=problem: flashinfer(p),  # type: ignore[misc]
        }
        if args.tilings:
            ways = {str(t)[6:]: lambda p=problem, t=t: purefill(p, t) for t in all_tilings()}  # type: ignore[misc]
        found = [measure(name, make, problem, exact, rate) for name, make in ways.items()]
        if args.tilings:
            found = sorted(found, key=lambda row: float(str(row.get("us", "inf"))))[:8]
        for row in found:
            rows.append({"shape": shape, "size": size, "page_size": page_size, **row})
            print_row(rows[-1])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    failed = [row for row in rows if row.get("ok") is False and "torch" not in str(row["name"])]
    return 1 if failed else 0


def print_row(row: dict[str, object]) -> None:
    """Print one figure."""
    where = f"{row['shape']:<13}{row['size']:>9} page {row['page_size']:>3}  {row['name']!s:<14}"
    if "us" not in row:
        print(f"{where} {row['error']}", flush=True)
        return
    wrong = "" if row["ok"] else "  WRONG"
    print(
        f"{where}{row['us']:9.1f} us {row['tb_per_s']:6.2f} TB/s {row['of_copy']:6.0%} of copy"
        f"  error {row['relative_error']:.1e}{wrong}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())

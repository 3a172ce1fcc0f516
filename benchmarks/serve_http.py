"""The whole way over HTTP: bursts and Poisson load on `purefill serve`, and on `vllm serve` where it is given.

    python benchmarks/serve_http.py --model qwen3-8b --vllm "python -m vllm.entrypoints.cli.main"
    python benchmarks/serve_http.py --model qwen3-0.6b --layers 2 --purefill-options "--device cpu" --seconds 5

Weights are random. The client is one process, which reads a stream of tokens in a tenth of the time that a server
needs to write it. One server after the other on the same device, the same client: vLLM first, with prefix caching
off and everything else as it comes. Each gets bursts of eight prompts, one burst when the last has been answered;
then as many requests of 64 tokens in and 64 out as it serves with 64 at once, which is its saturation; then the same
requests at random moments, at 25, 50 and 90 % of the saturation of the first server. If the second turns out slower,
give its rates by --rates. Two minutes for each server, and its start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop
from shapes import NAMES, write_shape
from stream_client import Answer, StreamClient
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

BURST_PROMPTS = 8
BURST_LENGTHS = (16, 64, 128)
PROMPT_TOKENS = OUTPUT_TOKENS = 64
CONCURRENCY = 64
SHARES = (0.25, 0.5, 0.9)
START_TIMEOUT_S = 420.0
MAX_MODEL_LEN = 4096


class Client:
    """Sends requests to one server."""

    def __init__(self, url: str, model: str, vocab_size: int) -> None:
        self._streams = StreamClient(url, "/v1/completions")
        self._model = model
        self._vocab_size = vocab_size
        self._numbers = random.Random(0)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._streams.close()

    def prompt(self, length: int) -> list[int]:
        """Return random token ids."""
        return [self._numbers.randrange(self._vocab_size) for _ in range(length)]

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Stream one completion."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        answer = await self._streams.ask(json.dumps(body).encode())
        if sum(answer.counts) != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens, got {sum(answer.counts)}")
        return answer


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that at least `share` of `values` do not exceed, in milliseconds."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e3


async def bursts(client: Client, length: int, count: int) -> dict[str, float]:
    """Send bursts of prompts, one after the other."""
    times: list[float] = []
    for number in range(count + 2):
        prompts = [client.prompt(length) for _ in range(BURST_PROMPTS)]
        answers = await asyncio.gather(*(client.ask(prompt, 1) for prompt in prompts))
        if number >= 2:
            times += [answer.ttft for answer in answers]
        await asyncio.sleep(0.02)
    return {"ttft_p50_ms": percentile(times, 0.5), "ttft_p99_ms": percentile(times, 0.99)}


async def saturation(client: Client, seconds: float) -> dict[str, float]:
    """Keep `CONCURRENCY` requests under way; return how many a second are served, by the second half's tokens."""
    started = time.perf_counter()
    answers: list[Answer] = []

    async def keep_asking() -> None:
        while time.perf_counter() < started + seconds:
            answers.append(await client.ask(client.prompt(PROMPT_TOKENS), OUTPUT_TOKENS))

    await asyncio.gather(*(keep_asking() for _ in range(CONCURRENCY)))
    tokens = sum(
        count
        for answer in answers
        for arrival, count in zip(answer.arrivals, answer.counts, strict=True)
        if started + seconds / 2 < arrival <= started + seconds
    )
    rate = tokens / (seconds / 2)
    return {"requests_per_s": rate / OUTPUT_TOKENS, "tokens_per_s": rate}


async def poisson(client: Client, rate: float, seconds: float) -> dict[str, float]:
    """Send requests at random moments, `rate` a second on average."""
    numbers = random.Random(round(rate * 1000))
    tasks: list[asyncio.Task[Answer]] = []
    started = time.perf_counter()
    due = numbers.expovariate(rate)
    while due < seconds:
        await asyncio.sleep(max(started + due - time.perf_counter(), 0))
        ask = client.ask(client.prompt(PROMPT_TOKENS), OUTPUT_TOKENS)
        tasks.append(asyncio.create_task(ask))
        due += numbers.expovariate(rate)
    answers = await asyncio.gather(*tasks)
    took = time.perf_counter() - started
    ttfts = [answer.ttft for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "requests_per_s": rate,
        "requests": len(answers),
        "ttft_p50_ms": percentile(ttfts, 0.5),
        "ttft_p99_ms": percentile(ttfts, 0.99),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "tokens_per_s": OUTPUT_TOKENS * len(answers) / took,
    }


async def measure(
    url: str, vocab_size: int, args: argparse.Namespace, rates: Sequence[float]
) -> dict[str, object]:
    """Put one server through everything; `rates` of the Poisson loads, or none for shares of its own saturation."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    results: dict[str, object] = {}
    async with Client(url, model, vocab_size) as client:
        await asyncio.gather(*(client.ask(client.prompt(PROMPT_TOKENS), OUTPUT_TOKENS) for _ in range(16)))
        for length in BURST_LENGTHS:
            results[f"burst 8x{length}"] = await bursts(client, length, args.bursts)
        full = await saturation(client, args.seconds)
        results["saturation"] = full
        for rate in rates or [share * full["requests_per_s"] for share in SHARES]:
            results[f"poisson {rate:.1f}/s"] = await poisson(client, rate, args.seconds)
    return results


@contextmanager
def running(name: str, command: Sequence[str], port: int, logs: Path) -> Iterator[str]:
    """Run a server that writes to ``logs/NAME.log``; yield its URL once it answers.

    Raises `RuntimeError`, with the server's last words, if it does not answer in time.
    """
    started = time.perf_counter()
    with (logs / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            while not asyncio.run(is_ready(url)):
                if process.poll() is not None or time.perf_counter() > started + START_TIMEOUT_S:
                    log.seek(0)
                    raise RuntimeError(f"{name} did not start:\n{log.read()[-3000:]}")
                time.sleep(0.5)
            print(f"{name} is ready after {time.perf_counter() - started:.1f} s", flush=True)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


async def is_ready(url: str) -> bool:
    """Return whether a server answers yet."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def write_tokenizer(folder: Path) -> int:
    """Give a shape a tokenizer in which each token is a word; return the size of the vocabulary."""
    vocab_size = int(json.loads((folder / "config.json").read_text())["vocab_size"])
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_MODEL_LEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return vocab_size


def commands(folder: Path, args: argparse.Namespace) -> dict[str, tuple[list[str], int]]:
    """Return the command and the port of each server, in the order in which they run."""
    common = ["--load-format", "dummy", "--max-model-len", str(MAX_MODEL_LEN)]
    found: dict[str, tuple[list[str], int]] = {}
    if args.vllm:
        port = free_port()
        options = ["--port", str(port), "--no-enable-prefix-caching", *shlex.split(args.vllm_options)]
        found["vllm"] = ([*shlex.split(args.vllm), "serve", str(folder), *common, *options], port)
    port = free_port()
    serve = [sys.executable, "-c", "import sys; from scheduler.cli import main; sys.exit(main())", "serve"]
    options = ["--model", str(folder), "--port", str(port), *shlex.split(args.purefill_options)]
    found["purefill"] = ([*serve, *common, *options], port)
    return found


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def print_table(results: dict[str, dict[str, object]]) -> None:
    """Print every figure of every server, one line a load."""
    for load in next(iter(results.values())):
        print(f"\n{load}")
        for server, loads in results.items():
            figures = loads.get(load, {})
            assert isinstance(figures, dict)
            print(f"  {server:<9}" + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))


def main() -> int:
    """Run the servers one after the other, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=NAMES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="use only so many layers")
    parser.add_argument(
        "--vllm", default="", help="how vLLM's command line is called, if it is to be measured"
    )
    parser.add_argument("--vllm-options", default="", help="more options of `vllm serve`")
    parser.add_argument("--purefill-options", default="", help="more options of `purefill serve`")
    parser.add_argument("--bursts", type=int, default=25, help="bursts of each length")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each of the other loads")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[], help="Poisson loads, in requests a second"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--logs", type=Path, help="an existing folder for what the servers write")
    args = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = write_shape(args.model, Path(work), num_layers=args.layers)
        vocab_size = write_tokenizer(folder)
        rates = list(args.rates)
        for name, (command, port) in commands(folder, args).items():
            with running(name, command, port, args.logs or Path(work)) as url:
                results[name] = uvloop.run(measure(url, vocab_size, args, rates))
            full = results[name]["saturation"]
            assert isinstance(full, dict)
            rates = rates or [share * full["requests_per_s"] for share in SHARES]
            if rates[-1] > full["requests_per_s"]:
                print(f"{name} does not keep up with {rates[-1]:.1f} requests a second: give lower --rates")
            print(json.dumps({name: results[name]}), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())

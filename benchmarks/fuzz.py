"""Bytes that are nearly HTTP, sent to a real service: nothing of it may be a 5xx, a crash, or a leak.

    python -m benchmarks.fuzz --seconds 90 --seed 1

Each case is one connection. It takes valid requests of every path, changes some of their bytes or fields, sends them
in pieces, and reads the answers or goes away in one of several ways. In between, a valid request must be answered with
the same tokens each time. At the end the service must be ready, all KV pages free, and the ApiServers must have no
more open files than at the start and hardly more memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.integration.test_load import check_nothing_is_left
from tests.support.service import Service, serve

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_READ_S = 2.0
"""Longest that a case waits for answers: what runs longer is left, as a client would."""
_CASES_PER_CANARY = 100
_MAX_GROWTH_BYTES = 48 * 2**20
"""Of an ApiServer's memory after its first fifth of the cases: allocators keep some of what was in use."""

_MAX_FILES = 8
"""What libraries open when they are first used."""

Mutation = Callable[[random.Random, bytes], bytes]


def _json_values(rng: random.Random) -> Any:
    """Return a value that a field may not expect."""
    depth = rng.choice((3, 50, 2000))
    nested: Any = "x"
    for _ in range(min(depth, 200)):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    choices: tuple[Any, ...] = (
        *(None, True, -1, 0, 1, 10**30, -(10**30), 2**31, 2**63, 2**64, 1e308, 5e-324, -0.0, 0.5),
        *("", "\0", "\ud800", "a" * 10_000, "\u2028", "😀" * 50, "<|im_start|>", "null"),
        *([], {}, [[]], [None], [1, "a"], [-1], ["a", 1], [10**10], {"": ""}, nested),
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"regex": rng.choice(("(a*)*b", "(", "[", "a{1,100000}", "\\"))},
        [{"role": "user", "content": rng.choice((None, 1, [], [{}], [{"type": "image_url"}]))}],
    )
    return rng.choice(choices)


_FIELDS = (
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "seed",
        "temperature",
    ),
    *(
        "top_p",
        "top_k",
        "min_p",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "stream",
        "stream_options",
        "echo",
    ),
    *("response_format", "structured_outputs", "stop_token_ids", "min_tokens", "prompt_logprobs", "user"),
    *("truncate_prompt_tokens", "priority", "ttft_slo_ms", "request_id", "chat_template_kwargs", "tokens"),
    *("add_special_tokens", "skip_special_tokens", "tools", "suffix", "best_of", "ignore_eos", "unknown"),
)


def _requests(rng: random.Random, model: str) -> tuple[str, str, dict[str, Any] | None]:
    """Return method, path and body of a valid request that costs little."""
    bodies: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
        ("POST", "/v1/completions", {"model": model, "prompt": "Once upon", "max_tokens": 3}),
        ("POST", "/v1/completions", {"model": model, "prompt": [[5, 6], [7]], "max_tokens": 2, "n": 2}),
        ("POST", "/v1/completions", {"model": model, "prompt": "a", "max_tokens": 4, "stream": True}),
        (
            "POST",
            "/v1/chat/completions",
            {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
        ),
        ("POST", "/tokenize", {"prompt": "some text"}),
        ("POST", "/detokenize", {"tokens": [5, 6, 7]}),
        ("GET", "/v1/models", None),
        ("GET", "/metrics", None),
        ("HEAD", "/health", None),
        ("DELETE", f"/v1/requests/{rng.choice(('x', '%00', '%ff', 'a/b', '..', 'y' * 3000))}", None),
        ("OPTIONS", "*", None),
        (
            "GET",
            rng.choice(("/docs", "/openapi.json", "/load?x=%zz", "//", "/%2e%2e/", "/v1/models/ü")),
            None,
        ),
    )
    return rng.choice(bodies)


def _odd_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Return a body with some fields changed, perhaps no valid JSON."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        body = {**body, rng.choice(_FIELDS): _json_values(rng)}
    text = json.dumps(body).encode()
    kind = rng.randrange(8)
    if kind == 0:  # the same key twice
        text = text[:-1] + b', "model": 1, "prompt": "b"}'
    elif kind == 1:  # deeper than any parser goes
        text = text[:-1] + b', "unknown": ' + b"[" * rng.choice((100, 5000, 100_000)) + b"}"
    elif kind == 2:
        text = text[:-1] + b', "seed": ' + b"9" * rng.choice((20, 400, 5000)) + b"}"
    elif kind == 3:  # no UTF-8
        text = text.replace(b"a", rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0")))
    return text


def _framed(rng: random.Random, method: str, path: str, body: bytes | None) -> bytes:
    """Return a request, whose framing is right most of the time."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: x"]
    if rng.random() < 0.5:
        lines.append(b"Connection: " + rng.choice((b"close", b"keep-alive", b"upgrade, x", b"Upgrade")))
    if rng.random() < 0.1:
        lines.append(b"Upgrade: " + rng.choice((b"websocket", b"h2c", b"x")))
    if rng.random() < 0.1:
        lines += [b"X-%d: %s" % (i, b"v" * rng.choice((1, 500))) for i in range(rng.choice((5, 100)))]
    if rng.random() < 0.1:
        lines.append(
            rng.choice((b"Expect: 100-continue", b"Expect: x", b"Content-Length: 0", b"TE: trailers"))
        )
    if body is None:
        return b"\r\n".join([*lines, b"", b""])
    lines.append(b"Content-Type: " + rng.choice((b"application/json",) * 8 + (b"text/plain", b"", b"\xff")))
    framing = rng.randrange(12)
    if framing < 7:
        lines.append(b"Content-Length: %d" % len(body))
    elif framing == 7:
        wrong = (0, len(body) - 1, len(body) + 1, len(body) * 10, 10**9, 10**25, -1)
        lines.append(b"Content-Length: %d" % rng.choice(wrong))
    elif framing == 8:
        lines.append(b"Content-Length: " + rng.choice((b"", b"x", b"1,1", b"0x10", b" 5 5", b"+5")))
    else:
        lines.append(
            b"Transfer-Encoding: " + rng.choice((b"chunked",) * 5 + (b"gzip, chunked", b"x", b"chunked, x"))
        )
        body = _chunked(rng, body)
    return b"\r\n".join([*lines, b"", body])


def _chunked(rng: random.Random, body: bytes) -> bytes:
    size = rng.randint(1, max(1, len(body)))
    parts = [body[i : i + size] for i in range(0, len(body), size)][:50]
    chunks = b"".join(
        b"%x%s\r\n%s\r\n" % (len(part), rng.choice((b"", b"", b";a=b")), part) for part in parts
    )
    ends = (b"0\r\n\r\n",) * 5 + (
        b"0\r\nX: y\r\n\r\n",
        b"",
        b"0",
        b"-1\r\n",
        b"ffffffffffffffffff\r\n",
        b"5\r\na",
    )
    return chunks + rng.choice(ends)


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.choice((0, 10, 13, 32, 34, 58, 255, rng.randrange(256)))
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(1, len(data) + 1)]


def _drop(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice((1, 4, 100)) :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    junk = (b"\0", b"\r\n", b"\n", b"\r\n\r\n", b"\xff\xfe", b" ", b"x" * 70_000, b"9" * 30, b":", b"\t")
    return data[:at] + rng.choice(junk) + data[at:]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    return data * rng.choice((2, 3, 20, 100))


_MUTATIONS: tuple[Mutation, ...] = (_flip, _cut, _drop, _insert, _repeat)


def make_case(rng: random.Random, model: str) -> bytes:
    """Return what one connection sends."""
    data = b""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        method, path, body = _requests(rng, model)
        request = _framed(rng, method, path, None if body is None else _odd_body(rng, body))
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
            request = rng.choice(_MUTATIONS)(rng, request) or b"\r\n"
        data += request
    return data[: 2**20]


@dataclass(kw_only=True)
class Findings:
    """What came of the cases."""

    statuses: Counter[int] = field(default_factory=Counter)
    num_cases: int = 0
    num_bytes: int = 0
    num_canaries: int = 0
    failures: list[str] = field(default_factory=list)
    """What must not be: a line each."""
    memory_bytes: tuple[int, int] = (0, 0)
    """Of the ApiServers together, after the first fifth and at the end."""
    num_files: tuple[int, int] = (0, 0)
    """Open files of the ApiServers, at the start and at the end."""


class Fuzzer:
    """Sends cases to one service, and looks at what it does."""

    def __init__(self, service: Service, seed: int) -> None:
        self._service = service
        self._seed = seed
        host, port = service.url.removeprefix("http://").rsplit(":", 1)
        self._address = host, int(port)
        self.findings = Findings()
        self._canary: str | None = None

    async def run(self, *, num_cases: int, seconds: float, concurrency: int = 12) -> Findings:
        """Send cases until there were so many, or the time is over; then look at what is left."""
        servers = api_servers(self._service)
        await self._check_canary()
        files = _num_files(servers)
        ends_at, numbers = time.monotonic() + seconds, iter(range(num_cases))
        early: list[int] = []

        async def send_some() -> None:
            for number in numbers:
                if time.monotonic() > ends_at:
                    return
                await self._case(number)
                if number % _CASES_PER_CANARY == 0:
                    await self._check_canary()
                done = max(number / num_cases, 1 - (ends_at - time.monotonic()) / seconds)
                if not early and done > 0.2:
                    early.append(_memory_bytes(servers))

        await asyncio.gather(*(send_some() for _ in range(concurrency)))
        await self._check_canary()
        await asyncio.to_thread(
            self._check_rest, servers, files, early[0] if early else _memory_bytes(servers)
        )
        return self.findings

    async def _case(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        data = make_case(rng, self._service.model)
        answer = b""
        try:
            answer = await asyncio.wait_for(self._exchange(rng, data), timeout=60)
        except OSError as error:
            self.findings.failures.append(f"case {number}: {error!r}")
        statuses = [int(status) for status in _STATUS.findall(answer)]
        self.findings.statuses.update(statuses)
        self.findings.num_cases += 1
        self.findings.num_bytes += len(data)
        if any(status >= 500 for status in statuses):
            self.findings.failures.append(f"case {number}: {data[:3000]!r} was answered {answer[-600:]!r}")

    async def _exchange(self, rng: random.Random, data: bytes) -> bytes:
        """Send the bytes of a case in its way, and return what was answered."""
        reader, writer = await asyncio.open_connection(*self._address)
        answer = bytearray()
        try:
            size = rng.choice((len(data), len(data), 1 + len(data) // 3, 1 + len(data) // 20))
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await writer.drain()
            ending = rng.randrange(8)
            if ending == 0:  # gone before the answer
                return b""
            if ending == 1:
                linger = struct.pack("ii", 1, 0)  # close with a reset
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return b""
            if ending == 2:
                writer.write_eof()
            try:
                async with asyncio.timeout(_READ_S * rng.random()):
                    while part := await reader.read(65_536):
                        answer += part
            except TimeoutError:
                pass
        except OSError:
            pass  # it may close the connection when what came is no HTTP
        finally:
            writer.transport.abort()
        return bytes(answer)

    async def _check_canary(self) -> None:
        """A valid request must be answered as the first one was."""
        body = {"model": self._service.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        async with httpx.AsyncClient(base_url=self._service.url, timeout=60) as client:
            answer = await client.post("/v1/completions", json=body)
        self.findings.num_canaries += 1
        text = (
            answer.json()["choices"][0]["text"] if answer.status_code == 200 else f"HTTP {answer.status_code}"
        )
        self._canary = self._canary or text
        if text != self._canary:
            self.findings.failures.append(f"a valid request got {text!r} instead of {self._canary!r}")

    def _check_rest(self, servers: list[psutil.Process], files: int, early: int) -> None:
        findings = self.findings
        check_nothing_is_left(self._service)
        if httpx.get(f"{self._service.url}/ready").status_code != 200:
            findings.failures.append("the service is not ready any more")
        for _ in range(500):  # connections close within seconds; each look is a request
            httpx.get(f"{self._service.url}/metrics")
            findings.num_files = files, _num_files(servers)
            if findings.num_files[1] <= files + _MAX_FILES:
                break
        else:
            findings.failures.append(f"open files grew from {files} to {findings.num_files[1]}")
        findings.memory_bytes = early, _memory_bytes(servers)
        growth = findings.memory_bytes[1] - early
        if growth > _MAX_GROWTH_BYTES:
            findings.failures.append(f"memory of the ApiServers grew by {growth / 2**20:.0f} MiB")


def api_servers(service: Service) -> list[psutil.Process]:
    """Return the processes of a service's ApiServers."""
    processes = map(psutil.Process, service.processes())
    return [process for process in processes if process.name().startswith("ray::ApiServer")]


def _memory_bytes(processes: list[psutil.Process]) -> int:
    return sum(process.memory_info().rss for process in processes)


def _num_files(processes: list[psutil.Process]) -> int:
    return sum(process.num_fds() for process in processes)


def main() -> None:
    """Fuzz a service of its own, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=12)
    given = parser.parse_args()
    with serve("--dtype", "float32", "--kv-memory", "1GiB") as service:
        run = Fuzzer(service, given.seed).run(
            num_cases=given.cases, seconds=given.seconds, concurrency=given.concurrency
        )
        found = asyncio.run(run)
        log = [line for line in service.log if "Traceback" in line or "Error" in line]
    memory = found.memory_bytes
    print(
        f"cases {found.num_cases}, {found.num_bytes / 2**20:.0f} MiB, valid requests between {found.num_canaries}"
    )
    print("answers " + ", ".join(f"{status}: {count}" for status, count in sorted(found.statuses.items())))
    print(f"open files {found.num_files[0]} to {found.num_files[1]}")
    print(f"memory of the ApiServers {memory[0] / 2**20:.0f} to {memory[1] / 2**20:.0f} MiB")
    print(f"lines of errors in the log {len(log)}")
    for line in found.failures[:20] + log[:20]:
        print("FAILED", line.rstrip())
    raise SystemExit(1 if found.failures or log else 0)


if __name__ == "__main__":
    main()

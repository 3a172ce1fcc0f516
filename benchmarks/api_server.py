"""How many streaming requests per second ApiServers sustain, with a stub in place of scheduler and workers.

Real ApiServer actors on one shared port, each on a core of its own, serve requests of 64 tokens of text in and 16
tokens out. A stub Scheduler actor answers each submission and sends every running request one token a step, as a
decode worker does: one message a step to each ApiServer. A client process sends requests at a fixed rate over
connections that it keeps, and checks every answer. Only the stub and the client share the remaining cores.

    python -m benchmarks.api_server --rate 400 --seconds 10 --api-servers 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from scheduler.api.app import AppSettings
from scheduler.api.server import ApiServer, ApiServerConfig
from scheduler.api.tokenizer import Tokenizer
from scheduler.journal.settings import JournalConfig
from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    Heartbeat,
    ModelInfo,
    QueueState,
    Request,
    SchedulerState,
    SubmitReply,
    TokenEvent,
    TokenEvents,
)
from scheduler.models import resolve_model

_PROMPT_TOKENS = 64
_OUTPUT_TOKENS = 16
_STEP_S = 0.02
"""A decode step, about that of a 7B model."""
_MODEL = ModelInfo(
    name="stub",
    max_model_len=4096,
    vocab_size=49152,
    eos_token_ids=(0,),
    dtype="bfloat16",
    num_parameters=1,
)


class StubScheduler:
    """Accepts everything, and gives every running request one token a step."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[Request, int]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def submit(self, groups: tuple[tuple[Request, ...], ...]) -> SubmitReply:
        """Start the requests."""
        for group in groups:
            for request in group:
                self._running[request.request_id] = (request, 0)
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_for_ever())
        return SubmitReply(rejections=(None,) * len(groups), queue=QueueState())

    async def heartbeat(self, heartbeat: Heartbeat) -> SchedulerState:
        """Show that the scheduler lives."""
        return SchedulerState(life=1, num_deaths=0)

    async def cancel(self, request_ids: tuple[str, ...]) -> None:
        """Forget requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def _step_for_ever(self) -> None:
        handles: dict[str, Any] = {}
        due = time.perf_counter()
        while True:
            due += _STEP_S
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            events: defaultdict[str, list[TokenEvent]] = defaultdict(list)
            for request_id, (request, index) in list(self._running.items()):
                last = index + 1 == request.sampling.max_tokens
                events[request.api_server].append(
                    TokenEvent(
                        request_id=request_id,
                        index=index,
                        token_id=1000 + index,
                        finish_reason="length" if last else None,
                    )
                )
                if last:
                    del self._running[request_id]
                else:
                    self._running[request_id] = (request, index + 1)
            for name, batch in events.items():
                if name not in handles:
                    handles[name] = ray.get_actor(name, namespace=RAY_NAMESPACE)
                handles[name].deliver.remote(TokenEvents(source="stub", events=tuple(batch)))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one run gave."""

    offered_per_s: float
    completed_per_s: float
    num_errors: int
    first_event_p50_ms: float
    first_event_p99_ms: float
    total_p99_ms: float
    cpu_ms_per_request: float
    """Of the ApiServers together."""
    cpu_share: tuple[float, ...]
    """Of each ApiServer's core."""


class Client:
    """Sends requests at a fixed rate, each over a connection that is free, and reads the streams to their end."""

    def __init__(self, port: int, body: bytes, *, keyed: bool) -> None:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
        )
        self._port = port
        self._head, self._body = head.encode(), body
        self._keyed = keyed
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.first_s: list[float] = []
        self.total_s: list[float] = []
        self.num_errors = 0

    async def run(self, rate: float, seconds: float) -> float:
        """Send `rate` requests a second for so long; return the seconds until the last answer ended."""
        started = time.perf_counter()
        tasks = []
        for i in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, started + i / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self._request()))
        await asyncio.gather(*tasks)
        return time.perf_counter() - started

    async def _request(self) -> None:
        sent = time.perf_counter()
        if self._free:
            reader, writer = self._free.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        key = f"Idempotency-Key: {random.getrandbits(128):032x}\r\n".encode() if self._keyed else b""
        writer.write(self._head + key + b"\r\n" + self._body)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = await reader.read(65536)
            if not part:
                break
            if b"data: " not in received and b"data: " in part:
                self.first_s.append(time.perf_counter() - sent)
            received += part
        self.total_s.append(time.perf_counter() - sent)
        whole = received.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in received
        if whole and received.count(b'"text":') == _OUTPUT_TOKENS:
            self._free.append((reader, writer))
        else:
            self.num_errors += 1
            writer.close()


def _client_process(
    port: int, body: bytes, rate: float, seconds: float, cores: set[int], keyed: bool, pipe: Any
) -> None:
    os.sched_setaffinity(0, cores)

    async def run() -> None:
        warm = Client(port, body, keyed=keyed)
        await warm.run(min(rate, 50), 2)
        pipe.send("warm")
        pipe.recv()
        client = Client(port, body, keyed=keyed)
        client._free = warm._free
        elapsed_s = await client.run(rate, seconds)
        pipe.send((client.first_s, client.total_s, client.num_errors, elapsed_s))

    asyncio.run(run())


def _pin(pid: int, cores: set[int]) -> None:
    """Keep a process, with all its threads, on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def _pid(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(
    rate: float,
    seconds: float,
    num_servers: int,
    journal: JournalConfig | None = None,
    *,
    keyed: bool = False,
) -> Report:
    """Start stub and ApiServers, run the client, and return what it saw. Ray must be running.

    `keyed`: each request has an `Idempotency-Key` of its own.
    """
    folder = resolve_model("smollm2-135m", progress=print).path
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    text = asyncio.run(tokenizer.decode(range(2000, 2000 + _PROMPT_TOKENS), skip_special_tokens=True))
    fields = {"model": "stub", "prompt": text, "max_tokens": _OUTPUT_TOKENS, "stream": True, "temperature": 0}
    stub = ray.remote(StubScheduler).options(name=SCHEDULER_NAME, num_cpus=0).remote()
    ray.get(stub.__ray_ready__.remote())
    servers, port = [], 0
    for i in range(num_servers):
        config = ApiServerConfig(
            name=f"api-{i}",
            host="127.0.0.1",
            port=port,
            model_folder=str(folder),
            model=_MODEL,
            settings=AppSettings(model_names=("stub",)),
            max_queued_requests=100_000,
            max_queued_tokens=100_000_000,
            journal=journal or JournalConfig(),
        )
        servers.append(ray.remote(ApiServer).options(name=config.name, num_cpus=0).remote(config))
        port = int(ray.get(servers[-1].start.remote()).rsplit(":", 1)[1])
    cores = list(range(os.cpu_count() or 1))
    others = set(cores[num_servers:]) or set(cores)
    pids = [_pid(server) for server in servers]
    for i, pid in enumerate(pids):
        _pin(pid, {cores[i % len(cores)]})
    _pin(_pid(stub), others)
    parent, child = multiprocessing.Pipe()
    body = json.dumps(fields).encode()
    client = multiprocessing.get_context("spawn").Process(
        target=_client_process, args=(port, body, rate, seconds, others, keyed, child)
    )
    client.start()
    parent.recv()
    before = [_cpu_s(pid) for pid in pids]
    parent.send("go")
    first_s, total_s, num_errors, elapsed_s = parent.recv()
    used = [_cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    client.join()
    for actor in (*servers, stub):
        ray.kill(actor)
    return Report(
        offered_per_s=rate,
        completed_per_s=round((len(total_s) - num_errors) / elapsed_s, 1),
        num_errors=num_errors,
        first_event_p50_ms=round(_quantile(first_s, 0.5) * 1e3, 1),
        first_event_p99_ms=round(_quantile(first_s, 0.99) * 1e3, 1),
        total_p99_ms=round(_quantile(total_s, 0.99) * 1e3, 1),
        cpu_ms_per_request=round(sum(used) / len(total_s) * 1e3, 2),
        cpu_share=tuple(round(seconds / elapsed_s, 2) for seconds in used),
    )


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", type=float, default=400.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--api-servers", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", namespace=RAY_NAMESPACE, include_dashboard=False, log_to_driver=False)
    report = measure(arguments.rate, arguments.seconds, arguments.api_servers)
    ray.shutdown()
    for name, value in asdict(report).items():
        print(f"{name:<20} {value}")


if __name__ == "__main__":
    main()

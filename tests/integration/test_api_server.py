"""ApiServer actors and their client of the scheduler, over a real Ray; the scheduler itself is scripted."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from ray.exceptions import RayActorError

from scheduler.admission import Admission
from scheduler.api.app import AppSettings
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.api.server import ApiServer, ApiServerConfig, bind_shared
from scheduler.errors import ConfigError, OverloadedError, UnavailableError
from scheduler.host import reserved_port
from scheduler.messages import (
    RAY_NAMESPACE,
    SCHEDULER_NAME,
    AbortReply,
    Figures,
    Heartbeat,
    ModelInfo,
    QueueState,
    Rejection,
    Request,
    SamplingParams,
    SchedulerState,
    ServiceLoad,
    SubmitReply,
    TokenEvent,
    TokenEvents,
)
from scheduler.observe import catalogue
from scheduler.observe.registry import Registry
from scheduler.supervisor import Supervisor

MODEL = ModelInfo(
    name="m", max_model_len=64, vocab_size=300, eos_token_ids=(0,), dtype="float32", num_parameters=1
)

MAX_QUEUED = 64


class ScriptedScheduler:
    """Sends a request's own prompt back, even before it says that it accepted it. Remembers what it was asked.

    A prompt that starts with 9 is refused. One that starts with 8 gets no token. One that starts with 7 is
    accepted only after `release`.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[tuple[Request, ...], ...]] = []
        self.cancelled: list[str] = []
        self.changed = asyncio.Condition()
        self.released = asyncio.Event()
        self.registry = Registry()
        self.lives: set[tuple[str, int]] = set()
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def submit(self, groups: tuple[tuple[Request, ...], ...]) -> SubmitReply:
        self.groups.append(groups)
        async with self.changed:
            self.changed.notify_all()
        answers = [await self._answer(group) for group in groups]
        return SubmitReply(rejections=tuple(answers), queue=QueueState())

    async def heartbeat(self, heartbeat: Heartbeat) -> SchedulerState:
        self.registry.add(heartbeat.figures)
        self.lives.add((heartbeat.api_server, heartbeat.life))
        await self.speaks.wait()
        return SchedulerState(life=1, num_deaths=0)

    async def refused(self) -> float:
        return self.registry.values(catalogue.REJECTIONS).get(("overloaded",), 0)

    async def be_silent(self) -> None:
        self.speaks.clear()

    async def speak(self) -> None:
        self.speaks.set()

    async def lives_of(self, api_server: str) -> set[int]:
        return {life for name, life in self.lives if name == api_server}

    async def _answer(self, group: tuple[Request, ...]) -> Rejection | None:
        for request in group:
            if request.prompt_token_ids[0] == 9:
                return Rejection(
                    request_id=request.request_id, label="overloaded", message="full", retry_after_s=7
                )
        for request in group:
            if request.prompt_token_ids[0] == 7:
                await self.released.wait()
            elif request.prompt_token_ids[0] != 8:
                await self._send_prompt_back(request)
        return None

    async def release(self) -> None:
        self.released.set()

    async def _send_prompt_back(self, request: Request) -> None:
        tokens = request.prompt_token_ids
        events = tuple(
            TokenEvent(
                request_id=request.request_id,
                index=i,
                token_id=token,
                finish_reason="length" if i == len(tokens) - 1 else None,
            )
            for i, token in enumerate(tokens)
        )
        api_server = ray.get_actor(request.api_server, namespace=RAY_NAMESPACE)
        await api_server.deliver.remote(TokenEvents(source="scripted", events=events))

    async def cancel(self, request_ids: tuple[str, ...]) -> None:
        self.cancelled += request_ids
        async with self.changed:
            self.changed.notify_all()

    async def metrics(self, figures: Figures) -> Figures:
        self.registry.add(figures)
        return self.registry.figures()

    async def abort(self, completion_id: str, key_digest: str) -> AbortReply:
        return AbortReply(
            num_sequences=int(completion_id == "mine"),
            num_foreign=int(completion_id == "theirs"),
            queue=QueueState(),
        )

    async def load(self) -> ServiceLoad:
        return ServiceLoad(num_live=3, num_waiting=2, num_waiting_tokens=50)

    async def not_ready(self) -> str | None:
        return "prefill-0 died" if self.released.is_set() else None

    async def group_sizes(self) -> list[list[int]]:
        return [[len(group) for group in groups] for groups in self.groups]

    async def request_ids(self) -> list[str]:
        return [request.request_id for groups in self.groups for group in groups for request in group]

    async def wait_for_submissions(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: sum(map(len, self.groups)) >= count)

    async def wait_for_cancelled(self, count: int) -> list[str]:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.cancelled) >= count)
        return self.cancelled


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        namespace=RAY_NAMESPACE,
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 1024 * 1024,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture
def scheduler() -> Iterator[Any]:
    actor: Any = ray.remote(ScriptedScheduler).options(name=SCHEDULER_NAME, num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    yield actor
    ray.kill(actor)


def start_server(
    name: str = "api-0", port: int = 0, max_restarts: int = 0, **options: Any
) -> tuple[Any, str]:
    config = ApiServerConfig(
        name=name,
        host="127.0.0.1",
        port=port,
        model_folder="/nowhere",
        model=MODEL,
        settings=AppSettings(model_names=("m",)),
        max_queued_requests=MAX_QUEUED,
        max_queued_tokens=4096,
        **options,
    )
    actor: Any = (
        ray.remote(ApiServer).options(name=name, num_cpus=0, max_restarts=max_restarts).remote(config)
    )
    url: str = ray.get(actor.start.remote())
    return actor, url


@pytest.fixture
def server(scheduler: Any) -> Iterator[tuple[Any, str]]:
    actor, url = start_server()
    yield actor, url
    ray.kill(actor)


def process_of(actor: Any) -> int:
    """Return the id of an actor's process."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    return pid


def completion(url: str, *prompt: int, **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": list(prompt), **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)


def request(request_id: str, *prompt: int) -> Request:
    return Request(
        request_id=request_id,
        api_server="none",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=4),
    )


def test_tokens_that_overtake_the_answer_are_not_lost(server: tuple[Any, str]) -> None:
    _, url = server
    answer = completion(url, 1, 2, 3).raise_for_status().json()
    assert answer["usage"]["total_tokens"] == 6
    answers = 'purefill_http_requests_total{model="m",route="/v1/completions",code="200"}'
    assert f"\n{answers} " in httpx.get(f"{url}/metrics").text
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_rejection_reaches_the_client(server: tuple[Any, str]) -> None:
    answer = completion(server[1], 9, stream=True)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["message"] == "full"


def test_what_operators_ask(scheduler: Any, server: tuple[Any, str]) -> None:
    _, url = server
    assert httpx.get(f"{url}/load").json()["queue_tokens"] == 50
    assert httpx.get(f"{url}/ready").status_code == 200
    ray.get(scheduler.release.remote())
    answer = httpx.get(f"{url}/ready")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "prefill-0 died")
    deleted = {
        name: httpx.delete(f"{url}/v1/requests/{name}").status_code for name in ("mine", "theirs", "no")
    }
    assert deleted == {"mine": 200, "theirs": 403, "no": 404}


def test_tls(scheduler: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match=r"tls_cert_file .*missing.pem .* cannot be used"):
        start_server("api-2", tls_cert_file=missing)
    cert, key = self_signed(tmp_path)
    for options in ({"tls_cert_file": cert, "tls_key_file": key}, {"tls_cert_file": both_in_one(cert, key)}):
        actor, url = start_server("api-1", **options)
        try:
            assert url.startswith("https://")
            context = ssl.create_default_context(cafile=cert)
            assert httpx.get(f"{url}/health", verify=context).status_code == 200
        finally:
            ray.kill(actor)


def self_signed(folder: Path) -> tuple[str, str]:
    """Certificate and key for 127.0.0.1."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "purefill")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return str(cert), str(key)


def both_in_one(cert: str, key: str) -> str:
    path = Path(cert).with_name("both.pem")
    path.write_text(Path(cert).read_text() + Path(key).read_text())
    return str(path)


def test_a_client_that_leaves_is_noticed(scheduler: Any, server: tuple[Any, str]) -> None:
    port = int(server[1].rsplit(":", 1)[1])
    for i, stream in enumerate((False, True)):
        body = json.dumps({"model": "m", "prompt": [8], "n": 2, "stream": stream})
        head = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
        head.append(f"Content-Length: {len(body)}")
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall("\r\n".join([*head, "", body]).encode())
            ray.get(scheduler.wait_for_submissions.remote(i + 1))
    cancelled = ray.get(scheduler.wait_for_cancelled.remote(4), timeout=60)
    assert len(set(cancelled)) == 4


def test_two_servers_share_a_port(server: tuple[Any, str]) -> None:
    _, url = server
    second, second_url = start_server("api-1", port=int(url.rsplit(":", 1)[1]))
    try:
        assert second_url == url
        ray.get(server[0].stop.remote())
        assert completion(url, 1).status_code == 200
    finally:
        ray.kill(second)


def test_a_port_in_use_is_a_config_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 cannot be used"):
            bind_shared("127.0.0.1", port)


def test_the_name_in_the_dashboard() -> None:
    config = ApiServerConfig(
        name="api-0",
        host="127.0.0.1",
        port=8000,
        model_folder="",
        model=MODEL,
        settings=AppSettings(model_names=("m",), api_keys=("secret",)),
        max_queued_requests=1,
        max_queued_tokens=1,
    )
    assert repr(ApiServer(config)) == "ApiServer(api-0, http://127.0.0.1:8000)"
    assert "secret" not in repr(config)


def test_stop_answers_what_is_open(scheduler: Any, server: tuple[Any, str]) -> None:
    actor, url = server

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": "m", "prompt": [8]}
            waiting = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await scheduler.wait_for_submissions.remote(1)
            await actor.stop.remote()
            return await waiting

    answer = asyncio.run(run())
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "the service is stopping"
    assert len(ray.get(scheduler.wait_for_cancelled.remote(1))) == 1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_death_of_the_scheduler_is_an_error_and_not_a_hang(
    scheduler: Any, server: tuple[Any, str]
) -> None:
    url = server[1]

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            plain, stream = (
                asyncio.create_task(
                    client.post(f"{url}/v1/completions", json={"model": "m", "prompt": [8], "stream": stream})
                )
                for stream in (False, True)
            )
            await scheduler.wait_for_submissions.remote(2)
            ray.kill(scheduler)
            return await plain, await stream

    plain, stream = asyncio.run(run())
    assert plain.status_code == 503
    assert plain.json()["error"]["message"] == "the scheduler is not running"
    error, done = stream.text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: ")) == plain.json()
    assert done == "data: [DONE]"
    assert completion(url, 1).status_code == 503
    assert httpx.get(f"{url}/health").status_code == 503
    assert httpx.get(f"{url}/metrics").status_code == 503


def client_of(scheduler: Any, registry: Registry | None = None, **options: Any) -> SchedulerClient:
    admission = Admission(max_requests=MAX_QUEUED, max_tokens=4096)
    registry = Registry() if registry is None else registry
    return SchedulerClient(
        scheduler, name="none", model=MODEL, admission=admission, registry=registry, **options
    )


def test_a_full_queue_turns_text_away_before_it_is_tokenised(scheduler: Any) -> None:
    async def run() -> None:
        client = client_of(scheduler)
        client.admit(1, 100, 0).close()
        # As many are on their way as may wait.
        with client.admit(MAX_QUEUED, 0, MAX_QUEUED), pytest.raises(OverloadedError):
            client.admit(1, 100, 0)
        client.admit(1, 100, 0).close()

    asyncio.run(run())


def test_what_is_counted_reaches_the_scheduler_once(scheduler: Any) -> None:
    async def run() -> None:
        registry = Registry()
        before = await scheduler.refused.remote()
        registry.inc(catalogue.REJECTIONS, "overloaded")
        watching = asyncio.create_task(client_of(scheduler, registry).watch())
        while await scheduler.refused.remote() == before:
            pass
        watching.cancel()
        assert await scheduler.refused.remote() == before + 1
        assert not registry.values(catalogue.REJECTIONS)

    asyncio.run(run())


def test_while_the_scheduler_is_silent_nothing_new_is_accepted(scheduler: Any) -> None:
    """What was accepted waits on, and once the scheduler answers again all is as before."""

    async def run() -> None:
        client = client_of(scheduler, answer_timeout_s=0.2)
        stream = await client.submit([request("a", 8)])
        await scheduler.be_silent.remote()
        watching = asyncio.create_task(client.watch())
        while await is_healthy(client):
            await scheduler.refused.remote()
        with pytest.raises(UnavailableError):
            await client.submit([request("b", 8)])
        assert await stream.read(timeout_s=0) == []
        await scheduler.speak.remote()
        while not await is_healthy(client):
            await scheduler.refused.remote()
        await client.submit([request("c", 8)])
        watching.cancel()
        assert await scheduler.request_ids.remote() == ["a", "c"]

    asyncio.run(run())


async def is_healthy(client: SchedulerClient) -> bool:
    try:
        await client.check_health()
    except UnavailableError:
        return False
    return True


def test_requests_of_one_turn_travel_together_and_are_answered_apart(scheduler: Any) -> None:
    async def run() -> None:
        client = client_of(scheduler)
        results = await asyncio.gather(
            client.submit([request("a", 8), request("b", 8)]),
            client.submit([request("c", 8), request("d", 9)]),
            client.submit([request("e", 8)]),
            return_exceptions=True,
        )
        assert not isinstance(results[0], BaseException)
        assert isinstance(results[1], OverloadedError)
        assert results[1].retry_after_s == 7
        assert not isinstance(results[2], BaseException)
        assert await scheduler.group_sizes.remote() == [[2, 2, 1]]

    asyncio.run(run())


def test_a_submission_that_is_given_up_is_cancelled_after_it_was_accepted(scheduler: Any) -> None:
    async def run() -> None:
        client = client_of(scheduler)
        submitting = asyncio.create_task(client.submit([request("a", 7), request("b", 7)]))
        await scheduler.wait_for_submissions.remote(1)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await scheduler.release.remote()
        assert await scheduler.wait_for_cancelled.remote(2) == ["a", "b"]

    asyncio.run(run())


def test_a_submission_that_is_not_answered_in_time_is_refused_and_cancelled_once_it_is(
    scheduler: Any,
) -> None:
    async def run() -> None:
        client = client_of(scheduler, submit_timeout_s=0.01)
        with pytest.raises(UnavailableError, match=r"did not accept the request within 0.01 s"):
            await client.submit([request("a", 7), request("b", 7)])
        await scheduler.wait_for_submissions.remote(1)
        await scheduler.release.remote()
        assert await scheduler.wait_for_cancelled.remote(2) == ["a", "b"]

    asyncio.run(run())


def test_without_a_scheduler_nothing_is_accepted(scheduler: Any) -> None:
    async def run() -> None:
        client = client_of(scheduler)
        ray.kill(scheduler)
        with suppress(RayActorError):  # it may answer for another moment
            while True:
                await scheduler.group_sizes.remote()
        with pytest.raises(UnavailableError):
            await client.submit([request("a", 8)])
        with pytest.raises(UnavailableError):
            await client.metrics()
        await client.cancel(["a"])

    asyncio.run(run())


def test_a_server_that_hangs_is_ended_and_comes_back_at_its_port(scheduler: Any) -> None:
    with reserved_port("127.0.0.1", 0) as port:
        actor, url = start_server(port=port, max_restarts=-1)
        said: list[str] = []
        supervisor = Supervisor(scheduler, [actor], hang_s=1.0, say=said.append)
        try:
            assert completion(url, 1).status_code == 200
            os.kill(process_of(actor), signal.SIGSTOP)
            while "api-0 is back" not in said:
                supervisor.look(time.monotonic())
            assert httpx.get(f"{url}/ready").status_code == 200
            assert completion(url, 1).status_code == 200
            assert len(ray.get(scheduler.lives_of.remote("api-0"))) == 2
        finally:
            ray.kill(actor)


def test_a_server_that_drains_finishes_what_runs_and_refuses_the_rest(
    scheduler: Any, server: tuple[Any, str]
) -> None:
    actor, url = server

    async def run() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            running = asyncio.create_task(
                client.post(f"{url}/v1/completions", json={"model": "m", "prompt": [7]})
            )
            await scheduler.wait_for_submissions.remote(1)
            draining = asyncio.ensure_future(actor.drain.remote(60))
            while (ready := await client.get(f"{url}/ready")).status_code == 200:
                pass
            refused = await client.post(f"{url}/v1/completions", json={"model": "m", "prompt": [1]})
            assert not draining.done()
            await actor.deliver.remote(
                TokenEvents(
                    source="decode-0",
                    events=tuple(
                        TokenEvent(request_id=request_id, index=0, token_id=5, finish_reason="stop")
                        for request_id in await scheduler.request_ids.remote()
                    ),
                )
            )
            await scheduler.release.remote()
            await draining
            return ready, refused, await running

    ready, refused, finished = asyncio.run(run())
    assert (ready.status_code, refused.status_code, finished.status_code) == (503, 503, 200)
    assert refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["message"] == "the service is stopping"

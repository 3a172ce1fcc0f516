"""The ApiServer actor: one HTTP server, in its own process. Several may share a port."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import ray
import uvicorn
from starlette.types import ASGIApp

from scheduler.admission import Admission
from scheduler.api.app import AppSettings, create_app, metrics_app
from scheduler.api.chat_template import ChatTemplate
from scheduler.api.protocol import HttpProtocol
from scheduler.api.request_log import RequestIdFilter
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import ConfigError
from scheduler.messages import RAY_NAMESPACE, SCHEDULER_NAME, ModelInfo, TokenEvents
from scheduler.observe import catalogue as m
from scheduler.observe.logs import LogFormat, log_to_stderr
from scheduler.observe.registry import Registry
from scheduler.observe.traces import OtelRecorder, make_recorder

_BACKLOG = 2048
_STOP_TIMEOUT_S = 3
_KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than clients keep theirs, so that none is closed as it is used."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServerConfig:
    """What an ApiServer is started with."""

    name: str
    """Name of the actor, to which tokens are sent."""
    host: str
    port: int
    """0: any free one."""
    model_folder: str
    """Folder with the model's `tokenizer.json`; without that file prompts must be token ids."""
    model: ModelInfo
    max_queued_requests: int
    """What may wait before requests are turned away, in requests..."""
    max_queued_tokens: int
    """...and in tokens."""
    settings: AppSettings
    tls_cert_file: str | None = None
    """With `tls_key_file`: serve HTTPS with this certificate, in PEM form."""
    tls_key_file: str | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
    metrics_port: int | None = None
    """Where ``/metrics`` is, if not at `port`."""
    otlp_endpoint: str | None = None
    """Where spans are sent by OTLP over HTTP, such as ``http://127.0.0.1:4318``."""
    scheduler: str = SCHEDULER_NAME
    namespace: str = RAY_NAMESPACE


class ApiServer:
    """Owns the clients' connections and the tokenizer. To be made a Ray actor by whoever starts it.

    The Scheduler actor must run before `start`.
    """

    def __init__(self, config: ApiServerConfig) -> None:
        self._config = config
        self._url = self._url_at(config.port)
        self._client: SchedulerClient | None = None
        self._watching: asyncio.Task[None] | None = None
        self._servers: dict[_Server, asyncio.Task[None]] = {}
        self._recorder: OtelRecorder | None = None

    def __repr__(self) -> str:
        # Ray reads it once, before `start`, and shows it in its dashboard.
        return f"ApiServer({self._config.name}, {self._url})"

    async def start(self) -> str:
        """Bind the port, serve, and return the URL.

        Raises ConfigError if the port or a TLS file cannot be used, or the model's chat template is broken.
        """
        config = self._config
        log_to_stderr(config.log_level, config.log_format, request_ids=RequestIdFilter())
        listener = bind_shared(config.host, config.port)
        scheduler = ray.get_actor(config.scheduler, namespace=config.namespace)
        admission = Admission(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        registry = Registry()
        registry.set(m.START_TIME, time.time(), "api", config.name)
        self._client = SchedulerClient(
            scheduler, name=config.name, model=config.model, admission=admission, registry=registry
        )
        if config.otlp_endpoint is not None:
            self._recorder = make_recorder(
                config.otlp_endpoint, model=config.model.name, api_server=config.name
            )
        if config.tls_cert_file is not None:
            _check_tls(config.tls_cert_file, config.tls_key_file)
        folder = Path(config.model_folder)
        app = create_app(
            self._client,
            Tokenizer.from_folder(folder),
            config.settings,
            chat_template=ChatTemplate.from_folder(folder),
            registry=registry,
            recorder=self._recorder,
        )
        self._watching = asyncio.create_task(self._client.watch())
        await self._serve(app, listener)
        if config.metrics_port is not None:
            await self._serve(metrics_app(self._client), bind_shared(config.host, config.metrics_port))
        self._url = self._url_at(listener.getsockname()[1])
        logger.info("%r serves %s", self, config.model.name)
        return self._url

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        """Serve an application at a bound port, and return once it accepts connections."""
        config = self._config
        server = _Server(
            uvicorn.Config(
                app,
                http=HttpProtocol,
                lifespan="off",
                access_log=False,
                log_config=None,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
                ssl_certfile=config.tls_cert_file,
                ssl_keyfile=config.tls_key_file,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        self._servers[server] = serving
        ready = asyncio.ensure_future(server.ready.wait())
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            ready.cancel()
            serving.result()

    def _url_at(self, port: int) -> str:
        host = self._config.host
        scheme = "http" if self._config.tls_cert_file is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def deliver(self, events: TokenEvents) -> None:
        """Take new tokens from a worker, or errors from the scheduler."""
        if self._client is not None:
            self._client.deliver(events)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests with 503, and return once all others are answered, or after `timeout_s`."""
        if self._client is not None:
            await self._client.drain(timeout_s)

    async def stop(self) -> None:
        """Answer what is open with an error, close the port and return. Takes a few seconds at most."""
        if self._watching is None or self._client is None:
            return
        for server in self._servers:
            server.should_exit = True
        self._client.shut_down("the service is stopping")
        self._watching.cancel()
        await asyncio.gather(*self._servers.values(), self._watching, return_exceptions=True)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)


class _Server(uvicorn.Server):
    """A server that says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def bind_shared(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the port, which others who bind it by this function share.

    Raises ConfigError if the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections inherit this; without it those of an ended service would keep the next one off the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setblocking(False)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port {port} on {host} cannot be used: {error.strerror}") from error
    return listener


def _check_tls(cert_file: str, key_file: str | None) -> None:
    """Raise ConfigError if the files cannot be used: the server itself would only say so in a traceback."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert_file, key_file)
    except OSError as error:  # SSLError is one
        raise ConfigError(
            f"tls_cert_file {cert_file} and tls_key_file {key_file} cannot be used: {error.strerror or error}"
        ) from error

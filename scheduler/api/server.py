"""The ApiServer actor: one HTTP server, in its own process. Several may share a port."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import socket
import ssl
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from scheduler.admission import Admission
from scheduler.api.app import AppSettings, create_app, metrics_app
from scheduler.api.chat_template import ChatTemplate
from scheduler.api.connections import ConnectionLimits, Connections
from scheduler.api.journaling import Journaling
from scheduler.api.protocol import HttpProtocol
from scheduler.api.request_log import RequestIdFilter
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import ConfigError
from scheduler.garbage import freeze_what_is_loaded
from scheduler.journal.base import JournalError
from scheduler.journal.connect import make_journal
from scheduler.journal.settings import JournalConfig, host_of
from scheduler.messages import RAY_NAMESPACE, SCHEDULER_NAME, ModelInfo, TokenEvents
from scheduler.observe import catalogue as m
from scheduler.observe.logs import LogFormat, log_to_stderr
from scheduler.observe.registry import Registry
from scheduler.observe.traces import OtelRecorder, make_recorder
from scheduler.wire import AsyncioReactor, Wire, WireServer, serve_actor

_BACKLOG = 2048
_OTHER_FILES = 512
"""Files besides connections: those of Ray, libraries, and connections that are about to be closed."""
_STOP_TIMEOUT_S = 3
_JOURNAL_PATIENCE_S = 5.0
"""A Redis that was started with this service may still read its file."""
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
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls_cert_file: str | None = None
    """With `tls_key_file`: serve HTTPS with this certificate, in PEM form."""
    tls_key_file: str | None = None
    journal: JournalConfig = field(default_factory=JournalConfig)
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
        self._journaling: Journaling | None = None
        self._watching: asyncio.Task[None] | None = None
        self._servers: dict[_Server, asyncio.Task[None]] = {}
        self._wire: Wire | None = None
        self._wire_server: WireServer | None = None
        self._recorder: OtelRecorder | None = None

    def __repr__(self) -> str:
        # Ray reads it once, before `start`, and shows it in its dashboard.
        return f"ApiServer({self._config.name}, {self._url})"

    async def start(self) -> str:
        """Bind the port, serve, and return the URL; only return it if that was done already.

        Raises ConfigError if the port or a TLS file cannot be used, the model's chat template is broken, or the
        journal cannot be reached.
        """
        if await self.is_serving():
            return self._url
        config = self._config
        log_to_stderr(config.log_level, config.log_format, request_ids=RequestIdFilter())
        if config.tls_cert_file is not None:
            _check_tls(config.tls_cert_file, config.tls_key_file)
        listeners = [bind_shared(config.host, config.port)]
        try:
            if config.metrics_port is not None:
                listeners.append(bind_shared(config.host, config.metrics_port))
            self._journaling = await self._join_journal()
            await self._serve_all(listeners, self._journaling)
        except BaseException:
            # The next attempt may be in this process.
            for listener in listeners:
                listener.close()
            if self._journaling is not None:
                await self._journaling.stop()
            self._close_wire()
            raise
        self._url = self._url_at(listeners[0].getsockname()[1])
        freeze_what_is_loaded()
        logger.info("%r serves %s", self, config.model.name)
        return self._url

    async def _serve_all(self, listeners: Sequence[socket.socket], journaling: Journaling) -> None:
        """Start everything that runs until `stop`, and return once connections are accepted.

        The second listener, if there is one, is for the metrics.
        """
        config, registry = self._config, Registry()
        registry.set(m.START_TIME, time.time(), "api", config.name)
        if config.otlp_endpoint is not None:
            self._recorder = make_recorder(
                config.otlp_endpoint, model=config.model.name, api_server=config.name
            )
        reactor = AsyncioReactor()
        self._wire = Wire(reactor, namespace=config.namespace)
        self._client = SchedulerClient(
            self._wire.handle(config.scheduler),
            name=config.name,
            model=config.model,
            admission=Admission(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens),
            registry=registry,
            journal_status=journaling.status,
            short_way=self._wire.peer(config.scheduler),
        )
        self._wire_server = serve_actor(
            config.name, reactor, {"deliver": self._client.deliver}, namespace=config.namespace
        )
        # Before anything is submitted, be it for a client or to go on with what the journal holds.
        await self._client.join()
        folder = Path(config.model_folder)
        app = create_app(
            self._client,
            Tokenizer.from_folder(folder),
            config.settings,
            chat_template=ChatTemplate.from_folder(folder),
            journaling=journaling,
            registry=registry,
            recorder=self._recorder,
        )
        self._watching = asyncio.create_task(self._client.watch())
        for listener, served in zip(listeners, (app, metrics_app(self._client)), strict=False):
            await self._serve(served, listener)

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        """Serve an application at a bound port, and return once it accepts connections."""
        config = self._config
        server = _Server(
            uvicorn.Config(
                app,
                http=_protocol(config.connections),
                ws="none",
                # Nothing here believes what a client says of where it comes from.
                proxy_headers=False,
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

    async def is_serving(self) -> bool:
        """Whether `start` was called in this life of the actor, and its server runs."""
        return bool(self._servers) and not any(serving.done() for serving in self._servers.values())

    async def _join_journal(self) -> Journaling:
        """Return what writes down requests. Raises ConfigError."""
        config = self._config
        # Each life of an ApiServer is another owner: what it had in its last one is to be taken over.
        owner = f"{config.name}-{uuid.uuid4().hex}"
        journal = make_journal(config.journal, owner=owner, model=config.model.name)
        journaling = Journaling(journal, on_failure=config.journal.on_failure)
        try:
            await journaling.start(patience_s=_JOURNAL_PATIENCE_S)
        except JournalError as error:
            await journal.close()
            raise ConfigError(
                f"{error}; journal_on_failure=continue starts without it ({host_of(config.journal.url)})"
            ) from error
        return journaling

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
        if self._journaling is not None:
            self._journaling.adopt_no_more()
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
        if self._journaling is not None:
            await self._journaling.stop()
        await asyncio.gather(*self._servers.values(), self._watching, return_exceptions=True)
        self._close_wire()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    def _close_wire(self) -> None:
        for end in (self._wire_server, self._wire):
            if end is not None:
                end.close()


def _protocol(limits: ConnectionLimits) -> Any:
    """Return what makes a protocol for each connection of one server."""
    make_room_for_files(limits.max_connections)
    return functools.partial(HttpProtocol, limits=limits, all_connections=Connections(limits.max_connections))


def make_room_for_files(max_connections: int) -> None:
    """Let this process have as many open files as it needs. Raises ConfigError if the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"max_connections must be <= {hard - _OTHER_FILES}, as a process may have {hard} open files here, "
            f"got {max_connections}"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
        # Notices a client that is gone without a word, while nothing is sent to it: after about two minutes.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
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

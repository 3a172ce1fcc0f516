"""The ApiServer actor: one HTTP server, in its own process. Several may share a port."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass, field
from pathlib import Path

import ray
import uvicorn

from scheduler.admission import Admission
from scheduler.api.app import create_app
from scheduler.api.scheduler_client import SchedulerClient
from scheduler.api.tokenizer import Tokenizer
from scheduler.errors import ConfigError
from scheduler.messages import RAY_NAMESPACE, SCHEDULER_NAME, ModelInfo, TokenEvents

_BACKLOG = 2048
_STOP_TIMEOUT_S = 3

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
    model_names: tuple[str, ...] = ()
    """Names by which requests may call the model; none: the model's own."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Who calls must know one of these; none: everybody may."""
    scheduler: str = SCHEDULER_NAME
    namespace: str = RAY_NAMESPACE


class ApiServer:
    """Owns the clients' connections and the tokenizer. To be made a Ray actor by whoever starts it.

    The Scheduler actor must run before `start`.
    """

    def __init__(self, config: ApiServerConfig) -> None:
        self._config = config
        self._url = _url(config.host, config.port)
        self._client: SchedulerClient | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._server: _Server | None = None

    def __repr__(self) -> str:
        # Ray reads it once, before `start`, and shows it in its dashboard.
        return f"ApiServer({self._config.name}, {self._url})"

    async def start(self) -> str:
        """Bind the port, serve, and return the URL. Raises ConfigError if the port cannot be used."""
        config = self._config
        listener = bind_shared(config.host, config.port)
        scheduler = ray.get_actor(config.scheduler, namespace=config.namespace)
        admission = Admission(max_requests=config.max_queued_requests, max_tokens=config.max_queued_tokens)
        self._client = SchedulerClient(scheduler, name=config.name, model=config.model, admission=admission)
        app = create_app(
            self._client,
            Tokenizer.from_folder(Path(config.model_folder)),
            model_names=config.model_names or (config.model.name,),
            api_keys=config.api_keys,
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="off",
                access_log=False,
                log_config=None,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )
        serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        self._tasks = [serving, asyncio.create_task(self._client.watch())]
        ready = asyncio.ensure_future(self._server.ready.wait())
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            ready.cancel()
            serving.result()
        self._url = _url(config.host, listener.getsockname()[1])
        logger.info("%r serves %s", self, config.model.name)
        return self._url

    async def deliver(self, events: TokenEvents) -> None:
        """Take new tokens from a worker, or errors from the scheduler."""
        if self._client is not None:
            self._client.deliver(events)

    async def stop(self) -> None:
        """Answer what is open with an error, close the port and return. Takes a few seconds at most."""
        if self._server is None or self._client is None:
            return
        self._server.should_exit = True
        self._client.shut_down("the service is stopping")
        serving, watching = self._tasks
        watching.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)


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


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

"""A short way between the actors of one host: Unix sockets beside Ray's calls, which stay the way for all else."""

from scheduler.wire.peer import Peer, RayPeer
from scheduler.wire.reactor import AsyncioReactor, Reactor, ThreadReactor
from scheduler.wire.server import WireServer, serve_actor
from scheduler.wire.wire import Wire

__all__ = [
    "AsyncioReactor",
    "Peer",
    "RayPeer",
    "Reactor",
    "ThreadReactor",
    "Wire",
    "WireServer",
    "serve_actor",
]

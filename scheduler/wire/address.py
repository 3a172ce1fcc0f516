"""Where an actor listens, and who may be at the other end."""

from __future__ import annotations

import hashlib
import os
import socket
import struct

import ray

_CREDENTIALS = struct.Struct("3i")
"""Of a peer: process, user, group."""


def cluster_address() -> str:
    """Return the address of the Ray cluster of this process."""
    address: str = ray.get_runtime_context().gcs_address
    return address


def address_of(cluster: str, namespace: str, name: str) -> str:
    """Return the address of an actor: a name in Linux' abstract namespace of Unix sockets, which leaves no file.

    Nothing has to be looked up, and a process that starts again has the name of the one before it. `cluster` is the
    address of Ray's GCS: no two clusters of a host have the same.
    """
    digest = hashlib.sha256(f"{cluster}\n{namespace}\n{name}".encode()).hexdigest()
    return f"\0purefill-{digest[:40]}"


def has_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a connection has the user of this one. The kernel says so."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


def connect(address: str) -> socket.socket | None:
    """Return a connection, without waiting; None if nobody listens there, or somebody who has another user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(address)
        if has_our_user(connection):
            return connection
    except OSError:
        pass
    connection.close()
    return None


def listen(address: str) -> socket.socket:
    """Return a socket that listens there, without blocking. Raises OSError: somebody else does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener

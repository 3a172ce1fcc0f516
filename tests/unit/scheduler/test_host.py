from __future__ import annotations

import socket

import pytest

from scheduler.api.server import bind_shared
from scheduler.errors import ConfigError
from scheduler.host import reserved_port


@pytest.mark.parametrize("host", ["nowhere.invalid", ".."])
def test_a_host_that_is_not_known_is_named(host: str) -> None:
    with pytest.raises(ConfigError) as caught, reserved_port(host, 0):
        pass
    assert str(caught.value) == f"host must be an address of this machine, got {host}"


def test_a_port_is_kept_from_other_services() -> None:
    with reserved_port("127.0.0.1", 0) as port, bind_shared("127.0.0.1", port):
        in_use = pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 cannot be used")
        with in_use, reserved_port("127.0.0.1", port):
            pass
    with reserved_port("127.0.0.1", port) as again:
        assert again == port


def test_a_restart_gets_its_port_back_although_the_old_connections_linger() -> None:
    """A server that closes first leaves its side of a connection in TIME_WAIT for a minute."""
    with reserved_port("127.0.0.1", 0) as port, bind_shared("127.0.0.1", port) as listener:
        listener.listen()
        listener.setblocking(True)
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()
            assert client.recv(1) == b""
    with reserved_port("127.0.0.1", port) as again, bind_shared("127.0.0.1", port):
        assert again == port

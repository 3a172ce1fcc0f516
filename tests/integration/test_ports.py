"""Which ports a service opens, and to whom."""

from __future__ import annotations

import ipaddress

import psutil

from tests.support.service import Service


def listening_addresses(pids: list[int]) -> dict[tuple[str, int], str]:
    """Return the name of the process behind each address and port that one of these processes listens on."""
    return {
        (connection.laddr.ip, connection.laddr.port): process.name()
        for process in map(psutil.Process, pids)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == psutil.socket.SOCK_DGRAM
    }


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def test_nothing_listens_but_on_the_loopback_interface(service: Service) -> None:
    """The API, the dashboard, and all of Ray's own ports: GCS, raylet, agents, and one of each worker."""
    found = listening_addresses(service.processes())
    assert {name for (host, _), name in found.items() if not is_loopback(host)} == set()
    # What is looked for is there.
    assert {"gcs_server", "raylet"} <= set(found.values())
    assert any(f":{port}" in service.url for _, port in found)
    assert len(found) > 6

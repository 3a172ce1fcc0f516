"""Runs the containers of a rendered chart as processes of this machine, each in namespaces of its own.

Network, mounts and process ids of a pod are its own, as in a container, so that command, arguments, environment and
ports are those of the manifest. Images, volumes, limits and users are not: a pod sees this machine's files. Needs root
and Linux. The network has no way out: a bridge that nothing else is attached to.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Manifest = dict[str, Any]

_BRIDGE_ADDRESS = "10.88.0.1"
_INSIDE = "PUREFILL_PODS_INSIDE"


def enter_network() -> None:
    """Start this program again in a network of its own, unless it is there already."""
    if os.environ.get(_INSIDE) == "1":
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        for command in (
            "link set lo up",
            "link add pods type bridge",
            f"addr add {_BRIDGE_ADDRESS}/24 dev pods",
            "link set pods up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        del os.environ[_INSIDE]
        return
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])


class Pod:
    """One running container, and its place in the network."""

    def __init__(self, name: str, address: str, folder: Path, hosts: Path) -> None:
        """`folder` takes its files and its log; `hosts` says which names have which addresses."""
        self.name, self.address = name, address
        self._folder, self._hosts = folder, hosts
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)
        device = f"v{address.rpartition('.')[2]}"
        for command in (
            f"netns add {name}",
            f"link add {device} type veth peer name eth0 netns {name}",
            f"link set {device} master pods up",
            f"-n {name} link set lo up",
            f"-n {name} addr add {address}/24 dev eth0",
            f"-n {name} link set eth0 up",
        ):
            subprocess.run(["ip", *command.split()], check=True)

    @property
    def log(self) -> str:
        """Return what it has written so far."""
        return (self._folder / "log").read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Return whether its first process has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(
        self, container: Manifest, environment: Mapping[str, str], mounts: Mapping[str, Path] | None = None
    ) -> None:
        """Run the container's command; `mounts` are folders of this machine by their path in the pod."""
        for name in ("ray", "home"):
            (self._folder / name).mkdir(exist_ok=True)
        binds = {
            "/tmp/ray": self._folder / "ray",
            "/etc/hosts": self._hosts,
            **(mounts or {}),
        }
        setup = ["mount -t tmpfs tmpfs /dev/shm"]
        setup += [f"mount --bind '{source}' '{target}'" for target, source in binds.items()]
        command = [*container["command"], *container.get("args", ())]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self.name),
                    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                    *("bash", "-ec", " && ".join([*setup, 'exec "$@"']), "pod", *command),
                ],
                env={**os.environ, **environment, "HOME": str(self._folder / "home")},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def execute(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Run a command in the pod, as a hook does, and return its exit code."""
        with (self._folder / "log").open("ab") as log:
            return subprocess.run(
                ["nsenter", "--target", str(self._first()), "--net", "--mount", "--pid", *command],
                env={**os.environ, **environment, "HOME": str(self._folder / "home")},
                stdout=log,
                stderr=log,
                check=False,
            ).returncode

    def terminate(self, grace_s: float) -> int:
        """Send SIGTERM to the first process and return its exit code. Raises TimeoutExpired after the grace."""
        assert self._process is not None
        os.kill(self._first(), signal.SIGTERM)
        return self._process.wait(grace_s)

    def kill(self) -> None:
        """End all its processes at once."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._first(), signal.SIGKILL)
            self._process.wait()

    def _first(self) -> int:
        """Return the process that is number 1 in the pod."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0]) if children else self._process.pid


def environment_of(
    container: Manifest, *, address: str, secrets: Mapping[tuple[str, str], str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return a container's variables as Kubernetes would set them; what is in `given` was set before, by KubeRay."""
    values = dict(given)
    for variable in container["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = {"status.podIP": address}[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = secrets[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
        else:
            value = variable["value"]
        values[variable["name"]] = re.sub(
            r"\$\((\w+)\)", lambda match: values.get(match[1], match[0]), str(value)
        )
    return values

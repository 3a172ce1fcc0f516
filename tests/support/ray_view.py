"""What Ray itself says of a running service: ``ray_view.py GCS-ADDRESS``, as JSON.

``actors`` are the states of the service's actors by name, ``endpoints`` where each node shows its metrics.
"""

from __future__ import annotations

import json
import sys

import ray
from ray.util.state import list_actors

from scheduler.messages import RAY_NAMESPACE


def main() -> None:
    context = ray.init(address=sys.argv[1], namespace=RAY_NAMESPACE, log_to_driver=False)
    dashboard = f"http://{context.dashboard_url}"
    actors = {
        actor.name: actor.state
        for actor in list_actors(dashboard, filters=[("ray_namespace", "=", RAY_NAMESPACE)])
    }
    endpoints = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    print(json.dumps({"actors": actors, "endpoints": endpoints}))


if __name__ == "__main__":
    main()

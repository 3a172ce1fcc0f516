"""What Ray itself says of a running service: ``ray_view.py GCS-ADDRESS``, as JSON.

``actors`` are the states of the service's actors by name, ``endpoints`` where each node shows its metrics.
"""

from __future__ import annotations

import json
import os
import sys

from scheduler.messages import RAY_NAMESPACE


def main() -> None:
    # As the service does. Ray reads it as it is imported, and would look for 127.0.0.1 at another address without it.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray
    from ray.util.state import list_actors

    context = ray.init(address=sys.argv[1], namespace=RAY_NAMESPACE, log_to_driver=False)
    found = list_actors(f"http://{context.dashboard_url}", filters=[("ray_namespace", "=", RAY_NAMESPACE)])
    endpoints = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes()]
    print(json.dumps({"actors": {actor.name: actor.state for actor in found}, "endpoints": endpoints}))


if __name__ == "__main__":
    main()

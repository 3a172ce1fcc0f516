"""Calls methods of a running service's Scheduler actor: ``ray_call.py GCS-ADDRESS CALLS``.

CALLS is a JSON list of [method, arguments by name]; the answers are written as a JSON list.
"""

from __future__ import annotations

import json
import os
import sys

from scheduler.messages import RAY_NAMESPACE, SCHEDULER_NAME


def main() -> None:
    # As the service does. Ray reads it as it is imported, and would look for 127.0.0.1 at another address without it.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    ray.init(address=sys.argv[1], namespace=RAY_NAMESPACE, log_to_driver=False)
    scheduler = ray.get_actor(SCHEDULER_NAME, namespace=RAY_NAMESPACE)
    print(
        json.dumps([ray.get(getattr(scheduler, name).remote(**kw)) for name, kw in json.loads(sys.argv[2])])
    )


if __name__ == "__main__":
    main()

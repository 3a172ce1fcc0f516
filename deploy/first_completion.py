"""Wait until a purefill service is healthy, ask it for one completion, and show both.

Run as ``python first_completion.py URL PID``; PID is the service's process, whose end ends the waiting. Uses
nothing but the standard library.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PROMPT = "The capital of France is"


def fetch(url: str, body: dict[str, object] | None = None) -> Any:
    """Return the JSON at `url`; with `body` it is posted."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        text = response.read()
    return json.loads(text) if text else {}


def wait_until_healthy(url: str, pid: int) -> None:
    """Return once `url`/health answers. Exits if the process `pid` is gone before."""
    while True:
        try:
            fetch(f"{url}/health")
            return
        except (urllib.error.URLError, OSError):
            pass
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            sys.exit("the service has stopped")
        time.sleep(0.2)


def main() -> None:
    """Show one completion of the service at ``sys.argv[1]``."""
    url, pid = sys.argv[1], int(sys.argv[2])
    wait_until_healthy(url, pid)
    model = fetch(f"{url}/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    print(f"\ncurl {url}/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'")
    answer = fetch(f"{url}/v1/completions", body)
    print(json.dumps(answer, indent=2))
    print(f"\n{PROMPT}{answer['choices'][0]['text']}\n", flush=True)


if __name__ == "__main__":
    main()

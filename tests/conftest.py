from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.service import Service, serve

# How long an example takes says nothing on a busy machine.
settings.register_profile("purefill", deadline=None)
settings.load_profile("purefill")


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The default model in float32, so that its tokens can be compared with a reference."""
    with serve("--dtype", "float32", "--kv-memory", "1GiB") as running:
        yield running

from __future__ import annotations

import pytest

from scheduler.errors import ConfigError
from scheduler.service import free_port


@pytest.mark.parametrize("host", ["nowhere.invalid", ".."])
def test_a_host_that_is_not_known_is_named(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        free_port(host, 0)
    assert str(caught.value) == f"host must be an address of this machine, got {host}"

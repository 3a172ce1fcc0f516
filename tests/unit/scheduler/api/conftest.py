from __future__ import annotations

import pytest

from scheduler.api.tokenizer import Tokenizer
from tests.unit.scheduler.api.scripted import byte_tokenizer


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte, and an end token."""
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))

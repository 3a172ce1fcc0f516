from __future__ import annotations

import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import processors

from scheduler.api.tokenizer import Tokenizer
from tests.unit.scheduler.api.scripted import END, byte_tokenizer


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte, and an end token."""
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def beginning_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same, but puts the end token before every text, as models do whose texts begin with it."""
    folder = tmp_path_factory.mktemp("beginning")
    byte_tokenizer(folder)
    tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")

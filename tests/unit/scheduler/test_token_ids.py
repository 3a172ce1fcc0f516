from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefix.hashing import chain_digests
from scheduler.token_ids import TokenIds
from scheduler.wire.pickling import dumps

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=200)


@given(TOKENS)
def test_they_are_a_tuple_of_the_same_numbers_also_after_a_way(numbers: list[int]) -> None:
    ids = TokenIds(numbers)
    for copy in (ids, pickle.loads(pickle.dumps(ids)), pickle.loads(dumps(ids))):
        assert copy == tuple(numbers)
        assert hash(copy) == hash(tuple(numbers))
        assert copy.words == ids.words
        assert type(copy) is TokenIds
    assert type(ids[:3]) is tuple


@given(TOKENS)
def test_their_digests_are_those_of_the_numbers(numbers: list[int]) -> None:
    assert chain_digests(b"", TokenIds(numbers), 8) == chain_digests(b"", numbers, 8)


def test_a_number_of_more_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bits"):
        TokenIds([1, 2**31])

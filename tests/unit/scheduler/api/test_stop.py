from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api.stop import StopMatcher

# Two letters, so that stop strings overlap each other and themselves.
TEXT = st.text(alphabet="ab", max_size=8)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4)


def run(stops: list[str], pieces: list[str], num_unarmed: int = 0) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    out = [matcher.feed(piece, armed=i >= num_unarmed) for i, piece in enumerate(pieces)]
    return [*out, matcher.flush()], matcher.matched


def search(stops: list[str], text: str, from_end: int = 0) -> tuple[str, str | None]:
    """The definition: the first end > `from_end` at which a stop string ends, the longest one there."""
    for end in range(from_end + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, st.lists(TEXT, max_size=8))
def test_equals_a_search_of_the_whole_text_however_it_is_cut(stops: list[str], pieces: list[str]) -> None:
    out, matched = run(stops, pieces)
    assert ("".join(out), matched) == search(stops, "".join(pieces))


@given(STOPS, st.lists(TEXT, max_size=8), st.integers(0, 8))
def test_a_match_must_end_in_an_armed_piece(stops: list[str], pieces: list[str], num_unarmed: int) -> None:
    out, matched = run(stops, pieces, num_unarmed)
    unarmed_chars = len("".join(pieces[:num_unarmed]))
    assert ("".join(out), matched) == search(stops, "".join(pieces), unarmed_chars)


@given(STOPS, st.lists(TEXT, max_size=8))
def test_holds_back_exactly_what_could_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = out = ""
    for piece in pieces:
        seen += piece
        out += matcher.feed(piece)
        if matcher.matched is not None:
            break
        held = seen[len(out) :]
        longest = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert len(held) == longest


def test_a_stop_string_across_tokens_leaves_no_trace() -> None:
    out, matched = run(["\n\nUser:"], ["Hello", "\n", "\nUs", "er", ": hi"])
    assert out == ["Hello", "", "", "", "", ""]
    assert matched == "\n\nUser:"


def test_what_looked_like_a_stop_string_comes_out_after_all() -> None:
    out, matched = run(["\n\nUser:"], ["Hello", "\n", "\nUs", "age"])
    assert out == ["Hello", "", "", "\n\nUsage", ""]
    assert matched is None


def test_an_unfinished_stop_string_comes_out_at_the_end() -> None:
    assert run(["END"], ["The EN"]) == (["The ", "EN"], None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])

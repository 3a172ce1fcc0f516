from __future__ import annotations

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.wire import frames
from scheduler.wire.frames import (
    MAX_FRAME_BYTES,
    Answer,
    BrokenFrameError,
    Call,
    FrameReader,
    FrameTooLargeError,
    Message,
    Post,
    encode,
)

MESSAGES = st.lists(
    st.one_of(
        st.builds(Post, method=st.text(), args=st.tuples(st.binary(), st.integers())),
        st.builds(Call, number=st.integers(), method=st.text(), args=st.tuples(st.text())),
        st.builds(Answer, number=st.integers(), value=st.none() | st.lists(st.integers())),
    ),
    max_size=5,
)


@given(MESSAGES, st.lists(st.integers(1, 50), min_size=1))
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    messages: list[Message], sizes: list[int]
) -> None:
    data = b"".join(map(encode, messages))
    reader, taken, start = FrameReader(), [], 0
    while start < len(data):
        for size in sizes:
            taken += reader.feed(data[start : start + size])
            start += size
    assert taken == messages


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 1000)
    encode(Post(method="m", args=(b"x" * 900,)))
    with pytest.raises(FrameTooLargeError, match="<= 1000 bytes"):
        encode(Post(method="m", args=(b"x" * 1000,)))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack(">I", MAX_FRAME_BYTES + 1), "must have <="),
        (struct.pack(">I", 3) + b"abc", "cannot be read"),
        (struct.pack(">I", 0), "cannot be read"),
        (struct.pack(">I", 4) + pickle.dumps(7, protocol=0)[:4], "must hold a message"),
    ],
    ids=["too large", "no pickle", "empty", "no message"],
)
def test_what_is_no_frame_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BrokenFrameError, match=reason):
        FrameReader().feed(data)


def test_what_came_before_a_broken_frame_is_not_lost_with_it() -> None:
    whole = [Post(method="m", args=(i,)) for i in range(3)]
    reader = FrameReader()
    assert reader.feed(encode(whole[0]) + encode(whole[1])[:7]) == whole[:1]
    with pytest.raises(BrokenFrameError) as caught:
        reader.feed(encode(whole[1])[7:] + encode(whole[2]) + struct.pack(">I", 3) + b"abc")
    assert caught.value.messages == whole[1:]

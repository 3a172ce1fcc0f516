from __future__ import annotations

import pytest

from worker.pacing import Pacer


@pytest.mark.parametrize(("share", "pause_s"), [(0.0, 0.0), (0.5, 0.2), (0.75, 0.6)])
def test_decode_has_its_share_of_the_time_to_itself(share: float, pause_s: float) -> None:
    pacer = Pacer(share)
    assert pacer.wait_s(5.0, is_decoding=True) == 0
    pacer.computed(0.2, now=10.0)
    assert pacer.wait_s(10.0, is_decoding=True) == pytest.approx(pause_s)
    assert pacer.wait_s(10.0, is_decoding=False) == 0
    assert pacer.wait_s(10.0 + pause_s, is_decoding=True) == pytest.approx(0)

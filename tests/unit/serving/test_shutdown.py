"""A shutdown that ends."""

import threading

from sgl_tiered.serving import shutdown
from sgl_tiered.serving.shutdown import close_in_time

PATIENCE_S = 10.0


def test_what_closes_is_waited_for():
    """A close that returns is a close, and nobody has to leave."""
    closed, left = [], []
    assert close_in_time(lambda: closed.append(1), PATIENCE_S, "it", leave=left.append)
    assert closed == [1]
    assert left == []


def test_what_does_not_close_is_left_behind(monkeypatch, caplog):
    """A close that never returns is given up, said so, and the process ends later."""
    monkeypatch.setattr(shutdown, "_LEAVE_AFTER_S", 0.01)
    never, left = threading.Event(), threading.Event()
    codes = []

    def leave(code):
        codes.append(code)
        left.set()

    assert not close_in_time(never.wait, 0.05, "the disk tier", leave=leave)
    assert left.wait(PATIENCE_S)
    assert codes == [0]
    assert "the disk tier does not close" in caplog.text
    never.set()

"""Weights that a test changes, and whose reading it holds up."""

import threading

from sgl_tiered.serving.weights import HashStopped, WeightsHash

PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


class FakeWeights:
    """Weights that hash to a text.

    Attributes:
        text: what they are now.
        gate: reads wait for it; set at first.
        began: set by each read; a test clears it.
        num_begun, num_stopped: reads that began, and that were stopped.
    """

    def __init__(self, text="model"):
        self.text = text
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()
        self.num_begun = self.num_stopped = 0

    def begin(self):
        """Return what reads them; it sees what they are when it ends."""

        def read(num_threads, stop):
            del num_threads
            self.num_begun += 1
            self.began.set()
            while not self.gate.wait(0.01):
                if stop.is_set():
                    self.num_stopped += 1
                    raise HashStopped
            return WeightsHash(self.text, 1, 4)

        return read


def read_out(identity):
    """Wait until this rank has read its weights."""
    assert identity._reading._done.wait(PATIENCE_S)

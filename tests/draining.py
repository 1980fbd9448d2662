"""Letting all that is under way end, which the product never waits for."""

PATIENCE_S = 20.0
"""Upper bound of every wait: only a defect makes a test wait so long."""


def drain(runtime):
    """Wait until no transfer of a runtime runs, of the disk's either."""
    runtime.drain_device()
    parts = runtime.parts
    # Also a store that was given up.
    ahead = (parts.offloader, parts.stager, parts.promoter)
    for worker in (*ahead, *parts.demoters.values()):
        assert worker is None or worker.drain(PATIENCE_S), "a transfer does not end"


def give_back(cache):
    """Give back all that a drop or a reset of a cache has forgotten."""
    while cache.free_dropped():
        pass

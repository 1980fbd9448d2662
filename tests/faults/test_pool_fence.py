"""A process stopped in the middle of a push, for longer than any grace time.

When it goes on, so do its writes: until it has said that nothing of it is left, nobody
else may have got the blocks. Loopback, whose pushes stand still while the receiver is
stopped, so that "in the middle" is no matter of chance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sgl_tiered.errors import TransportUnavailableError
from sgl_tiered.transport.loopback import open_loopback
from tests.faults.pool_process import NUM_BLOCKS
from tests.faults.pool_support import Node, settle

GRACE_S = 1.0
TTL_S, TIMEOUT_S = 8.0, 120.0
"""So that pushes begin before they, or the leases of stopped processes, end."""
NUM_PAGES = 20
SENDING_S, MEETING_S, MAX_ROUNDS = 0.2, 0.005, 8


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Who sends, with a prompt, and who receives."""
    try:
        open_loopback().close()
    except TransportUnavailableError as error:
        pytest.skip(f"not run: {error}")
    registry = f"file:{tmp_path / 'pool.json'}"
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(
                Node(name, registry, "loopback", TTL_S, GRACE_S, TIMEOUT_S)
            )
            for name in ("one", "two")
        )
        one.knows(two)
        two.knows(one)
        assert one.ask(f"hold 0 {NUM_PAGES}")["ok"]
        yield one, two


def stopped_in_a_push(one: Node, two: Node) -> None:
    """One writes to blocks that it was given by two; both are stopped."""
    assert one.ask(f"lend {two.instance} {NUM_PAGES}")["ok"]
    two.stop()
    # It begins once the transport's endpoints have met. Who is stopped before that may
    # go on for a moment: on a busy machine a short one is none, and in a long one all
    # is written; then they have met, and the next push begins at once.
    for round_ in range(MAX_ROUNDS):
        if "RUNNING" not in one.ask("check")["pushes"]:
            assert not one.ask(f"push {two.instance} 0 {NUM_PAGES}")["error"]
        if is_pushing(one):
            break
        two.go_on()
        time.sleep(MEETING_S * 2**round_)
        two.stop()
    else:
        pytest.fail(f"a push is not begun: {one.ask('check')}")
    one.stop()


def stopped_in_a_fetch(one: Node, two: Node) -> None:
    """One writes pages that two has asked for; both are stopped."""
    # Their endpoints have shaken hands: a message reaches one that is stopped.
    assert two.ask(f"fetch {one.instance} 2 4")["error"]
    one.stop()
    two.tell(f"fetch {one.instance} 0 {NUM_PAGES}")
    # A fetch is under way before the socket's own thread has sent what asks for it. Who
    # is stopped too soon may go on until the message has gone.
    for _ in range(MAX_ROUNDS):
        two.until(lambda found: found["fetching"] > 0)
        time.sleep(SENDING_S)
        two.stop()
        one.go_on()
        if is_pushing(one):
            break
        one.stop()
        two.go_on()
    else:
        pytest.fail("a fetch that was asked for is not begun")
    one.stop()


def is_pushing(one: Node) -> bool:
    """Return whether it begins to push while who asked for it has a lease."""
    end_s = time.monotonic() + TTL_S / 16
    while time.monotonic() < end_s:
        if one.ask("check")["pushing"] > 0:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("way", ["push", "fetch"])
def test_blocks_are_kept_until_the_stopped_one_has_its_say(
    pair: tuple[Node, Node], way: str
) -> None:
    """However long; then they are free, and all that others had is as it was."""
    one, two = pair
    (stopped_in_a_push if way == "push" else stopped_in_a_fetch)(one, two)
    two.go_on()
    if way == "fetch":
        assert two.hear()["num_pages"] == 0
    two.knows()
    kept = "kept_for_the_gone" if way == "push" else "lent"
    two.until(lambda found: found["fences"] == 1)
    assert two.ask("fill")["num"] == NUM_BLOCKS - NUM_PAGES
    time.sleep(4 * GRACE_S)
    found = two.ask("check")
    assert (found[kept], found["fences"]) == (NUM_PAGES, 1)
    assert two.ask("fill")["num"] == 0
    one.go_on()
    two.knows(one)
    two.until(lambda found: found["fences"] == 0)
    assert two.ask("fill")["num"] == NUM_PAGES
    assert two.ask("filled")["right"]
    two.ask("drop")
    settle(one, two)


def test_the_end_of_the_stopped_one_frees_them(pair: tuple[Node, Node]) -> None:
    """A process that is over writes no more, and nobody has to say so."""
    one, two = pair
    stopped_in_a_push(one, two)
    two.go_on()
    two.knows()
    two.until(lambda found: found["fences"] == 1)
    one.process.kill()
    one.process.wait()
    two.until(lambda found: found["fences"] == 0)
    assert two.ask("fill")["num"] == NUM_BLOCKS
    assert two.ask("filled")["right"]
    two.ask("drop")
    settle(two)

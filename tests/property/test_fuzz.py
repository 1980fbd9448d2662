"""The bounded form of ``make fuzz``: some inputs of each target, and planted faults.

The pool's machine has tests of its own (``test_hostile_pool_machine``), and the calls
of ``/tiered/*`` need SGLang in this process: both are left to ``make fuzz``.
"""

import pytest

from tests.fuzz.http_targets import TieredBodies
from tests.fuzz.kit import Fault, Target, find_fault, run_target
from tests.fuzz.pool_targets import PoolStates
from tests.fuzz.targets import TARGETS

HERE = [each for each in TARGETS.values() if each not in (PoolStates, TieredBodies)]
NUM_INPUTS = 150
MAX_INPUTS = 3_000
"""In which a planted fault must show; most show within a hundred."""


@pytest.mark.parametrize("target", HERE, ids=lambda target: target.name)
def test_nothing_ends_in_a_crash_or_wrong(target: type[Target]) -> None:
    """Inputs are taken rightly or refused in a sentence, and there are both."""
    tally = run_target(target(), NUM_INPUTS, 1)
    assert not tally.found, tally.findings
    assert tally.inputs == NUM_INPUTS
    assert tally.accepted
    assert tally.refused


@pytest.mark.parametrize(
    ("target", "fault"),
    [(target, fault) for target in HERE for fault in target.faults[:1]],
    ids=lambda value: value.name,
)
def test_a_planted_fault_is_found(target: type[Target], fault: Fault) -> None:
    """What takes a check away is noticed."""
    assert find_fault(target(), fault, MAX_INPUTS, 1)

"""What a request may say of its SLO, and what becomes of nonsense."""

import pytest

from sgl_tiered.policies.admission.base import NO_TARGET
from sgl_tiered.serving.targets import Targets, request_targets

DEFAULTS = Targets(3.0, 0.2)


@pytest.mark.parametrize("custom", [None, {}, {"other": 1}, "text"])
def test_without_a_wish_the_flags_hold(custom):
    """Whatever else custom_params are used for."""
    assert request_targets(custom, DEFAULTS) == (DEFAULTS, True)


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [
        ({"ttft_s": 1}, Targets(1.0, 0.2)),
        ({"tpot_s": 0.05}, Targets(3.0, 0.05)),
        ({"ttft_s": 1.5, "tpot_s": 0.1}, Targets(1.5, 0.1)),
        ({"ttft_s": None}, Targets(NO_TARGET, 0.2)),
        ({"explain": True}, DEFAULTS),
    ],
)
def test_a_request_brings_its_own_targets(wish, wanted):
    """One of them or both; null is no target at all."""
    assert request_targets({"tiered": wish}, DEFAULTS) == (wanted, True)


def test_no_target_is_below_the_servers_floor():
    """It counts as the floor, and is told; neither its TPOT nor a default is raised."""
    wish = {"tiered": {"ttft_s": 1e-9, "tpot_s": 1e-9}}
    assert request_targets(wish, DEFAULTS, 0.5) == (Targets(0.5, 1e-9), False)
    wish = {"tiered": {"ttft_s": 0.5}}
    assert request_targets(wish, DEFAULTS, 0.5) == (Targets(0.5, 0.2), True)
    assert request_targets(None, Targets(0.1), 0.5) == (Targets(0.1), True)


@pytest.mark.parametrize(
    "value", ["soon", 0, -1.0, True, float("nan"), float("inf"), [1.0]]
)
def test_nonsense_leaves_the_flags_and_is_told(value):
    """The request is served all the same, and its other target counts."""
    wish = {"ttft_s": value, "tpot_s": 0.1}
    assert request_targets({"tiered": wish}, DEFAULTS) == (Targets(3.0, 0.1), False)


def test_a_wish_that_is_no_object_is_told():
    """Not a server error."""
    assert request_targets({"tiered": 7}, DEFAULTS) == (DEFAULTS, False)

"""The negative control, before anything else: wrong KV must turn the gate red."""

import pytest
from sgl_tiered_workloads.gate import check_equality, negative_control
from sgl_tiered_workloads.sessions import replay
from sgl_tiered_workloads.systems import MB, Tiers, tiered_spec

from tests.e2e.e2e_support import Case, drop, sequential

pytestmark = [pytest.mark.sglang, pytest.mark.e2e]

CASE = Case(16)


@pytest.mark.parametrize(
    "corruption", ["zero", pytest.param("swap", marks=pytest.mark.full)]
)
def test_wrong_pages_are_caught(servers, model, reference, corruption):
    """The gate is red where each load brings one zeroed or exchanged page."""
    plain = reference(CASE)
    server = servers.get(
        tiered_spec(
            CASE.device(model),
            Tiers(32 * MB),
            f"fault-{corruption}",
            flags=(
                "--tiered-load-policy",
                "always",
                "--tiered-fault-corrupt",
                corruption,
            ),
            env={"SGL_TIERED_ALLOW_FAULTS": "1"},
        )
    )
    chosen = plain.chat[-6:]
    sequential(server, replay(chosen))
    drop(server, "device")
    answers = sequential(server, replay(chosen))
    loaded = [record for record in answers if record.cached_by_tier.get("host", 0)]
    assert loaded, "no answer used the host tier, so nothing was corrupted"
    result = check_equality(
        chosen,
        answers,
        page_size=CASE.page_size,
        spread=plain.spread,
        min_exact_fraction=0.0,
    )
    negative_control({corruption: result})

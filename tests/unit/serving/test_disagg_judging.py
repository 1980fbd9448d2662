"""What a prefill instance tells of itself, and what decode makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.cost.calibration import CachingFit, LocationFit, write_calibration
from sgl_tiered.cost.context_caching import CachedPrompt, ContextCaching
from sgl_tiered.cost.links import LinkCost
from sgl_tiered.cost.model import CostModel
from sgl_tiered.cost.prefill import PrefillCost
from sgl_tiered.serving.disagg.figures import (
    PrefillFigures,
    PrefillTold,
    figures_of,
    read_told,
    teller,
)
from sgl_tiered.serving.disagg.judging import ReturnJudge
from sgl_tiered.serving.options import Loads, Options
from tests.unit.cost.calibration_support import CALIBRATION, QUALITY

LAYOUT = PageLayout(num_layers=4, page_tokens=16, token_bytes=256)
LINK = 1e9
MODEL = b"model"


def model(token_s: float = 1e-4) -> ContextCaching:
    host = LocationFit("host", 5e-4, 1e-6, 2e-7, True, QUALITY)
    disk = LocationFit("disk", 5e-3, 1e-5, 0.0, False, QUALITY)
    fit = CachingFit(0.004, 0.003, 0.001, token_s, 3e-8, 1e-6, (disk, host), QUALITY)
    return ContextCaching(fit, LAYOUT.page_tokens, LAYOUT.num_layers, 512)


def figures(token_s: float = 1e-4, link: float = LINK) -> PrefillFigures:
    told = figures_of(model(token_s), (3, 8), link, is_fitted=True)
    assert told is not None
    return told


def tokens(seed: int, num: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, num, dtype=np.int32)


def test_what_is_told_is_what_is_known() -> None:
    """Of prompts on the device, in the host tier and nowhere."""
    sent = msgspec.msgpack.encode(PrefillTold("name", "epoch", figures()))
    read = read_told(sent).figures
    assert read == figures()
    assert read.place == (3, 8)
    theirs = read.model(LAYOUT.page_tokens, LAYOUT.num_layers)
    for found in ((), ((TierId.DEVICE, 512),), ((TierId.HOST, 512),)):
        batch = [CachedPrompt(1500, found)]
        assert theirs.decide(batch).seconds == model().decide(batch).seconds


def packed(*values: object) -> bytes:
    return msgspec.msgpack.encode(["name", "epoch", list(values)])


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"\x00",
        b"\x91" * 10_000,
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(["name", "epoch"]),
        packed(*msgspec.structs.astuple(figures())[:-1], 0.0),
        packed(*msgspec.structs.astuple(figures())[:-1], -1.0),
        packed(-1, *msgspec.structs.astuple(figures())[1:]),
    ],
)
def test_what_cannot_be_read_is_of_nobody(told: bytes) -> None:
    """Then nothing goes back, and the KV is not kept as that of the weights here."""
    assert read_told(told) == PrefillTold("", "", None)


def test_without_a_host_tier_nothing_is_told() -> None:
    """Nowhere to return to, as far as the model knows."""
    bare = CachingFit(0.0, 0.0, 0.0, 1e-4, 0.0, 0.0, (), QUALITY)
    assert (
        figures_of(ContextCaching(bare, 16, 4), (1, 1), LINK, is_fitted=False) is None
    )


def served(calibration: object = None) -> SimpleNamespace:
    prefill = PrefillCost.from_coefficients(1e-3, 1e-4, 1e-9)
    cost = CostModel(prefill, {TierId.HOST: LinkCost(1e-5, 1e9)})
    parts = SimpleNamespace(
        config=Options(loads=Loads(calibration=calibration)),
        cost=cost,
        device=SimpleNamespace(layout=LAYOUT),
        cache=SimpleNamespace(config=SimpleNamespace(load_overlaps=False)),
    )
    return SimpleNamespace(parts=parts)


def test_without_a_profile_the_planners_figures_are_told() -> None:
    """As they are then: they are refined while the server runs."""
    runtime = served()
    tell = teller(runtime, lambda: (1, 2))
    before = tell(LINK)
    assert not before.is_fitted
    assert before.token_s == pytest.approx(1e-4)
    for _ in range(64):
        runtime.parts.cost.observe_prefill(0, 1000, 1.0)
    assert tell(LINK).token_s > 2 * before.token_s


def test_a_profile_is_told_if_it_knows_the_host(tmp_path) -> None:
    """One without goes by the planner's figures."""
    path = tmp_path / "c.json"
    for host, is_fitted in (("host", True), ("disk", False)):
        place = LocationFit(host, 5e-4, 1e-6, 0.0, False, QUALITY)
        fit = CachingFit(0.0, 0.003, 0.001, 7e-4, 0.0, 0.0, (place,), QUALITY)
        write_calibration(path, replace(CALIBRATION, caching=fit))
        told = teller(served(path), lambda: (1, 2))(LINK)
        assert told.is_fitted is is_fitted
        assert (told.token_s == pytest.approx(7e-4)) is is_fitted


class Rig:
    """A judge and what it counts."""

    def __init__(self, policy: str = "auto") -> None:
        self.counts: Counter[str] = Counter()
        self.judge = ReturnJudge(
            policy, LAYOUT, lambda name, num: self.counts.update({name: num})
        )

    def ended(self, told: PrefillFigures, num_tokens=512, num_prompt=256, seed=1):
        return self.judge.is_worth(
            f"r{seed}", told, MODEL, tokens(seed, num_tokens), num_prompt
        )


def test_an_answer_that_saves_more_than_it_costs() -> None:
    """And one that does not; decisions are counted and told."""
    rig = Rig()
    assert rig.ended(figures())
    assert not rig.counts
    assert not rig.ended(figures(link=1e5))
    assert rig.counts == {"returns_declined": 1, "pages_declined": 16}
    stats = rig.judge.stats()
    good, bad = stats["last"]
    assert good["num_tokens"] == good["missing_tokens"] == 256
    assert good["gain_s"] > good["cost_s"] > 0
    assert bad["num_tokens"] == 0
    assert bad["gain_s"] < bad["cost_s"]
    assert good["reason"] != bad["reason"]
    assert good["figures"] == "calibration"


def test_experiments_decide_themselves() -> None:
    """Always and never, whatever is predicted."""
    assert Rig("always").ended(figures(link=1.0))
    assert not Rig("never").ended(figures())


def test_an_answer_without_a_page_stays() -> None:
    """Prefill has all whole pages of it."""
    rig = Rig()
    assert not rig.ended(figures(), num_tokens=256, num_prompt=256)
    assert rig.counts["pages_declined"] == 0
    assert rig.judge.stats()["continued_share"] == 1.0


def test_returns_end_where_nobody_continues() -> None:
    """And begin again with the first sessions."""
    rig = Rig()
    link = 1e8
    assert rig.ended(figures(link=link))
    for seed in range(2, 6000):
        rig.ended(figures(link=link), seed=seed)
    assert not rig.ended(figures(link=link), seed=6000)
    for seed in range(7000, 9000):
        rig.ended(figures(link=link), seed=seed)
        rig.judge.asked(MODEL, tokens(seed, 512))
    assert rig.ended(figures(link=link), seed=9000)

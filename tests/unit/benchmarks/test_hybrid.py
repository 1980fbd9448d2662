"""The activations bench: links by proportions, the decode phase, figures, doubts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hybrid.arms import (
    ARMS,
    HALF_PAGES,
    MODEL,
    PAGE,
    TOKEN_BYTES,
    Link,
    Scale,
    batch_of,
    question,
    resident_spec,
    spec_of,
)
from hybrid.measure import Hybrid, Options, parts_of
from hybrid.relation import (
    BatchFacts,
    Relation,
    bound_of,
    device_bytes_of,
    facts_of,
    layer_pages,
    paper_relation,
)
from hybrid.results import PARTS_OF, TARGETS, Findings, device_bytes, summary
from hybrid.servers import Decode, Reloads, moved
from hybrid.window import LEAST_STEPS, Window, WindowError, num_equal, window_of
from sgl_tiered_workloads.records import RequestRecord

from sgl_tiered.core.ids import TierId
from sgl_tiered.cost.calibration import FitQuality, TokensFit, read_calibration
from sgl_tiered.policies.activations.balance import split_at
from sgl_tiered.serving.emulation import parse_emulation
from sgl_tiered.serving.option_reader import read_options

FIT = TokensFit(0.0, 10e-6, FitQuality(6, 1.0, 0.0, 0.0))
SCALE = Scale()


# -- Link, weights and the bound ---------------------------------------------------


def test_the_link_follows_from_the_proportion():
    """Equal tokens take 1.25 times as long to load as to rebuild, overhead included."""
    fit = TokensFit(1e-3, 10e-6, FIT.quality)
    rate = Relation(1.25).bytes_per_s(fit, 512, 4_096)
    assert 512 * 4_096 / rate == pytest.approx(1.25 * fit.seconds(512))


def test_the_papers_proportions():
    """OPT-30B on a 4090: rebuilding takes longer, and weights a third of the KV."""
    relation = paper_relation()
    assert 0.4 < relation.load_over_gen < 0.6
    assert 0.2 < relation.weights_over_load < 0.5
    # Weights and context on our link are in that proportion.
    num_bytes = relation.weight_bytes(5_000, 4_096)
    assert num_bytes / (5_000 * 4_096) == pytest.approx(
        relation.weights_over_load, rel=1e-5
    )


def batch(**changes):
    """Two requests on a link that is 1.25 times slower than rebuilding."""
    facts = BatchFacts(
        contexts=(1_000, 1_000),
        page_tokens=16,
        token_bytes=4_096,
        kv_gen=FIT,
        bytes_per_s=4_096 / 12.5e-6,
        weight_bytes=0,
        compute_s=0.0,
        device_bytes=0,
    )
    return replace(facts, **changes)


def test_the_bound_is_the_balance():
    """Both sides take as long at 10 / 13 of the pages, in each layer."""
    bound_s, split = bound_of(batch(), 12)
    assert layer_pages((1_000, 1_000), 16) == 124
    assert split.num_act / 124 == pytest.approx(10 / 13, abs=1 / 124)
    assert bound_s == pytest.approx(12 * 124 * 16 * 10e-6 * 10 / 13, rel=0.01)
    kv_only_s = split_at(facts_of(batch()), 0).seconds
    assert 12 * kv_only_s / bound_s == pytest.approx(1.625, rel=0.01)


def test_weights_and_room_move_the_bound():
    """Weights lengthen it and take more activations; room on the device shortens it."""
    plain_s, plain = bound_of(batch(), 1)
    heavy_s, heavy = bound_of(batch(weight_bytes=2_000_000), 1)
    roomy_s, _ = bound_of(batch(device_bytes=40 * 16 * 4_096), 1)
    assert heavy_s > plain_s > roomy_s
    assert heavy.num_act > plain.num_act


def test_the_devices_room_by_hand():
    """What staging, open pages and the other layers leave, KV and activations."""
    page = 16 * 4_096
    assert device_bytes_of(376, 0, 8, 12, page) == (376 - 96) * page // 12
    both = device_bytes_of(376, 120, 8, 12, page)
    assert both == ((376 - 96) * page + 24 * page // 2) // 12
    assert device_bytes_of(50, 50, 8, 12, page) == 0
    stats = {
        "layer_pages": {"total": 376},
        "activations": {"device_layer_pages": 320, "staging_layer_pages": 200},
    }
    assert device_bytes(stats, 8) == both


# -- Arms --------------------------------------------------------------------------


def settings_of(spec):
    """Return the tiers' flags by name, as the product reads them."""
    flags = [flag for flag in spec.flags if flag.startswith("--tiered-layerkv")]
    pairs = (flag.removeprefix("--tiered-").split("=", 1) for flag in flags)
    return {name.replace("-", "_"): value for name, value in pairs}


def test_arms_differ_in_activations_alone(tmp_path):
    """One thread each, the same pool and the same bytes; only one flag is another."""
    link = Link(250e6, 9_000_000)
    specs = {n: spec_of(arm, tmp_path, SCALE, link) for n, arm in ARMS.items()}
    kv_only = set(specs["kv_only"].flags)
    assert set(specs["act_only"].flags) - kv_only == {"--tiered-activations=1.0"}
    assert set(specs["hybrid"].flags) - kv_only == {"--tiered-activations=auto"}
    for spec in specs.values():
        assert kv_only <= set(spec.flags)
        assert spec.env["OMP_NUM_THREADS"] == "1"


def test_sizes_fit_the_load(tmp_path):
    """The region holds batch and prefixes; a half holds the longest of both."""
    for reloads, tokens in (
        (False, SCALE.batch_tokens),
        (True, SCALE.batch_tokens + SCALE.prefixes * SCALE.prefix_tokens),
    ):
        spec = spec_of(ARMS["kv_only"], tmp_path, SCALE, Link(), reloads=reloads)
        settings = read_options(settings_of(spec)).layerkv
        assert settings.host_bytes >= tokens * TOKEN_BYTES * MODEL.num_layers
        assert settings.staging_bytes == 2 * HALF_PAGES * PAGE * TOKEN_BYTES
        assert settings.decode == "stream"
        assert settings.retain == 0
    longest = max(SCALE.longest + SCALE.answer, SCALE.prefix_tokens + PAGE + 2)
    assert longest <= HALF_PAGES * PAGE
    pool = int(spec.flags[spec.flags.index("--max-total-tokens") + 1])
    assert pool < SCALE.prefix_tokens
    resident = resident_spec(tmp_path, SCALE)
    pool = int(resident.flags[resident.flags.index("--max-total-tokens") + 1])
    assert pool > SCALE.batch_tokens
    assert read_options(settings_of(resident)).layerkv.retain is None


def test_the_link_is_read_as_meant():
    """Each direction has all of it; no link, no flag."""
    link = Link(254_900_000.0, 1_000)
    text = link.flags[0].removeprefix("--tiered-emulate=")
    (section,) = parse_emulation(text, (TierId.HOST,))
    assert section.read_bytes_per_s == section.write_bytes_per_s == 254_900_000
    assert link.flags[1] == "--tiered-emulate-weights=1000"
    assert Link().flags == ()


def test_the_load_is_the_same_for_all_arms():
    """A seed gives a batch; lengths are spread, questions are new."""
    first, again = (batch_of(SCALE, np.random.default_rng(3)) for _ in range(2))
    assert first == again
    lengths = [len(request.prompt) for request in first]
    assert (lengths[0], lengths[-1], len(lengths)) == (768, 1_536, 10)
    rng = np.random.default_rng(0)
    one, other = (question((7, 8, 9), rng, "q").prompt for _ in range(2))
    assert one[:3] == other[:3] == (7, 8, 9)
    assert one != other


# -- The decode phase --------------------------------------------------------------


def record(first_s, num, step_s=1.0, output=None, late_s=0.0):
    """An answer whose tokens come at a step each."""
    return RequestRecord(
        key="r",
        order=0,
        prompt=(1,) * 64,
        targeted_s=0.0,
        started_s=0.0,
        token_times_s=tuple(first_s + late_s + n * step_s for n in range(num)),
        output=tuple(range(num)) if output is None else output,
    )


def test_the_window_has_neither_ramp_nor_end():
    """From the last first token to the first end, each step with a token for all."""
    early, late = record(0.0, 20), record(4.0, 20, late_s=1e-3)
    window = window_of([early, late])
    # From 4.001 to 19: 15 steps, of which the late one's come a moment after.
    assert window.num_steps == 15
    assert window.num_tokens == 30
    assert window.seconds == pytest.approx(14.999)
    assert window.tokens_per_s == pytest.approx(2.0, rel=1e-3)
    assert window.step_s == pytest.approx(1.0, rel=1e-3)


def test_no_window_is_an_error():
    """Answers that end before the others have begun have no decode phase."""
    num = LEAST_STEPS
    window_of([record(0.0, num + 5), record(4.0, 20)])
    with pytest.raises(WindowError, match="too short"):
        window_of([record(0.0, num + 4), record(4.0, 20)])


def test_equal_answers_are_counted():
    """Token by token, request by request."""
    ours = [record(0.0, 3), record(0.0, 3)]
    theirs = [record(5.0, 3), record(0.0, 3, output=(0, 1, 9))]
    assert num_equal(ours, theirs) == 1


# -- Figures -----------------------------------------------------------------------


def decoded(step_s, streamed, *, acts=None, answers=None):
    """Eight requests with 40 steps of so long, and so many bytes streamed."""
    records = tuple(record(0.0, 40, step_s, answers) for _ in range(8))
    figures = {
        "bytes_streamed": streamed,
        "bytes_pulled": 0.0,
        "bytes_offloaded": 5e6,
        "requests": 8.0,
        "stall_s": 0.1,
    }
    layers = {"layer_pages": {"total": 500}}
    if acts is not None:
        figures |= {
            "act_pages": 100 * acts,
            "kv_pages": 100 * (1 - acts),
            "bytes_saved": 1e6,
            "rebuild_s": 2.0,
            "rebuild_exposed_s": 0.5,
        }
        layers["activations"] = {"share": acts}
    window = Window(39 * step_s, 8 * 39, 39)
    total_s = 40 * step_s
    return Decode(window, records, moved_of(figures), total_s, layers)


def moved_of(figures):
    """Return what two stats whose difference this is give."""
    after = {f"layerkv_{name}": value + 1.0 for name, value in figures.items()}
    return moved(dict.fromkeys(after, 1.0), after)


@pytest.fixture
def findings():
    """Everything as hoped for."""
    whole = SCALE.prefix_tokens * TOKEN_BYTES * MODEL.num_layers
    asked = (SCALE.prefix_tokens,) * 4
    return Findings(
        resident=decoded(0.1, 0.0),
        a={
            "kv_only": [decoded(1.6, 160e6), decoded(1.7, 160e6)],
            "act_only": [decoded(1.25, 80e6, acts=1.0)],
            "hybrid": [decoded(1.0, 100e6, acts=0.77)],
        },
        b={"hybrid": [decoded(1.0, 1e6, acts=0.5)], "kv_only": [decoded(1.2, 2e6)]},
        reloads={
            "kv_only": [Reloads((0.3, 0.4, 0.5, 0.4), asked, whole * 0.95)],
            "hybrid": [Reloads((0.2, 0.25, 0.3, 0.25), asked, whole * 0.6)],
        },
        pairs=[(10.0, 10.1), (10.0, 9.95), (10.0, 9.9)],
        balance_share={"a": 0.76, "b": 0.52},
        bound_s=0.95,
        facts={"a_link_mb_per_s": 250.0},
    )


def summed(findings, *parts):
    """Return the summary, which has to be strict JSON."""
    result = summary(findings, parts or tuple(PARTS_OF), SCALE)

    def refuse(text):
        raise AssertionError(text)

    return json.loads(json.dumps(result), parse_constant=refuse)


def test_figures_by_hand(findings):
    """Ratios of medians, bytes per token, and nothing missed."""
    result = summed(findings)
    assert result["throughput_vs_kv_only"] == pytest.approx(1.65, rel=0.01)
    assert result["throughput_vs_act_only"] == pytest.approx(1.25)
    assert result["traffic_vs_kv_only"] == pytest.approx(1.6)
    assert result["reload_ttft_vs_kv_only"] == pytest.approx(1.6)
    assert result["balance_efficiency"] == pytest.approx(0.95)
    assert result["b_throughput_vs_kv_only"] == pytest.approx(1.2)
    assert result["auto_regret"] == pytest.approx(0.005)
    assert result["outputs_equal"] == {
        "of": 8,
        "kv_only": 8,
        "act_only": 8,
        "resident": 8,
    }
    assert result["a"]["hybrid"]["overlap"] == 0.75
    assert result["a"]["hybrid"]["mb_per_token"] == pytest.approx(100 / (8 * 39), 0.01)
    assert "overlap" not in result["a"]["kv_only"]
    assert (result["a_share"], result["a_share_of_balance"]) == (0.77, 0.76)
    assert (result["missed"], result["problems"]) == ([], [])
    assert result["a_link_mb_per_s"] == 250.0


def test_targets_are_missed_by_name(findings):
    """Each target alone, from its own part."""
    findings.a["hybrid"] = [decoded(1.5, 150e6, acts=0.77)]
    findings.reloads["hybrid"] = findings.reloads["kv_only"]
    findings.bound_s = 0.5
    findings.pairs = [(10.0, 9.0)]
    result = summed(findings)
    assert set(result["missed"]) == {*TARGETS, "auto_regret"}
    assert summed(findings, "b")["missed"] == ["balance_efficiency"]


def test_what_did_not_run_is_missed_and_said(findings):
    """A part that was asked for and has nothing is no success."""
    result = summed(Findings())
    assert set(result["missed"]) == {*TARGETS, "auto_regret"}
    assert len(result["problems"]) == 4
    assert summed(Findings(), "regret")["missed"] == ["auto_regret"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.balance_share.update(a=0.6), "the balance is at 0.60"),
        (
            lambda f: f.a.update(
                act_only=[decoded(1.25, 1.0, acts=1.0, answers=(1, 2))]
            ),
            "answers are those of act_only",
        ),
        (
            lambda f: f.reloads.update(kv_only=[Reloads((0.4,), (16,), 1e9)]),
            "found 16 tokens",
        ),
        (
            lambda f: f.reloads.update(
                hybrid=[Reloads((0.2,), (SCALE.prefix_tokens,), 1e6)]
            ),
            "of a prefix's bytes",
        ),
    ],
)
def test_doubtful_figures_are_problems(findings, change, words):
    """Another share, other answers, prefixes that were not loaded."""
    change(findings)
    assert any(words in problem for problem in summed(findings)["problems"])


def test_differences_of_counters():
    """Only what the server has; activations where it counts them."""
    before = {"layerkv_bytes_streamed": 5, "layerkv_bytes_pulled": 1}
    after = {
        "layerkv_bytes_streamed": 25,
        "layerkv_bytes_pulled": 4,
        "layerkv_rebuild_s": 2.0,
        "layerkv_rebuild_exposed_s": 0.5,
        "layerkv_act_pages": 3,
        "layerkv_kv_pages": 1,
        "logical_pages": 9,
    }
    found = moved(before, after)
    assert found.to_device_bytes == 23
    assert found.overlap == 0.75
    assert found.act_share == 0.75
    assert moved(before, before).overlap is None


def test_parts_by_name():
    """All of them unless some are named, in the order of the bench."""
    assert parts_of(()) == parts_of(("all",)) == ("a", "reload", "b", "regret")
    assert parts_of(("b", "a")) == ("a", "b")


def test_a_share_that_is_asked_for_replaces_auto(tmp_path):
    """Only the hybrid's."""
    options = Options(tmp_path, tmp_path, ("a",), SCALE, share=0.7)
    hybrid = Hybrid(options, lambda text: None, lambda: FIT)
    assert hybrid._arm("hybrid", Link(1e8)).activations == "0.7"
    assert hybrid._arm("act_only", Link(1e8)).activations == "1.0"


def test_the_hybrids_server_reads_what_a_server_has_measured(tmp_path):
    """Both regressions, for an emulated link; the server compares what is known."""
    options = Options(tmp_path, tmp_path / "logs", ("a",), SCALE)
    hybrid = Hybrid(options, lambda text: None, lambda: FIT)
    path = hybrid._arm("hybrid", Link(2e8)).calibration
    rebuild = read_calibration(path).rebuild
    assert rebuild.kv_gen == FIT
    assert rebuild.load_kv.seconds(1_000) == pytest.approx(1_000 * 4_096 / 2e8)
    flags = spec_of(hybrid._arm("hybrid", Link(2e8)), tmp_path, SCALE, Link(2e8)).flags
    assert f"--tiered-calibration={path}" in flags
    assert hybrid._arm("hybrid", Link()).calibration is None
    assert hybrid._arm("kv_only", Link(2e8)).calibration is None

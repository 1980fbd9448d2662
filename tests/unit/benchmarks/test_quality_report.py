"""The quality bench's figures follow from its records, and its faults are seen."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from offline.cases import RandomCases, RecallCase, TextCase
from offline.curves import measure_curves
from offline.llama import Llama, LlamaShape
from offline.measure import DENSE, Codec, Method, grid, measure
from offline.report import figures_of, headline, problems_of, table

from sgl_tiered.policies.sparsity.car import CarSelection
from sgl_tiered.policies.sparsity.registry import SELECTIONS, make_selection

SHAPE = LlamaShape(2, 2, 1, 8, 1e-5, 10_000.0)
VOCABULARY, HIDDEN = 31, 16


def weights() -> dict[str, torch.Tensor]:
    """Random weights of a very small model."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(SHAPE.num_layers):
        sizes |= {
            f"model.layers.{layer}.{name}": size
            for name, size in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (16, HIDDEN),
                "self_attn.k_proj": (8, HIDDEN),
                "self_attn.v_proj": (8, HIDDEN),
                "self_attn.o_proj": (HIDDEN, 16),
                "mlp.gate_proj": (24, HIDDEN),
                "mlp.up_proj": (24, HIDDEN),
                "mlp.down_proj": (HIDDEN, 24),
            }.items()
        }
    return {
        f"{name}.weight": torch.randn(size, generator=generator)
        for name, size in sizes.items()
    }


@pytest.fixture(scope="module")
def model() -> Llama:
    """The model."""
    return Llama(SHAPE, weights())


def scores_of(model, case, methods, **more):
    rng = np.random.default_rng(0)
    selections = {name: make_selection(name, rng) for name in SELECTIONS}
    return dict(measure(model, case, methods, selections, **more))


@pytest.fixture
def text() -> TextCase:
    """A text whose prefix is longer than what is always kept."""
    return RandomCases(VOCABULARY).texts("evaluation", 1, 150, 20)[0]


def test_all_tokens_kept_is_dense(model, text) -> None:
    """Whatever the selection."""
    scores = scores_of(model, text, [DENSE, *grid(SELECTIONS, [1.0])])
    for score in scores.values():
        assert score.nll == pytest.approx(scores[DENSE].nll, rel=1e-6)
        assert score.bytes_ratio == 1.0


def test_equal_budgets_have_equal_bytes(model, text) -> None:
    """No selection keeps more than another, and fewer tokens predict otherwise."""
    scores = scores_of(model, text, [DENSE, *grid(SELECTIONS, [0.6])])
    dense = scores.pop(DENSE)
    assert {score.bytes_ratio for score in scores.values()} == {180 / 300}
    assert all(abs(score.nll - dense.nll) > 1e-4 for score in scores.values())


def test_only_what_follows_the_prefix_is_scored(model, text) -> None:
    """From its second token on, as the whole sequence predicts it."""
    dense = scores_of(model, text, [DENSE])[DENSE]
    tokens = torch.from_numpy(text.tokens)
    logs = torch.log_softmax(model.run(tokens[None])[0][0], dim=-1)
    expected = -sum(float(logs[i - 1, tokens[i]]) for i in range(151, 170))
    assert dense.num_tokens == 19
    assert dense.nll == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_an_answer_is_right_if_all_of_it_is(model, wrong) -> None:
    """The greedy answer is; with one other token it is not."""
    tokens = np.arange(130) % VOCABULARY
    for _ in range(3):
        logits, _ = model.run(torch.from_numpy(tokens)[None])
        tokens = np.append(tokens, int(logits[0, -1].argmax()))
    if wrong is not None:
        tokens[130 + wrong] = (tokens[130 + wrong] + 1) % VOCABULARY
    case = RecallCase(tokens, num_prefix=120, num_answer=3, distance=50)
    score = scores_of(model, case, [DENSE])[DENSE]
    assert score.is_right == (wrong is None)
    assert score.num_tokens == 3


def test_an_encoding_changes_what_is_read_and_its_bytes(model, text) -> None:
    """Also under a selection: kept tokens come from the encoded KV."""

    def halve(kv):
        return kv[0], 0.5 * kv[1]

    def quarter(num_tokens, kept):
        count = num_tokens if kept is None else np.mean([len(layer) for layer in kept])
        return 0.25 * count / num_tokens

    methods = [DENSE, Method("dense", 1.0, "x"), Method("car", 0.6, "x")]
    methods += [Method("car", 0.6), Method("car", 1.0, "x")]
    scores = scores_of(model, text, methods, codecs={"x": Codec(halve, quarter)})
    ratios = [scores[method].bytes_ratio for method in methods]
    assert ratios == pytest.approx([1.0, 0.25, 0.15, 0.6, 0.25])
    nlls = [scores[method].nll for method in methods]
    assert len({round(nll, 4) for nll in nlls[:4]}) == 4
    assert nlls[4] == pytest.approx(nlls[1], rel=1e-6)


def test_curves_hold_everything_in_all_tokens(model) -> None:
    """Rising to one; a layer's weight is its long-range share of all attention."""
    cases = RandomCases(VOCABULARY).texts("profile", 2, 150, 90)
    curves = measure_curves(model, cases, CarSelection())
    assert curves.num_layers == SHAPE.num_layers
    assert (np.diff(curves.held, axis=1) >= 0.0).all()
    assert curves.held[:, -1] == pytest.approx(1.0)
    assert ((curves.weights > 0.01) & (curves.weights < 1.0)).all()


def record(selection, share, case, nll=10.0, right=None, distance=0, encoding="raw"):
    kind = "text" if right is None else "recall"
    return {
        "kind": kind,
        "case": case,
        "distance": distance,
        "selection": selection,
        "keep_share": share,
        "encoding": encoding,
        "bytes_ratio": share,
        "nll": nll,
        "num_tokens": 10,
        "is_right": right,
    }


def records():
    """Two texts and four questions, dense and under two methods."""
    found = []
    for name, share, more, lost in (
        ("dense", 1.0, 0.0, ()),
        ("car", 0.5, 0.1, (3,)),
        ("h2o", 0.5, 0.05, (2, 3)),
    ):
        found += [record(name, share, case, 10.0 + more) for case in (0, 1)]
        found += [
            record(name, share, 2 + n, 1.0, n not in (0, *lost), 1024 * (1 + n % 2))
            for n in range(4)
        ]
    return found


def test_figures_by_hand() -> None:
    """Perplexity of the sums, recall of the counts, dense recall by distance."""
    figures = figures_of(records())
    assert figures.dense_ppl == pytest.approx(math.e)
    assert figures.dense_recall == {1024: 0.5, 2048: 1.0}
    ours = figures.points["car", 0.5, "raw"]
    assert ours.ppl_increase == pytest.approx(math.exp(0.01) - 1)
    assert ours.recall_ratio == pytest.approx(2 / 3)
    assert ours.recall_low <= ours.recall_ratio <= ours.recall_high
    assert ours.bytes_ratio == 0.5
    assert "| car | 50% | raw | 50.0% | +1.01% |" in table(figures)


def test_the_last_line_says_what_was_missed_and_who_was_better() -> None:
    """Both by name; what was not measured is missed, and no number."""
    found = headline(figures_of(records()))
    assert found["ppl_increase_at_50"] == pytest.approx(math.exp(0.01) - 1)
    assert found["ppl_increase_at_25"] is None
    assert found["dense_recall_worst"] == 0.5
    assert set(found["missed"]) == {
        "ppl_increase_at_50",
        "recall_ratio_at_50",
        "ppl_increase_at_25",
        "recall_ratio_at_25",
        "ppl_increase_at_4x",
        "dense_recall_worst",
    }
    assert found["beaten_by"] == ["h2o 50% raw: perplexity"]
    json.dumps(found, allow_nan=False)


def test_more_questions_may_be_asked_of_the_dense_prefix_only() -> None:
    """They count for dense recall only; no others may be left out."""
    found = records()
    dense = [one for one in found if one["selection"] == "dense"]
    more = next(one for one in dense if one["is_right"] is False)
    alone = more | {"case": 99, "is_dense_only": True, "is_right": True}
    before, after = figures_of(found), figures_of([*found, alone])
    assert after.points == before.points
    assert after.dense_recall[more["distance"]] > before.dense_recall[more["distance"]]
    with pytest.raises(KeyError):
        figures_of([*found, alone | {"is_dense_only": False}])


def test_a_quarter_of_the_bytes_is_not_picked_by_its_score() -> None:
    """An encoding alone if one is so small, be others better on these very texts."""
    dense, alone = record("dense", 1.0, 0), record("dense", 1.0, 0, 10.3)
    more = [
        record("car", 0.25, 0, 10.0) | {"bytes_ratio": 0.07, "encoding": "int4"},
        record("car", 0.5, 0, 10.2) | {"bytes_ratio": 0.25, "encoding": "int8"},
        record("dense", 1.0, 0, 10.0) | {"bytes_ratio": 0.5, "encoding": "fp8"},
    ]
    found = headline(figures_of([dense, *more]))
    assert found["method_at_4x"] == "car 50% int8"
    assert found["ppl_increase_at_4x"] == pytest.approx(math.exp(0.02) - 1)
    more.append(alone | {"bytes_ratio": 0.24, "encoding": "int4"})
    found = headline(figures_of([dense, *more]))
    assert found["method_at_4x"] == "dense 100% int4"
    assert found["ppl_increase_at_4x"] == pytest.approx(math.exp(0.03) - 1)


@pytest.mark.parametrize("change", [{"nll": 10.01}, {}])
def test_a_whole_prefix_that_is_not_dense_is_a_fault(change) -> None:
    """Then the measurement is wrong, whatever else it says."""
    found = [record("dense", 1.0, 0), record("car", 1.0, 0) | change]
    assert bool(problems_of(figures_of(found))) == bool(change)


def test_the_program_runs_from_checkpoint_to_last_line(
    load_script, tmp_path: Path, monkeypatch, capsys
) -> None:
    """With a model that knows nothing, on random cases: every file is written."""
    from safetensors.torch import save_file

    bench = load_script("quality/bench_sparsity.py")
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": SHAPE.num_layers,
        "num_attention_heads": SHAPE.num_heads,
        "num_key_value_heads": SHAPE.num_kv_heads,
        "head_dim": SHAPE.head_dim,
        "rms_norm_eps": SHAPE.norm_eps,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights(), tmp_path / "model.safetensors")
    monkeypatch.setattr(bench, "NUM_PREFIX", 150)
    monkeypatch.setattr(bench, "NUM_AFTER", 70)
    monkeypatch.setattr(bench, "DISTANCES", (40, 160))
    flags = ["--part", "quality", "--model", str(tmp_path), "--random-cases"]
    flags += ["--quick", "--shares", "1", "0.6", "--encodings"]
    flags += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["bench_sparsity.py", *flags])
    assert bench.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["problems"] == []
    assert last["num_texts"] == 2
    assert last["num_questions"] == 2
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"records.jsonl", "table.md", "pareto.png", "result.json"}

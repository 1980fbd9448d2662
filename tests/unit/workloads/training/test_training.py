"""A tiny training learns, stops cleanly, resumes to the same bits, and is exported."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sgl_tiered_workloads.training import __main__ as program  # noqa: E402
from sgl_tiered_workloads.training import trainer as trainer_module  # noqa: E402
from sgl_tiered_workloads.training.corpus import Corpus  # noqa: E402
from sgl_tiered_workloads.training.curve import COLUMNS  # noqa: E402
from sgl_tiered_workloads.training.evaluate import (  # noqa: E402
    LoadedModel,
    right_answers,
    text_losses,
)
from sgl_tiered_workloads.training.evaluate import main as judge  # noqa: E402
from sgl_tiered_workloads.training.prompts import recall_prompt  # noqa: E402
from sgl_tiered_workloads.training.recipe import RECIPES  # noqa: E402
from sgl_tiered_workloads.training.trainer import (  # noqa: E402
    Trainer,
    make_batch,
    stretched_positions,
)

from sgl_tiered.core.clock import ManualClock  # noqa: E402

TINY = RECIPES["tiny"]


def make_trainer(sample: Any, folder: Path, **changed: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    given = {
        "corpus_digest": sample.corpus.digest(),
        "folder": folder,
        "clock": ManualClock(),
        "dtype": torch.float32,
    }
    recipe = changed.pop("recipe", TINY)
    return Trainer(recipe, sample.text, sample.vocabulary, **{**given, **changed})


def stop_behind(step: int) -> tuple[Event, Callable[[int], None]]:
    stop = Event()
    return stop, lambda done: stop.set() if done == step else None


@pytest.fixture(scope="module")
def whole(sample: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A training that nothing interrupted."""
    trainer = make_trainer(sample, tmp_path_factory.mktemp("whole"))
    assert trainer.run(Event())
    return trainer


def test_the_loss_falls(whole: Trainer) -> None:
    """Text is predicted better at the end than behind the first steps."""
    at = COLUMNS.index("text_loss")
    losses = [row[at] for row in whole.rows]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.3
    assert whole.num_tokens == TINY.num_tokens


@pytest.mark.parametrize("step", [7, 12])
def test_a_resumed_training_ends_with_the_same_bits(
    sample: Any, whole: Trainer, tmp_path: Path, step: int
) -> None:
    """Stopped inside a row or between phases: weights and curve come out alike."""
    stop, hook = stop_behind(step)
    first = make_trainer(sample, tmp_path / "run")
    assert not first.run(stop, after_step=hook)
    assert first.step == step
    second = make_trainer(sample, tmp_path / "run")
    second.resume()
    assert second.run(Event())
    for name, value in whole.parameters.items():
        assert torch.equal(value, second.parameters[name]), name
    assert second.rows == whole.rows
    assert second.num_tokens == whole.num_tokens


def test_training_goes_on_from_its_own_checkpoints_only(
    sample: Any, tmp_path: Path
) -> None:
    """Another recipe or corpus, or no checkpoint, is refused."""
    with pytest.raises(FileNotFoundError):
        make_trainer(sample, tmp_path).resume()
    make_trainer(sample, tmp_path).save()
    with pytest.raises(ValueError, match="another recipe"):
        make_trainer(sample, tmp_path, recipe=replace(TINY, seed=1)).resume()
    with pytest.raises(ValueError, match="of corpus"):
        make_trainer(sample, tmp_path, corpus_digest="other").resume()


def test_the_budget_counts_earlier_runs(sample: Any, tmp_path: Path) -> None:
    """With ten seconds a step, 45 seconds are five steps, and no more after that."""
    clock = ManualClock()
    trainer = make_trainer(sample, tmp_path, clock=clock)
    real = trainer._one_step

    def slow(pool: Any) -> None:
        real(pool)
        clock.advance(10.0)

    trainer._one_step = slow  # type: ignore[method-assign]
    assert not trainer.run(Event(), budget_s=45.0)
    assert trainer.step == 5
    again = make_trainer(sample, tmp_path, clock=clock)
    again.resume()
    assert not again.run(Event(), budget_s=45.0)
    assert (again.step, again.elapsed_s) == (5, 50.0)


def test_a_batch_depends_on_seed_and_step_alone(sample: Any) -> None:
    """Equal seeds and steps give equal batches; others give others."""

    def tokens(recipe: Any, step: int) -> bytes:
        batch = make_batch(recipe, step, sample.text, sample.vocabulary)
        return batch.tokens.tobytes() + batch.positions.tobytes()

    assert tokens(TINY, 3) == tokens(TINY, 3)
    others = {tokens(TINY, 3), tokens(TINY, 4), tokens(replace(TINY, seed=1), 3)}
    assert len(others) == 3


def test_stretched_positions_jump_and_stay_in_bounds() -> None:
    """They rise, mostly by one, and reach far beyond the sequence's length."""
    rng = np.random.default_rng(0)
    furthest = 0
    for _ in range(50):
        positions = stretched_positions(64, 1000, rng)
        steps = np.diff(positions)
        assert positions[0] == 0
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= 3
        assert positions[-1] < 1000
        furthest = max(furthest, int(positions[-1]))
    assert furthest > 700


def greedy(model: LoadedModel, tokens: list[int], num_tokens: int) -> list[int]:
    found = list(tokens)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids = torch.tensor([found])
            positions = torch.arange(len(found))[None]
            hidden = model.network.hidden(model.own, ids, positions)
            found.append(int(model.network.logits(model.own, hidden[0, -1]).argmax()))
    return found[len(tokens) :]


def test_right_answers_are_what_greedy_decoding_gives(
    sample: Any, whole: Trainer
) -> None:
    """The model's own greedy continuation is right; with any token changed, not."""
    parameters = {k: v.detach() for k, v in whole.parameters.items()}
    model = LoadedModel.of(TINY.shape, parameters, torch.float32)
    drawn = [
        recall_prompt(sample.text, sample.vocabulary, 256, np.random.default_rng(seed))
        for seed in range(3)
    ]
    prompts = []
    for prompt in drawn:
        asked = np.concatenate([prompt.prefix, prompt.question]).tolist()
        answer = np.array(greedy(model, asked, 3), dtype=np.int32)
        prompts.append(replace(prompt, answer=answer))
        for at in range(3):
            wrong = answer.copy()
            wrong[at] = (wrong[at] + 1) % TINY.shape.vocab_tokens
            prompts.append(replace(prompt, answer=wrong))
    assert right_answers(model, prompts).tolist() == [True, False, False, False] * 3


def test_text_losses_cover_whole_windows(sample: Any, whole: Trainer) -> None:
    """A last piece shorter than a window is left out; the mean is that of training."""
    parameters = {k: v.detach() for k, v in whole.parameters.items()}
    model = LoadedModel.of(TINY.shape, parameters, torch.float32)
    losses = text_losses(model, sample.text.tokens[:1000], sample.vocabulary.bos, 128)
    assert losses.shape == (7, 128)
    assert 1.0 < losses.mean() < np.log(TINY.shape.vocab_tokens)


@pytest.fixture
def small_program(sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program on the small corpus."""
    monkeypatch.setattr(Corpus, "read", staticmethod(lambda: sample.corpus))


@pytest.mark.usefixtures("small_program")
def test_the_program_stops_resumes_exports_and_judges(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM leaves a checkpoint; going on ends in a model that transformers loads."""
    transformers = pytest.importorskip("transformers")
    asked = ["--out", str(tmp_path), "--recipe", "tiny", "--questions", "3"]
    asked += ["--dtype", "float32"]

    def signalling(recipe: Any, step: int, text: Any, vocabulary: Any) -> Any:
        if step == 5:
            signal.raise_signal(signal.SIGTERM)
        return make_batch(recipe, step, text, vocabulary)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(trainer_module, "make_batch", signalling)
        assert program.main(asked) == program.UNFINISHED
    assert signal.getsignal(signal.SIGTERM) == before
    state = torch.load(tmp_path / "work" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 6
    assert not (tmp_path / "model").exists()

    assert program.main(asked) == 2
    assert "--resume" in capsys.readouterr().err
    assert program.main([*asked, "--resume"]) == 0

    folder = tmp_path / "model"
    assert {path.name for path in folder.iterdir()} >= {
        *("config.json", "model.safetensors", "tokenizer.json", "README.md"),
        *("training.json", "loss.csv", "loss.png"),
    }
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((folder / "training.json").read_text())
    assert record["facts"]["steps"] == TINY.num_steps
    assert record["judged"]["ngram_perplexity"] > 1
    assert "| 256 |" in (folder / "README.md").read_text()

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|ask|> value def main(self):\n", return_tensors="pt").input_ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    ours = LoadedModel.read(folder, torch.float32)
    with torch.inference_mode():
        hidden = ours.network.hidden(ours.own, ids, torch.arange(ids.shape[1])[None])
        torch.testing.assert_close(
            ours.network.logits(ours.own, hidden),
            theirs(ids).logits,
            rtol=1e-4,
            atol=1e-4,
        )

    capsys.readouterr()
    assert judge([str(folder), "--questions", "2", "--distances", "256"]) == 0
    judged = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(judged["recall"]) == {"256"}
    assert judged["perplexity"] > 1

"""Trains the demo model: ``python -m sgl_tiered_workloads.training --out DIR``.

``DIR/work`` holds tokenizer, checkpoint and loss curve; ``DIR/model`` the finished
model. SIGTERM and Ctrl-C stop behind the running step with a checkpoint; ``--resume``
goes on.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import torch

from sgl_tiered.core.clock import SystemClock
from sgl_tiered_workloads.tokenizer import train_tokenizer
from sgl_tiered_workloads.training.corpus import Corpus, TextTokens
from sgl_tiered_workloads.training.evaluate import LoadedModel, evaluate
from sgl_tiered_workloads.training.export import export_model, write_card
from sgl_tiered_workloads.training.recipe import RECIPES, Recipe
from sgl_tiered_workloads.training.trainer import Trainer
from sgl_tiered_workloads.training.vocabulary import RECALL_TOKENS, Vocabulary

__all__ = ["UNFINISHED", "main"]

UNFINISHED = 3
"""Exit code of a run that was stopped or whose budget ended; ``--resume`` goes on."""

_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and when all steps are done export, judge and write the card."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="[model] %(message)s")
    _keep_freed_memory()
    recipe = RECIPES[args.recipe]
    work: Path = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read()
    tokenizer = _tokenizer(corpus, recipe, work / "tokenizer")
    vocabulary = Vocabulary.of(tokenizer)
    text = TextTokens.encode(corpus.training, tokenizer, vocabulary)
    _LOG.info(
        "corpus %s: %d tokens to train on; %.1f M parameters, %d steps, %.1f M tokens",
        corpus.digest(),
        len(text.tokens),
        recipe.shape.num_params / 1e6,
        recipe.num_steps,
        recipe.num_tokens / 1e6,
    )
    trainer = Trainer(
        recipe,
        text,
        vocabulary,
        corpus_digest=corpus.digest(),
        folder=work,
        clock=SystemClock(),
        dtype=getattr(torch, args.dtype),
    )
    if trainer.checkpoint_path.exists():
        if not args.resume:
            print(
                f"{trainer.checkpoint_path} exists: --resume goes on from it",
                file=sys.stderr,
            )
            return 2
        trainer.resume()
    finished = args.export_now or _run(trainer, args)
    if not finished:
        _LOG.info("unfinished at step %d: --resume goes on", trainer.step)
        return UNFINISHED
    held_out = TextTokens.encode(corpus.held_out, tokenizer, vocabulary)
    _finish(args, recipe, trainer, vocabulary, text, held_out, corpus.digest())
    return 0


def _keep_freed_memory() -> None:
    """Let the C library keep what tensors free, instead of giving it to the system.

    Otherwise every large tensor of every step is made of new pages, which the system
    clears first. Where there is no glibc, nothing changes.
    """
    threshold, trim, most = -3, -1, 1 << 30  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    try:
        library = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    library.mallopt(threshold, most)
    library.mallopt(trim, most)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sgl_tiered_workloads.training",
        description="train the demo model on the standard library",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the training"
    )
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="demo")
    parser.add_argument(
        "--minutes",
        type=float,
        default=90.0,
        help="training time in all, earlier runs counted (default 90)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --out")
    parser.add_argument(
        "--export-now",
        action="store_true",
        help="train no more: export and judge what the checkpoint holds",
    )
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--questions", type=int, default=120, help="per distance")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser


def _tokenizer(corpus: Corpus, recipe: Recipe, folder: Path) -> Any:
    from tokenizers import Tokenizer

    load: Any = Tokenizer.from_file
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer(
            folder,
            recipe.shape.max_positions,
            texts=[text.text for text in corpus.training],
            vocab_tokens=recipe.shape.vocab_tokens,
            more_tokens=RECALL_TOKENS,
        )
    return load(str(folder / "tokenizer.json"))


def _run(trainer: Trainer, args: argparse.Namespace) -> bool:
    stop = Event()
    old = [
        (number, signal.signal(number, lambda *_: stop.set()))
        for number in (signal.SIGTERM, signal.SIGINT)
    ]
    try:
        return trainer.run(
            stop,
            budget_s=args.minutes * 60,
            save_every_s=args.save_minutes * 60,
        )
    finally:
        for number, handler in old:
            signal.signal(number, handler)


def _finish(
    args: argparse.Namespace,
    recipe: Recipe,
    trainer: Trainer,
    vocabulary: Vocabulary,
    text: TextTokens,
    held_out: TextTokens,
    corpus_digest: str,
) -> None:
    folder: Path = args.out / "model"
    tokenizer_folder = args.out / "work" / "tokenizer"
    export_model(recipe, trainer.parameters, vocabulary, tokenizer_folder, folder)
    longest = recipe.shape.max_positions
    judged = evaluate(
        LoadedModel.read(folder, getattr(torch, args.dtype)),
        text,
        held_out,
        vocabulary,
        distances=[d for d in (1024, 2048, 3072, 4096) if d < longest - 512] or [256],
        questions=args.questions,
        window_tokens=min(4096, longest),
    )
    facts = {
        "corpus_digest": corpus_digest,
        "python": platform.python_version(),
        "steps": trainer.step,
        "tokens": trainer.num_tokens,
        "minutes": trainer.elapsed_s / 60,
        "training_text_tokens": len(text.tokens),
    }
    write_card(folder, recipe, judged, facts, trainer.rows)
    _LOG.info("%s: %s", folder, judged.to_json())


if __name__ == "__main__":
    raise SystemExit(main())

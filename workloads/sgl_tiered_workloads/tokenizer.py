"""A byte-level BPE tokenizer trained on the running Python's standard library.

Nothing is downloaded: the corpus is the top-level ``.py`` files of the
interpreter's own library, in name order, so two runs of one Python version
train the same tokenizer. Special tokens and a small chat template make it
usable behind SGLang's chat endpoint.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "VOCAB_TOKENS",
    "corpus_digest",
    "corpus_texts",
    "train_tokenizer",
]

VOCAB_TOKENS = 8192
"""Entries of the vocabulary, special tokens included."""

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
"""Their ids are their positions here: 0 to 6."""

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# 6 MB train in a few seconds on 2 cores and already fill 8,192 merges.
_CORPUS_BYTES = 6_000_000


def corpus_texts() -> Iterator[str]:
    """Yield the training texts: standard library sources, about 6 MB in all."""
    left_bytes = _CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if left_bytes <= 0:
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        left_bytes -= len(text)
        yield text


def corpus_digest() -> str:
    """Return a digest of the corpus; part of the cache key of a made model."""
    digest = hashlib.blake2b(digest_size=16)
    for text in corpus_texts():
        digest.update(text.encode("utf-8", errors="replace"))
        digest.update(b"\0")
    return digest.hexdigest()


def train_tokenizer(
    folder: Path,
    max_positions: int,
    *,
    texts: Iterable[str] | None = None,
    vocab_tokens: int = VOCAB_TOKENS,
    more_tokens: Sequence[str] = (),
) -> None:
    """Train the tokenizer and save it into ``folder`` (which must exist).

    Args:
        folder: where ``tokenizer.json`` and its config go.
        max_positions: longest sequence of the model, in tokens.
        texts: what to train on; ``corpus_texts()`` unless given.
        vocab_tokens: entries of the vocabulary, special tokens included.
        more_tokens: special tokens whose ids follow ``SPECIAL_TOKENS``.

    Raises:
        RuntimeError: the texts are too few for so many entries.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bpe_trainer: Any = trainers.BpeTrainer
    trainer = bpe_trainer(
        vocab_size=vocab_tokens,
        special_tokens=[*SPECIAL_TOKENS, *more_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_texts() if texts is None else texts, trainer)
    if tokenizer.get_vocab_size() != vocab_tokens:
        raise RuntimeError(
            f"the corpus gave {tokenizer.get_vocab_size()} tokens, "
            f"not {vocab_tokens}: is the standard library's source installed?"
        )
    saved: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )
    saved.chat_template = CHAT_TEMPLATE
    saved.save_pretrained(folder)

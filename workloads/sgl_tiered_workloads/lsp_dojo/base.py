"""The nouns of the search: who completes, who checks, and what they say.

Lines and characters count from 0. ``character`` is an index into the Python string
of the line; the language server's adapter converts its own units.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sgl_tiered_workloads.usage import Usage

__all__ = [
    "Checker",
    "Completer",
    "CompleterError",
    "Completions",
    "Finding",
    "LanguageServerError",
    "PromptRefusedError",
]


class CompleterError(RuntimeError):
    """The model's server refused, broke or did not answer; one clear sentence."""


class PromptRefusedError(CompleterError):
    """The server answers, but will not take this prompt: it is too long, mostly."""


class LanguageServerError(RuntimeError):
    """The language server is absent, died or hangs; one clear sentence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error that the checker found.

    Attributes:
        line: where it begins, from 0.
        character: where it begins in that line, from 0.
        end_character: where it ends in that line; the line's end if it goes on.
        message: first line of what the checker says.
        code: its rule's name; empty if it has none.
    """

    line: int
    character: int
    end_character: int
    message: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class Completions:
    """The samples of one node.

    Attributes:
        texts: what follows the prompt, one per sample.
        prompt: the prompt counted once, with what was in cache before sampling.
        samples: every sample's own prompt and answer, as the server counts them.
    """

    texts: tuple[str, ...]
    prompt: Usage = field(default_factory=Usage)
    samples: Usage = field(default_factory=Usage)


class Completer(Protocol):
    """Writes code after a prompt: a served model, or a script in its place."""

    async def complete(self, prompt: str, num_samples: int) -> Completions:
        """Return ``num_samples`` continuations of ``prompt``.

        Raises:
            PromptRefusedError: this prompt gets no answer, others may.
            CompleterError: there is no answer.
        """
        ...


class Checker(Protocol):
    """Knows the language: a language server, or a script in its place."""

    async def check(self, source: str) -> tuple[Finding, ...]:
        """Return the errors of a whole program, in reading order.

        Raises:
            LanguageServerError: it died or did not answer in time.
        """
        ...

    async def offer(
        self, source: str, line: int, character: int, wrong: str
    ) -> tuple[str, ...]:
        """Return names that may stand in the place of a wrong one.

        Args:
            source: a whole program.
            line: from 0.
            character: from 0; where the wrong name begins.
            wrong: the wrong name; it is among the answers if it is a known one.

        Raises:
            LanguageServerError: it died or did not answer in time.
        """
        ...

"""Cutting code at an error: the new prompt p' = gen[:line] + err of the report."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from sgl_tiered_workloads.lsp_dojo.base import Finding

__all__ = [
    "closest_names",
    "code_lines",
    "cut_at_error",
    "errors_by_line",
    "replace_name",
    "wrong_name",
]

_CUTOFF = 0.5
"""Least similarity of an offered name; below it names share little but a letter."""

_MAX_NOTES = 2
"""Errors of one line that are written down. A line that is no code at all has dozens:
of noise from a model with random weights, pyrefly finds 31 in a sample, and with all of
them a prompt grows by 600 tokens a level. The first ones cause the others."""

_NAME_AT_END = re.compile(r"[^\W\d]\w*$")

# Not str.splitlines: it also splits at form feeds and a few more, LSP does not.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def code_lines(source: str) -> list[str]:
    """Return the lines of ``source`` as LSP counts them, with their ends."""
    return _LINE.findall(source)


def errors_by_line(findings: Sequence[Finding]) -> list[tuple[Finding, ...]]:
    """Group findings by line, in reading order; a line is cut only once."""
    lines: dict[int, list[Finding]] = {}
    for finding in findings:
        lines.setdefault(finding.line, []).append(finding)
    return [tuple(lines[line]) for line in sorted(lines)]


def cut_at_error(
    source: str,
    findings: Sequence[Finding],
    offers: Sequence[str],
    comment: str = "#",
) -> str:
    """Return the code before the error line, then the line and the error as comments.

    Args:
        source: the program.
        findings: errors of one line.
        offers: names that the checker offers instead; may be empty.
        comment: what begins a comment line in the language.
    """
    lines = code_lines(source)
    number = min(findings[0].line, len(lines))
    wrong = lines[number] if number < len(lines) else ""
    indent = wrong[: len(wrong) - len(wrong.lstrip())].rstrip("\r\n")
    notes = [f"wrong: {wrong.strip()}"] if wrong.strip() else []
    for finding in findings[:_MAX_NOTES]:
        code = f" [{finding.code}]" if finding.code else ""
        notes.append(f"error: {finding.message}{code}")
    if offers:
        notes.append("known names: " + ", ".join(offers))
    before = "".join(lines[:number])
    if before and not before.endswith("\n"):
        before += "\n"
    return before + "".join(f"{indent}{comment} {note}\n" for note in notes)


def wrong_name(source: str, finding: Finding) -> tuple[int, str] | None:
    """Return where the name that an error ends with begins, and the name.

    Checkers mark ``math.pii`` whole or only ``pii``: what is unknown comes last.
    None where the marked text ends with something else, such as a bracket.
    """
    lines = code_lines(source)
    if finding.line >= len(lines):
        return None
    marked = lines[finding.line][finding.character : finding.end_character]
    found = _NAME_AT_END.search(marked)
    if found is None:
        return None
    return finding.character + found.start(), found.group()


def replace_name(source: str, line: int, character: int, wrong: str, name: str) -> str:
    """Return the code up to and with ``line``, ``name`` standing for ``wrong``."""
    lines = code_lines(source)
    text = lines[line]
    fixed = text[:character] + name + text[character + len(wrong) :]
    return "".join(lines[:line]) + fixed


def closest_names(wrong: str, names: Sequence[str], num_names: int) -> tuple[str, ...]:
    """Return the names most like ``wrong``, best first; none if none is like it.

    A language server offers all that is in scope, often hundreds of names. A name
    that it offers unchanged is known: the error is of another kind.
    """
    if wrong in names:
        return ()
    # In reading order, so that names of equal likeness keep the server's own order.
    distinct = list(dict.fromkeys(names))
    return tuple(
        difflib.get_close_matches(wrong, distinct, n=num_names, cutoff=_CUTOFF)
    )

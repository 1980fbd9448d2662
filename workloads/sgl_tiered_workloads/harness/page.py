"""A page of sections and pictures: as Markdown, or as one HTML file by itself."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Section", "html_page", "markdown"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child, td.text { text-align: left }
img { max-width: 100%; margin: 1rem 0 }
h2 { margin-top: 2rem }
"""
_NUMBER = re.compile(r"-|[\d.,]+%?")


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, what must be known, and a table; none where it has no columns.

    Attributes:
        title: the heading.
        note: what must be known to read the table; ``**`` marks what must be seen.
        head: names of the columns.
        rows: the cells.
    """

    title: str
    note: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def markdown(title: str, parts: Sequence[Section], pictures: Sequence[str]) -> str:
    """Return a page as Markdown.

    Args:
        title: of the page.
        parts: its sections, in order.
        pictures: names of files beside it; they follow the sections.
    """
    lines = [f"# {title}", ""]
    for part in parts:
        lines += [f"## {part.title}", ""]
        lines += [part.note, ""] if part.note else []
        if not part.head:
            continue
        lines.append("| " + " | ".join(part.head) + " |")
        lines.append("|---" * len(part.head) + "|")
        for row in part.rows:
            cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    for name in pictures:
        lines += [f"![{Path(name).stem}]({name})", ""]
    return "\n".join(lines)


def html_page(
    title: str, parts: Sequence[Section], pictures: Mapping[str, bytes]
) -> str:
    """Return the page; it loads nothing from anywhere.

    Args:
        title: of the page.
        parts: its tables, in order.
        pictures: PNG files by name; they follow the tables.
    """
    body = [f"<h1>{html.escape(title)}</h1>"]
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>")
        body.append(f"<p>{_marked(part.note)}</p>")
        if not part.head:
            continue
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in part.head)
        rows = "".join(
            "<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in part.rows
        )
        body.append(f"<table><tr>{head}</tr>{rows}</table>")
    for name, data in pictures.items():
        source = base64.b64encode(data).decode("ascii")
        body.append(
            f'<img alt="{html.escape(name)}" src="data:image/png;base64,{source}">'
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def _cell(text: str) -> str:
    kind = "" if _NUMBER.fullmatch(text) else ' class="text"'
    return f"<td{kind}>{html.escape(text)}</td>"


def _marked(text: str) -> str:
    bold = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", bold)

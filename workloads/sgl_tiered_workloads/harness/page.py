"""One self-contained HTML page: tables and pictures in a single file."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["html_page"]

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


class Table(Protocol):
    """What is shown under one heading."""

    @property
    def title(self) -> str:
        """The heading."""
        ...

    @property
    def note(self) -> str:
        """What must be known to read the table; ``**`` marks what must be seen."""
        ...

    @property
    def head(self) -> tuple[str, ...]:
        """Names of the columns."""
        ...

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells."""
        ...


def html_page(title: str, parts: Sequence[Table], pictures: Mapping[str, bytes]) -> str:
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

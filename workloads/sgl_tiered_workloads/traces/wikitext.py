"""WikiText-2 as articles: ``= Title =`` starts one, ``= = Part = =`` does not."""

from __future__ import annotations

import re
from pathlib import Path

from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.files import text_lines
from sgl_tiered_workloads.traces.texts import Document

__all__ = ["read_wikitext"]

_TITLE = re.compile(r"^ ?= ([^=]+) = ?$")


def read_wikitext(path: Path) -> tuple[Document, ...]:
    """Read the articles in file order.

    Raises:
        TraceError: text comes before the first title, or there is none.
    """
    path = Path(path)
    titles: list[str] = []
    bodies: list[list[str]] = []
    for number, line in text_lines(path):
        title = _TITLE.match(line)
        if title:
            titles.append(title.group(1))
            bodies.append([])
        elif not bodies:
            raise TraceError(
                path,
                number,
                "text before the first title",
                "give WikiText's own file, whose articles begin with ' = Title = '",
            )
        else:
            bodies[-1].append(line)
    if not titles:
        raise TraceError(path, None, "no articles", "give WikiText's own file")
    return tuple(
        Document(title, "\n".join(body))
        for title, body in zip(titles, bodies, strict=True)
    )

"""Writes ``docs/reference/options.md`` from the rows of ``sgl_tiered.serving.options``.

``python scripts/options_page.py``; a test fails where the page is not what it writes.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from sgl_tiered.serving.option_reader import NEEDS
from sgl_tiered.serving.options import CONFIG, GROUPS, Option, Options, Pd

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[1] / "docs/reference/options.md"
_HEAD = f"""\
# Settings of a server

Each is a flag `--tiered-NAME` and a key of `{CONFIG.flag} FILE.toml`, alone or in the
table of its group; a flag that is given wins. Keys may be spelt with `-` or `_`. Sizes
are of one rank. What the column *place* calls a key works as a flag as well, though
`--help` does not name it; what it calls test is for experiments and tests.

```toml
host-size = "32GB"

[queue]
prefetch = "car"
prefetch-window = 32
```

This page is made from `sgl_tiered/serving/options.py` by `scripts/options_page.py`.
"""
_PLACES = {"flag": "flag", "table": "key", "hidden": "test"}


def page() -> str:
    """Return the page."""
    parts = {each.name: each.metadata["part"] for each in dataclasses.fields(Options)}
    parts["pd"] = Pd
    sections = [_section(name, parts[name], rows) for name, rows in GROUPS.items()]
    return "\n".join([_HEAD, *sections])


def _section(name: str, part: type, rows: tuple[Option, ...]) -> str:
    says = (inspect.getdoc(part) or "").partition("\n")[0]
    lines = [
        f"## {name}",
        "",
        says,
        "",
        "| setting | place | may be | only with | means |",
        "|---|---|---|---|---|",
        *map(_line, rows),
        "",
    ]
    return "\n".join(lines)


def _line(row: Option) -> str:
    needs = [NEEDS[need][1].removeprefix("add ") for need in row.needs.split()]
    cells = (
        f"`{row.name.replace('_', '-')}`",
        _PLACES[row.place],
        row.kind.says,
        " or ".join(f"`{need.partition(',')[0]}`" for need in needs),
        row.help.replace("|", r"\|"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page())

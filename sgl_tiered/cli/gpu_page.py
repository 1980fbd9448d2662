"""What the page of a GPU session holds, for who writes it and who draws it."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_tiered.cli.gpu_copies import Case

__all__ = ["Page"]


@dataclass(slots=True)
class Page:
    """The page, and what its pictures show.

    Attributes:
        text: Markdown.
        copies: cases, for the picture of copies.
        link_gb_per_s: of the PCIe link; None if unknown.
        shares: figures as shares of their roofs.
        is_dry_run: whether all of it is of a dry run.
        num_stages: of the session.
    """

    text: str
    copies: list[Case]
    link_gb_per_s: float | None
    shares: dict[str, float]
    is_dry_run: bool
    num_stages: int

"""Hooks of the documentation's build (``mkdocs.yml``).

Three things that MkDocs does not do by itself:

- The READMEs and other pages that lie beside the code become pages below ``code/``, so
  that they are read, searched and checked with the rest and stand in one place only.
- Links in pages are written as they work in the repository. One to a file that is a
  page leads to that page; one to any other file of the repository becomes the file's
  path. One to nothing is a warning, and the build is strict.
- ``llms.txt``: every page with its first sentence.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["beside_the_code", "first_sentence", "rewrite_links"]

ROOT = Path(__file__).resolve().parents[1]
DOCS, CODE = "docs", "code"
FOLDERS = (
    "benchmarks",
    "examples",
    "kernels",
    "platform_dist",
    "sgl_tiered",
    "tests",
    "workloads",
)
TOP = ("CHANGELOG.md", "CONTRIBUTING.md")
HOME = "index.md"
log = logging.getLogger("mkdocs.hooks.sgl_tiered")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.M | re.S)
_told: dict[str, tuple[str, str]] = {}
"""Title and first sentence by the page's place in the site."""


def beside_the_code(root: Path = ROOT) -> dict[str, str]:
    """Return the Markdown files outside of ``docs/``: place in the site by path."""
    found = [root / name for name in TOP]
    for folder in FOLDERS:
        found += sorted((root / folder).rglob("*.md"))
    paths = [path.relative_to(root).as_posix() for path in found if path.is_file()]
    kept = [path for path in paths if not any(p[0] == "." for p in path.split("/"))]
    return {path: f"{CODE}/{path}" for path in kept}


def rewrite_links(
    text: str, place: str, pages: Mapping[str, str], root: Path = ROOT
) -> tuple[str, list[str]]:
    """Return a page's text with links for the site, and the targets that lead nowhere.

    Args:
        text: of the page.
        place: of the page in the site.
        pages: place in the site by path in the repository.
        root: of the repository.
    """
    origin = next((path for path, where in pages.items() if where == place), None)
    assert origin is not None, place
    broken: list[str] = []

    def turn(found: re.Match[str]) -> str:
        image, words, link = found.groups()
        target, hash_, anchor = link.partition("#")
        if not target or "://" in target or target.startswith("mailto:"):
            return found.group()
        path = posixpath.normpath(
            posixpath.join(posixpath.dirname(origin), target.rstrip("/"))
        )
        if not (root / path).exists():
            broken.append(link)
            return found.group()
        page = pages.get(path) or pages.get(f"{path}/README.md")
        if page is not None:
            to = posixpath.relpath(page, posixpath.dirname(place) or ".")
            return f"{image}[{words}]({to}{hash_}{anchor})"
        if path.startswith(f"{DOCS}/"):
            return found.group()  # a picture, or a file that is handed out
        return f"`{path}`" if f"`{path}`" == words else f"{words} (`{path}`)"

    parts = _CODE.split(text)
    # What is code stays as it is; but a link's words may be code, so only fences count.
    kept = [part if part.startswith("```") else None for part in parts]
    pieces: list[str] = []
    run = ""
    for part, fence in zip(parts, kept, strict=True):
        if fence is None:
            run += part
            continue
        pieces += [_LINK.sub(turn, run), fence]
        run = ""
    return "".join([*pieces, _LINK.sub(turn, run)]), broken


def first_sentence(text: str) -> str:
    """Return the first sentence of a page's first paragraph, as plain words."""
    bare = re.sub(r"<!--.*?-->|^```.*?^```$", "", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n", bare):
        words = " ".join(block.split())
        if words and words[0] not in "#|!<":
            plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", words)
            plain = re.sub(r"\*\*|^- ", "", plain)
            return re.split(r"(?<=[.!?:])\s", plain)[0].rstrip(":")
    return ""


def _pages() -> dict[str, str]:
    in_docs = (path.relative_to(ROOT / DOCS) for path in (ROOT / DOCS).rglob("*.md"))
    ours = {f"{DOCS}/{path.as_posix()}": path.as_posix() for path in in_docs}
    return {**ours, **beside_the_code(), "README.md": HOME}


def on_config(config: MkDocsConfig) -> None:
    """Put the pages beside the code at the end of the navigation."""
    folders: dict[str, list[Any]] = {}
    for path, place in beside_the_code().items():
        folder = path.split("/")[0] if "/" in path else "project"
        name = posixpath.dirname(path) if path.endswith("README.md") else path
        folders.setdefault(folder, []).append({name: place})
    config.nav.append({"Code": [{name: each} for name, each in folders.items()]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie beside the code."""
    from mkdocs.structure.files import File

    for path, place in beside_the_code().items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(text: str, page: Page, **_: object) -> str:
    """Rewrite links, and note what ``llms.txt`` says of the page."""
    place = page.file.src_uri
    turned, broken = rewrite_links(text, place, _pages())
    for link in broken:
        log.warning("%s: a link leads nowhere: %s", place, link)
    _told[place] = (str(page.title), first_sentence(text))
    return turned


def on_post_build(config: MkDocsConfig) -> None:
    """Write ``llms.txt``."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for part in config.nav:
        for title, below in part.items():
            lines += [f"## {title}", "", *_listed(below), ""]
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines))


def _listed(below: Any) -> Iterator[str]:
    if isinstance(below, str):
        title, sentence = _told[below]
        url = os.path.splitext(below)[0]
        url = re.sub(r"(^|/)(index|README)$", r"\1", url)
        url = url if url.endswith("/") or not url else url + "/"
        yield f"- [{title}]({url or './'})" + (f": {sentence}" if sentence else "")
        return
    if isinstance(below, dict):
        below = list(below.values())
    for each in below:
        yield from _listed(each)

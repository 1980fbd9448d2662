"""How pages are written below the device: as they are, encoded, or some tokens only."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from sgl_tiered.core.encoded import EncodedLayout
from sgl_tiered.core.kept import KeptLayout
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.engines.device.encoded_pools import (
    LEAST_PAGE_TOKENS,
    encoded_pool_layout,
)
from sgl_tiered.errors import ConfigError
from sgl_tiered.serving.options import Options
from sgl_tiered.sparse.keep import SINKS

__all__ = ["PageForm", "page_form"]


@dataclass(frozen=True, slots=True)
class PageForm:
    """The form of pages below the device.

    Attributes:
        layout: of what the tiers hold of a page.
        whole: of a page of which nothing is left out, written in the same way.
        name: of the form, for namespaces; empty for pages as they are.
    """

    layout: PageLayout
    whole: PageLayout
    name: str

    def facts(self, config: Options) -> dict[str, Any]:
        """Return what ``served`` says of the form; empty where all KV is exact."""
        whole, told = self.whole, dict[str, Any]()
        if isinstance(whole, EncodedLayout):
            told = {
                "encoding": config.lossy.encoding.label,
                "encoding_form": whole.form,
                "encoding_ratio": round(whole.ratio, 3),
            }
        if isinstance(self.layout, KeptLayout):
            told["stored_tokens_of_page"] = self.layout.inner.page_tokens
        if config.is_lossy:
            told["lossy_default"] = config.lossy_default
        return told


def page_form(pool: Any, raw: PageLayout, config: Options) -> PageForm:
    """Return the form that the settings ask for.

    Args:
        pool: SGLang's.
        raw: shape of its pages.
        config: the settings.

    Raises:
        EngineCompatibilityError: the pool cannot be encoded.
        ConfigError: pages are too small.
    """

    def written(layout: PageLayout) -> PageLayout:
        if not config.is_encoded:
            return layout
        return encoded_pool_layout(pool, layout, config.lossy.encoding)

    whole = written(raw)
    name = f" {whole.form}" if isinstance(whole, EncodedLayout) else ""
    if getattr(getattr(pool, "plan", None), "acts", None) is not None:
        # What is made again may be rounded in another way than what was computed.
        name += " act"
    if config.sparsity is None or not config.sparsity.on_store:
        return PageForm(whole, whole, name)
    count = config.sparsity.tokens_of(raw.page_tokens)
    least = LEAST_PAGE_TOKENS if config.is_encoded else SINKS
    if count < least:
        raise ConfigError(
            "--tiered-sparsity",
            f"store would keep {count} tokens of a page of {raw.page_tokens}, and "
            f"needs {least} or more",
            "give a larger --page-size or --tiered-sparsity-keep",
        )
    stored = PageLayout(raw.num_layers, count, raw.token_bytes)
    kept = KeptLayout(raw.num_layers, raw.page_tokens, raw.token_bytes, written(stored))
    # Which tokens were kept is known to this process only, so no other may find them.
    return PageForm(kept, whole, f"{name} {kept.form} {secrets.token_hex(8)}")

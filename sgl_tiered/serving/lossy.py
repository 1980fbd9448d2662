"""Which requests may be given KV that was altered, and the marks that keep KV apart.

Encodings and sparsity give back KV that is not what the model computed. A request that
did not allow that must never meet it, on the device either, where pages once loaded are
shared. So all KV of requests that allow it lives under a mark before SGLang's own
``extra_key``: it keys the device's tree, the namespaces of the tiers and the lookups.
Nothing is read across. Where all that the tiers keep is altered, requests that refuse
are served without them (`kept_exact`). A request says

    {"custom_params": {"tiered": {"lossy": "allow"}}}

or ``"refuse"``; ``--tiered-lossy-default`` speaks for those that do not. Any other word
is a refusal. On a server where nothing alters KV nobody allows it: no mark, but where a
sender's own key looks like one, since the disk may hold what a former server altered.

SGLang puts an adapter's id behind the ``extra_key`` and reads it there. A request
without an adapter whose own key ends like an id would share the KV of that adapter, so
it gets marks as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from sgl_tiered.serving.targets import PARAMS_KEY

__all__ = [
    "ALLOW",
    "LOSSY_DEFAULTS",
    "REFUSE",
    "LossySettings",
    "allows_lossy",
    "has_no_adapter",
    "is_lossy_key",
    "kept_exact",
    "mark_generation",
    "marked_key",
    "unmarked_key",
]

ALLOW, REFUSE = "allow", "refuse"
LOSSY_DEFAULTS = (REFUSE, ALLOW)
_OURS = "tiered-"
# Before the sender's key: SGLang looks for an adapter's name at the end of it.
_LOSSY, _EXACT = _OURS + "lossy|", _OURS + "exact|"
# The same without an adapter, of keys that may name one; these get an end too.
_LOSSY_BASE, _EXACT_BASE = _OURS + "lossy-base|", _OURS + "exact-base|"
_BASE_END = "|"
_LIKE_ADAPTER = re.compile(r"[0-9a-f]{32}")


class LossySettings(Protocol):
    """The settings that this file reads."""

    @property
    def is_lossy(self) -> bool:
        """Whether anything here alters KV."""
        ...

    @property
    def alters_all(self) -> bool:
        """Whether all pages below the device are altered."""
        ...

    @property
    def lossy_default(self) -> str:
        """``ALLOW`` or ``REFUSE``, for requests that do not say."""
        ...


def allows_lossy(req: Any, config: LossySettings) -> bool:
    """Say whether a request of SGLang's may be given altered KV."""
    params = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    wishes = params.get(PARAMS_KEY) if isinstance(params, Mapping) else None
    word = wishes.get("lossy") if isinstance(wishes, Mapping) else None
    return bool((config.lossy_default if word is None else word) == ALLOW)


def marked_key(
    extra_key: str | None, *, allows: bool, may_mean_adapter: bool = False
) -> str | None:
    """Return the key under which a request's KV is kept.

    Two requests share one only if they gave the same key and both allow, or both
    refuse, and have the same adapter: a key that looks like one of ours is marked too.

    Args:
        extra_key: what the sender gave, and the adapter's id behind it.
        allows: altered KV.
        may_mean_adapter: the request has no adapter, on a server where others have.
    """
    key = extra_key or ""
    if may_mean_adapter and _LIKE_ADAPTER.search(key):
        return (_LOSSY_BASE if allows else _EXACT_BASE) + key + _BASE_END
    if allows:
        return _LOSSY + key
    return _EXACT + key if key.startswith(_OURS) else extra_key


def unmarked_key(extra_key: str | None) -> str | None:
    """Return what the sender gave (and the adapter's name behind it)."""
    if extra_key is None:
        return None
    for mark in (_LOSSY_BASE, _EXACT_BASE):
        if extra_key.startswith(mark):
            return extra_key.removeprefix(mark).removesuffix(_BASE_END)
    for mark in (_LOSSY, _EXACT):
        if extra_key.startswith(mark):
            return extra_key.removeprefix(mark) or None
    return extra_key


def is_lossy_key(extra_key: str | None) -> bool:
    """Say whether KV under this key may have been altered."""
    return extra_key is not None and extra_key.startswith((_LOSSY, _LOSSY_BASE))


def has_no_adapter(extra_key: str) -> bool:
    """Say whether a key is of requests without adapter, though it may name one."""
    return extra_key.startswith((_LOSSY_BASE, _EXACT_BASE))


def kept_exact(req: Any, config: LossySettings) -> bool:
    """Say whether a request is served without the tiers, which hold altered KV only.

    Neither are its pages offloaded: nobody who refuses could use them.
    """
    return config.alters_all and not is_lossy_key(req.extra_key)


def mark_generation(
    req: Any, config: LossySettings, *, has_adapters: bool = False
) -> None:
    """Mark a new request; once, before SGLang first looks its prompt up.

    Args:
        req: SGLang's.
        config: of this server.
        has_adapters: whether requests may have an adapter here.
    """
    req.extra_key = marked_key(
        req.extra_key,
        allows=config.is_lossy and allows_lossy(req, config),
        may_mean_adapter=has_adapters and req.lora_id is None,
    )

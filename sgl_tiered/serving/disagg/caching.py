"""Who keeps KV where prefill and decode are two servers, and what that sets."""

from __future__ import annotations

from typing import Any

from sgl_tiered.serving.options import BACKEND_NAME, Pd, PdCaching

__all__ = ["declare_caching", "read_pd"]


def read_pd(server_args: Any) -> Pd:
    """Read the settings of disaggregated serving from SGLang's arguments."""

    def given(name: str) -> Any:
        return getattr(server_args, name, None)

    caching = given("tiered_pd_caching")
    is_decode = given("disaggregation_mode") == "decode"
    if caching is None and is_decode and given("radix_cache_backend") == BACKEND_NAME:
        caching = PdCaching.BOTH
    return Pd(
        None if caching is None else PdCaching(caching),
        given("tiered_pd_transport") or Pd().transport,
        given("tiered_pd_returns") or Pd().returns,
    )


def declare_caching(server_args: Any) -> dict[str, Any]:
    """Return the fields of SGLang's arguments that a caching mode sets.

    Prefill: the radix cache on, or off for ``NOBODY``. Decode: its radix cache on from
    ``BOTH`` on, which also makes SGLang ask for missing pages only.
    """
    caching = read_pd(server_args).caching
    if caching is None:
        return {}
    if server_args.disaggregation_mode == "prefill":
        return {"disable_radix_cache": caching is PdCaching.NOBODY}
    return {"disaggregation_decode_enable_radix_cache": caching >= PdCaching.BOTH}

"""Names of the write admissions, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.policies.by_name import maker_of
from sgl_tiered.policies.write_admission.all import AllAdmission
from sgl_tiered.policies.write_admission.auto import AutoAdmission
from sgl_tiered.policies.write_admission.base import WriteAdmission
from sgl_tiered.policies.write_admission.reuse import ReuseAdmission
from sgl_tiered.policies.write_admission.second_hit import SecondHitAdmission

__all__ = ["WRITE_ADMISSIONS", "make_write_admission"]

_MAKERS: dict[str, Callable[[], WriteAdmission]] = {
    "auto": AutoAdmission,
    "all": AllAdmission,
    "second-hit": SecondHitAdmission,
    "reuse": ReuseAdmission,
}

WRITE_ADMISSIONS: tuple[str, ...] = tuple(_MAKERS)


def make_write_admission(name: str) -> WriteAdmission:
    """Return a new policy.

    Raises:
        ConfigError: no policy has this name.
    """
    return maker_of(_MAKERS, "disk_admission", name)()

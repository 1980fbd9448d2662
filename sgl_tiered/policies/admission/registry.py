"""Names of the admissions, as flags spell them."""

from __future__ import annotations

from collections.abc import Callable

from sgl_tiered.policies.admission.base import AdmissionPolicy
from sgl_tiered.policies.admission.goodput import GoodputAdmission
from sgl_tiered.policies.admission.none import NoAdmission
from sgl_tiered.policies.admission.slo import SloAdmission
from sgl_tiered.policies.by_name import maker_of

__all__ = ["ADMISSIONS", "NO_ADMISSION", "make_admission"]

NO_ADMISSION = NoAdmission.name

_MAKERS: dict[str, Callable[[], AdmissionPolicy]] = {
    "none": NoAdmission,
    "slo": SloAdmission,
    "goodput": GoodputAdmission,
}

ADMISSIONS: tuple[str, ...] = tuple(_MAKERS)


def make_admission(name: str) -> AdmissionPolicy:
    """Return a new policy.

    Raises:
        ConfigError: no policy has this name.
    """
    return maker_of(_MAKERS, "slo_admission", name)()

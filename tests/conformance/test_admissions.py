"""Our own admissions pass the published kit."""

from __future__ import annotations

import pytest

from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.admission.base import AdmissionPolicy
from sgl_tiered.policies.admission.registry import ADMISSIONS, make_admission
from sgl_tiered.testing.admission_kit import AdmissionKit


class TestNone(AdmissionKit):
    """none."""

    def make_admission(self) -> AdmissionPolicy:
        return make_admission("none")


class TestSlo(AdmissionKit):
    """slo."""

    def make_admission(self) -> AdmissionPolicy:
        return make_admission("slo")


class TestGoodput(AdmissionKit):
    """goodput."""

    def make_admission(self) -> AdmissionPolicy:
        return make_admission("goodput")


@pytest.mark.parametrize("name", ADMISSIONS)
def test_every_registered_admission_has_a_kit(name: str) -> None:
    """An admission that a flag can name is checked above."""
    kits = AdmissionKit.__subclasses__()
    assert name in {kit().make_admission().name for kit in kits}


def test_an_unknown_name_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match="slo"):
        make_admission("sometimes")

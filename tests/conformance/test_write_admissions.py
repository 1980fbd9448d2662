"""Our own write admissions pass the published kit."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_tiered.core.ids import TierId
from sgl_tiered.errors import ConfigError
from sgl_tiered.policies.write_admission.base import WriteAdmission, WriteFacts
from sgl_tiered.policies.write_admission.registry import (
    WRITE_ADMISSIONS,
    make_write_admission,
)
from sgl_tiered.testing.policy_kit import WriteAdmissionKit


class TestAuto(WriteAdmissionKit):
    """auto."""

    def make_admission(self) -> WriteAdmission:
        return make_write_admission("auto")


class TestAll(WriteAdmissionKit):
    """all."""

    def make_admission(self) -> WriteAdmission:
        return make_write_admission("all")


class TestSecondHit(WriteAdmissionKit):
    """second-hit."""

    def make_admission(self) -> WriteAdmission:
        return make_write_admission("second-hit")


class TestReuse(WriteAdmissionKit):
    """reuse."""

    def make_admission(self) -> WriteAdmission:
        return make_write_admission("reuse")


@pytest.mark.parametrize("name", WRITE_ADMISSIONS)
def test_every_registered_admission_has_a_kit(name: str) -> None:
    """An admission that a flag can name is checked above."""
    kits = WriteAdmissionKit.__subclasses__()
    assert name in {kit().make_admission().name for kit in kits}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("all", [True, True, True, True]),
        ("second-hit", [False, False, True, False]),
        ("reuse", [False, False, True, True]),
    ],
)
def test_what_each_one_writes(name: str, wanted: list[bool]) -> None:
    """Pages forgotten, seen once, seen twice, and seen once where much is reused."""
    facts = WriteFacts(
        TierId.DISK,
        np.array([0, 1, 2, 1], np.uint8),
        np.array([0.0, 0.05, 0.0, 0.3]),
    )
    assert make_write_admission(name).admit(facts).tolist() == wanted


@pytest.mark.parametrize(
    ("comes_again", "wanted"),
    [(True, [True, True, True]), (False, [False, False, True])],
)
def test_auto_writes_all_until_nothing_comes_again(
    comes_again: bool, wanted: list[bool]
) -> None:
    """Then it writes what was seen twice."""
    facts = WriteFacts(
        TierId.DISK,
        np.array([0, 1, 2], np.uint8),
        np.zeros(3),
        comes_again=comes_again,
    )
    assert make_write_admission("auto").admit(facts).tolist() == wanted


def test_an_unknown_name_is_refused() -> None:
    """The error lists those that there are."""
    with pytest.raises(ConfigError, match="second-hit"):
        make_write_admission("sometimes")

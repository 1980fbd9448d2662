"""Every page is written."""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import Bools
from sgl_tiered.policies.write_admission.base import WriteFacts

__all__ = ["AllAdmission"]


class AllAdmission:
    """Writes what the faster tier has: the most hits, and the most bytes."""

    name = "all"
    needs_sightings = False

    def admit(self, facts: WriteFacts) -> Bools:
        """Admit every page."""
        return np.ones(len(facts.num_sightings), np.bool_)

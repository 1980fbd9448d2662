"""What was seen twice is written."""

from __future__ import annotations

import numpy as np

from sgl_tiered.core.plans import Bools
from sgl_tiered.policies.write_admission.base import WriteFacts

__all__ = ["SecondHitAdmission"]


class SecondHitAdmission:
    """Writes a page when a second request has it, so its first reuse is never a hit."""

    name = "second-hit"
    needs_sightings = True

    def admit(self, facts: WriteFacts) -> Bools:
        """Admit what two requests had."""
        admitted: Bools = np.asarray(facts.num_sightings >= 2, np.bool_)
        return admitted

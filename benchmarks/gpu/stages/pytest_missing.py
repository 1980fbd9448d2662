"""A plugin of pytest: what is not installed comes from ``stand_ins``."""

from __future__ import annotations

from stages.stage import add_stand_ins, use_checkout

use_checkout()
add_stand_ins()

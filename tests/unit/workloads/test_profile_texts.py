"""Texts for profiles: alike for equal seeds, with something to read from afar."""

import re

import numpy as np
import pytest
from sgl_tiered_workloads import profile_texts as texts
from sgl_tiered_workloads.profile_texts import profile_texts

ENTRY = re.compile(r"# The \w+ \d+ of the \w+ is in box \d+\.")


def test_every_second_text_repeats_entries_wherever_it_is_cut():
    """In the first third of a register's text there are entries that came before."""
    plain, register = profile_texts(2, 12_000, np.random.default_rng(0))
    assert not ENTRY.findall(plain)
    found = ENTRY.findall(register[: len(register) // 3])
    assert len(found) - len(set(found)) >= 3
    assert len(plain) == 12_000
    assert len(register) > 12_000


def test_a_seed_gives_the_same_texts():
    """Equal seeds give equal texts, another seed others."""
    first, again, other = (
        profile_texts(3, 500, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_a_library_without_sources_is_refused(monkeypatch):
    """Where nothing can be read, a sentence says so."""
    monkeypatch.setattr(texts, "_MODULES", ("no_such_module_here", "sys"))
    with pytest.raises(ValueError, match="keeps no sources"):
        profile_texts(1, 10, np.random.default_rng(0))

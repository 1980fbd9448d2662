"""The CPU platform is a fallback: it serves only where nothing else does."""

from __future__ import annotations

import pytest
import sgl_tiered_platform as platform

torch = pytest.importorskip("torch")


class Entry:
    """An installed platform's entry point."""

    def __init__(self, name, answer):
        self.name = name
        self._answer = answer

    def load(self):
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer if callable(self._answer) else lambda: self._answer


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without an accelerator, with no other platform and no choice made."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name in ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    install(monkeypatch)


def install(monkeypatch, *entries):
    """Install other platforms beside ours."""
    ours = Entry(platform.NAME, platform.activate)
    monkeypatch.setattr(platform, "entry_points", lambda group: [*entries, ours])


def test_it_serves_a_machine_with_nothing_else():
    """No accelerator and no other platform: ours."""
    assert platform.activate().endswith(".TieredCpuPlatform")


def test_it_leaves_an_accelerator_alone(monkeypatch):
    """Where torch sees an accelerator, SGLang's own platform serves."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert platform.activate() is None


def test_selecting_it_beside_an_accelerator_says_what_to_do(monkeypatch):
    """An impossible choice is refused in one sentence."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("SGLANG_PLATFORM", platform.NAME)
    with pytest.raises(RuntimeError, match="without an accelerator"):
        platform.activate()


def test_it_stands_back_for_an_active_platform(monkeypatch):
    """SGLang refuses two active platforms, so the fallback yields."""
    install(monkeypatch, Entry("other", "other.Platform"))
    assert platform.activate() is None


@pytest.mark.parametrize("answer", [None, ImportError("no driver")])
def test_it_serves_beside_an_inactive_or_broken_platform(monkeypatch, answer):
    """A platform that says no, or fails, does not count."""
    install(monkeypatch, Entry("other", answer))
    assert platform.activate() is not None


def test_a_platform_that_the_user_did_not_allow_does_not_count(monkeypatch):
    """SGLANG_PLUGINS hides other platforms from SGLang and so from us."""
    install(monkeypatch, Entry("other", "other.Platform"))
    monkeypatch.setenv("SGLANG_PLUGINS", f"sgl_tiered, {platform.NAME}")
    assert platform.activate() is not None
    monkeypatch.setenv("SGLANG_PLUGINS", f"other,{platform.NAME}")
    assert platform.activate() is None


def test_an_explicit_choice_is_not_discussed(monkeypatch):
    """Selected by name, it serves without asking the others."""
    install(monkeypatch, Entry("other", "other.Platform"))
    monkeypatch.setenv("SGLANG_PLATFORM", platform.NAME)
    assert platform.activate() is not None


def test_sglangs_own_cpu_engine_goes_first(monkeypatch):
    """SGLANG_USE_CPU_ENGINE=1 asks for another CPU platform."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_two_fallbacks_that_ask_each_other_end(monkeypatch):
    """Asked while asking, it says no instead of asking again."""
    install(monkeypatch, Entry("mirror", platform.activate))
    assert platform.activate() is not None

"""The public types as a third party uses them: type-checked by ``make lint``, not run.

A tier, a device pool and a clock written outside the project must fit the interfaces.
"""

from __future__ import annotations

from typing import assert_type

import numpy as np
import numpy.typing as npt

from sgl_tiered.core.clock import Clock, ManualClock, SystemClock
from sgl_tiered.core.ids import Encoding, Lookup, Representation, TierId
from sgl_tiered.core.keys import Namespace, as_tokens, page_keys
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.core.plans import Decision, FoundPages, LoadPlan, TransferResult
from sgl_tiered.errors import (
    ConfigError,
    EngineCompatibilityError,
    TieredError,
    TierUnavailableError,
    TransportUnavailableError,
)
from sgl_tiered.pipelines.base import DevicePool
from sgl_tiered.policies.length.base import (
    LengthFacts,
    LengthPrediction,
    LengthPredictor,
    bounded,
)
from sgl_tiered.policies.length.book import LengthBook
from sgl_tiered.policies.sparsity.base import KeepSets, PrefixFacts, Selection
from sgl_tiered.policies.sparsity.keeping import even_counts, keep_best
from sgl_tiered.testing.scripted_library import ADDRESS, ScriptedLibrary
from sgl_tiered.tiers.base import MemoryTier, Tier, TierHealth, TierIO
from sgl_tiered.transport.base import Pieces, TransferStatus, Transport
from sgl_tiered.transport.batched import BatchedTransport
from sgl_tiered.transport.control import ControlClient
from sgl_tiered.transport.messages import Message, Refused, Reply
from sgl_tiered.transport.transfer_library import Library


class ThirdPartyTier:
    """A tier by somebody else: no base class, only the shape of ``Tier``."""

    tier_id = TierId.CXL
    slot_bytes = 4096
    num_slots = 8

    def load(self, io: TierIO) -> TransferResult:
        """Nothing ever arrives from here."""
        return TransferResult.failed(len(io.addresses), 0.0, "this tier is empty")

    def store(self, io: TierIO) -> TransferResult:
        """Nothing is ever kept here."""
        return TransferResult.failed(len(io.addresses), 0.0, "this tier is empty")

    def recover(self) -> FoundPages:
        """Return what a former process left: nothing."""
        return FoundPages.of([])

    def holds(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return none."""
        return np.zeros(len(addresses), np.bool_)

    def forget(self, addresses: npt.NDArray[np.int64]) -> None:
        """There is nothing to forget."""

    def health(self) -> TierHealth:
        """Return that it works."""
        return TierHealth(usable=True, emulated=True)

    def close(self) -> None:
        """There is nothing to release."""


class ThirdPartyMemoryTier(ThirdPartyTier):
    """The same with slots that can be read in place."""

    region = np.zeros((8, 4096), np.uint8)

    def read_view(
        self, addresses: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return the slots in place."""
        return self.region, addresses

    def charge(self, num_bytes: int, *, is_store: bool = False) -> None:
        """Copies cost nothing here."""


class ThirdPartyPool:
    """A device pool by somebody else."""

    layout = PageLayout(num_layers=2, page_tokens=16, token_bytes=64)
    waiter_copies = False

    def mark(self) -> object:
        """Return nothing to wait for."""
        return None

    def load_layer(
        self,
        layer: int,
        region: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        device_pages: npt.NDArray[np.int64],
        *,
        after: object = None,
        by_waiter: bool = False,
    ) -> None:
        """Copy nothing."""

    def store_pages(
        self,
        region: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.int64],
        device_pages: npt.NDArray[np.int64],
        after: object,
    ) -> None:
        """Copy nothing."""


class ThirdPartyLengths:
    """A length predictor by somebody else."""

    name = "as-the-prompt"

    def predict(self, facts: LengthFacts, num_done: int = 0) -> LengthPrediction:
        """Expect an answer as long as the prompt."""
        tokens = facts.num_prompt_tokens
        return bounded(facts, num_done, tokens, tokens, tokens)

    def observe(self, facts: LengthFacts, num_output_tokens: int) -> None:
        """Learn nothing."""


class ThirdPartySelection:
    """A selection by somebody else."""

    name = "every-other"
    needs_mass = False
    local_tokens = 0
    mass_power = 1
    window_tokens = 0

    def keep(self, facts: PrefixFacts) -> KeepSets:
        """Keep even positions first."""
        scores = np.arange(1, facts.num_tokens + 1) % 2.0
        shape = facts.num_layers, facts.num_tokens
        return keep_best(facts, np.broadcast_to(scores, shape), even_counts(facts))


tier: Tier = ThirdPartyTier()
memory_tier: MemoryTier = ThirdPartyMemoryTier()
pool: DevicePool = ThirdPartyPool()
lengths: LengthPredictor = ThirdPartyLengths()
selection: Selection = ThirdPartySelection()
library: Library = ScriptedLibrary()
transport: Transport = BatchedTransport(library)
clocks: list[Clock] = [SystemClock(), ManualClock()]

assert_type(tier.health().usable, bool)
assert_type(pool.layout.slot_bytes, int)
assert_type(LengthBook(lengths).prediction("rid", 3), LengthPrediction | None)
assert_type(TierId.HOST.label, str)
assert_type(
    page_keys(Namespace("m", "bfloat16", 16).digest(), as_tokens([1, 2]), 16),
    npt.NDArray[np.uint8],
)


def load_or_recompute(decision: Decision, committed: LoadPlan) -> str:
    """A decision can be read, and a committed plan says what it moves."""
    assert_type(decision.lookup, Lookup)
    assert_type(decision.num_from(TierId.DISK), int)
    assert_type(committed.num_pages, int)
    return decision.reason


def moved(pieces: Pieces) -> TransferStatus:
    """Any transport is used in the same way, whatever the peer is inside."""
    return transport.push(transport.connect(ADDRESS), pieces, timeout_s=1.0).wait()


def asked(client: ControlClient, message: Message) -> Reply | Refused:
    """The type of the reply is the one that was expected."""
    return client.ask(message, Reply, timeout_s=1.0)


def forms() -> tuple[Representation, Encoding]:
    """The forms in which a page can be kept are closed sets."""
    return Representation.KV, Encoding.RAW


def errors() -> list[TieredError | ValueError | RuntimeError | OSError]:
    """Each error is also the builtin that a caller expects."""
    as_value: ValueError = ConfigError("--x", "is wrong", "mend it")
    as_runtime: RuntimeError = EngineCompatibilityError("SGLang 0 does not fit")
    as_os: OSError = TierUnavailableError("no such disk")
    as_os_too: OSError = TransportUnavailableError("not installed")
    return [as_value, as_runtime, as_os, as_os_too]

"""What decisions are told of SGLang's requests that decode: targets, pace, lengths.

The SLO admission and the turns of layer-wise KV read them here, so that both judge by
the same Eq. 1 (``policies/admission/slo.py``). Nothing is measured: times are those of
the ranks' agreement, lengths those of the server's predictor.
"""

from __future__ import annotations

from typing import Any

from sgl_tiered.engines.sglang.lengths import LengthReader
from sgl_tiered.engines.sglang.prefetching import allowed_tokens
from sgl_tiered.policies.admission.base import NO_TARGET, RunningFacts
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.options import Options
from sgl_tiered.serving.targets import Targets, request_targets

__all__ = ["Decoders"]

_UNBOUNDED = 1 << 30


class Decoders:
    """Reads the requests of one scheduler.

    Args:
        config: has the targets of requests that bring none.
        lengths: what is predicted of the answers under way; None where nothing is.
        agreement: between the ranks.
    """

    def __init__(
        self, config: Options, lengths: LengthReader | None, agreement: Agreement
    ) -> None:
        self._defaults = Targets(
            config.slo.slo_ttft_s or NO_TARGET, config.slo.slo_tpot_s or NO_TARGET
        )
        self._floor_s = config.slo.slo_floor_s
        self._lengths = lengths
        self._agreement = agreement
        self._targets: dict[str, Targets] = {}
        self.num_bad_targets = 0

    def targets(self, req: Any) -> Targets:
        """Return a request's targets, as it brought them or as the server has them."""
        found = self._targets.get(req.rid)
        if found is None:
            custom = req.sampling_params.custom_params
            found, is_good = request_targets(custom, self._defaults, self._floor_s)
            self.num_bad_targets += not is_good
            self._targets[req.rid] = found
        return found

    def running(self, req: Any, now_s: float) -> RunningFacts | None:
        """Return what Eq. 1 needs of a request that decodes.

        None where it cannot be said: nothing predicts lengths.
        """
        if self._lengths is None:
            return None
        # 0 until SGLang has taken in the first token's result.
        own_s = req.time_stats.prefill_finished_time
        first_s = self._agreement.moment_s(req.rid, "first", own_s) if own_s else now_s
        return RunningFacts.at(
            now_s,
            req.rid,
            len(req.output_ids),
            first_s,
            self.targets(req).tpot_s,
            self._lengths.prediction(req),
        )

    def with_target(self, req: Any, now_s: float) -> RunningFacts | None:
        """Return the same for a request with a TPOT target; None for any other."""
        if self._lengths is None or self.targets(req).tpot_s == NO_TARGET:
            return None
        return self.running(req, now_s)

    def tokens_left(self, req: Any) -> int:
        """Return the tokens that a request will still have, as far as can be said.

        The median of its prediction; what it allows where nothing predicts lengths. At
        least 1.
        """
        num_done = len(req.output_ids)
        if self._lengths is not None:
            return max(self._lengths.prediction(req).median - num_done, 1)
        return max((allowed_tokens(req) or _UNBOUNDED) - num_done, 1)

    def forget(self, rid: str) -> None:
        """Forget a request that has left."""
        self._targets.pop(rid, None)

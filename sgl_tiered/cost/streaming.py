"""Time of a decode step under which layers are copied to the device (LayerKV).

Learned in two parts: what the step takes by itself, from steps without copies and from
those that were shorter than it even so, and what each copied byte adds to that. Were
both one fit, whatever slows steps that stream would pass for their computation, and
allow more streaming.
"""

from __future__ import annotations

from sgl_tiered.cost.decode import DecodeCost

__all__ = ["StreamingCost"]

_WEIGHT = 0.05
"""Of one step, in what streaming a byte adds to it."""
_SURELY = 0.8
"""Of an estimate: a step is off by 20 % as a rule (``regression.py``)."""
_STALLED = 0.1
"""Of a step, spent waiting for what streams: then less is to be streamed."""
_LESS, _MORE, _MORE_WITHOUT = 0.9, 0.01, 0.005
"""Factor of the share after a step that stalled, and what each other adds to it. One
without streaming adds as well: with a small share nothing may be short enough."""
_LEAST_SHARE = 0.05


class StreamingCost:
    """Learns both parts. Used on one thread.

    Args:
        decode: of steps without copies.

    Attributes:
        byte_s: seconds that a step takes longer for each byte streamed under it.
        share: of what the link should carry in a step, what it has been seen to carry
            without a stall. It needs no estimate, so it holds where these are wrong:
            on a machine that was fast a moment ago.
    """

    def __init__(self, decode: DecodeCost) -> None:
        self._decode = decode
        self.byte_s = 0.0
        self.share = 1.0

    def seconds(self, batch: float, context_tokens: float) -> float:
        """Return the predicted time of one step without copies; contexts are summed."""
        return self._decode.seconds(batch, context_tokens)

    def observe(
        self,
        batch: int,
        context_tokens: int,
        seconds: float,
        streamed_bytes: float,
        stall_s: float,
        bytes_per_s: float,
    ) -> None:
        """Learn from one step.

        Args:
            batch: requests.
            context_tokens: of all of them.
            seconds: from its launch to the next, waiting for copies included.
            streamed_bytes: copied under it. One with more than the link carries in its
                time waits for the link, which says nothing of what copies slow.
            stall_s: of these seconds, waited for copies.
            bytes_per_s: of the link.
        """
        if not streamed_bytes:
            self.share = min(self.share + _MORE_WITHOUT, 1.0)
            self._decode.observe(batch, context_tokens, seconds)
            return
        if stall_s > _STALLED * seconds:
            self.share = max(self.share * _LESS, _LEAST_SHARE)
        else:
            self.share = min(self.share + _MORE, 1.0)
        alone_s = self.seconds(batch, context_tokens)
        if seconds < _SURELY * alone_s:
            # Streaming makes no step shorter. Where all steps stream, this alone ends
            # an estimate that is too long, which by itself allows more streaming.
            self._decode.observe(batch, context_tokens, seconds)
        elif streamed_bytes <= alone_s * bytes_per_s:
            byte_s = max(seconds - alone_s, 0.0) / streamed_bytes
            byte_s = min(byte_s, 1.0 / bytes_per_s)
            self.byte_s += _WEIGHT * (byte_s - self.byte_s)

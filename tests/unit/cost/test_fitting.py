"""Fits: known coefficients come back, noise moves them little, few points work."""

from dataclasses import replace

import numpy as np
import pytest

from sgl_tiered.cost.fitting import (
    DecodeSample,
    LinkSample,
    PrefillSample,
    fit_decode,
    fit_link,
    fit_nonnegative,
    fit_prefill,
)

LENGTHS = (16, 64, 256, 1024, 2048, 4096)


def prefill_seconds(context, new, passes):
    pairs = new * (context + (new + 1) / 2)
    return 0.004 + 0.003 * passes + 2e-4 * new + 3e-8 * pairs


def prefill_samples(chunk=10**6, noise=None):
    samples = []
    for context in (0, 1024, 4096):
        for new in LENGTHS:
            passes = -(-new // chunk)
            seconds = prefill_seconds(context, new, passes)
            if noise is not None:
                seconds *= 1 + noise.uniform(-0.03, 0.03)
            samples.append(PrefillSample(context, new, passes, seconds))
    return samples


def test_prefill_is_recovered_with_chunks():
    """Prompts of several passes tell what a request and what a pass costs."""
    line = fit_prefill(prefill_samples(chunk=512))
    assert line.request_s == pytest.approx(0.004)
    assert line.overhead_s == pytest.approx(0.003)
    assert line.token_s == pytest.approx(2e-4)
    assert line.pair_s == pytest.approx(3e-8)
    assert line.quality.r2 == pytest.approx(1.0)
    assert line.quality.max_relative_residual < 1e-6


def test_reading_the_context_is_told_from_attention():
    """A time per token of context comes back beside the time per pair."""
    samples = [
        replace(s, seconds=s.seconds + 5e-6 * s.context_tokens)
        for s in prefill_samples()
    ]
    line = fit_prefill(samples, 0.003)
    assert line.context_token_s == pytest.approx(5e-6)
    assert line.pair_s == pytest.approx(3e-8)


@pytest.mark.parametrize(
    ("guess_s", "request_s", "overhead_s"),
    [(0.003, 0.004, 0.003), (None, 0.007, 0.0), (1.0, 0.0, 0.007)],
)
def test_without_chunks_the_guess_splits_the_overhead(guess_s, request_s, overhead_s):
    """With one pass each, only the sum is known; the guess takes no more than that."""
    line = fit_prefill(prefill_samples(), guess_s)
    assert line.request_s == pytest.approx(request_s, abs=1e-9)
    assert line.overhead_s == pytest.approx(overhead_s)
    assert line.token_s == pytest.approx(2e-4)


def test_noise_moves_the_fit_little():
    """With 3 % noise, what is predicted is within 4 % of the truth."""
    line = fit_prefill(prefill_samples(512, np.random.default_rng(1)))
    for context, new in ((0, 128), (0, 3000), (2048, 512)):
        passes = -(-new // 512)
        pairs = new * (context + (new + 1) / 2)
        predicted = (
            line.request_s
            + line.overhead_s * passes
            + line.token_s * new
            + line.pair_s * pairs
        )
        truth = prefill_seconds(context, new, passes)
        assert predicted == pytest.approx(truth, rel=0.04)
    assert 0 < line.quality.max_relative_residual < 0.06


def test_a_known_pass_is_taken_as_known():
    """Prompts of several passes then agree with the overhead that was given."""
    line = fit_prefill(prefill_samples(chunk=512), 0.003)
    assert line.overhead_s == pytest.approx(0.003)
    assert line.request_s == pytest.approx(0.004)
    assert line.pair_s == pytest.approx(3e-8)


def test_one_time_that_is_far_too_short_does_not_rule():
    """A point of nearly nothing leaves the others' line where it is."""
    rows = [[1.0, float(n)] for n in range(1, 11)]
    times = [0.02 + 0.001 * n for n in range(1, 11)]
    times[4] = 1e-5
    found, quality = fit_nonnegative(rows, times)
    for n in (1, 10):
        assert found[0] + found[1] * n == pytest.approx(0.02 + 0.001 * n, rel=0.2)
    assert quality.max_relative_residual > 10


def test_nothing_becomes_negative():
    """Times that shrink with the work give zeros, not negative coefficients."""
    found, quality = fit_nonnegative([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.0])
    assert min(found) >= 0
    assert quality.r2 < 0.1
    assert quality.max_relative_residual > 0.3


def test_one_length_is_no_line():
    """A single length cannot tell overhead from tokens, so nothing is claimed."""
    assert fit_prefill([PrefillSample(0, 64, 1, 0.1)] * 3) is None
    assert fit_prefill([]) is None


def test_decode_is_recovered():
    """Batch and context each get their coefficient."""
    samples = [
        DecodeSample(batch, batch * context, 0.005 + 1e-3 * batch + 2e-7 * batch * c)
        for batch in (1, 2, 4, 8)
        for context in (64, 2048)
        for c in (context,)
    ]
    fit = fit_decode(samples)
    assert fit.step_s == pytest.approx(0.005)
    assert fit.request_s == pytest.approx(1e-3)
    assert fit.context_token_s == pytest.approx(2e-7)
    assert fit.seconds(4, 1000) == pytest.approx(0.0092)


def test_decode_from_little():
    """No sample is no fit; one sample predicts itself."""
    assert fit_decode([]) is None
    fit = fit_decode([DecodeSample(1, 100, 0.01)])
    assert fit.seconds(1, 100) == pytest.approx(0.01)
    assert fit.quality.num_points == 1


def test_link_is_recovered():
    """Latency and bandwidth come back from transfers of several sizes."""
    sizes = (10_000, 1_000_000, 50_000_000)
    line = fit_link([LinkSample(n, 1e-3 + n / 2e9) for n in sizes])
    assert line.latency_s == pytest.approx(1e-3)
    assert line.bytes_per_s == pytest.approx(2e9)


def test_link_from_little():
    """One size gives a bandwidth and no latency; larger in less time, a bandwidth."""
    assert fit_link([]) is None
    line = fit_link([LinkSample(100, 0.5), LinkSample(100, 0.5)])
    assert line.latency_s == 0
    assert line.bytes_per_s == pytest.approx(200)
    line = fit_link([LinkSample(100, 2.0), LinkSample(1000, 1.0)])
    assert line.bytes_per_s > 0
    assert line.quality.r2 < 0


def test_equal_times_are_met_perfectly():
    """Where all times are equal there is no variance, and a constant explains them."""
    _, quality = fit_nonnegative([[1.0], [1.0]], [0.5, 0.5])
    assert quality.r2 == 1.0

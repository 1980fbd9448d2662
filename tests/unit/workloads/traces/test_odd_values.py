"""Values that no trace has, in files that are right otherwise: refused with a place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sgl_tiered_workloads.traces.azure import read_azure
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.traces.lengths import read_sharegpt_lengths
from sgl_tiered_workloads.traces.servegen import read_servegen
from sgl_tiered_workloads.traces.weka import read_weka

LENGTHS = "num_prefill_tokens,num_decode_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"


def talk(new: str, tokens: int = 33) -> str:
    request = f'{{"t": 0, "in": {tokens}, "out": 4, "lcp": 0, "new": {new}}}'
    return f'{{"start_s": 0, "block_size": 16, "requests": [{request}]}}'


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_sharegpt_lengths, LENGTHS + f"{2**64},5"),
        (read_sharegpt_lengths, LENGTHS + "1," + "9" * 200_000),
        (read_azure, AZURE + "2023-11-16 18:15:50+00:00,1,1"),
        (read_weka, talk(f"[[{2**63}, 1]]")),
        (read_weka, talk(f"[[0, {2**50}]]", tokens=2**54)),
    ],
)
def test_they_are_refused(tmp_path: Path, read: Callable, text: str) -> None:
    """Numbers that 64 bits or the memory do not hold, and times of two kinds."""
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(TraceError, match="trace"):
        read(file)


@pytest.mark.parametrize(
    ("rates", "lengths"),
    [
        (b"0,1,1,Gamma,1,1\n60,1,1,Ga\xce,1,1", b"{}"),
        (b"nan,0,0,,0,0\n60,0,0,,0,0", b"{}"),
        (b"0,inf,1,Gamma,1,1\n60,0,0,,0,0", b"{}"),
        (
            b"0,0,0,,0,0\n60,0,0,,0,0",
            b'{"0": {"input_tokens": "{inf: 1}", "output_tokens": "{1: 1}"}}',
        ),
    ],
)
def test_rates_and_lengths_are_numbers(
    tmp_path: Path, rates: bytes, lengths: bytes
) -> None:
    """Not a number and infinity are none; nor are other bytes than text."""
    (tmp_path / "chunk-0-trace.csv").write_bytes(rates)
    (tmp_path / "chunk-0-dataset.json").write_bytes(lengths)
    with pytest.raises(TraceError, match="chunk-0"):
        read_servegen(tmp_path)

"""Every workload is made by name, is a function of its seed, and refuses nonsense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sgl_tiered_workloads.arrivals import ClosedLoop, OpenLoop
from sgl_tiered_workloads.params import WorkloadError
from sgl_tiered_workloads.registry import WORKLOADS, make_workload
from sgl_tiered_workloads.traces.base import TraceError
from sgl_tiered_workloads.workload import Workload

from tests.unit.workloads.sample_support import (
    LENGTHS,
    MBPP,
    MOONCAKE,
    MT_BENCH,
    TAU_BENCH,
    write_json,
    write_lines,
    write_servegen,
    write_text,
)

VOCAB = 300

Make = Callable[[Path], dict[str, Any]]

SMALL: dict[str, Make] = {
    "chat": lambda _: {"num_sessions": 3, "think_s": 2.0},
    "fixed_lengths": lambda _: {"prompt_tokens": 20, "num_requests": 5},
    "length_sweep": lambda _: {"prompt_lengths": [8, 16]},
    "long_document": lambda _: {"num_documents": 3, "document_tokens": 40},
    "longalign": lambda _: {"num_requests": 4, "min_tokens": 8, "max_tokens": 90},
    "mt_bench": lambda at: {"path": str(write_lines(at / "m", MT_BENCH))},
    "problems": lambda at: {"mbpp": str(write_lines(at / "p", MBPP))},
    "react": lambda _: {"num_sessions": 3, "few_shot_tokens": 30},
    "servegen": lambda at: {"path": str(write_servegen(at / "s")), "start_s": 900},
    "sharegpt": lambda at: {"lengths": str(write_text(at / "l", LENGTHS))},
    "system_chat": lambda _: {"num_requests": 5},
    "tau_bench": lambda at: {"path": str(write_json(at / "t", TAU_BENCH))},
    "text_analysis": lambda _: {"num_prefixes": 4, "num_requests": 9},
    "trace": lambda at: {
        "format": "mooncake",
        "path": str(write_lines(at / "t", MOONCAKE)),
    },
}


def played(workload: Workload) -> list[Any]:
    """Return all that a run would send, with answers of eights."""
    sent: list[Any] = [workload.arrivals]
    for session in workload.as_sessions():
        while not session.finished:
            request = session.next_request()
            sent.append(request)
            session.record_answer((8,) * request.max_new_tokens)
            sent.append(session.think_s)
    return sent


def test_every_registered_workload_is_tried_here() -> None:
    """The table of small parameters has them all."""
    assert set(SMALL) == set(WORKLOADS)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_workload_is_a_function_of_its_seed(name: str, tmp_path: Path) -> None:
    """Equal seeds give equal prompts, pauses and arrivals, with ids in range."""
    params = {
        **SMALL[name](tmp_path),
        "arrivals": {"process": "poisson", "rate_per_s": 2.0},
    }
    one, same, other = (
        played(make_workload(name, params, seed, VOCAB)) for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    prompts = [item.prompt for item in one if hasattr(item, "prompt")]
    assert prompts
    assert all(min(prompt) >= 7 and max(prompt) < VOCAB for prompt in prompts)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_workload_counts_its_requests_and_names_them_apart(
    name: str, tmp_path: Path
) -> None:
    """The stated number is what is sent, and no key repeats."""
    workload = make_workload(name, SMALL[name](tmp_path), 1, VOCAB)
    keys = [item.key for item in played(workload) if hasattr(item, "key")]
    assert len(keys) == len(set(keys)) == workload.num_requests > 0
    assert workload.name == name


@pytest.mark.parametrize("name", sorted(SMALL))
def test_an_unknown_parameter_is_refused_by_every_workload(
    name: str, tmp_path: Path
) -> None:
    """Nothing that a spec says is ignored."""
    with pytest.raises(WorkloadError, match=f"{name} has no parameter colour"):
        make_workload(name, {**SMALL[name](tmp_path), "colour": 1}, 1, VOCAB)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    """A slip of the pen is recognised."""
    with pytest.raises(WorkloadError, match=r"did you mean react\? known are chat, "):
        make_workload("raect", {}, 1, VOCAB)


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ({"process": "posson"}, "process must be one of poisson"),
        ({"process": "poisson"}, "needs the parameter rate_per_s"),
        ({"process": "bursty", "rate_per_s": 1}, "needs the parameter cv"),
        ({"process": "even", "rate_per_s": 0}, "above 0"),
        ({"process": "closed", "concurrency": 0}, "at least 1"),
        ({"process": "trace"}, "this data has no times"),
        ({"process": "even", "rate_per_s": 1, "cv": 2}, "no parameter cv"),
        ("soon", "must be a table"),
    ],
)
def test_wrong_arrivals_are_named(arrivals: Any, message: str) -> None:
    """Each fault of the table of arrivals is one sentence."""
    with pytest.raises(WorkloadError, match=message):
        make_workload("text_analysis", {"arrivals": arrivals}, 1, VOCAB)


def test_arrivals_of_requests_are_their_starts() -> None:
    """Under an open loop each planned request carries its own time."""
    params = {"num_requests": 200, "arrivals": {"process": "even", "rate_per_s": 4}}
    workload = make_workload("text_analysis", params, 1, VOCAB)
    assert isinstance(workload.arrivals, OpenLoop)
    assert workload.requests[6].start_s == 1.5
    assert workload.concurrency is None


def test_a_closed_loop_is_a_concurrency() -> None:
    """The paper's workloads without a rate run closed by default."""
    workload = make_workload("text_analysis", {}, 1, VOCAB)
    assert workload.arrivals == ClosedLoop(16)
    assert workload.concurrency == 16


def test_a_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    """Paths are the user's; a wrong one is said."""
    with pytest.raises(TraceError, match="No such file"):
        make_workload("mt_bench", {"path": str(tmp_path / "absent")}, 1, VOCAB)

"""Programming tasks behind one few-shot template, as in the report's text analysis."""

from __future__ import annotations

from sgl_tiered_workloads.generators.base import (
    SIXTEEN_USERS,
    Scene,
    make_arrivals,
    requests_workload,
)
from sgl_tiered_workloads.params import Params
from sgl_tiered_workloads.sessions import PlannedRequest
from sgl_tiered_workloads.traces.problems import read_human_eval, read_mbpp
from sgl_tiered_workloads.traces.texts import Problem
from sgl_tiered_workloads.workload import Workload

__all__ = ["problems"]


def problems(params: Params, scene: Scene) -> Workload:
    """Make ``problems``: each task after the same ``num_shots`` solved ones.

    Tasks come from ``human_eval`` or ``mbpp`` (a path). The first ``num_shots`` tasks
    are the examples; answers are as long as the solutions. ``num_requests`` keeps the
    first ones.

    Raises:
        WorkloadError: a parameter is wrong.
        TraceError: the file cannot be used.
    """
    if params.has("human_eval"):
        tasks = read_human_eval(params.path("human_eval"))
    else:
        tasks = read_mbpp(params.path("mbpp"))
    num_shots = params.integer("num_shots", 3, minimum=0)
    if num_shots >= len(tasks):
        raise params.wrong("num_shots", f"below {len(tasks)}", num_shots)
    examples = "".join(_solved(task) for task in tasks[:num_shots])
    asked = tasks[num_shots:]
    asked = asked[: params.integer("num_requests", len(asked))]
    requests = [
        PlannedRequest(
            task.name,
            tuple(scene.encode(f"{examples}{task.prompt}\n")),
            max(1, len(scene.encode(task.solution))),
        )
        for task in asked
    ]
    arrivals = make_arrivals(params, SIXTEEN_USERS, len(requests), scene.generator)
    return requests_workload("problems", requests, arrivals)


def _solved(task: Problem) -> str:
    return f"{task.prompt}\n{task.solution}\n\n"

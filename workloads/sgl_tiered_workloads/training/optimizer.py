"""Muon for matrices, AdamW for the embedding and the norms.

Muon (Jordan et al., 2024) replaces a matrix's averaged gradient by the nearest
semi-orthogonal one, so that all its directions move alike; on small Llamas it reaches a
loss in about half of AdamW's steps. The replacement is a polynomial iteration of five
matrix products on all matrices of one size at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

import torch

from sgl_tiered_workloads.training.network import EMBEDDING, OUTPUT

__all__ = ["Optimizer", "orthogonalised"]

_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPS = 1e-10
# Coefficients of x -> a x + b x^3 + c x^5 that lift all singular values to about one
# fast.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonalised(batch: torch.Tensor) -> torch.Tensor:
    """Return each matrix of [count, rows, columns] with singular values near one.

    Near: between about 0.7 and 1.2. Computed in the type of ``batch``.
    """
    tall = batch.shape[-2] > batch.shape[-1]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Changes parameters in place by their gradients.

    Args:
        parameters: by name, float32 leaves; matrices other than the embedding are
        Muon's.
        matrix_rate: Muon's rate.
        embedding_rate: AdamW's rate for the embedding.
        vector_rate: AdamW's rate for the others.
        matrix_decay: weight decay of the matrices, per unit of rate.
        dtype: what Muon's products are computed in.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        matrix_rate: float,
        embedding_rate: float,
        vector_rate: float,
        matrix_decay: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._parameters = dict(parameters)
        self._matrix_rate = matrix_rate
        self._embedding_rate = embedding_rate
        self._vector_rate = vector_rate
        self._decay = matrix_decay
        self._dtype = dtype
        self._groups: dict[tuple[int, ...], list[str]] = {}
        self._vectors: list[str] = []
        for name, value in self._parameters.items():
            if value.ndim == 2 and name not in (EMBEDDING, OUTPUT):
                self._groups.setdefault(tuple(value.shape), []).append(name)
            else:
                self._vectors.append(name)
        self._first = {k: torch.zeros_like(v) for k, v in self._parameters.items()}
        self._second = {k: torch.zeros_like(parameters[k]) for k in self._vectors}
        self._num_steps = 0

    def step(self, rate: float, pool: Executor | None = None) -> None:
        """Apply the gradients and clear them; ``rate`` scales all rates.

        A ``pool`` computes matrices of different sizes side by side; the result is the
        same.
        """
        self._num_steps += 1

        def vectors() -> None:
            for name in self._vectors:
                own = self._embedding_rate if name == EMBEDDING else self._vector_rate
                self._vector(name, rate * own)

        jobs: list[Callable[[], None]] = [
            partial(self._matrices, size, names, rate * self._matrix_rate)
            for size, names in self._groups.items()
        ]
        jobs.append(vectors)
        if pool is None:
            for job in jobs:
                job()
        else:
            for done in [pool.submit(job) for job in jobs]:
                done.result()

    def state(self) -> dict[str, Any]:
        """Return what ``load`` needs to go on from here; not a copy."""
        return {
            "first": self._first,
            "second": self._second,
            "num_steps": self._num_steps,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from another optimizer's state."""
        for own, other in (
            (self._first, state["first"]),
            (self._second, state["second"]),
        ):
            for name, value in own.items():
                value.copy_(other[name])
        self._num_steps = int(state["num_steps"])

    def _gradient(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name]
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(f"{name} has no gradient")
        parameter.grad = None
        return gradient

    def _matrices(self, size: tuple[int, ...], names: list[str], rate: float) -> None:
        with torch.no_grad():
            directions = []
            for name in names:
                gradient = self._gradient(name)
                average = self._first[name].lerp_(gradient, 1 - _MOMENTUM)
                directions.append(gradient.lerp(average, _MOMENTUM))
            batch = orthogonalised(torch.stack(directions).to(self._dtype)).float()
            # A tall matrix writes more outputs than it reads inputs: a larger step
            # keeps the change of one output alike.
            scaled = rate * max(1.0, size[0] / size[1]) ** 0.5
            for name, direction in zip(names, batch, strict=True):
                parameter = self._parameters[name]
                parameter.mul_(1 - rate * self._decay).sub_(direction, alpha=scaled)

    def _vector(self, name: str, rate: float) -> None:
        with torch.no_grad():
            gradient = self._gradient(name)
            first, second = self._first[name], self._second[name]
            first.lerp_(gradient, 1 - _BETAS[0])
            second.lerp_(gradient.square(), 1 - _BETAS[1])
            unbiased = first / (1 - _BETAS[0] ** self._num_steps)
            spread = (second / (1 - _BETAS[1] ** self._num_steps)).sqrt()
            self._parameters[name].sub_(unbiased / (spread + _EPS), alpha=rate)

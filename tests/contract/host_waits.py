"""Counts what would hold the scheduler's thread until a CUDA device has come so far.

``DeviceTensor`` lies in the CPU's memory and says that it is CUDA's; what is made of
such tensors is one as well. While ``HostWaits`` is entered, everything that the
entering thread asks of one is looked at, by two modes of torch: one sees the calls of
Python, the other the operations that they come to. What would wait on a device is
noted with the frames that asked: a number or a copy on the host, an operation whose
result has as many rows as the data say, memory of the host that is not pinned copied
to the device, an event or a stream that is synchronized, and, apart, waits for threads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CUDA", "DeviceTensor", "HostWaits", "asking", "on_device"]

CUDA = torch.device("cuda:0")
_CPU = torch.device("cpu")
_READ_CALLS = """
    cpu item tolist numpy __array__ __bool__ __int__ __float__ __index__ __contains__
    __repr__ __format__ __reduce_ex__ __deepcopy__ nonzero argwhere unique
    unique_consecutive masked_select equal allclose bincount histc is_nonzero
"""
"""Calls that need the data, or as many rows of memory as they say."""
_MAKES = frozenset(["tensor", "as_tensor", "asarray"])
"""Calls that copy numbers of the host to the device that they name."""
_READ_OPERATIONS = """
    _local_scalar_dense nonzero masked_select _unique _unique2 unique_dim
    unique_consecutive equal is_nonzero bincount nonzero_numpy
"""
"""Operations of the same kind, for calls that are not known to come to them."""
_READS = frozenset(_READ_CALLS.split())
_READ_OPS = frozenset(_READ_OPERATIONS.split())
_MOST_FRAMES = 8
_INDEXES = frozenset(["__getitem__", "__setitem__"])


class DeviceTensor(torch.Tensor):
    """A tensor of the played device.

    Attributes:
        says: the device that it names; the CPU's for code that runs on a CPU only.
    """

    says: ClassVar[torch.device] = CUDA

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run on the CPU; results are such tensors, but for copies on the host."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return cls.says
        if name == "__get__" and func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return cls.says == CUDA
        is_down = name == "cpu" or (name == "to" and _target(args, kwargs) == _CPU)
        args, kwargs = _as_cpu(args, kwargs)
        if name == "pin_memory":
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if is_down:
            return found.as_subclass(torch.Tensor).clone()
        if name in ("numpy", "__array__"):
            return found
        return _of_device(found)


def on_device(tensor: torch.Tensor) -> DeviceTensor:
    """Return a tensor over the same memory, as the device's."""
    return tensor.as_subclass(DeviceTensor)


class HostWaits:
    """What would wait, by what is under way and by who asked; see the module.

    Attributes:
        path: what is under way, as a label.
        ours, sglang: calls by path, and by place: of the product's code, and of
            SGLang's own.
        through: those of the latter that a call of the product's led to.
        threads: waits for other threads, in the product's code, by path and place.
        pinned: allocations of pinned memory by the product's code. Torch keeps such
            memory, so that CUDA is asked for it now and then only.
        moment: names when those are: ``in flight``, ``idle`` or ``results``.
        waiting_since: when the wait began that the thread is in; None while it is in
            none.
    """

    def __init__(self) -> None:
        self.path = "start"
        self.ours: dict[str, Counter[str]] = {}
        self.sglang: dict[str, Counter[str]] = {}
        self.through: dict[str, Counter[str]] = {}
        self.threads: dict[str, Counter[str]] = {}
        self.pinned: dict[str, Counter[str]] = {}
        self.moment: Callable[[], str] = lambda: "in flight"
        self.waiting_since: float | None = None
        self._thread = 0
        self._stack = contextlib.ExitStack()
        self._num_held = 0

    def __enter__(self) -> HostWaits:
        self._thread = threading.get_ident()
        enter = self._stack.enter_context
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            enter(mock.patch.object(kind, "synchronize", self._wrapped("synchronize")))
        enter(mock.patch.object(torch.cuda, "synchronize", self._nothing))
        enter(mock.patch.object(threading.Condition, "wait", self._waiting("wait")))
        enter(mock.patch.object(time, "sleep", self._slept()))
        enter(_Calls(self))
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def watch(self, kind: type, *names: str) -> None:
        """Note calls of methods that wait for the device."""
        for name in names:
            wrapped = self._wrapped(name, getattr(kind, name))
            self._stack.enter_context(mock.patch.object(kind, name, wrapped))

    @contextlib.contextmanager
    def on(self, path: str) -> Iterator[None]:
        """Name what is under way."""
        before, self.path = self.path, path
        try:
            yield
        finally:
            self.path = before

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Do what a device does, or a test: nothing of it counts."""
        is_own = threading.get_ident() == self._thread
        self._num_held += is_own
        try:
            yield
        finally:
            self._num_held -= is_own

    @property
    def counts(self) -> bool:
        """Whether the calling thread is watched now."""
        return threading.get_ident() == self._thread and not self._num_held

    def note(self, what: str) -> None:
        """Note that the calling thread would wait."""
        if not self.counts:
            return
        place, is_ours, caller = _asked()
        by_path = self.ours if is_ours else self.sglang
        by_path.setdefault(self.path, Counter())[f"{what} {place}"] += 1
        if caller and not is_ours:
            line = f"{what} {place} for {caller}"
            self.through.setdefault(self.path, Counter())[line] += 1

    def note_pinned(self) -> None:
        """Note that the calling thread asks for pinned memory."""
        place, is_ours, _ = _asked()
        if self.counts and is_ours:
            self.pinned.setdefault(self.path, Counter())[place] += 1

    def _nothing(self, *args: object, **kwargs: object) -> None:
        self.note("synchronize")

    def _wrapped(self, name: str, real: Callable[..., Any] | None = None) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            if real is None:
                return None
            with self.held(), self._timed():
                return real(*args, **kwargs)

        return called

    def _waiting(self, name: str) -> Any:
        real = getattr(threading.Condition, name)

        def wait(condition: Any, timeout: float | None = None) -> Any:
            self._note_thread()
            with self._timed():
                return real(condition, timeout)

        return wait

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Note for how long the watched thread waits."""
        is_own = threading.get_ident() == self._thread
        if is_own:
            self.waiting_since = time.monotonic()
        try:
            yield
        finally:
            if is_own:
                self.waiting_since = None

    def _note_thread(self) -> None:
        if not self.counts:
            return
        place, is_ours, _ = _asked()
        if is_ours:
            line = f"{self.moment()}: {place}"
            self.threads.setdefault(self.path, Counter())[line] += 1

    def _slept(self) -> Any:
        real = time.sleep

        def sleep(seconds: float) -> None:
            self._note_thread()
            real(seconds)

        return sleep


class _Calls(TorchFunctionMode):
    """Sees calls of Python."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if kwargs.get("pin_memory"):
            self._waits.note_pinned()
        names_cuda = _is_cuda(kwargs.get("device")) or any(map(_is_cuda, args))
        is_device = _has_device(args) or _has_device(kwargs.values())
        if not is_device and not names_cuda:
            return func(*args, **kwargs)
        if name == "__get__" or not self._waits.counts:
            return self._run(func, types, args, kwargs, is_device=is_device)
        what = _wait_of(name, args, kwargs, names_cuda=names_cuda)
        if what:
            self._waits.note(what)
            return self._run(func, types, args, kwargs, is_device=is_device)
        with _Operations() as seen:
            found = self._run(func, types, args, kwargs, is_device=is_device)
        for operation in sorted(seen.found):
            self._waits.note(f"{operation} in {name}")
        return found

    @staticmethod
    def _run(func: Any, types: Any, args: Any, kwargs: Any, *, is_device: bool) -> Any:
        if is_device:
            return DeviceTensor.__torch_function__(func, types, args, kwargs)
        # Made of nothing, on the device.
        args, kwargs = _as_cpu(args, kwargs)
        return _of_device(func(*args, **kwargs))


class _Operations(TorchDispatchMode):
    """Sees what calls come to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _READ_OPS:
            self.found.add(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            chosen = [one for one in args[1] if one is not None]
            if any(one.dtype in (torch.bool, torch.uint8) for one in chosen):
                self.found.add("nonzero")
        if name == "repeat_interleave" and not (kwargs or {}).get("output_size"):
            self.found.add("repeat_interleave")
        return func(*args, **(kwargs or {}))


def _wait_of(name: str, args: Any, kwargs: Any, *, names_cuda: bool) -> str:
    """Return what a call would wait for; empty for nothing, as far as is known."""
    if name in _READS:
        return name
    if name in _MAKES and names_cuda and not isinstance(args[0], DeviceTensor):
        return "copy to the device"
    is_async = bool(kwargs.get("non_blocking"))
    if name == "to":
        target, is_here = _target(args, kwargs), isinstance(args[0], DeviceTensor)
        if target is None or is_async or (len(args) > 3 and bool(args[3])):
            return ""
        if is_here and target == _CPU:
            return "to the host"
        return "copy to the device" if not is_here and target == CUDA else ""
    if name == "copy_" and not is_async and len(args) > 1:
        to, source = args[:2]
        is_up = isinstance(to, DeviceTensor)
        if isinstance(source, torch.Tensor) and is_up != isinstance(
            source, DeviceTensor
        ):
            return "copy to the device" if is_up else "copy to the host"
    if name in _INDEXES and isinstance(args[0], DeviceTensor):
        wanted = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(_is_host_data(one) for one in wanted):
            return "index of the host"
        if name == "__setitem__" and _is_host_data(args[2]):
            return "copy to the device"
    if name == "__setitem__" and isinstance(args[2], DeviceTensor):
        return "" if isinstance(args[0], DeviceTensor) else "copy to the host"
    if name == "where" and len(args) == 1 and not kwargs:
        return "nonzero"
    return ""


def _is_host_data(value: Any) -> bool:
    """Say whether it is numbers of the host that have to be brought over."""
    if isinstance(value, DeviceTensor):
        return False
    if isinstance(value, torch.Tensor):
        return value.dim() > 0
    return isinstance(value, (np.ndarray, list))


def _target(args: Any, kwargs: Any) -> torch.device | None:
    """Return the device that a call of ``to`` names."""
    for one in (kwargs.get("device"), *args[1:2]):
        if isinstance(one, str):
            return torch.device(one)
        if isinstance(one, torch.device):
            return one
        if isinstance(one, torch.Tensor):
            return CUDA if isinstance(one, DeviceTensor) else one.device
    return None


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("cuda")
    return isinstance(value, torch.device) and value.type == "cuda"


def _has_device(values: Any) -> bool:
    for one in values:
        if isinstance(one, DeviceTensor):
            return True
        if isinstance(one, (tuple, list)) and len(one) < 1000 and _has_device(one):
            return True
    return False


def _as_cpu(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments that name the CPU where they name the device."""
    args = tuple(_CPU if _is_cuda(one) else one for one in args)
    return args, {k: _CPU if _is_cuda(one) else one for k, one in kwargs.items()}


def _of_device(found: Any) -> Any:
    if isinstance(found, torch.Tensor):
        return found if isinstance(found, DeviceTensor) else on_device(found)
    if isinstance(found, (tuple, list)):
        made = [_of_device(one) for one in found]
        # Named tuples of torch are made of one sequence.
        return type(found)(made)
    return found


def asking(frame: Any) -> list[str]:
    """Return where in the product and in SGLang a thread is, innermost first."""
    found = []
    while frame is not None:
        package, where = _place(frame)
        if package:
            found.append(where)
        frame = frame.f_back
    return found[:_MOST_FRAMES]


def _asked() -> tuple[str, bool, str]:
    """Return who asked: the place, whether it is ours, and our frame behind it."""
    frame = sys._getframe(1)
    place, is_ours = "elsewhere", False
    while frame is not None:
        package, where = _place(frame)
        if package:
            place, is_ours = where, package == "sgl_tiered"
            break
        frame = frame.f_back  # type: ignore[assignment]
    while frame is not None and not is_ours:
        package, where = _place(frame)
        if package == "sgl_tiered":
            return place, False, where
        frame = frame.f_back  # type: ignore[assignment]
    return place, is_ours, ""


def _place(frame: Any) -> tuple[str, str]:
    name = frame.f_globals.get("__name__", "")
    package = name.partition(".")[0]
    if package not in ("sgl_tiered", "sglang") or name.startswith("sgl_tiered.testing"):
        return "", ""
    file = frame.f_code.co_filename.rpartition(f"/{package}/")[2]
    return package, f"{file}:{frame.f_code.co_name}"

"""Hooks around collectives, on stand-ins; real ones are in ``tests/contract``."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sgl_tiered.core.clock import ManualClock, SystemClock  # noqa: E402
from sgl_tiered.engines.sglang.layered import collectives  # noqa: E402
from sgl_tiered.pipelines.contention import CountedCollectives  # noqa: E402


@pytest.fixture
def watch():
    """A watch that the hooks tell."""
    watch = CountedCollectives(ManualClock())
    collectives.watch_collectives(watch)
    yield watch
    collectives.watch_collectives(None)


def call(original, num_ranks=2, **kwargs):
    group = SimpleNamespace(world_size=num_ranks)
    if kwargs:
        return collectives._around(original, group, **kwargs)
    return collectives._around(original, group, torch.zeros(4, 8))


def test_a_collective_is_in_flight_while_it_runs(watch):
    """The watch knows it from the call to the return, and how large it is."""
    seen = []

    def reduce(group, input_):
        seen.append((watch.in_flight_s(), watch._open[0].num_bytes))
        return input_ + group.world_size

    assert call(reduce).sum() == 2 * 32
    assert call(reduce, input_=torch.zeros(2)).tolist() == [2, 2]
    assert seen == [(0.0, 128), (0.0, 8)]
    assert watch.in_flight_s() is None
    assert watch.num_seen == 2


def test_a_collective_that_breaks_is_over(watch):
    """Otherwise every swap after it would wait its full time."""

    def fail(group, input_):
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="gone"):
        call(fail)
    assert watch.in_flight_s() is None


def test_one_rank_has_no_collectives(watch):
    """SGLang calls the same method there, and it does nothing."""
    call(lambda group, input_: input_, num_ranks=1)
    assert watch.num_seen == 0


@pytest.mark.parametrize(
    ("num_ranks", "device", "nvlink", "shared"),
    [
        (1, "cuda", False, False),
        (2, "cuda", True, False),
        (2, "cuda", False, True),
        (2, "cuda", None, True),
        (2, "cpu", None, True),
    ],
)
def test_a_guard_is_made_where_links_are_shared(num_ranks, device, nvlink, shared):
    """NVLink between all devices, or one device, needs none; what is unknown does."""
    try:
        assert collectives.link_is_shared(num_ranks, device, nvlink=nvlink) is shared
        guard = collectives.make_guard(
            num_ranks, "cpu" if shared else device, SystemClock(), nvlink=nvlink
        )
        assert (guard is not None) is shared
    finally:
        collectives.watch_collectives(None)


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        (SimpleNamespace(ca_comm=None), None),
        (SimpleNamespace(ca_comm=SimpleNamespace(disabled=True)), None),
        (SimpleNamespace(ca_comm=SimpleNamespace(full_nvlink=True)), True),
        (SimpleNamespace(ca_comm=SimpleNamespace(full_nvlink=False)), False),
    ],
)
def test_what_sglang_knows_of_nvlink_is_taken_over(group, wanted):
    """And what it gave up before it knew is unknown."""
    assert collectives.group_has_nvlink(group) is wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_a_device_is_seen_at_its_collective():
    """Events around a kernel: in flight while it runs, and not when it is queued."""
    watch = collectives.make_watch("cuda", SystemClock())
    for _ in range(3):
        begun = watch.begin(1 << 20)
        torch.cuda._sleep(200_000_000)
        watch.end(begun)
        torch.cuda.current_stream().synchronize()
        assert watch.in_flight_s() is None
    begun = watch.begin(1 << 20)
    torch.cuda._sleep(200_000_000)
    watch.end(begun)
    while watch.in_flight_s() is None and not torch.cuda.current_stream().query():
        pass
    assert watch.in_flight_s() is None or watch.in_flight_s() > 0.0
    torch.cuda.synchronize()
    assert watch.in_flight_s() is None

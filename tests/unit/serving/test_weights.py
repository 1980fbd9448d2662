"""What the weights are: known at the start, and again a while after each change."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.engines.sglang.adapters import Adapters
from sgl_tiered.engines.sglang.weight_hooks import _around
from sgl_tiered.metrics.registry import MetricsRegistry
from sgl_tiered.serving.agreement import Agreement
from sgl_tiered.serving.lossy import is_lossy_key, mark_generation, unmarked_key
from sgl_tiered.serving.weights import WeightsIdentity
from tests.unit.engines.ranks_support import on_two_ranks
from tests.unit.engines.weights_support import FakeWeights, read_out


def identity_of(weights, agreement=None):
    return WeightsIdentity(
        weights.begin, agreement or Agreement(ManualClock()), MetricsRegistry()
    )


@pytest.fixture
def weights():
    return FakeWeights("a")


@pytest.fixture
def identity(weights):
    identity = identity_of(weights)
    yield identity
    weights.gate.set()
    identity.close()


def change(identity, weights, text, *, device_is_empty=True):
    """Change the weights in one call of SGLang's."""
    identity.changing()
    weights.text = text
    identity.changed(device_is_empty=device_is_empty)


def test_weights_are_known_at_the_start(identity):
    """They are read before anything is served."""
    assert identity.value == "a"
    assert identity.settled
    assert not identity.poll()


def test_a_change_is_unsettled_until_the_weights_are_read(identity, weights):
    """The scheduler goes on meanwhile; then it is told once of the new name."""
    weights.gate.clear()
    change(identity, weights, "b")
    assert (identity.value, identity.settled) == (None, False)
    assert not identity.poll()
    weights.gate.set()
    read_out(identity)
    assert not identity.settled, "nothing becomes known between two looks"
    assert identity.poll()
    assert (identity.value, identity.settled) == ("b", True)
    assert not identity.poll()


def test_while_weights_change_they_are_not_known(identity, weights):
    """Not even if they had been read to the end before."""
    change(identity, weights, "b")
    read_out(identity)
    identity.changing()
    assert not identity.poll()
    assert identity.value is None
    weights.text = "c"
    identity.changed(device_is_empty=True)
    read_out(identity)
    assert identity.poll()
    assert identity.value == "c"


def test_nobody_reads_weights_that_are_touched(identity, weights):
    """A read is over when ``changing`` returns: their memory may be released."""
    weights.gate.clear()
    weights.began.clear()
    change(identity, weights, "b")
    assert weights.began.wait(20.0)
    identity.changing()
    assert weights.num_stopped == 1
    assert weights.num_begun == 2
    weights.gate.set()
    assert not identity.poll()
    identity.changed(device_is_empty=True)
    read_out(identity)
    assert identity.poll()


def test_without_a_flush_the_device_is_mixed_until_it_is_emptied(
    identity, weights, caplog
):
    """KV of the weights before may be under anything that is computed."""
    change(identity, weights, "b", device_is_empty=False)
    read_out(identity)
    assert identity.poll(), "the weights are others, so what is below is forgotten"
    assert identity.value == "b"
    assert identity.is_mixed
    assert not identity.settled
    assert "until it is flushed" in caplog.text
    identity.emptied()
    assert identity.settled


def test_a_flush_while_weights_are_read_empties_the_device(identity, weights):
    """What is computed after it is by the weights that are being read."""
    change(identity, weights, "b", device_is_empty=False)
    identity.emptied()
    read_out(identity)
    assert identity.poll()
    assert identity.settled


def test_a_flush_within_the_change_empties_the_device(identity, weights):
    """As SGLang flushes after an update."""
    identity.changing()
    weights.text = "b"
    identity.emptied()
    identity.changed(device_is_empty=False)
    read_out(identity)
    assert identity.poll()
    assert identity.settled


def test_a_flush_before_the_last_part_of_a_change_does_not(identity, weights):
    """Batches may run between the calls of one session."""
    identity.changing()
    identity.emptied()
    identity.changing()
    weights.text = "b"
    identity.changed(device_is_empty=False)
    read_out(identity)
    identity.poll()
    assert identity.is_mixed


def test_weights_that_come_back_as_they_were_change_nothing(identity, weights):
    """Released and resumed: what the device holds, and what is below, is good."""
    change(identity, weights, "a", device_is_empty=False)
    assert not identity.settled
    read_out(identity)
    assert not identity.poll(), "nothing is to be forgotten"
    assert identity.settled
    assert identity.value == "a"


def test_weights_that_come_back_after_others_leave_a_mixed_device(identity, weights):
    """Others may have computed in between, though nobody ever read them."""
    weights.gate.clear()
    change(identity, weights, "b", device_is_empty=False)
    change(identity, weights, "a", device_is_empty=False)
    weights.gate.set()
    read_out(identity)
    assert not identity.poll()
    assert identity.is_mixed
    # Nor does it help that they come a third time.
    change(identity, weights, "a", device_is_empty=False)
    read_out(identity)
    identity.poll()
    assert identity.is_mixed


def test_weights_that_cannot_be_read_are_nobody_elses(weights, monkeypatch, caplog):
    """The server serves on; what it keeps is found by itself alone."""
    identity = identity_of(weights)

    def begin():
        def read(num_threads, stop):
            raise RuntimeError("illegal memory access")

        return read

    names = set()
    for _ in range(2):
        identity._begin = begin
        identity.changing()
        identity.changed(device_is_empty=True)
        read_out(identity)
        assert identity.poll()
        assert identity.settled
        names.add(identity.value)
    assert len(names) == 2
    assert "could not be read" in caplog.text
    assert identity._metrics.snapshot()["counters"]["weights_unreadable"] == 2


def test_weights_that_cannot_be_read_at_the_start_end_nothing(weights):
    """The server starts; its name is its own."""

    def begin():
        raise RuntimeError("no such memory")

    weights.begin = begin
    names = {identity_of(weights).value for _ in range(2)}
    assert len(names) == 2


def test_every_rank_counts_weights_that_one_cannot_read(identity):
    """Rank 0 is asked for the figures, and the name of all is nobody else's."""
    assert identity._joined([["a", 0], ["b", 1]]) == "a-b"
    assert identity._metrics.snapshot()["counters"]["weights_unreadable"] == 1


def test_kv_of_other_weights_mixes_the_device_until_it_is_emptied(identity):
    """A prefill instance that was updated first, say."""
    identity.received("a", "1")
    assert identity.settled
    identity.received("b", "2")
    assert identity.is_mixed
    identity.received("a", "1")
    assert not identity.settled, "the device still has the other's"
    identity.emptied()
    assert identity.settled
    identity.received("", "")
    assert identity.is_mixed, "KV of several weights"


def test_kv_whose_weights_are_being_read_waits_for_their_name(identity, weights):
    """On either side, or both: nothing is kept or found meanwhile, then all as ever."""
    identity.received("", "1")
    assert not identity.settled
    assert not identity.is_mixed
    identity.received("a", "1")
    assert identity.settled
    weights.gate.clear()
    change(identity, weights, "b")
    identity.received("", "2")
    identity.received("b", "2")
    identity.received("b", "3")
    weights.gate.set()
    read_out(identity)
    assert identity.poll()
    assert identity.settled
    weights.gate.clear()
    change(identity, weights, "c")
    identity.received("b", "3")
    weights.gate.set()
    read_out(identity)
    identity.poll()
    assert identity.is_mixed


def test_weights_that_come_back_do_not_clear_a_device_with_others(identity, weights):
    """KV that was received is none of those before."""
    change(identity, weights, "a", device_is_empty=False)
    identity.received("b", "1")
    read_out(identity)
    identity.poll()
    assert identity.is_mixed


def test_names_that_are_waited_for_are_bounded(identity):
    """Senders that never name their weights end in a device that is to be flushed."""
    for number in range(5000):
        identity.received("", str(number))
    assert identity.is_mixed
    assert len(identity._unnamed) < 2000


def test_what_is_told_of_weights_is_true_of_the_kv(identity, weights):
    """Their name, or when it comes; nothing where it may be of several."""
    name, epoch = identity.told()
    assert name == "a"
    identity.changing()
    assert identity.told() == ("", "")
    weights.gate.clear()
    weights.text = "b"
    identity.changed(device_is_empty=True)
    name, later = identity.told()
    assert name == ""
    assert later not in ("", epoch)
    weights.gate.set()
    read_out(identity)
    identity.poll()
    assert identity.told() == ("b", later)
    change(identity, weights, "c", device_is_empty=False)
    assert identity.told() == ("", "")


def test_weights_that_no_thread_can_read_are_nobody_elses(
    identity, weights, monkeypatch
):
    """The scheduler lives on; the next change is read, if there is a thread again."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        change(identity, weights, "b")
    assert identity.poll()
    assert identity.value not in ("a", "b")
    change(identity, weights, "b")
    read_out(identity)
    assert identity.poll()
    assert identity.value == "b"


def test_ranks_know_the_weights_at_the_same_meeting():
    """One has read its part long before the other; nobody uses it before both have."""
    both_asked, may_end = threading.Barrier(2), threading.Event()

    def work(number, seat):
        agreement = Agreement(ManualClock(), seat)
        weights = FakeWeights(f"part {number} of a")
        identity = identity_of(weights, agreement)
        found = [identity.value]
        if number:
            weights.gate.clear()
        identity.changing()
        weights.text = f"part {number} of b"
        identity.changed(device_is_empty=True)
        if not number:
            read_out(identity)
        for turn in range(6):
            agreement.meet({})
            found.append((identity.poll(), identity.value, identity.settled))
            if turn == 2:
                both_asked.wait()
                if number:
                    weights.gate.set()
                    read_out(identity)
                    may_end.set()
                assert may_end.wait(20.0)
        identity.close()
        return found

    first, second = on_two_ranks(work)
    assert first == second
    assert first[0] == "part 0 of a-part 1 of a"
    new = "part 0 of b-part 1 of b"
    assert first[1:4] == [(False, None, False)] * 3
    assert first[4] == (True, new, True)
    assert first[5:] == [(False, new, True)] * 2


def test_what_a_rank_read_before_a_change_is_not_used_after_it():
    """A rank that tells of the change before is not taken for one that is done."""

    def work(number, seat):
        agreement = Agreement(ManualClock(), seat)
        weights = FakeWeights("a")
        identity = identity_of(weights, agreement)
        for text in "bc":
            identity.changing()
            weights.text = text
            if number == 0 and text == "c":
                weights.gate.clear()
            identity.changed(device_is_empty=True)
            if weights.gate.is_set():
                read_out(identity)
        agreement.meet({})
        known = [identity.poll(), identity.value]
        weights.gate.set()
        read_out(identity)
        agreement.meet({})
        known += [identity.poll(), identity.value]
        identity.close()
        return known

    assert on_two_ranks(work) == [[False, None, True, "c-c"]] * 2


class Tree:
    """What the hooks tell."""

    def __init__(self, agreement):
        weights = SimpleNamespace(was_emptied=False)
        self.tiered = SimpleNamespace(agreement=agreement, weights=weights)
        self.said = []

    def weights_changing(self):
        self.said.append("changing")

    def weights_changed(self):
        self.said.append("changed")

    def flushed(self):
        self.tiered.weights.was_emptied = True
        self.said.append("flushed")


def manager(agreement=None, **state):
    tree = Tree(agreement or Agreement(ManualClock()))
    state = {
        "_session": None,
        "offload_tags": set(),
        "flush_cache": tree.flushed,
        **state,
    }
    return SimpleNamespace(scheduler=SimpleNamespace(tree_cache=tree), **state), tree


ASKED = SimpleNamespace()


def test_an_update_is_announced_and_its_end_told():
    """Before SGLang touches anything, and after."""
    updater, tree = manager()

    def update(self, recv_req):
        assert tree.said == ["changing"]
        return "updated"

    assert _around(lambda *_: True)(update, updater, ASKED) == "updated"
    assert tree.said == ["changing", "changed"]


def test_an_update_that_breaks_has_an_end_as_well():
    """Who knows what it changed."""
    updater, tree = manager()

    def update(self, recv_req):
        raise RuntimeError("half of it is loaded")

    with pytest.raises(RuntimeError):
        _around(lambda *_: True)(update, updater, ASKED)
    assert tree.said == ["changing", "changed"]


@pytest.mark.parametrize("session", [None, object()])
@pytest.mark.parametrize("num_flush", [0, 1, 2])
def test_ranks_of_which_some_failed_to_load_weights_have_flushed_alike(
    session, num_flush
):
    """SGLang flushes where they were loaded; ranks with other caches would hang."""

    def work(number, seat):
        agreement = Agreement(ManualClock(), seat)
        updater, tree = manager(agreement, _session=session)

        def update(self, recv_req):
            if number < num_flush:
                self.flush_cache()
            return number

        assert _around(lambda *_: True)(update, updater, ASKED) == number
        return "flushed" in tree.said, tree.said[-1]

    last = "changed" if session is None else "flushed" if num_flush else "changing"
    assert on_two_ranks(work) == [(num_flush > 0, last)] * 2


def test_a_change_goes_on_within_a_session():
    """They are not yet what will be computed with."""
    updater, tree = manager(_session=object())
    _around(lambda *_: True)(lambda self, recv_req: None, updater, ASKED)
    assert tree.said == ["changing"]


def test_a_change_goes_on_while_weights_are_away():
    """From their release until they are back is one change: nothing computes."""
    updater, tree = manager()

    def release(self, recv_req):
        self.offload_tags.add("weights")

    def resume(self, recv_req):
        self.offload_tags.remove("weights")

    _around(lambda *_: True)(release, updater, ASKED)
    assert tree.said == ["changing"]
    _around(lambda *_: True)(resume, updater, ASKED)
    assert tree.said == ["changing", "changed"]


def test_a_call_that_changes_nothing_is_left_alone():
    """And so is a server without our cache."""
    updater, tree = manager()
    _around(lambda *_: False)(lambda self, recv_req: None, updater, ASKED)
    tree.tiered = None
    _around(lambda *_: True)(lambda self, recv_req: None, updater, ASKED)
    assert tree.said == []


torch = pytest.importorskip("torch")
ID, OTHER = "1" * 32, "2" * 32


def lora(value):
    return SimpleNamespace(
        config=SimpleNamespace(r=2, target_modules=["q_proj"]),
        scaling=1.0,
        layers=[SimpleNamespace(weights={"q_proj.lora_A": torch.full((2, 4), value)})],
        embedding_layers={},
        added_tokens_embeddings={},
    )


def lora_manager(**adapters):
    return SimpleNamespace(
        loras={name[1:]: lora(value) for name, value in adapters.items()},
        target_modules={"qkv_proj"},
        lora_backend=SimpleNamespace(name="torch_native"),
    )


def test_an_adapter_is_known_by_what_is_in_it():
    """Not by its id, which follows from a path or from nothing."""
    agreement = Agreement(ManualClock())
    before = Adapters(lora_manager(**{f"_{ID}": 1.0}), agreement)
    trained = Adapters(lora_manager(**{f"_{ID}": 2.0}), agreement)
    moved = Adapters(lora_manager(**{f"_{OTHER}": 1.0}), agreement)
    assert before.parted("key" + ID) != trained.parted("key" + ID)
    assert before.parted("key" + ID) == moved.parted("key" + OTHER)
    assert before.parted("key" + ID)[0] == "key"
    assert before.parted(OTHER) == (OTHER, "")
    assert before.parted("") == ("", "")


def test_adapters_come_and_go():
    """One that SGLang has and we were not told of is nobody's."""
    served = lora_manager()
    adapters = Adapters(served, Agreement(ManualClock()))
    served.loras[ID] = lora(1.0)
    assert adapters.parted(ID) is None
    adapters.loaded(ID)
    key, content = adapters.parted(ID)
    assert (key, len(content)) == ("", 32)
    del served.loras[ID]
    adapters.unloaded(ID)
    assert adapters.parted(ID) == (ID, "")
    adapters.emptied()
    served.loras[ID] = lora(2.0)
    adapters.loaded(ID)
    assert adapters.parted(ID)[1] not in ("", content)


def test_an_adapter_under_an_old_id_waits_for_an_empty_device():
    """SGLang's tree may have KV of the former content, or of both, under that id."""
    served = lora_manager(**{f"_{ID}": 1.0, f"_{OTHER}": 1.0})
    adapters = Adapters(served, Agreement(ManualClock()))
    _, former = adapters.parted(ID)

    def come_back(value):
        del served.loras[ID]
        adapters.unloaded(ID)
        served.loras[ID] = lora(value)
        return adapters.loaded(ID)

    assert not come_back(1.0)
    assert adapters.parted(ID) == ("", former)
    assert come_back(2.0)
    assert adapters.parted("key" + ID) is None
    assert adapters.parted(OTHER) == ("", former)
    assert not come_back(1.0)
    assert adapters.parted(ID) is None, "there may be KV of the second as well"
    adapters.emptied()
    assert adapters.parted(ID) == ("", former)
    assert come_back(2.0)


def test_what_stands_behind_an_adapters_id_makes_it_nobodys():
    """As SGLang puts the number of experts' ranks there: else no content names it."""
    adapters = Adapters(lora_manager(**{f"_{ID}": 1.0}), Agreement(ManualClock()))
    assert adapters.parted(f"key{ID}|elastic_ep_size=4") is None
    assert adapters.parted("key|elastic_ep_size=4") == ("key|elastic_ep_size=4", "")


def test_an_adapter_that_cannot_be_read_is_nobodys(caplog):
    """The server serves on with it."""
    served, metrics = lora_manager(), MetricsRegistry()
    adapters = Adapters(served, Agreement(ManualClock()), metrics)
    served.loras[ID] = lora(1.0)
    del served.loras[ID].scaling
    adapters.loaded(ID)
    assert adapters.parted(ID) is None
    assert "could not be read" in caplog.text
    assert metrics.snapshot()["counters"]["adapters_unreadable"] == 1


def test_an_adapter_of_which_a_part_cannot_be_read_is_counted(caplog):
    """Its KV is found while it is loaded, and by nobody after that."""
    served, metrics = lora_manager(), MetricsRegistry()
    adapters = Adapters(served, Agreement(ManualClock()), metrics)
    served.loras[ID] = lora(1.0)
    served.loras[ID].embedding_layers = {"lm_head": lambda: None}
    adapters.loaded(ID)
    _, content = adapters.parted(ID)
    other = Adapters(served, Agreement(ManualClock()))
    assert content
    assert content != other.parted(ID)[1]
    assert "cannot be read" in caplog.text
    assert metrics.snapshot()["counters"]["adapters_unreadable"] == 1


def test_an_adapter_of_which_a_part_cannot_be_read_may_be_the_same(caplog):
    """When it is loaded again: nothing is said of another content, and nothing kept or
    found until the device is empty, which counts."""
    served, metrics = lora_manager(), MetricsRegistry()
    adapters = Adapters(served, Agreement(ManualClock()), metrics)
    served.loras[ID] = lora(1.0)
    served.loras[ID].embedding_layers = {"lm_head": lambda: None}
    assert not adapters.loaded(ID)
    assert adapters.loaded(ID)
    assert adapters.parted(ID) is None
    assert "another content" not in caplog.text
    assert "is not known" in caplog.text
    adapters.emptied()
    assert adapters.parted(ID)[1] != ""
    assert adapters.loaded(ID), "the device may have KV of a part that nobody has read"
    served.loras[ID] = lora(1.0)
    adapters.loaded(ID)
    assert "another content" not in caplog.text
    adapters.emptied()
    served.loras[ID] = lora(2.0)
    adapters.loaded(ID)
    assert "another content" in caplog.text
    assert metrics.snapshot()["counters"]["adapters_mixed"] == 4


@pytest.mark.parametrize("is_flushed", [False, True])
def test_kv_of_an_adapter_that_could_not_be_read_is_not_the_next_ones(is_flushed):
    """What it has computed is on the device when its id comes back with a content that
    is known, be it the one before."""
    served = lora_manager(**{f"_{ID}": 1.0})
    adapters = Adapters(served, Agreement(ManualClock()))
    del served.loras[ID].scaling
    assert adapters.loaded(ID)
    assert adapters.parted(ID) is None
    if is_flushed:
        # It goes on computing.
        adapters.emptied()
    served.loras[ID] = lora(1.0)
    adapters.loaded(ID)
    assert adapters.parted(ID) is None
    adapters.emptied()
    assert adapters.parted(ID)[1] != ""


@pytest.mark.parametrize("mark", ["", "tiered-exact-base|", "tiered-lossy|"])
@pytest.mark.parametrize("end", ["", "|"])
@pytest.mark.parametrize("is_lossy", [False, True])
def test_a_key_that_names_an_adapter_is_not_that_adapter(mark, end, is_lossy):
    """Whoever gives its id, which follows from a path, gets no KV of it, nor the
    adapter's requests that of the model alone; on the device neither."""
    adapters = Adapters(lora_manager(**{f"_{ID}": 1.0}), Agreement(ManualClock()))
    settings = SimpleNamespace(is_lossy=is_lossy, lossy_default="allow")
    config = {"sampling_params": SimpleNamespace(custom_params=None)}

    def keyed(given, lora_id):
        # As SGLang's ``Req`` does.
        key = given if lora_id is None else (given or "") + lora_id
        req = SimpleNamespace(extra_key=key, lora_id=lora_id, **config)
        mark_generation(req, settings, has_adapters=adapters.has_manager)
        return req.extra_key

    plain = keyed(mark + ID + end, None)
    others = [keyed(mark + ID, ID), keyed(mark + ID + end, ID), keyed(None, ID)]
    others += [keyed(before + mark, ID) for before in ("", "tiered-exact-base|")]
    assert plain not in others
    assert not plain.endswith(ID), "SGLang takes what ends so for the adapter's"
    assert adapters.parted(plain) == (plain, "")
    assert unmarked_key(plain) == mark + ID + end
    assert is_lossy_key(plain) == is_lossy


def test_servers_that_apply_adapters_otherwise_do_not_share():
    """The modules that a server lets adapters change are part of what they are."""
    agreement = Agreement(ManualClock())
    one, other = (lora_manager(**{f"_{ID}": 1.0}) for _ in range(2))
    other.target_modules = {"qkv_proj", "gate_up_proj"}
    assert Adapters(one, agreement).parted(ID) != Adapters(other, agreement).parted(ID)


def test_ranks_agree_on_an_adapter():
    """All have one name for it, whatever each of them was given; a rank that failed to
    load it makes it nobody's everywhere."""

    def work(number, seat):
        agreement = Agreement(ManualClock(), seat)
        served = lora_manager(**{f"_{ID}": 1.0 + number})
        adapters = Adapters(served, agreement)
        served.loras[OTHER] = lora(1.0)
        if number:
            del served.loras[OTHER]
        adapters.loaded(OTHER)
        return adapters.parted(ID), OTHER in adapters._hashes

    first, second = on_two_ranks(work)
    assert first == second
    assert first[0][1] != ""
    assert not first[1]


def test_ranks_agree_on_keys_that_name_an_adapter_that_one_has_not():
    """A sender may write the id into its own key; ranks that part end the server."""

    def work(number, seat):
        served = lora_manager()
        adapters = Adapters(served, Agreement(ManualClock(), seat))
        served.loras[ID] = lora(1.0)
        adapters.loaded(ID)
        # Of two that were told to unload it and to load another content, one did.
        if number:
            del served.loras[ID]
            adapters.unloaded(ID)
        adapters.loaded(ID)
        settings = SimpleNamespace(is_lossy=False)
        keys = [ID, f"a{ID}b", f"{ID}|elastic_ep_size=2"]
        reqs = [SimpleNamespace(extra_key=key, lora_id=None) for key in keys]
        for req in reqs:
            mark_generation(req, settings, has_adapters=True)
        return [adapters.parted(req.extra_key) for req in reqs] + [
            dict(adapters._hashes)
        ]

    first, second = on_two_ranks(work)
    assert first == second
    assert first[-1] == {}

"""Who may be given altered KV, and the wall between those and the others."""

from types import SimpleNamespace

import pytest

from sgl_tiered.core.clock import ManualClock
from sgl_tiered.core.encoded import encoded_layout
from sgl_tiered.core.ids import Encoding
from sgl_tiered.core.layout import PageLayout
from sgl_tiered.metrics.ledger import RequestLedger
from sgl_tiered.serving.explain import Explainer, Namespaces
from sgl_tiered.serving.lossy import (
    ALLOW,
    REFUSE,
    allows_lossy,
    is_lossy_key,
    mark_generation,
    marked_key,
    unmarked_key,
)

RAW = PageLayout(2, 16, 64)
KEYS = [None, "key", "keylora1", "tiered-lossy|", "tiered-lossy|key", "tiered-exact|k"]


def _settings(default=REFUSE, *, lossy=True):
    return SimpleNamespace(lossy_default=default, is_lossy=lossy)


def _req(custom=None, extra_key=None):
    sampling = SimpleNamespace(custom_params=custom)
    return SimpleNamespace(sampling_params=sampling, extra_key=extra_key)


@pytest.mark.parametrize("default", [REFUSE, ALLOW])
@pytest.mark.parametrize(
    "custom",
    [None, {}, {"other": 1}, "text", {"tiered": "x"}, {"tiered": {"explain": True}}],
)
def test_the_flag_speaks_for_those_who_say_nothing(custom, default):
    """Whatever else they say."""
    assert allows_lossy(_req(custom), _settings(default)) == (default == ALLOW)


@pytest.mark.parametrize("default", [REFUSE, ALLOW])
def test_a_request_has_the_last_word(default):
    """Against the flag, both ways."""
    allow, refuse = ({"tiered": {"lossy": word}} for word in (ALLOW, REFUSE))
    assert allows_lossy(_req(allow), _settings(default))
    assert not allows_lossy(_req(refuse), _settings(default))


@pytest.mark.parametrize("word", ["no", "ALLOW", False, True, 0, 1, [], {}])
def test_a_word_that_is_not_understood_refuses(word):
    """A slip must not hand out KV that was altered."""
    custom = {"tiered": {"lossy": word}}
    assert not allows_lossy(_req(custom), _settings(ALLOW))


def test_a_request_without_sampling_says_nothing():
    """Such as one for an embedding."""
    assert not allows_lossy(SimpleNamespace(), _settings())


def test_no_two_requests_share_a_key_that_should_not():
    """Whatever senders give as their own key, marks of ours included."""
    marked = [marked_key(key, allows=allows) for key in KEYS for allows in (0, 1)]
    assert len(set(marked)) == len(marked)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("allows", [False, True])
def test_a_mark_can_be_taken_off(key, allows):
    """And says which it was; an adapter's name stays last, where SGLang looks."""
    marked = marked_key(key, allows=allows)
    assert is_lossy_key(marked) == allows
    assert unmarked_key(marked) == key
    assert (marked or "").endswith(key or "")


def test_an_exact_request_keeps_its_key():
    """Its pages of before, on disk, stay its own."""
    assert marked_key(None, allows=False) is None
    assert marked_key("key", allows=False) == "key"


def test_requests_are_marked_where_something_alters_kv():
    """And left alone where nothing does."""
    allow = {"tiered": {"lossy": ALLOW}}
    req, other = _req(allow, "key"), _req(None, "key")
    mark_generation(req, _settings())
    mark_generation(other, _settings())
    assert is_lossy_key(req.extra_key)
    assert other.extra_key == "key"
    plain = _req(allow, "key")
    mark_generation(plain, _settings(lossy=False))
    assert plain.extra_key == "key"


@pytest.mark.parametrize("key", ["tiered-lossy|", "tiered-lossy|key", "tiered-exact|k"])
def test_a_disk_with_altered_kv_gives_it_to_nobody_who_did_not_allow_it(key):
    """On a later server too, where nothing alters KV and no word is asked for."""
    refuses, later = (_req({"tiered": {"lossy": REFUSE}}, key) for _ in range(2))
    mark_generation(refuses, _settings())
    mark_generation(later, _settings(lossy=False))
    assert not is_lossy_key(later.extra_key)
    assert later.extra_key == refuses.extra_key, "its own pages of before"


def test_an_explanation_names_the_other_side_of_the_wall():
    """To who could have sent the same prompt there; nobody else is told of it."""
    names = Namespaces()
    lossy = marked_key("key", allows=True)
    names.note(lossy, None, None, b"lossy")
    names.note("key", None, None, b"exact")
    names.note(marked_key("key", allows=True), "salt", None, b"salted")
    assert names.siblings("key", None, None) == {
        "for requests that allow lossy KV": b"lossy"
    }
    assert names.siblings(lossy, None, None) == {
        "for requests that refuse lossy KV": b"exact"
    }
    assert names.siblings("key", "salt", None) == {
        "for requests that allow lossy KV": b"salted"
    }


@pytest.mark.parametrize("refuses", [True, False])
@pytest.mark.parametrize("layout", [RAW, encoded_layout(RAW, Encoding.INT8, 2, 16)])
def test_who_refuses_is_told_that_the_tiers_hold_nothing_for_it(layout, refuses):
    """For the whole pages behind its prefix, and only where they are encoded."""
    ledger = RequestLedger(10, ManualClock(1.0))
    cache = SimpleNamespace(config=SimpleNamespace(layout=layout))
    req = SimpleNamespace(
        rid="r",
        origin_input_ids=[0] * 81,
        extra_key=marked_key(None, allows=not refuses),
    )
    ledger.queued("r", 81)
    Explainer(ledger, cache).admitted(req, None, 32)
    missing = ledger.details("r")["missing"]
    if layout is RAW or not refuses:
        assert missing == []
        return
    (span,) = missing
    assert (span["first_token"], span["tokens"]) == (32, 48)
    assert span["cause"] == "not allowed"
    assert "int8" in span["text"]

"""``/tiered/*`` of a server: endpoints by keys by flags, origins, odd questions."""

import itertools

import pytest

from sgl_tiered.serving.option_reader import FAULT_ENV
from tests.contract.story_support import output_of

pytestmark = pytest.mark.sglang

ADMIN = (
    "/tiered/drop",
    "/tiered/explain",
    "/tiered/explain/{rid:path}",
    "/tiered/faults",
    "/tiered/load-policy",
    "/tiered/profile",
    "/tiered/profile POST",
)
NORMAL = ("/tiered/stats",)
FLAGS = ("none", "api", "admin", "both")
KEYS = ("none", "wrong", "client", "admin")
OPENS = {"none": set(KEYS), "api": {"client"}, "admin": {"admin"}, "both": {"admin"}}
"""Flags -> the keys that open what changes a server, or tells of its tenants."""
OPENS_NORMAL = {**OPENS, "admin": set(KEYS), "both": {"client"}}


@pytest.fixture(scope="module")
def told():
    """What the program saw."""
    return output_of("http_program.py", **{FAULT_ENV: "1"})


def test_every_endpoint_is_in_the_matrix(told):
    """Who adds one says here who may call it."""
    listed = {name.removesuffix(" POST") for name in (*ADMIN, *NORMAL)}
    assert told["paths"] == sorted(listed)
    assert {*told["matrix"]} == {*ADMIN, *NORMAL, "/flush_cache"}


@pytest.mark.parametrize("path", [*ADMIN, *NORMAL])
def test_who_may_call_it(told, path):
    """What changes a server or tells of its tenants is for the operator's key, if there
    is one: as SGLang's own ``/flush_cache``."""
    opens = OPENS_NORMAL if path in NORMAL else OPENS
    for flags, key in itertools.product(FLAGS, KEYS):
        expected = 200 if key in opens[flags] else 401
        assert told["matrix"][path][flags][key] == expected, (flags, key)
    if path in ADMIN:
        assert told["matrix"][path] == told["matrix"]["/flush_cache"]


@pytest.mark.parametrize("path", [*ADMIN, *NORMAL])
def test_a_page_of_another_origin_reaches_nothing(told, path):
    """A browser is no operator, whatever site it shows."""
    for word, (status, is_reached, text) in told["origins"][path].items():
        is_ours = word in ("none", "same")
        assert status == (200 if is_ours else 403), (word, text)
        assert is_reached is (is_ours and path not in NORMAL)
        assert is_ours or "without a browser" in text
    # Of each path, four origins and one whose site took our address.
    foreign = 5 * len((*ADMIN, *NORMAL))
    assert told["counted"]["origin"] == foreign


@pytest.mark.parametrize("path", [*ADMIN, *NORMAL])
def test_a_page_that_gave_its_name_our_address_reaches_nothing(told, path):
    """Where a key is wanted, a proxy may well call this machine by another name."""
    assert told["rebound"]["none"][path] == 403
    assert told["rebound"]["admin"][path] == 200


def test_odd_questions_are_refused_in_a_sentence(told):
    """And counted; none of them goes on to the scheduler."""
    statuses = {word: status for word, (status, _) in told["odd"].items()}
    assert statuses == dict.fromkeys(told["odd"], 400) | {"nobody": 404}
    for _, sentence in told["odd"].values():
        assert sentence.endswith(".")
    assert told["sent"] == []
    assert told["counted"]["input"] == len(told["odd"]) - 1
    assert told["counted"]["unknown"] == 1

"""Replicas that know the same want the same, and what is over means nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sgl_tiered.pool.membership import InstanceKind, Member
from sgl_tiered.router.config import parse_instance
from sgl_tiered.router.wanted import Change, is_over, wanted_instances

NAMES = ("a", "b", "c")
URLS = tuple(f"http://127.0.0.1:{port}" for port in (1, 2, 3))
names, urls = st.sampled_from(NAMES), st.sampled_from(URLS)
incarnations = st.integers(1, 3)
flags = st.lists(
    st.builds(lambda n, u: parse_instance(f"{u},name={n}"), names, urls),
    max_size=3,
    unique_by=(lambda each: each.name, lambda each: each.url),
)
members = st.lists(
    st.builds(
        lambda name, incarnation, url, is_draining: Member(
            name,
            NAMES.index(name),
            incarnation,
            InstanceKind.COLOCATED,
            {"http": url},
            is_draining,
        ),
        names,
        incarnations,
        urls,
        st.booleans(),
    ),
    max_size=3,
    unique_by=lambda each: each.name,
)
changes = st.dictionaries(
    names,
    st.one_of(
        st.just(Change()),
        st.builds(lambda u, d: Change(u, d), urls, st.booleans()),
        st.builds(
            lambda d, r, i: Change("", d, r, i),
            st.booleans(),
            st.booleans(),
            st.integers(0, 3),
        ),
    ),
)


def named(said):
    """Give the words of requests the names under which they were said."""
    return {
        name: Change(f"{c.words},name={name}", c.draining, c.removed, c.incarnation)
        if c.words
        else c
        for name, c in said.items()
    }


@given(flags, members, changes, st.randoms(use_true_random=False))
def test_the_order_in_which_it_was_heard_does_not_matter(
    given_, there, said, shuffler
) -> None:
    """Of members and changes; flags have an order of their own."""
    said = named(said)
    first = wanted_instances(given_, there, said)
    mixed, items = list(there), list(said.items())
    shuffler.shuffle(mixed)
    shuffler.shuffle(items)
    second = wanted_instances(given_, mixed, dict(items))
    assert dict(second.entries) == dict(first.entries)
    assert sorted(second.troubles) == sorted(first.troubles)


@given(flags, members, changes)
def test_names_and_addresses_are_had_once_and_words_are_kept(
    given_, there, said
) -> None:
    """What is removed is not there, what drains gets nothing."""
    said = named(said)
    entries = wanted_instances(given_, there, said).entries
    assert all(name == entry.config.name for name, entry in entries.items())
    assert len({entry.config.url for entry in entries.values()}) == len(entries)
    leases = {(each.name, each.incarnation): each for each in there}
    for name, entry in entries.items():
        lease = leases.get((entry.member, entry.incarnation))
        assert (lease is None) == (entry.member == "")
        if lease is not None:
            assert lease.endpoints["http"] == entry.config.url
            assert entry.is_draining or not lease.draining
        change = said.get(name, Change())
        if not change.incarnation:
            assert not change.removed or change.words
            assert entry.is_draining or not change.draining


@given(flags, members, changes, members)
def test_what_is_over_means_nothing_now_and_later(given_, there, said, later) -> None:
    """So whoever takes it away, and when, makes no difference: two leaders neither."""
    said = named(said)
    kept = {n: c for n, c in said.items() if not is_over(c, n, there)}
    assert wanted_instances(given_, there, said) == wanted_instances(
        given_, there, kept
    )
    # Incarnations only grow: what comes later under a name has a higher one, or is the
    # same start as now.
    now = {each.name: each.incarnation for each in there}
    last = {
        n: max([c.incarnation for k, c in said.items() if k == n] + [now.get(n, 0)])
        for n in NAMES
    }
    after = [
        Member(
            each.name,
            each.instance,
            last[each.name] + each.incarnation,
            each.kind,
            each.endpoints,
            each.draining,
        )
        for each in later
    ]
    after += [each for each in there if each.name not in {m.name for m in later}]
    for name, change in said.items():
        if is_over(change, name, there):
            assert is_over(change, name, after)
    assert wanted_instances(given_, after, said) == wanted_instances(
        given_, after, kept
    )

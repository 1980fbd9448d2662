"""Names of namespaces: kept while there are pages, few of them otherwise."""

from __future__ import annotations

import pytest

from sgl_tiered.serving.namespaces import MAX_NAME_BYTES, NamedSpaces, is_too_long


class Pages:
    """Which namespaces have pages."""

    def __init__(self):
        self.digests = set()
        self.num_asked = 0
        self.spaces = NamedSpaces(self.has_pages)

    def has_pages(self, digest):
        self.num_asked += 1
        return digest in self.digests

    def name(self, tenant, has_pages=False):
        digest = tenant.to_bytes(16, "little")
        self.spaces.add(("", f"salt {tenant}"), digest)
        if has_pages:
            self.digests.add(digest)
        return digest

    def lose(self, digest):
        self.digests.remove(digest)
        self.spaces.lost_pages(digest)


def test_names_without_pages_are_bounded():
    """However many tenants come; the latest are known."""
    pages = Pages()
    for tenant in range(20_000):
        pages.name(tenant)
    assert pages.spaces.num_empty == len(pages.spaces) < 4096
    assert pages.spaces.get(("", "salt 19999")) == (19_999).to_bytes(16, "little")
    assert pages.spaces.get(("", "salt 0")) is None


def test_names_with_pages_stay():
    """They are told to others; those of the others come and go."""
    pages = Pages()
    mine = [pages.name(tenant, has_pages=True) for tenant in range(3000)]
    for tenant in range(3000, 30_000):
        pages.name(tenant)
    assert all(pages.spaces.names_of(digest) for digest in mine)
    pages.spaces.drop_empty()
    assert (len(pages.spaces), pages.spaces.num_empty) == (3000, 0)
    pages.lose(mine[0])
    assert pages.spaces.num_empty == 1
    pages.spaces.drop_empty()
    assert (len(pages.spaces), pages.spaces.num_empty) == (2999, 0)
    assert pages.spaces.names_of(mine[0]) is None


def test_a_look_at_the_names_costs_what_has_changed():
    """Of many tenants with pages, only new ones and those that lost theirs count."""
    pages = Pages()
    mine = [pages.name(tenant, has_pages=True) for tenant in range(20_000)]
    pages.spaces.drop_empty()
    pages.num_asked = 0
    for tenant in range(20_000, 20_100):
        pages.name(tenant, has_pages=True)
        pages.lose(mine.pop())
        pages.spaces.drop_empty()
    assert (len(pages.spaces), pages.spaces.num_empty) == (20_000, 0)
    assert pages.num_asked <= 200


def test_names_whose_pages_go_are_bounded_while_nobody_is_idle():
    """Each tenant's pages push out those of another one, without a pause."""
    pages = Pages()
    alive = []
    for tenant in range(20_000):
        alive.append(pages.name(tenant, has_pages=True))
        if len(alive) > 100:
            pages.lose(alive.pop(0))
    assert len(pages.spaces) < 4096
    assert all(pages.spaces.names_of(digest) for digest in alive)


def test_new_names_are_told_once():
    """Also of a namespace that was forgotten and is named again."""
    pages = Pages()
    first = pages.name(1)
    assert pages.spaces.take_new() == [first]
    assert pages.spaces.take_new() == []
    pages.spaces.drop_empty()
    pages.name(1)
    assert pages.spaces.take_new() == [first]
    second = pages.name(2)
    pages.spaces.drop_empty()
    assert second not in pages.spaces.take_new(), "nobody can tell its name any more"


@pytest.mark.parametrize("letter", ["x", "ü", "\ud800"])
def test_a_long_name_is_not_kept(letter):
    """By its bytes; one that is no text neither."""
    num = MAX_NAME_BYTES // len(letter.encode(errors="replace"))
    assert not is_too_long(letter * num)
    assert is_too_long(letter * (num + 1))
    pages = Pages()
    pages.spaces.add((letter * (num + 1), ""), bytes(16))
    assert len(pages.spaces) == 0


def test_adapters_of_equal_content_share_a_namespace_and_leave_no_names():
    """One by another name is named beside it; each is forgotten with its adapter."""
    pages = Pages()
    spaces, ids = pages.spaces, ["a" * 32, "b" * 32]
    for tenant in range(5000):
        for lora_id in ids:
            spaces.add((lora_id, f"salt {tenant}"), tenant.to_bytes(16, "little"))
    assert len(spaces) < 8192, "names without pages"
    spaces.drop_empty()
    assert len(spaces) == 0
    shared = bytes(16)
    pages.digests.add(shared)
    for lora_id in ids:
        spaces.add((lora_id, ""), shared)
    spaces.forget_adapter(ids[0])
    assert spaces.names_of(shared) == (ids[1], ""), "the other adapter is still there"
    assert spaces.get((ids[0], "")) is None
    spaces.forget_adapter(ids[1])
    assert (len(spaces), spaces.names_of(shared), spaces.take_new()) == (0, None, [])

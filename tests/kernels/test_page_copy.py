"""The page copies move exactly the bytes that they were told to, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from sgl_tiered_kernels import page_copy
from sgl_tiered_kernels.page_copy import backend, reference

SIZES = [1, 7, 8, 63, 64, 513, 4096]


def region(seed, rows, row_bytes):
    return np.random.default_rng(seed).integers(0, 256, (rows, row_bytes), np.uint8)


def pick(seed, rows, count):
    return np.random.default_rng(seed).permutation(rows)[:count].astype(np.int64)


@pytest.fixture(params=["numba", "reference"])
def each_backend(request, monkeypatch):
    """Run a test with numba and, as where it is not installed, without."""
    if request.param == "numba":
        pytest.importorskip("numba")
        yield
        return
    monkeypatch.setattr(page_copy, "load_backend", lambda: reference)
    yield


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offsets", [(0, 0), (3, 0), (8, 16)])
def test_rows_equal_the_reference_and_nothing_else_changes(nbytes, offsets):
    """Every byte of the destination is what plain numpy leaves there."""
    to_offset, from_offset = offsets
    dst, src = region(0, 11, nbytes + 29), region(1, 9, nbytes + 17)
    to_rows, from_rows = pick(2, 11, 6), pick(3, 9, 6)
    expected = dst.copy()
    expected[to_rows, to_offset : to_offset + nbytes] = src[
        from_rows, from_offset : from_offset + nbytes
    ]
    page_copy.copy_rows(dst, to_rows, to_offset, src, from_rows, from_offset, nbytes)
    np.testing.assert_array_equal(dst, expected)


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("nbytes", SIZES)
def test_a_layer_goes_down_and_comes_back(nbytes):
    """gather_layer then copy_layer restores the layer, in other pages."""
    keys, values = region(0, 8, nbytes), region(1, 8, nbytes)
    host = region(2, 13, 6 * nbytes)
    untouched = host.copy()
    pages, host_pages, new_pages = pick(3, 8, 5), pick(4, 13, 5), pick(5, 8, 5)
    page_copy.gather_layer(
        host, host_pages, 2 * nbytes, 3 * nbytes, keys, values, pages, nbytes
    )
    untouched[host_pages, 2 * nbytes : 3 * nbytes] = keys[pages]
    untouched[host_pages, 3 * nbytes : 4 * nbytes] = values[pages]
    np.testing.assert_array_equal(host, untouched)

    new_keys, new_values = region(6, 8, nbytes), region(7, 8, nbytes)
    want_keys, want_values = new_keys.copy(), new_values.copy()
    want_keys[new_pages], want_values[new_pages] = keys[pages], values[pages]
    page_copy.copy_layer(
        new_keys,
        new_values,
        new_pages,
        host,
        host_pages,
        2 * nbytes,
        3 * nbytes,
        nbytes,
    )
    np.testing.assert_array_equal(new_keys, want_keys)
    np.testing.assert_array_equal(new_values, want_values)


@pytest.mark.usefixtures("each_backend")
def test_wide_types_are_copied_as_bytes():
    """Arrays of any item size are accepted, offsets being bytes."""
    dst, src = np.zeros((3, 4), np.int64), np.arange(12, dtype=np.int64).reshape(3, 4)
    page_copy.copy_rows(dst, [2], 8, src, [1], 16, 16)
    assert dst.tolist() == [[0] * 4, [0] * 4, [0, 6, 7, 0]]


@pytest.mark.usefixtures("each_backend")
def test_no_rows_and_no_bytes_are_no_work():
    """Empty row lists and zero bytes leave everything as it is."""
    dst, src = region(0, 4, 16), region(1, 4, 16)
    before = dst.copy()
    page_copy.copy_rows(dst, [], 0, src, [], 0, 16)
    page_copy.copy_rows(dst, [1], 16, src, [2], 16, 0)
    np.testing.assert_array_equal(dst, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dst_rows": [4]}, "dst"),
        ({"dst_rows": [-1]}, "dst"),
        ({"src_rows": [5]}, "src"),
        ({"src_rows": [-1]}, "src"),
        ({"dst_offset": 9}, "dst"),
        ({"dst_offset": -1}, "dst"),
        ({"src_offset": 17}, "src"),
        ({"nbytes": -1}, "dst"),
        ({"dst_rows": [0, 1]}, "differ in length"),
        ({"dst_rows": [0.5]}, "row numbers"),
        ({"dst_rows": [[0]]}, "row numbers"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_copied(arguments, message):
    """A wrong row, offset or size is a ValueError that names the array."""
    dst, src = region(0, 4, 16), region(1, 5, 24)
    before = dst.copy()
    call = {
        "dst_rows": [0],
        "dst_offset": 0,
        "src_rows": [0],
        "src_offset": 0,
        "nbytes": 8,
    }
    with pytest.raises(ValueError, match=message):
        page_copy.copy_rows(dst, src=src, **(call | arguments))
    np.testing.assert_array_equal(dst, before)


@pytest.mark.parametrize("which", ["k_dst", "v_dst", "src"])
def test_a_layer_copy_checks_each_of_its_arrays(which):
    """The block must fit into keys, values and the host page alike."""
    arrays = {
        "k_dst": region(0, 4, 16),
        "v_dst": region(1, 4, 16),
        "src": region(2, 4, 32),
    }
    arrays[which] = arrays[which][:, :12].copy()
    with pytest.raises(ValueError, match=which):
        page_copy.copy_layer(
            **arrays, dst_rows=[0], src_rows=[0], k_offset=0, v_offset=16, nbytes=16
        )


@pytest.mark.parametrize("which", ["dst", "k_src", "v_src"])
def test_a_layer_gather_checks_each_of_its_arrays(which):
    """The block must fit into the host page, keys and values alike."""
    arrays = {
        "dst": region(2, 4, 32),
        "k_src": region(0, 4, 16),
        "v_src": region(1, 4, 16),
    }
    arrays[which] = arrays[which][:, :12].copy()
    with pytest.raises(ValueError, match=which):
        page_copy.gather_layer(
            **arrays, dst_rows=[0], src_rows=[0], k_offset=0, v_offset=16, nbytes=16
        )


def aligned(seed, rows, row_bytes):
    """Return rows that begin with a cache line if their size is whole lines."""
    memory = np.zeros(rows * row_bytes + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    found = memory[begin : begin + rows * row_bytes].reshape(rows, row_bytes)
    found[:] = region(seed, rows, row_bytes)
    return found


@pytest.fixture
def team(monkeypatch):
    """Let three threads share a copy, also where tests give torch but one."""
    pytest.importorskip("numba")
    from sgl_tiered_kernels.page_copy import team

    if team._libgomp() is None:
        pytest.skip("torch has no libgomp here")
    monkeypatch.setattr(team, "team_size", lambda: 3)
    monkeypatch.setattr(page_copy, "load_team", lambda: team)


@pytest.fixture(params=["numba", "reference", "team"])
def each_form(request, monkeypatch):
    """As ``each_backend``, and a team; return its words for a call."""
    if request.param == "reference":
        monkeypatch.setattr(page_copy, "load_backend", lambda: reference)
        return {}
    pytest.importorskip("numba")
    if request.param == "numba":
        return {}
    request.getfixturevalue("team")
    return {"by_team": True}


@pytest.mark.parametrize("make", [region, aligned])
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("spare", [0, 64])
def test_a_layer_is_copied_to_two_places(nbytes, make, each_form, spare):
    """Pages without a second place reach the first; no other byte changes."""
    host = region(2, 13, 4 * nbytes + 3)
    first = [make(0, 8, nbytes + spare), make(1, 8, nbytes + spare)]
    second = [make(3, 9, nbytes), make(4, 9, nbytes)]
    pages, host_pages, rows = pick(5, 8, 6), pick(6, 13, 6), pick(7, 9, 6)
    rows[[1, 4]] = -1
    want_first, want_second = [a.copy() for a in first], [a.copy() for a in second]
    for to, also, at in zip(want_first, want_second, (nbytes, 3 * nbytes), strict=True):
        to[pages, :nbytes] = host[host_pages, at : at + nbytes]
        there = rows >= 0
        also[rows[there]] = host[host_pages[there], at : at + nbytes]
    page_copy.copy_layer_twice(
        *first,
        pages,
        *second,
        rows,
        host,
        host_pages,
        nbytes,
        3 * nbytes,
        nbytes,
        **each_form,
    )
    for found, want in zip(first + second, want_first + want_second, strict=True):
        np.testing.assert_array_equal(found, want)


def test_no_pages_go_to_no_two_places(each_form):
    """An empty list is no work."""
    places = [region(seed, 2, 64) for seed in range(4)]
    before = [place.copy() for place in places]
    page_copy.copy_layer_twice(
        *places[:2], [], *places[2:], [], region(5, 2, 128), [], 0, 64, 64, **each_form
    )
    for place, was in zip(places, before, strict=True):
        np.testing.assert_array_equal(place, was)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dst_rows": [4]}, "k_dst"),
        ({"also_rows": [4]}, "k_also"),
        ({"also_rows": [-2]}, "k_also"),
        ({"also_rows": [0, 1]}, "differ in length"),
        ({"src_rows": [4]}, "src"),
        ({"v_offset": 17}, "src"),
        ({"v_also": np.zeros((4, 12), np.uint8)}, "v_also"),
    ],
)
def test_two_places_are_checked_before_anything_is_copied(changes, message):
    """Each place must have the row, and the block must fit into it."""
    call = {name: region(0, 4, 16) for name in ("k_dst", "v_dst", "k_also", "v_also")}
    call |= {"src": region(2, 4, 32), "k_offset": 0, "v_offset": 16, "nbytes": 16}
    call |= {"dst_rows": [0], "src_rows": [0], "also_rows": [0]}
    before = call["k_dst"].copy()
    with pytest.raises(ValueError, match=message):
        page_copy.copy_layer_twice(**(call | changes))
    np.testing.assert_array_equal(call["k_dst"], before)


@pytest.mark.parametrize("bad", [np.zeros(16, np.uint8), np.zeros((4, 32))[:, ::2]])
def test_arrays_that_are_not_rows_in_memory_are_refused(bad):
    """One-dimensional and strided arrays are a ValueError."""
    with pytest.raises(ValueError, match="C-contiguous"):
        page_copy.copy_rows(bad, [0], 0, region(0, 4, 16), [0], 0, 8)


def test_the_backend_is_named_and_prepared():
    """prepare compiles what backend_name names, and both agree."""
    assert page_copy.prepare() == page_copy.backend_name()
    expected = "cpu" if page_copy.backend_name() == "numba" else "reference"
    assert backend.load_backend().__name__.endswith(expected)


@pytest.mark.parametrize(
    "name", ["copy_rows", "copy_layer", "copy_layer_twice", "gather_layer"]
)
def test_the_compiled_copies_release_the_gil(name):
    """Each entry is compiled to run without the GIL."""
    pytest.importorskip("numba")
    from sgl_tiered_kernels.page_copy import cpu

    assert getattr(cpu, name).targetoptions["nogil"] is True


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_team_copies_the_same_bytes(nbytes, count):
    """Torch's threads share the rows; none is left out, none done twice."""
    host = region(2, 13, 4 * nbytes)
    keys, values = region(0, 8, nbytes), region(1, 8, nbytes)
    pages, host_pages = pick(3, 8, count), pick(4, 13, count)
    want_keys, want_values = keys.copy(), values.copy()
    want_keys[pages] = host[host_pages, nbytes : 2 * nbytes]
    want_values[pages] = host[host_pages, 3 * nbytes :]
    page_copy.copy_layer(
        keys,
        values,
        pages,
        host,
        host_pages,
        nbytes,
        3 * nbytes,
        nbytes,
        by_team=True,
    )
    np.testing.assert_array_equal(keys, want_keys)
    np.testing.assert_array_equal(values, want_values)

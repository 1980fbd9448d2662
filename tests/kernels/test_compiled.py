"""Triton kernels compile for every architecture, with the registers of the table."""

from __future__ import annotations

import copy
import importlib
import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

FOLDER = Path(__file__).parents[2] / "benchmarks/gpu"
TABLE = {"triton": "1", "kernels": {"a:bf16": {"sm_90": [40, 0]}}}
ROW = {"name": "a:bf16", "sm": 90, "registers": 40, "spill_bytes": 0, "error": ""}


@pytest.fixture
def program(monkeypatch):
    """The compiling program as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("compile_kernels")
    for name in ("compile_kernels", "launches"):
        sys.modules.pop(name, None)


def problems(program, rows, table=TABLE, version="1", is_whole=False):
    """Return the lines of what is wrong, and how many rows were compared."""
    lines, told = program.compare(rows, table, version, is_whole=is_whole)
    return lines, told["compared"]


@pytest.fixture
def stands_alone(monkeypatch):
    """No program is interpreted, whatever a test before this one has set."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("stands_alone")
def test_one_variant_of_each_kernel_compiles_for_each_architecture(program, capsys):
    """By the ptxas of the wheel; registers and spills are those of the table."""
    assert program.main(["--sample", "--jobs", "1"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["sm"] == [80, 90, 100]
    assert told["variants"] == 3 * told["programs"] >= 27
    assert told["failed"] == told["regressions"] == 0
    assert told["spilling"] == []


@pytest.mark.usefixtures("stands_alone")
def test_a_table_with_a_planted_figure_ends_with_status_1(program, tmp_path, capsys):
    """What was compiled is compared, and not only counted."""
    table = json.loads(program.TABLE.read_text())
    table["kernels"]["copy_rows:words"]["sm_90"][0] += 1
    planted = tmp_path / "kernels.json"
    planted.write_text(json.dumps(table))
    words = ["--only", "copy_rows:words", "--sm", "90", "--jobs", "1"]
    assert program.main([*words, "--table", str(planted)]) == 1
    assert "copy_rows:words sm_90" in capsys.readouterr().out
    assert program.main(words) == 0


@pytest.mark.usefixtures("stands_alone")
@pytest.mark.parametrize(
    ("name", "num_loads", "caches"),
    [
        ("up_llama8b_page16", 2, ("", "")),
        ("down_llama8b_page16", 2, ("", "")),
        ("up_wide", 4, ("", "")),
        ("up_streams", 2, (".cg", ".cs")),
        ("down_wide_streams", 4, (".cg", ".cs")),
    ],
)
def test_pages_move_by_128_bits_where_all_addresses_allow_it(
    program, name, num_loads, caches
):
    """In the text of each architecture: no word goes singly, and nothing waits.

    All that a thread has of a block is read before any of it is written.
    """
    launches = importlib.import_module("launches")
    (variant,) = [v for v in launches.all_variants() if v.name == f"parts:{name}"]
    for sm in program.ARCHITECTURES:
        text = program.compiled(variant, sm).asm["ptx"]
        found = Counter(re.findall(r"(ld|st)\.global\S*?\.((?:v\d\.)?b\d+)", text))
        # Besides: the row, the page and the address of the buffer.
        assert found == {
            ("ld", "b64"): 3,
            ("ld", "v4.b32"): num_loads,
            ("st", "v4.b32"): num_loads,
        }
        moves = re.findall(r"(ld|st)\.global(\S*?)\.v4\.b32", text)
        load, store = (("ld", caches[0]), ("st", caches[1]))
        assert moves == num_loads * [load] + num_loads * [store]
        assert "bar.sync" not in text


@pytest.mark.usefixtures("stands_alone")
@pytest.mark.parametrize("part_bytes", [32 << 10, 8 << 10, 2000, 84, 6])
@pytest.mark.parametrize("alignment", [16, 4])
def test_a_pool_needs_one_program_each_way(program, part_bytes, alignment):
    """However many pages there are, of whichever layer, and wherever numbers lie."""
    del program
    launches = importlib.import_module("launches")
    from sgl_tiered_kernels.page_copy import triton as kernels

    layers, row_bytes = 5, 4096 * -(-10 * part_bytes // 4096)
    whole = torch.empty((40, row_bytes), dtype=torch.uint8)
    table = torch.zeros((layers, 2), dtype=torch.int64)
    numbers = torch.zeros(40, dtype=torch.int64)

    def load(layer, count, first):
        chosen = numbers[first : first + count]
        at = layer * 2 * part_bytes
        kernels.scatter_parts(
            table[layer], chosen, whole, chosen, at, part_bytes, alignment=alignment
        )

    def gather(count, first):
        kernels.gather_parts(
            whole,
            numbers[:count],
            0,
            table.view(-1),
            numbers[first : first + count],
            part_bytes,
            alignment=alignment,
        )

    def serve():
        for count, first in ((1, 0), (1, 1), (2, 3), (8, 0), (16, 0), (17, 5)):
            gather(count, first)
            for layer in range(layers):
                load(layer, count, first)

    def warm():
        load(0, 1, 0)
        gather(1, 0)

    ready = {variant.key for variant in launches.launches_of(kernels, warm)}
    assert {variant.key for variant in launches.launches_of(kernels, serve)} == ready
    assert len(ready) == 2


@pytest.mark.usefixtures("stands_alone")
def test_a_layer_is_rebuilt_by_one_program(program):
    """Of any number of tokens, wherever their numbers lie."""
    del program
    launches = importlib.import_module("launches")
    from sgl_tiered_kernels.kv_gen import KVProjection, Rotary
    from sgl_tiered_kernels.kv_gen import triton as kv_gen

    projection = KVProjection(
        torch.empty((2 * 2 * 8, 32)), None, 2, 8, Rotary(torch.empty((64, 8)))
    )
    acts, out = torch.empty((32, 32)), torch.empty((32, 2, 8))

    def rebuild(count):
        rows, slots, positions = torch.zeros(3 * count, dtype=torch.int64).view(3, -1)
        kv_gen.rebuild_kv(acts, rows, projection, out, out.clone(), slots, positions)

    def serve():
        for count in (1, 2, 3, 16, 21):
            rebuild(count)

    assert len({one.key for one in launches.launches_of(kv_gen, serve)}) == 1


@pytest.mark.usefixtures("stands_alone")
def test_variants_are_told_apart_as_triton_does(program):
    """Types, constants and alignments of each launch are those of its own binder."""
    del program
    launches = importlib.import_module("launches")
    jit = pytest.importorskip("triton.runtime.jit")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", 90, 32))
    variants = launches.all_variants()
    assert {one.kernel.__name__ for one in variants} >= {"_parts_kernel"}
    for variant in variants:
        kernel = variant.kernel
        bind = jit.create_function_from_signature(
            kernel.signature, kernel.params, backend
        )
        _, found, _ = bind(**variant.arguments)
        types = dict(zip(kernel.arg_names, (kind for kind, _ in found), strict=True))
        divisible = {(i,) for i, (_, how) in enumerate(found) if how == "D"}
        assert types == variant.signature, variant.name
        assert divisible == set(variant.attributes), variant.name


@pytest.mark.full
@pytest.mark.usefixtures("stands_alone")
def test_all_variants_compile_for_each_architecture(program, capsys):
    """Every type, shape and constant that the product launches."""
    assert program.main([]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["spilling"] == []


def test_the_table_has_what_the_product_launches(program):
    """A launch of another kind needs its row, and one that is gone has none."""
    table = json.loads(program.TABLE.read_text())
    assert sorted(program.variant_names()) == sorted(table["kernels"])
    architectures = {f"sm_{sm}" for sm in program.ARCHITECTURES}
    assert all(set(row) == architectures for row in table["kernels"].values())
    spills = [row[sm][1] for row in table["kernels"].values() for sm in architectures]
    assert not any(spills)


def test_other_figures_than_the_tables_are_caught(program):
    """More registers or spills are a regression; fewer ask for a new table."""
    assert problems(program, [ROW]) == ([], 1)
    planted = copy.deepcopy(TABLE)
    planted["kernels"]["a:bf16"]["sm_90"] = [39, 0]
    (line,), _ = problems(program, [ROW], planted)
    assert line == "regression: a:bf16 sm_90: 40 registers, was 39"
    planted["kernels"]["a:bf16"]["sm_90"] = [41, 0]
    (line,), _ = problems(program, [ROW], planted)
    assert line.startswith("better than the table (--write): a:bf16 sm_90: 40")


def test_nothing_may_spill(program):
    """Both where the table knows of it, and where it does not."""
    spills = ROW | {"spill_bytes": 8}
    lines, _ = problems(program, [spills])
    assert lines == [
        "spills 8 bytes: a:bf16 sm_90",
        "regression: a:bf16 sm_90: 8 bytes of spills, was 0",
    ]
    table = {"triton": "1", "kernels": {"a:fp32": {"sm_90": [40, 8]}}}
    lines, _ = problems(program, [spills | {"name": "a:fp32"}], table)
    assert lines == ["spills 8 bytes: a:fp32 sm_90"]


def test_what_does_not_compile_or_is_not_known_is_told(program):
    """With the beginning of the error; and what only the table has, of a whole run."""
    lines, _ = problems(program, [ROW | {"error": "ptxas: no"}])
    assert lines == ["does not compile: a:bf16 sm_90: ptxas: no"]
    lines, _ = problems(program, [ROW | {"name": "b"}], is_whole=True)
    assert lines == [
        "not in the table (--write): b sm_90",
        "in the table and not launched any more (--write): a:bf16 sm_90",
    ]


def test_figures_of_another_triton_are_not_compared(program):
    """One sentence says so, as what fails; spills are told all the same."""
    worse = ROW | {"registers": 99}
    (line,), num_compared = problems(program, [worse], version="2")
    assert "Triton 1, and this is 2" in line
    assert num_compared == 0
    assert len(problems(program, [worse | {"spill_bytes": 4}], version="2")[0]) == 2


@pytest.mark.usefixtures("stands_alone")
def test_another_triton_than_the_tables_ends_with_status_1(program, tmp_path, capsys):
    """Else an upgrade would pass with nothing compared."""
    table = json.loads(program.TABLE.read_text()) | {"triton": "0"}
    other = tmp_path / "kernels.json"
    other.write_text(json.dumps(table))
    words = ["--only", "copy_rows:words", "--sm", "90", "--jobs", "1"]
    assert program.main([*words, "--table", str(other)]) == 1
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("nothing is compared: the table is of Triton 0")
    assert json.loads(last)["other_triton"] == 1


def test_a_part_of_the_table_can_be_made_anew(program):
    """The rest stays; what is not launched any more goes; so do another Triton's."""
    fresh = ROW | {"name": "b", "registers": 12}
    table = program.merged([fresh], TABLE, "1", ["b", "a:bf16"])
    assert table["kernels"] == {"a:bf16": {"sm_90": [40, 0]}, "b": {"sm_90": [12, 0]}}
    assert list(program.merged([fresh], TABLE, "1", ["b"])["kernels"]) == ["b"]
    assert list(program.merged([fresh], TABLE, "2", ["b", "a:bf16"])["kernels"]) == [
        "b"
    ]

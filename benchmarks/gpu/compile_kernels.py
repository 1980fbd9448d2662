"""Compile every Triton kernel variant that the product launches; no GPU is needed.

    python benchmarks/gpu/compile_kernels.py             # all, for sm_80, sm_90, sm_100
    python benchmarks/gpu/compile_kernels.py --sample    # one variant of each kernel
    python benchmarks/gpu/compile_kernels.py --write     # and make the table anew
    python benchmarks/gpu/compile_kernels.py --write --only parts   # a part of it

``ptxas`` comes with the triton wheel (one of its own for Blackwell). Registers and
bytes of spills of each variant are compared with ``kernels.json`` beside this file. It
fails where a variant does not compile, where a figure differs from the table (a worse
one is a regression; a better one asks for ``--write``, so that it stays), where a
variant spills, and where Triton is not the version that made the table: its compiler
allocates otherwise, so that nothing can be compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("kernels.json")
ARCHITECTURES = (80, 90, 100)
_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_ERROR_CHARS = 400

Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Compile, compare and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sample", action="store_true", help="one of each kernel")
    parser.add_argument("--only", default="", help="variants whose name has this")
    parser.add_argument("--sm", type=int, nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--write", action="store_true", help="make the table anew")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    args = parser.parse_args(argv)
    if args.write and (args.sample or args.sm != list(ARCHITECTURES)):
        parser.error("--write takes all architectures, and --only at most")
    began = time.perf_counter()
    rows = list(_compile_all(args.sm, args.jobs, sample=args.sample, only=args.only))
    table = json.loads(args.table.read_text(encoding="utf-8"))
    if args.write:
        table = merged(rows, table, triton_version(), variant_names())
        args.table.write_text(_as_text(table), encoding="utf-8")
    is_whole = not (args.sample or args.only)
    problems, told = compare(rows, table, triton_version(), is_whole=is_whole)
    for line in [*_table_lines(rows), *problems]:
        print(line)
    failed = [f"{row['name']} sm_{row['sm']}" for row in rows if row["error"]]
    spilling = sorted({row["name"] for row in rows if row["spill_bytes"]})
    summary = {
        "variants": len(rows),
        "programs": len({row["name"] for row in rows}),
        "sm": sorted({row["sm"] for row in rows}),
        "failed": len(failed),
        "failed_names": failed[:10],
        "spilling": spilling,
        **told,
        "triton": triton_version(),
        "seconds": round(time.perf_counter() - began, 1),
        "ok": not problems,
    }
    print(json.dumps(summary))
    return 0 if summary["ok"] else 1


def variant_names() -> list[str]:
    """Return the names of all variants, found by calling the product."""
    sys.path.insert(0, str(Path(__file__).parent))
    from launches import all_variants

    return [variant.name for variant in all_variants()]


def triton_version() -> str:
    """Return the version whose compiler and ptxas made the figures."""
    import triton

    return str(triton.__version__)


def compare(
    rows: list[Row], table: dict[str, Any], version: str, *, is_whole: bool
) -> tuple[list[str], dict[str, int]]:
    """Return one line per problem, and how many there are of each kind.

    Args:
        rows: as compiled: name, sm, registers, spill_bytes, error.
        table: what is committed: ``triton``, and [registers, spill_bytes] by variant
            and ``sm_*``.
        version: of the Triton that compiled.
        is_whole: the rows are all there are, so what only the table has is gone.
    """
    problems: dict[str, list[str]] = {
        "other_triton": [],
        "not_compiled": [],
        "spills": [],
        "regressions": [],
        "better": [],
        "unknown": [],
        "gone": [],
    }
    wanted = table["kernels"]
    is_comparable = table["triton"] == version
    if not is_comparable:
        problems["other_triton"].append(
            f"nothing is compared: the table is of Triton {table['triton']}, and this "
            f"is {version}; install that one, or make the table anew (--write)"
        )
    seen = set()
    for row in rows:
        where = f"{row['name']} sm_{row['sm']}"
        seen.add((row["name"], f"sm_{row['sm']}"))
        if row["error"]:
            problems["not_compiled"].append(
                f"does not compile: {where}: {row['error']}"
            )
            continue
        if row["spill_bytes"]:
            problems["spills"].append(f"spills {row['spill_bytes']} bytes: {where}")
        known = wanted.get(row["name"], {}).get(f"sm_{row['sm']}")
        if not is_comparable:
            continue
        if known is None:
            problems["unknown"].append(f"not in the table (--write): {where}")
            continue
        for what, now, then in zip(
            ("registers", "bytes of spills"),
            (row["registers"], row["spill_bytes"]),
            known,
            strict=True,
        ):
            if now != then:
                kind = "regressions" if now > then else "better"
                word = "regression" if now > then else "better than the table (--write)"
                problems[kind].append(f"{word}: {where}: {now} {what}, was {then}")
    if is_whole and is_comparable:
        pairs = ((name, sm) for name, by_sm in wanted.items() for sm in by_sm)
        problems["gone"] = [
            f"in the table and not launched any more (--write): {name} {sm}"
            for name, sm in pairs
            if (name, sm) not in seen
        ]
    counts = {kind: len(lines) for kind, lines in problems.items()}
    counts["compared"] = len(rows) if is_comparable else 0
    return [line for lines in problems.values() for line in lines], counts


def _compile_all(
    architectures: list[int], jobs: int, *, sample: bool, only: str
) -> Iterator[Row]:
    """Yield one row per variant and architecture, in that order."""
    sys.path.insert(0, str(Path(__file__).parent))
    from launches import all_variants

    kept = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        _variants.extend(
            one
            for one in all_variants()
            if (one.is_sample or not sample) and only in one.name
        )
        work = [(n, sm) for n in range(len(_variants)) for sm in architectures]
        try:
            if jobs <= 1:
                yield from map(_compile, work)
                return
            # Forked: the variants need not be found again by each process.
            with multiprocessing.get_context("fork").Pool(jobs) as pool:
                yield from pool.imap(_compile, work, chunksize=4)
        finally:
            _variants.clear()
            if kept is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = kept


_variants: list[Any] = []


def compiled(variant: Any, sm: int) -> Any:
    """Return what Triton makes of a variant for an architecture: ``asm["ptx"]`` etc.

    Args:
        variant: of ``launches.py``.
        sm: 90 for sm_90.
    """
    from triton import compile as compile_source
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=variant.kernel,
        signature=variant.signature,
        constexprs=variant.constants,
        attrs=variant.attributes,
    )
    with knobs.compilation.scope():
        knobs.compilation.always_compile = True
        return compile_source(
            source, target=GPUTarget("cuda", sm, 32), options=variant.options
        )


def _compile(work: tuple[int, int]) -> Row:
    from triton import knobs

    number, sm = work
    variant = _variants[number]
    row: Row = {"name": variant.name, "sm": sm, "registers": 0, "spill_bytes": 0}
    log = io.StringIO()
    try:
        with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            # Triton runs ptxas with -v, and then prints what it said.
            knobs.nvidia.dump_ptxas_log = True
            compiled(variant, sm)
    except Exception as problem:  # noqa: BLE001 - every kind of failure is a row
        text = f"{type(problem).__name__}: {problem}"
        return row | {"error": text[:_ERROR_CHARS]}
    used, spills = _USED.search(log.getvalue()), _SPILLS.search(log.getvalue())
    if used is None or spills is None:
        return row | {"error": f"ptxas did not tell: {log.getvalue()[:_ERROR_CHARS]}"}
    return row | {
        "registers": int(used[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "error": "",
    }


def merged(
    rows: list[Row], table: dict[str, Any], version: str, names: list[str]
) -> dict[str, Any]:
    """Return a table with the figures of rows, and without what is not launched.

    Args:
        rows: as compiled.
        table: of before; what another Triton made of it is left out.
        version: of this one.
        names: of all variants.
    """
    kernels = dict(table["kernels"]) if table["triton"] == version else {}
    for name in {row["name"] for row in rows}:
        kernels[name] = {
            f"sm_{row['sm']}": [row["registers"], row["spill_bytes"]]
            for row in rows
            if row["name"] == name and not row["error"]
        }
    kept = {name: kernels[name] for name in sorted(names) if name in kernels}
    return {"triton": version, "kernels": kept}


def _as_text(table: dict[str, Any]) -> str:
    """Return JSON with a line per variant."""
    kernels = table["kernels"]
    text = ",\n".join(f'"{name}": {json.dumps(kernels[name])}' for name in kernels)
    return f'{{"triton": "{table["triton"]}", "kernels": {{\n{text}\n}}}}\n'


def _table_lines(rows: list[Row]) -> Iterator[str]:
    """Yield a line per variant: registers and bytes of spills by architecture."""
    by_name: dict[str, list[str]] = {}
    for row in rows:
        told = "failed" if row["error"] else str(row["registers"])
        if row["spill_bytes"]:
            told += f" (spills {row['spill_bytes']} B)"
        by_name.setdefault(row["name"], []).append(f"sm_{row['sm']} {told}")
    for name, figures in by_name.items():
        yield f"{name:44} {', '.join(figures)}"


if __name__ == "__main__":
    sys.exit(main())

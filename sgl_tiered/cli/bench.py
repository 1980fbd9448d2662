"""``sgl-tiered bench``: runs a comparison, reports it, compares two record files.

``gpu-report`` makes a page of a folder of ``benchmarks/gpu/session.py``.

The harness belongs to the workloads package and needs the extra ``[bench]``; it is
imported only when one of these commands runs, so the rest of the CLI does without.
Exit code 0 on success, 1 when the answers were not equal or a server did not start, 2
for a wrong specification, argument or file.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgl_tiered.cli.calibrate import check_folder

__all__ = ["register"]

_MISSING = (
    "bench needs more packages ({name} is absent): pip install 'sgl-tiered[bench]'"
)


_EXAMPLES = """\
examples:
  sgl-tiered bench run benchmarks/specs/chat.toml --out out/chat
  sgl-tiered bench report out/chat
  sgl-tiered bench compare out/chat/records/plain.jsonl out/chat/records/tiered.jsonl
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="run a benchmark specification, report it, compare two runs",
        description="Specification to records to report. No speed is reported unless "
        "the answers of the compared systems are equal. Exit code 0 when it is done, 1 "
        "when the answers were not equal or a server did not start, 2 for a wrong "
        "specification, argument or file.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a specification and report it")
    run.add_argument("spec", type=Path, help="a TOML file")
    run.add_argument("--out", type=Path, required=True, help="folder of the results")
    run.add_argument(
        "--models",
        type=Path,
        default=Path("out/models"),
        help="where models made on the spot are kept (default: %(default)s)",
    )
    run.add_argument("--first-port", type=int, help="default: any free ports")
    run.add_argument("--no-bar", action="store_true", help="show no progress bars")
    run.set_defaults(run=_guarded(_run))
    report = actions.add_parser("report", help="make the report of a run again")
    report.add_argument("out", type=Path, help="folder of the results")
    report.set_defaults(run=_guarded(_report))
    compare = actions.add_parser("compare", help="compare two record files")
    compare.add_argument("base", type=Path, help="records/SYSTEM.jsonl of one side")
    compare.add_argument("other", type=Path, help="and of the other")
    compare.add_argument(
        "--different-specs",
        action="store_true",
        help="compare although the specifications differ",
    )
    compare.set_defaults(run=_guarded(_compare))
    gpu = actions.add_parser(
        "gpu-report", help="make a page of a folder of benchmarks/gpu/session.py"
    )
    gpu.add_argument("dir", type=Path, metavar="DIR", help="its --out")
    gpu.set_defaults(run=_gpu_report)


Action = Callable[[argparse.Namespace], int]


def _guarded(action: Action) -> Action:
    """Turn what the harness refuses into one sentence and an exit code."""

    def run(arguments: argparse.Namespace) -> int:
        # These need no package beyond the base.
        from sgl_tiered_workloads.gate import NegativeControlError
        from sgl_tiered_workloads.harness.errors import GateRedError, HarnessError
        from sgl_tiered_workloads.params import WorkloadError
        from sgl_tiered_workloads.server import ServerStartError
        from sgl_tiered_workloads.traces.base import TraceError

        try:
            return action(arguments)
        except ModuleNotFoundError as error:
            print(f"sgl-tiered: {_MISSING.format(name=error.name)}", file=sys.stderr)
            return 2
        except (GateRedError, NegativeControlError, ServerStartError) as error:
            print(f"sgl-tiered: {error}", file=sys.stderr)
            return 1
        except (HarnessError, WorkloadError, TraceError, OSError) as error:
            print(f"sgl-tiered: {error}", file=sys.stderr)
            return 2

    return run


def _run(arguments: argparse.Namespace) -> int:
    from sgl_tiered_workloads.harness.runner import Comparison
    from sgl_tiered_workloads.harness.spec import load_spec
    from sgl_tiered_workloads.server import exit_on_signals

    spec = load_spec(arguments.spec)
    _check_place(arguments, spec)
    exit_on_signals()
    comparison = Comparison(
        spec,
        arguments.out,
        arguments.models,
        arguments.first_port,
        quiet=arguments.no_bar,
    )
    asyncio.run(comparison.run())
    return _report(arguments)


def _check_place(arguments: argparse.Namespace, spec: Any) -> None:
    """Check what the command line and this machine have to do with it.

    Raises:
        HarnessError: a value is wrong; nothing was started.
        ConfigError: the results have no place.
    """
    from sgl_tiered_workloads.harness.errors import SpecError

    # Two more servers than systems judge the answers.
    most = 65_535 - len(spec.started) - 2
    port = arguments.first_port
    if port is not None and not 1 <= port <= most:
        raise SpecError("--first-port", f"{port} is no port", f"give 1 to {most}")
    folder = Path(spec.model.path).expanduser()
    if spec.model.path and not (folder / "config.json").is_file():
        remedy = "give the folder of a Hugging Face model"
        raise SpecError("model.path", f"{folder} holds no config.json", remedy)
    check_folder(arguments.out)


def _report(arguments: argparse.Namespace) -> int:
    from sgl_tiered_workloads.harness.report import write_report

    paths = write_report(arguments.out)
    text = (arguments.out / "report.md").read_text(encoding="utf-8")
    print(text)
    print("written: " + ", ".join(str(path) for path in paths))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from sgl_tiered_workloads.harness.compare import compare_files, format_differences

    pairing = compare_files(arguments.base, arguments.other, arguments.different_specs)
    print(format_differences(pairing))
    return 0


def _gpu_report(arguments: argparse.Namespace) -> int:
    from sgl_tiered.cli.gpu_report import write_page

    try:
        paths, page = write_page(arguments.dir)
    except OSError as error:
        print(f"sgl-tiered: {error}", file=sys.stderr)
        return 2
    print(page.text)
    print("written: " + ", ".join(str(path) for path in paths))
    if not page.num_stages:
        print("sgl-tiered: the session has no stage to tell of.", file=sys.stderr)
        return 1
    return 0

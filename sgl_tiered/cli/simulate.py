"""``sgl-tiered simulate``: what a server with these tiers would do with this load."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import orjson

from sgl_tiered.cli.calibrate import check_folder, check_writable
from sgl_tiered.cli.capacity import (
    add_capacity_flags,
    check_capacity_flags,
    run_capacity_plan,
)
from sgl_tiered.cli.progress import progress
from sgl_tiered.cli.simulate_workload import make_workload
from sgl_tiered.cost.calibration import Calibration, read_calibration
from sgl_tiered.errors import ConfigError
from sgl_tiered.sim.answers import LengthReport
from sgl_tiered.sim.chrome import write_chrome_trace
from sgl_tiered.sim.records import SimResult
from sgl_tiered.sim.server import SimServer
from sgl_tiered.sim.settings import Setting, flag_of
from sgl_tiered.sim.spec import SETTINGS, SimSpec, read_spec
from sgl_tiered.sim.summary import Percentiles, SimSummary, Slo, summarize

__all__ = ["register"]

_CAVEAT = (
    "Simulated: quote it only with the simulator's error against a real run of the\n"
    "same kind. Profiles are data sheets; a calibration file replaces them."
)


_GROUPS = {
    "server": "server",
    "tiers": "tiers below the device",
    "scheduler": "scheduler",
    "workload": "load: a trace, a workload by name, or --rate",
    "slo": "targets",
}
"""Titles of the help by section of a file."""
_EXAMPLES = """\
examples:
  sgl-tiered simulate --rate 2 --num-prefixes 50 --prefix-tokens 1500 --host-gb 64
  sgl-tiered simulate --workload chat --params '{"num_sessions": 64}' --host-gb 64
  sgl-tiered simulate trace.jsonl --page-size 512 --hardware H100 --model Qwen3-8B \\
      --host-gb 256 --disk-gb 4000 --json
  sgl-tiered simulate trace.jsonl --page-size 512 --capacity-plan \\
      --host-sizes 0,64,256 --disk-sizes 0,2000 --out out/plan
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "simulate",
        help="serve a trace or a synthetic load on a modelled machine",
        description="What a server with these tiers would do with this load. A flag "
        "goes over the file's value. Exit code 0 when it ran, 1 when no request could "
        "run, 2 for a wrong setting.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "input",
        nargs="?",
        help="SPEC.toml, or a trace (Mooncake or WEKA JSON lines, gzipped or not)",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="folder for records, summary and Chrome trace"
    )
    parser.add_argument(
        "--explain",
        metavar="OUT.jsonl",
        help="write what became of each request: its waits by reason, its misses",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    defaults = {field.name: field.default for field in fields(SimSpec)}
    groups = {name: parser.add_argument_group(text) for name, text in _GROUPS.items()}
    for name, setting in SETTINGS.items():
        if name != "trace":
            _add_flag(groups[setting.section], name, setting, defaults[name])
    add_capacity_flags(parser)
    parser.set_defaults(run=run)


def _add_flag(group: Any, name: str, setting: Setting, default: Any) -> None:
    """Add the flag of one setting; unset it is None, so that a file's value stays."""
    if isinstance(default, bool):
        text = f"{setting.text} (default: {'yes' if default else 'no'})"
        group.add_argument(
            flag_of(name),
            action=argparse.BooleanOptionalAction,
            default=None,
            help=text,
        )
        return
    said = "" if default == "" else f" (default: {default})"
    unit = setting.unit
    if setting.choices:
        unit = "{" + ",".join(choice for choice in setting.choices if choice) + "}"
    group.add_argument(
        flag_of(name), type=type(default), metavar=unit, help=setting.text + said
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit code."""
    check_capacity_flags(arguments)
    spec = spec_of(arguments)
    if arguments.out:
        check_folder(Path(arguments.out))
    calibration = None
    if spec.calibration:
        calibration = read_calibration(Path(spec.calibration))
        if arguments.page_size is None:
            spec = replace(spec, page_size=calibration.model.page_tokens)
    if arguments.capacity_plan:
        return run_capacity_plan(arguments, spec, calibration)
    result, summary = simulate_spec(spec, calibration, arguments.explain)
    if arguments.json:
        print(orjson.dumps(summary).decode())
    else:
        print(table(spec, summary, calibration))
    if arguments.out:
        write_outputs(Path(arguments.out), spec, result, summary)
    if summary.num_aborted == summary.num_requests:
        print(
            f"sgl-tiered: none of the {summary.num_requests} requests could run: the "
            "device's KV pool holds no prompt of them with its answer; give more "
            "--device-gb or --tensor-parallel, or shorter prompts.",
            file=sys.stderr,
        )
        return 1
    return 0


def spec_of(arguments: argparse.Namespace) -> SimSpec:
    """Return the file's values with the flags' on top."""
    spec = SimSpec()
    values: dict[str, Any] = {}
    if arguments.input and arguments.input.endswith(".toml"):
        spec = read_spec(Path(arguments.input))
    elif arguments.input:
        values["trace"] = arguments.input
    for field in fields(SimSpec):
        value = getattr(arguments, field.name, None)
        if field.name != "trace" and value is not None:
            values[field.name] = value
    return spec.with_values(values)


def simulate_spec(
    spec: SimSpec, calibration: Calibration | None, explain: str | None = None
) -> tuple[SimResult, SimSummary]:
    """Run one spec; write what became of its requests to the file ``explain``."""
    config = replace(spec.server(calibration), explain=explain is not None)
    if explain is not None:
        check_writable(Path(explain), "--explain")
    workload = make_workload(spec)
    if not workload.requests:
        raise ConfigError("trace", "it holds no requests", "give another one")
    server = SimServer(config, workload)
    with progress("simulating", server.state):
        result = server.run()
    if explain is not None:
        _write_explanations(Path(explain), server)
    return result, summarize(result, Slo(spec.ttft_s, spec.tpot_s))


def _write_explanations(path: Path, server: SimServer) -> None:
    try:
        with path.open("wb") as file:
            for told in server.ledger.explanations():
                file.write(
                    orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
                )
    except OSError as error:
        raise ConfigError(
            "explain", f"{path} cannot be written ({error.strerror})", "give another"
        ) from None


def table(
    spec: SimSpec, summary: SimSummary, calibration: Calibration | None = None
) -> str:
    """Return the summary as text."""
    load = spec.trace or spec.workload or f"{spec.rate:g} requests/s"
    lines = [
        f"{_machine(spec, calibration)}; {load}",
        f"{summary.num_requests} requests in {summary.duration_s:.1f} s; "
        f"{summary.num_aborted} refused, {summary.num_retractions} retractions",
        "",
        f"{'':8}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}   seconds",
    ]
    rows: list[tuple[str, Percentiles]] = [
        ("TTFT", summary.ttft),
        ("queue", summary.queue),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("E2E", summary.e2e),
    ]
    for name, value in rows:
        numbers = (value.mean, value.p50, value.p90, value.p99)
        lines.append(f"{name:8}" + "".join(f"{number:10.4f}" for number in numbers))
    lines += [
        "",
        "prompt tokens from: "
        + ", ".join(f"{name} {part:.1%}" for name, part in summary.hit_ratio.items())
        + f", computed {1 - summary.total_hit_ratio:.1%}",
        f"throughput: {summary.requests_per_s:.3f} requests/s, "
        f"{summary.prompt_tokens_per_s:.0f} prompt and "
        f"{summary.output_tokens_per_s:.0f} output tokens/s; "
        f"device busy {summary.busy:.0%}, stalled on loads {summary.stall_s:.1f} s",
        f"within TTFT {spec.ttft_s:g} s and TPOT {spec.tpot_s:g} s: "
        f"{summary.slo_attainment:.1%}, goodput {summary.goodput_per_s:.3f} requests/s",
    ]
    if summary.link_bytes:
        moved = ", ".join(
            f"{name} {num / 1e9:.1f} GB" for name, num in summary.link_bytes.items()
        )
        lines.append(f"moved: {moved}")
    if summary.lengths is not None:
        lines.append(_lengths_line(summary.lengths))
    return "\n".join([*lines, "", _CAVEAT])


def _machine(spec: SimSpec, calibration: Calibration | None) -> str:
    """Say where the times come from: what was measured, and what was not."""
    sheet = f"{spec.tensor_parallel} x {spec.hardware}, {spec.model}"
    if calibration is None:
        return sheet
    parts = {
        "prefill": calibration.prefill is not None,
        "decode": calibration.decode is not None,
    }
    measured = [name for name, is_there in parts.items() if is_there]
    measured += [f"{link.source} -> {link.target}" for link in calibration.links]
    guessed = [name for name, is_there in parts.items() if not is_there]
    text = f"{', '.join(measured) or 'nothing'} by {spec.calibration}"
    if guessed:
        text += f"; {' and '.join(guessed)} NOT measured: the data sheet of {sheet}"
    return text


def _lengths_line(report: LengthReport) -> str:
    score, asking = report.score, report.asking
    line = (
        f"answer lengths ({report.predictor}): {score.coverage:.1%} reach the lower "
        f"bound, on average {score.mean_lower_tokens:.0f} of "
        f"{score.mean_output_tokens:.0f} tokens; the median is off by "
        f"{score.mean_error_tokens:.0f}"
    )
    if asking is not None:
        line += (
            f"\nasking the model (emulated): {asking.num_asked} questions, "
            f"{asking.prompt_tokens} prompt and {asking.output_tokens} output tokens, "
            f"{asking.seconds:.1f} s"
        )
    return line


def write_outputs(
    folder: Path, spec: SimSpec, result: SimResult, summary: SimSummary
) -> None:
    """Write records, token times, event log, summary and Chrome trace.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "records.jsonl").open("wb") as file:
            for record in result.records:
                row = asdict(record)
                del row["spans"], row["resumed_s"]
                if not record.aborted:
                    times = result.token_times(record)
                    row["token_times_s"] = times.round(6).tolist()
                file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        with (folder / "events.jsonl").open("wb") as file:
            for event in result.log.rows:
                file.write(
                    orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
                )
        head = {
            "spec": asdict(spec),
            "summary": asdict(summary),
            "event_log_hash": result.log.digest(),
        }
        text = orjson.dumps(head, option=orjson.OPT_INDENT_2) + b"\n"
        (folder / "summary.json").write_bytes(text)
    except OSError as error:
        raise ConfigError(
            "out", f"{folder} cannot be written ({error.strerror})", "give another"
        ) from None
    write_chrome_trace(folder / "trace.json", result)

"""Errors of `nanotrain plan` on published measurements, each source predicted with constants that
it had no part in.

    python benchmarks/plan_left_out.py                # a sample: benchmarks/data/published_runs.tsv
    python benchmarks/plan_left_out.py FILE.tsv       # a minute of one core for 1,425 rows
    python benchmarks/plan_left_out.py FILE.tsv --halves        # five minutes: nanotron's constants alone

as shipped   median error with the constants of nanotrain/planner/data
left out     with those fitted to the other sources alone:
             - the reachable share of a GPU is the largest product measured on it (stas00/ml-engineering@744d01e), times
               a factor by architecture and bits that is fitted here. Where other sources have fewer than three runs of
               them, the factor is that of the same architecture and other bits, else of other architectures
             - what was fitted of an engine to runs of this source only has the value of an engine without fits
MFU          median error of one MFU for all runs: the median of the other sources' medians, and the source's own

Nothing else is refitted: factors of kernels and collectives are measured, and none of these sources
is part of them.

--halves: the runs of nanotron are split in two by their layouts, and its engine's constants are
refitted, from round numbers, to a fourth of one half; the error is that of the other half. The
numbers of nodes and the share of the memory from which on something is slow, and how stalls grow
with tp, are not refitted.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any
from zlib import crc32

from plan import SAMPLE, Run

from nanotrain.errors import NanotrainError, report
from nanotrain.planner.engine import Engine, engines, with_sections
from nanotrain.planner.hardware import gpu_of, gpus
from nanotrain.planner.rows.table import predict_row, read_table

ARCHITECTURES = {"a100": "a100", "h100": "h100", "b200": "blackwell", "gb200": "blackwell"}
LARGEST = {
    "a100": (0.869, 0.869),
    "h100": (0.803, 0.709),
    "b200": (0.776, 0.763),
    "gb200": (0.729, 0.723),
}  # 16, 8 bits
MIN_RUNS = 3  # of other sources, to fit a factor to
FACTORS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "fp8_block": 8, "mxfp8": 8, "nvfp4": 4}
PLAIN: dict[str, dict[str, dict[str, Any]]] = {  # values of these fields without a fit
    "fsdp2": {"operators": {"attention_factor": 1.0}},
    "nanotron": {
        "launches": {"operator_s": 5.0e-5, "collective_s": 4.0e-5},
        "operators": {"time_factor": 1.0, "loss_forward_bytes": 12.0, "loss_backward_bytes": 8.0},
        "overlap": {"contention": 0.1},
        "pipeline": {"slow_transfer": None},
        "optimizer": {"update_bytes": 34.0, "gather_factor": 1.0, "gather_copy_s": 0.0},
        "memory": {"saved_factor": 1.0},
        "network": {"link": None, "host_stall_s": 0.0, "device_stall_s": 0.0, "slow_step": None},
    },
}
# beginnings of the sources of each
FITTED_TO = {"fsdp2": ("mosaicml",), "nanotron": ("huggingface", "vinjn")}
ROUND = {  # numbers from which the constants of nanotron are refitted, in this order
    "launches.operator_s": 5.0e-5,
    "operators.time_factor": 1.0,
    "network.host_stall_s": 1.0e-4,
    "pipeline.slow_transfer.seconds": 0.1,
    "network.slow_step.seconds": 0.2,
    "overlap.contention": 0.2,
    "network.device_stall_s": 1.0e-5,
    "network.link.bandwidth": 4.0e10,
    "optimizer.gather_factor": 2.0,
    "optimizer.update_bytes": 50.0,
    "launches.collective_s": 4.0e-5,
}
LINK_LATENCY_S = 1.0e-4  # which is not refitted
STEPS, ROUNDS = (0.5, 0.8, 1.25, 2.0), 3
ROW = "{:<34}{:>6}{:>12}{:>10}{:>13}{:>9}"

Kind = tuple[str, int]  # architecture and bits


def kind_of(run: Run) -> Kind | None:
    """The architecture and the bits of a run's products."""
    gpu = gpu_of(run.cells.get("hardware") or "h100").name.split("-")[0]
    text = run.cells.get("precision", "").lower().replace("-", "").replace("_", "")
    bits = 4 if "fp4" in text else 8 if "fp8" in text else 16
    return (ARCHITECTURES[gpu], bits) if gpu in ARCHITECTURES else None


def set_shares(factors: Mapping[Kind, float]) -> None:
    """Replace the reachable shares of the GPUs."""
    for name, gpu in gpus().items():
        chip = name.split("-")[0]
        if chip in LARGEST and name != "h100-pcie" and name != "h100-96gb":
            shares = {
                dtype: LARGEST[chip][BITS[dtype] < 16] * factors[ARCHITECTURES[chip], BITS[dtype]]
                for dtype in gpu.reachable
                if dtype in BITS
            }
            gpus()[name] = replace(gpu, reachable={**gpu.reachable, **shares})


def predicted(rows: Sequence[dict[str, str]]) -> list[Run]:
    """The runs of rows, with their predictions."""
    return [Run(cells, predict_row(cells)) for cells in rows]


def curves(rows: Sequence[dict[str, str]]) -> dict[str, list[float]]:
    """By id the logarithms of measured relative to predicted tokens per second, at every factor."""
    found = defaultdict(list)
    for factor in FACTORS:
        set_shares(
            dict.fromkeys(
                ((name, bits) for name in ARCHITECTURES.values() for bits in (16, 8, 4)), factor
            )
        )
        for run in predicted(rows):
            if run.error is not None:
                found[run.cells["id"]].append(-log(1 + run.error))
    return {key: values for key, values in found.items() if len(values) == len(FACTORS)}


def fit(logs: Iterable[Sequence[float]]) -> float:
    """The factor of the least median error."""

    def error(factor: float) -> float:
        place = next(i for i, (_, high) in enumerate(pairwise(FACTORS)) if factor <= high + 1e-9)
        share = (factor - FACTORS[place]) / (FACTORS[place + 1] - FACTORS[place])
        return median(
            abs(exp(-(each[place] * (1 - share) + each[place + 1] * share)) - 1)
            for each in all_logs
        )

    all_logs = list(logs)
    return min((FACTORS[0] + 0.01 * step for step in range(51)), key=error)


def factors_without(
    source: str, runs: Sequence[Run], logs: Mapping[str, Sequence[float]]
) -> dict[Kind, float]:
    """The factors fitted to the other sources."""
    known: dict[Kind, list[Sequence[float]]] = defaultdict(list)
    for run in runs:
        kind = kind_of(run)
        if (
            kind
            and run.source != source
            and run.cells["id"] in logs
            and not run.source.startswith(FITTED_TO["nanotron"])
        ):
            known[kind].append(logs[run.cells["id"]])
    found = {kind: fit(each) for kind, each in known.items() if len(each) >= MIN_RUNS}
    factors = {}
    for name in ARCHITECTURES.values():
        for bits in (16, 8, 4):
            near = [found[kind] for kind in ((name, bits), (name, 8), (name, 16)) if kind in found]
            factors[name, bits] = near[0] if near else median(found.values() or [0.85])
    return factors


def with_constants(engine: Engine, values: Mapping[str, float]) -> Engine:
    """The engine with constants by their dotted names, of a link, a transfer or a step too."""
    link = {"network": {"link": {"bandwidth": 1.0, "latency": LINK_LATENCY_S}}}
    engine = with_sections(engine, link)
    for name, value in values.items():
        section, field, *inner = name.split(".")
        changed: Any = value
        if inner:
            changed = replace(getattr(getattr(engine, section), field), **{inner[0]: value})
        engine = with_sections(engine, {section: {field: changed}})
    return engine


def refit(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Constants of nanotron fitted to rows, one after the other."""

    def error(values: dict[str, float]) -> float:
        engines()["nanotron"] = with_constants(engines()["nanotron"], values)
        return mean(
            min(1.0, abs(log(1 + run.error))) for run in predicted(rows) if run.error is not None
        )

    best = dict(ROUND)
    least = error(best)
    for name in [*ROUND] * ROUNDS:
        for step in STEPS:
            changed = best | {name: best[name] * step}
            found = error(changed)
            if found < least:
                least = found
                best = changed
    return best


def halves(rows: Sequence[dict[str, str]]) -> list[str]:
    """The median errors of the constants fitted to one half on the other."""
    rows = [row for row in rows if row["source"].startswith(FITTED_TO["nanotron"])]
    keys = [
        " ".join(row[name] for name in ("hidden", "gpus", "tp", "pp", "mbs", "zero"))
        for row in rows
    ]
    sides = [
        [row for row, key in zip(rows, keys, strict=True) if crc32(key.encode()) % 2 == side]
        for side in (0, 1)
    ]
    lines = []
    for fitted, other in (sides, sides[::-1]):
        values = refit(fitted[::4])
        engines()["nanotron"] = with_constants(engines()["nanotron"], values)
        errors = sorted(abs(run.error) for run in predicted(other) if run.error is not None)
        at = errors[len(errors) * 9 // 10]
        lines.append(
            f"{len(other)} runs of the other half: {median(errors):.1%}, 90th percentile {at:.1%}"
        )
        lines.append("    " + ", ".join(f"{name} {value}" for name, value in values.items()))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the exit code is 2 for a table that cannot be read."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument(
        "table", nargs="?", type=Path, default=SAMPLE, help="measurements (default: a sample)"
    )
    parser.add_argument(
        "--halves", action="store_true", help="refit nanotron to one half, predict the other"
    )
    args = parser.parse_args(argv)
    try:
        rows = read_table(args.table)
    except NanotrainError as error:
        return report(error)
    if args.halves:
        print("\n".join(halves(rows)))
        return 0
    runs = [run for run in predicted(rows) if run.error is not None]
    by_source = defaultdict(list)
    for run in runs:
        by_source[run.source].append(run)
    fitted = [run.cells for run in runs if not run.source.startswith(FITTED_TO["nanotron"])]
    logs, shipped = curves(fitted), dict(engines())
    print(ROW.format("source", "runs", "as shipped", "left out", "others' MFU", "own MFU"))
    for source, source_runs in sorted(by_source.items(), key=lambda item: -len(item[1])):
        factors = factors_without(source, runs, logs)
        set_shares(factors)
        for name, begin in FITTED_TO.items():
            engines()[name] = shipped[name]
            if source.startswith(begin):
                engines()[name] = with_sections(shipped[name], PLAIN[name])
        again = [
            run.error
            for run in predicted([run.cells for run in source_runs])
            if run.error is not None
        ]
        mfus = {name: median(run.mfu for run in each) for name, each in by_source.items()}
        other = (
            median(mfu for name, mfu in mfus.items() if name != source)
            if len(mfus) > 1
            else mfus[source]
        )
        errors = [
            median(abs(run.error or 0.0) for run in source_runs),
            median(map(abs, again)),
            *(
                median(abs(mfu / run.mfu - 1) for run in source_runs)
                for mfu in (other, mfus[source])
            ),
        ]
        print(ROW.format(source[:33], len(source_runs), *(f"{error:.1%}" for error in errors)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

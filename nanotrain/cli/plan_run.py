"""`nanotrain plan --run`: its flags, and the conditions of a run from them and from the plan.

Each default has its source in the help. Rates of failures are those of Llama 3 405B: of 419
unexpected interruptions in 54 days of 16,384 GPUs 268 were of GPUs, 46 of hosts, 49 of the network
and 56 of software; 47 more were planned.

Source: Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.4 and table 5.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotrain.cli.values import not_negative, number, positive
from nanotrain.errors import ConfigError

if TYPE_CHECKING:
    from nanotrain.planner.calendar_screen import RunCalendar
    from nanotrain.planner.prediction import Prediction
    from nanotrain.planner.run_calendar import Component, RunConditions

LLAMA_3 = "Llama 3 405B, table 5 of arXiv 2407.21783"
BYTES_PER_PARAMETER = 12  # fp32 main parameters and two moments
STORAGE_GB_PER_S_PER_GPU = 0.12
FORWARD_SHARE = 1 / 3  # share of a forward pass in the FLOPs of a step without recomputation
HOUR_S = 3600.0


def day(text: str) -> date:
    """A date as 2026-12-31."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no date such as 2026-12-31") from None


few_hosts = number("whole number of at least 0 and at most 100,000", low=0, high=100_000)
share = number("share of at least 0 and at most 10", low=0.0, high=10.0)


@dataclass(frozen=True)
class RunFlag:
    """A flag of `nanotrain plan --run`."""

    flag: str
    convert: Callable[[str], object]
    meaning: str
    source: str  # of the default
    default: float | None = None  # None: from the plan, or unset

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments."""
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def help(self) -> str:
        """The help text with the default and its source."""
        default = "" if self.default is None else f"{self.default:g}; "
        return f"with --run: {self.meaning} (default: {default}{self.source})"


def _failures(flag: str, meaning: str, *, default: float) -> RunFlag:
    """The flag of a rate of failures."""
    meaning = f"{meaning} per 1,000 GPU-days"
    return RunFlag(flag, not_negative, meaning=meaning, source=LLAMA_3, default=default)


RUN_FLAGS = (
    _failures("--gpu-failures", "failures of GPUs and their memory", default=0.303),
    _failures("--host-failures", "failures of hosts", default=0.052),
    _failures(
        "--network-failures", "failures of adapters, cables and switches, as hangs", default=0.055
    ),
    _failures("--software-failures", "failures of software", default=0.063),
    _failures("--planned-stops", "planned interruptions", default=0.053),
    RunFlag(
        "--detect-s",
        not_negative,
        meaning="seconds from a crash to the end of all ranks",
        default=5.0,
        source="the watchdog of a run",
    ),
    RunFlag(
        "--hang-detect-s",
        not_negative,
        meaning="seconds from a hang to the end of all ranks",
        default=540.0,
        source="the watchdog of a run, with --hang-timeout-s unset",
    ),
    RunFlag(
        "--restart-s",
        not_negative,
        meaning="seconds from the end of all ranks to the next step",
        default=240.0,
        source="OLMo Hybrid on 512 GPUs, lambda.ai 2026",
    ),
    RunFlag(
        "--storage-gb-per-s",
        positive,
        meaning="GB per second that the storage takes of a save",
        source="0.12 per GPU: 2 TB/s for 16,384, Llama 3, section 3.3.1",
    ),
    RunFlag(
        "--save-stall-s",
        not_negative,
        meaning="seconds for which a save blocks steps",
        source="12 bytes per parameter to the storage, with --async-save to the memory of hosts",
    ),
    RunFlag(
        "--save-lag-s",
        not_negative,
        meaning="seconds from then until the save is complete",
        source="0, with --async-save the same bytes to the storage",
    ),
    RunFlag(
        "--straggler-slowdown",
        share,
        meaning="longer steps by stragglers, as a share of a step",
        default=0.0,
        source="the planner is fitted to measured runs, which have theirs",
    ),
    RunFlag(
        "--evaluation-share",
        share,
        meaning="evaluation, as a share of the time of steps",
        source="--eval-iters forward passes every --eval-interval steps",
    ),
    RunFlag(
        "--spare-hosts",
        few_hosts,
        meaning="hosts that replace failed ones",
        source="as many as have one ready for 99 percent of failed hosts",
    ),
    RunFlag(
        "--repair-hours",
        not_negative,
        meaning="hours until a failed host can be used again",
        default=24.0,
        source="an assumption",
    ),
    RunFlag(
        "--gpu-hour-price",
        positive,
        meaning="price of a GPU-hour, spare hosts included",
        source="no cost",
    ),
    RunFlag("--start-date", day, meaning="first day of the run, as 2026-12-31", source="today"),
)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add --run and the flags of its conditions."""
    parser.add_argument(
        "--run",
        action="store_true",
        help="also print when the run of --train-tokens or --train-iters ends: failures, "
        "restarts, saves, spare hosts, goodput, cost",
    )
    for flag in RUN_FLAGS:
        metavar = "DATE" if flag.convert is day else "N"
        parser.add_argument(flag.flag, type=flag.convert, metavar=metavar, help=flag.help)


def require_run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Check that flags of --run come with it, and that it plans one run."""
    given = [flag.flag for flag in RUN_FLAGS if getattr(args, flag.name) is not None]
    if given and not args.run:
        parser.error(f"{given[0]} without --run has no effect: add --run")
    if args.run and (args.search or args.rows is not None):
        parser.error("--run is of one layout: leave out --search and --rows")


def calendar_of(args: argparse.Namespace, prediction: "Prediction") -> "RunCalendar":
    """The calendar of a planned run.

    Raises:
        ConfigError: the run has no step, or makes no progress.
    """
    from nanotrain.planner.calendar_screen import RunCalendar

    return RunCalendar.of(
        conditions_of(args, prediction),
        start=args.start_date or datetime.now(UTC).date(),
        gpu_hour_price=args.gpu_hour_price,
    )


def conditions_of(args: argparse.Namespace, prediction: "Prediction") -> "RunConditions":
    """The conditions of a run: given values, defaults, and numbers of the plan."""
    from nanotrain.planner.launch_lines import GPUS_OF_A_MACHINE
    from nanotrain.planner.run_calendar import RunConditions, needed_spares

    values = {flag.name: getattr(args, flag.name) for flag in RUN_FLAGS}
    for flag in RUN_FLAGS:
        if values[flag.name] is None:
            values[flag.name] = flag.default
    scenario = prediction.scenario
    config = scenario.config
    save = _save_times(values, prediction)
    evaluation = values["evaluation_share"]
    if evaluation is None:
        evaluation = _evaluation_share(prediction)
    run = RunConditions(
        step_s=prediction.time.total,
        num_steps=_num_steps(args, prediction),
        num_gpus=scenario.world_size,
        gpus_per_host=min(scenario.gpu.gpus_per_node, GPUS_OF_A_MACHINE),
        components=components_of(values),
        restart_s=values["restart_s"],
        save_interval=config.checkpoint.save_interval,
        save_stall_s=save.stall_s,
        save_lag_s=save.lag_s,
        straggler_slowdown=values["straggler_slowdown"],
        evaluation_share=evaluation,
        repair_s=values["repair_hours"] * HOUR_S,
    )
    spares = values["spare_hosts"]
    return replace(run, spare_hosts=needed_spares(run) if spares is None else spares)


def components_of(values: Mapping[str, Any]) -> "tuple[Component, ...]":
    """The kinds of failures; GPUs and hosts that fail take their host out of the run."""
    from nanotrain.planner.run_calendar import Component

    crash_s = values["detect_s"]
    return (
        Component("GPU", values["gpu_failures"], detect_s=crash_s, takes_host=True),
        Component("host", values["host_failures"], detect_s=crash_s, takes_host=True),
        Component(
            "network",
            values["network_failures"],
            detect_s=values["hang_detect_s"],
            takes_host=False,
        ),
        Component("software", values["software_failures"], detect_s=crash_s, takes_host=False),
        Component("planned", values["planned_stops"], detect_s=0.0, takes_host=False),
    )


def _num_steps(args: argparse.Namespace, prediction: "Prediction") -> int:
    """The steps of --train-tokens, else of the configuration.

    Raises:
        ConfigError: there is none.
    """
    config = prediction.scenario.config
    if not args.train_tokens:
        if config.train.train_iters:
            return config.train.train_iters
        raise ConfigError(
            "the run has no step", why="--train-iters is 0", fix="set --train-tokens or raise it"
        )
    tokens_per_step = (
        prediction.time.tokens_per_s_per_gpu
        * prediction.scenario.world_size
        * prediction.time.total
    )
    return max(1, math.ceil(args.train_tokens / tokens_per_step))


class SaveTimes(NamedTuple):
    """How long a save takes."""

    stall_s: float  # steps are blocked
    lag_s: float  # from then until it is complete


def _save_times(values: Mapping[str, Any], prediction: "Prediction") -> SaveTimes:
    """The seconds of a save: as given, else from its bytes and the speeds of storage and host."""
    from nanotrain.spec.counts import num_parameters

    scenario = prediction.scenario
    num_bytes = BYTES_PER_PARAMETER * num_parameters(scenario.shape)
    per_gpu = STORAGE_GB_PER_S_PER_GPU * scenario.world_size
    write_s = num_bytes / 1e9 / (values["storage_gb_per_s"] or per_gpu)
    stall_s = write_s
    lag_s = 0.0
    if scenario.config.checkpoint.async_save:
        stall_s = num_bytes / scenario.world_size / scenario.gpu.host_bandwidth
        lag_s = write_s
    if values["save_stall_s"] is not None:
        stall_s = values["save_stall_s"]
    if values["save_lag_s"] is not None:
        lag_s = values["save_lag_s"]
    return SaveTimes(stall_s, lag_s)


def _evaluation_share(prediction: "Prediction") -> float:
    """The time of validation relative to the time of steps.

    Tasks are not counted, nor is --full-validation, which is as long as a corpus that is not read.
    """
    config = prediction.scenario.config
    if not config.validates or config.train.full_validation:
        return 0.0
    return config.train.eval_iters * FORWARD_SHARE / config.train.eval_interval

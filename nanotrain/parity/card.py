"""`nanotrain card`: what was checked of a recipe or a family, on a tiny model of its structure.

    make_card   run the checks
    Card        their results with date, versions and command, as markdown and as JSON
    Check       one result: holds, fails, or was not run and why

    conversion              a Hugging Face folder out and in, in transformers too (conversion.py)
    logits and gradients    beside transformers in fp64
    layouts                 every layout of LAYOUTS beside one rank (check.py)
    resume, plan            a checkpoint of two ranks resumed by one; bytes planned and measured
    curve                   losses of one rank on eight samples that repeat

A check that was not run is never counted as one that holds.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from nanotrain.config.config import Config
from nanotrain.config.load import Loaded
from nanotrain.config.parallel import ParallelConfig
from nanotrain.config.schema import flat_values
from nanotrain.errors import NanotrainError
from nanotrain.interop.hf.families import config_from_hf, family_of
from nanotrain.parity.card_checks import BESIDE_TRANSFORMERS, CHECKS
from nanotrain.parity.card_ranks import Measured, measure_rank
from nanotrain.parity.check import check_parity
from nanotrain.parity.conversion import ConversionReport, check_conversion, twin_config
from nanotrain.parity.local_ranks import run_local_ranks
from nanotrain.parity.report import relative
from nanotrain.parity.shrink import on_one_rank, shrink
from nanotrain.topology.topology import Topology
from nanotrain.train.inputs import with_known_model

Result = Literal["holds", "fails", "not run"]
# layouts of two ranks, by the fields of the section
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2, ZeRO-3": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "tp 2 with sequence parallelism": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    },
    "pp 2": {"pipeline_model_parallel_size": 2},
    "cp 2": {"context_parallel_size": 2},
    "ep 2": {"expert_model_parallel_size": 2},
}
TOLERANCE = 1e-5  # of losses, as `nanotrain parity`
NUM_STEPS = 3
CURVE_STEPS = 30
SAVED_STEP = 2  # of the run that is resumed, which takes twice as many
MTP_LEFT_OUT = "without multi-token prediction, which transformers does not compute"
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    result: Result
    text: str  # what was compared, or why it was not run
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Card:
    """The results of the checks of a recipe or a family.

    Attributes:
        subject: "recipe tiny", "family llama".
        command: the command that makes it.
        date: day of the checks.
        versions: of nanotrain, torch and transformers.
        twin: sizes of the tiny model.
        checks: one per name of CHECKS, in that order.
    """

    subject: str
    command: str
    date: str
    versions: Mapping[str, str]
    twin: Mapping[str, Any]
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether no check failed, and at least one was run and holds."""
        results = {check.result for check in self.checks}
        return "holds" in results and "fails" not in results

    def text(self) -> str:
        """The card as markdown."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        twin = ", ".join(f"{name} {value}" for name, value in self.twin.items())
        rows = [f"| {check.name} | {check.result} | {check.text} |" for check in self.checks]
        lines = [
            f"# {self.subject}",
            "",
            f"    {self.command}",
            "",
            f"{self.date}, {versions}. A tiny model of the same structure on CPUs: {twin}.",
            "",
            "| check | result | |",
            "|---|---|---|",
            *rows,
        ]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """All results as values of a JSON file."""
        return json.dumps(asdict(self) | {"holds": self.holds}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Card":
        """The card of a file that `to_json` wrote."""
        values = json.loads(text)
        values.pop("holds")
        values["checks"] = tuple(Check(**check) for check in values["checks"])
        return cls(**values)


def make_card(
    loaded: Loaded, *, subject: str, command: str, only: Collection[str] = CHECKS
) -> Card:
    """Check a tiny model of a configuration.

    Args:
        loaded: the configuration.
        subject: what the card is about.
        command: the command that makes the card.
        only: names of the checks to run; the others are said to be left out.
    """
    config = with_known_model(loaded.config, loaded.explicit)
    loaded = replace(loaded, config=config, data_parallel_size=None)
    twin = flat_values(twin_config(config.model))
    checks: list[Check] = []
    for names, run in GROUPS:
        wanted = [name for name in names if name in only]
        results = {check.name: check for check in run(loaded)} if wanted else {}
        for name in names:
            if name in wanted:
                checks.append(results[name])
            else:
                checks.append(Check(name, "not run", "left out by --only", {}))
    numbers = {"nanotrain": version("nanotrain"), "torch": version("torch")}
    numbers["transformers"] = version("transformers")
    return Card(
        subject,
        command,
        date=datetime.now(UTC).date().isoformat(),
        versions=numbers,
        twin={name: twin[name] for name in SIZES},
        checks=tuple(checks),
    )


def check_beside_transformers(loaded: Loaded) -> Iterator[Check]:
    """Compare files after a round trip, and logits and gradients, with transformers."""
    model_config = loaded.config.model
    note = ""
    try:
        family = family_of(twin_config(model_config))
        report = check_conversion(model_config, family)
        if model_config.mtp.num_layers:
            note = f"{MTP_LEFT_OUT}; "
    except NanotrainError as error:
        for name in BESIDE_TRANSFORMERS:
            yield Check(name, "not run", _reason(error), {})
        return
    for check in conversion_checks(report):
        yield replace(check, text=note + check.text)


def conversion_of_family(name: str) -> tuple[Check, ...]:
    """The two checks of a family in the sizes that transformers' class has by default."""
    try:
        model_config = config_from_hf({"model_type": name})
        return tuple(conversion_checks(check_conversion(model_config, name)))
    except NanotrainError as error:
        return tuple(Check(check, "not run", _reason(error), {}) for check in BESIDE_TRANSFORMERS)


def conversion_checks(report: ConversionReport) -> Iterator[Check]:
    """The two checks of a comparison with transformers."""
    trip = f"`{report.family}` written, loaded by transformers and read again"
    same = "the bits of every tensor" if report.is_round_trip else "other tensors"
    yield Check("conversion", _result(report.is_round_trip), f"{trip}: {same}", {})
    numbers = {"logits": report.logits, "gradients": report.gradients}
    text = (
        f"fp64: logits differ by {report.logits:.1e} of the largest, {report.num_gradients} "
        f"gradients by at most {report.gradients:.1e} ({report.worst_gradient})"
    )
    yield Check("logits and gradients", _result(report.is_equal), text, numbers)


def check_layouts(loaded: Loaded) -> Iterator[Check]:
    """Compare losses, gradients and weights of layouts of two ranks with one rank."""
    texts = []
    numbers = {}
    has_failed = False
    for name, fields in LAYOUTS.items():
        try:
            report = check_parity(
                _in_layout(loaded, fields), 2, num_steps=NUM_STEPS, tolerance=TOLERANCE
            )
        except NanotrainError as error:
            texts.append(f"{name} not run: {_reason(error)}")
            continue
        difference = max(step.loss_difference for step in report.steps)
        numbers[name] = difference
        verdict = "equal" if report.holds else "NOT EQUAL: " + "; ".join(report.complaints)
        texts.append(f"{name} {verdict}, losses within {difference:.1e}")
        has_failed = has_failed or not report.holds
    result: Result = _result(not has_failed) if numbers else "not run"
    text = f"{len(numbers)} of {len(LAYOUTS)} run: " + "; ".join(texts)
    yield Check("layouts", result, text, numbers)


def check_resume_and_plan(loaded: Loaded) -> Iterator[Check]:
    """Check that one rank resumes a run of two, and that it allocates the planned bytes."""
    fields = LAYOUTS["dp 2, ZeRO-3"]
    try:
        config = _in_layout(loaded, fields).config
        small = shrink(config, 2, num_steps=2 * SAVED_STEP)
        with TemporaryDirectory(prefix="nanotrain-card-") as name:
            folder = Path(name)
            ranks = _run(small, num_ranks=2, folder=folder, saves_at=SAVED_STEP)
            (single,) = _run(on_one_rank(small), num_ranks=1, folder=folder, resumes=SAVED_STEP)
    except NanotrainError as error:
        for name in ("resume", "plan"):
            yield Check(name, "not run", _reason(error), {})
        return
    expected = ranks[0].losses[SAVED_STEP:]
    pairs = zip(single.losses, expected, strict=True)
    difference = max(relative(loss, reference=other) for loss, other in pairs)
    text = (
        f"saved by two ranks (ZeRO-3) after step {SAVED_STEP}, resumed by one: losses of the next "
        f"{len(expected)} steps within {difference:.1e}"
    )
    yield Check("resume", _result(difference <= TOLERANCE), text, {"losses": difference})
    yield _plan_check([*ranks, single])


def _plan_check(measured: Collection[Measured]) -> Check:
    """Bytes of parameters, gradients and optimizer state, and bytes sent, by plan and measured."""
    is_equal = all(rank.planned == rank.measured for rank in measured)
    first = next(iter(measured))
    resident, sent = first.measured
    text = (
        f"parameters, gradients and optimizer state {resident:,} bytes, {sent:,} bytes sent per "
        f"step by data parallelism, on rank 0 of two; planned "
        f"{first.planned[0]:,} and {first.planned[1]:,}"
    )
    return Check("plan", _result(is_equal), text, {"resident": resident, "sent": sent})


def check_curve(loaded: Loaded) -> Iterator[Check]:
    """Check that the losses of one rank fall on samples that repeat."""
    try:
        small = on_one_rank(shrink(_in_layout(loaded, {}).config, 1, num_steps=CURVE_STEPS))
        with TemporaryDirectory(prefix="nanotrain-card-") as name:
            folder = Path(name)
            (run,) = _run(small, num_ranks=1, folder=folder, repeats=True)
    except NanotrainError as error:
        yield Check("curve", "not run", _reason(error), {})
        return
    shown = {f"step {step}": run.losses[step - 1] for step in (1, 10, 20, CURVE_STEPS)}
    text = ", ".join(f"{step} {loss:.4f}" for step, loss in shown.items())
    falls = run.losses[-1] < run.losses[0]
    yield Check("curve", _result(falls), f"losses of {text}", shown)


GROUPS: tuple[tuple[tuple[str, ...], Callable[[Loaded], Iterator[Check]]], ...] = (
    (BESIDE_TRANSFORMERS, check_beside_transformers),
    (("layouts",), check_layouts),
    (("resume", "plan"), check_resume_and_plan),
    (("curve",), check_curve),
)


def _in_layout(loaded: Loaded, fields: Mapping[str, Any]) -> Loaded:
    """The configuration in another layout, with everything else as it is."""
    parallel = replace(ParallelConfig(), **fields)
    memory = replace(loaded.config.memory, recompute_num_layers=None)
    return replace(loaded, config=replace(loaded.config, parallel=parallel, memory=memory))


def _run(config: Config, *, num_ranks: int, **options: Any) -> list[Measured]:
    """`measure_rank` on local processes."""
    has_experts = config.model.moe is not None
    topology = Topology.of(config.parallel, num_ranks, has_experts=has_experts)
    return run_local_ranks(topology, partial(measure_rank, **options), arguments=[config])


def _result(holds: bool) -> Result:
    return "holds" if holds else "fails"


def _reason(error: NanotrainError) -> str:
    return " ".join(f"{error.what}: {error.why}".split()).rstrip(": ").replace("|", "/")

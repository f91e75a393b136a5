"""Law: a task has the same log-likelihoods in every layout, for every kind of layer and rows of 2
tokens to a whole sequence, as on one rank.

The test takes two kinds and three lengths per layout; `python -m tests.laws.test_task_rows` all of
them (5 minutes).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from nanotrain.cli.evaluate import evaluation_config
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.flags import parse
from nanotrain.config.load import load_line
from nanotrain.data.tasks import Question, Row, Task
from nanotrain.errors import ConfigError
from nanotrain.inference.checkpoint import open_model
from nanotrain.plan.plan import plan_run
from nanotrain.train.build import build_pipeline
from nanotrain.train.evaluate import load_stages
from nanotrain.train.tasks import score_task
from tests.harness import run_ranks
from tests.inference.test_checkpoint import write_run
from tests.laws.more_layouts import with_mark

SEQ_LENGTH = 64
# tokens of the longest row of a task; of a longer one than the sequence the end is read
LONGEST = (2, 3, 4, 9, 12, 25, 64, 70)
SAMPLED = (3, 12, 70)
EXPERTS = {"num_experts": 4, "ffn_hidden_size": 24}
DELTA = {
    "num_key_heads": 4,
    "num_value_heads": 4,
    "key_head_dim": 8,
    "value_head_dim": 8,
}
MAMBA = {"num_groups": 4, "num_heads": 8, "head_dim": 8, "state_dim": 6}
KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "experts": {"moe": EXPERTS},
    "gated delta net": {"linear_attention_type": "gated_delta_net", "linear_attention": DELTA},
    "kda": {"linear_attention_type": "kda", "linear_attention": DELTA},
    "mamba with experts": {"linear_attention_type": "mamba2", "mamba": MAMBA, "moe": EXPERTS},
    "attention beside mamba": {"linear_attention_type": "attention_mamba2", "mamba": MAMBA},
    "short convolutions": {"linear_attention_type": "short_conv"},
}
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "init_method_std": 0.3,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 64,
}
TP, PP, CP, EP = (
    f"--{axis}-parallel-size"
    for axis in ("tensor-model", "pipeline-model", "context", "expert-model")
)
SP = "--sequence-parallel"
# flags, and the sizes of the world
LAYOUTS = {
    "dp 4": ("", {}),
    "tp 4": (f"{TP} 4", {"tp": 4}),
    "tp 4 sp": (f"{TP} 4 {SP}", {"tp": 4}),
    "cp 4": (f"{CP} 4", {"cp": 4}),
    "cp 4 by all-to-all": (f"{CP} 4 --cp-comm-type a2a", {"cp": 4}),
    "pp 2 tp 2": (f"{PP} 2 {TP} 2", {"pp": 2, "tp": 2}),
    "tp 2 cp 2": (f"{TP} 2 {CP} 2", {"tp": 2, "cp": 2}),
    "tp 2 sp cp 2": (f"{TP} 2 {SP} {CP} 2", {"tp": 2, "cp": 2}),
    "pp 2 cp 2": (f"{PP} 2 {CP} 2", {"pp": 2, "cp": 2}),
    "ep 4": (f"{EP} 4", {"ep": 4}),
    "ep 2 tp 2": (f"{EP} 2 {TP} 2", {"ep": 2, "tp": 2}),
    "ep 2 cp 2": (f"{EP} 2 {CP} 2", {"ep": 2, "cp": 2}),
    "ep 2 pp 2": (f"{EP} 2 {PP} 2", {"ep": 2, "pp": 2}),
}
# of `make layouts`: pairs of axes that the suite has one by one
MORE_LAYOUTS = ("tp 2 cp 2", "pp 2 cp 2", "ep 2 cp 2", "ep 2 pp 2")
IN_SUITE = [name for name in LAYOUTS if name not in MORE_LAYOUTS]


@dataclass(frozen=True)
class RecordedTask(Task):
    """A task whose score is what it was given: the log-likelihood of every row, greedy tokens."""

    def score(self, log_likelihoods: Sequence[float], greedy_tokens: Sequence[float]) -> Any:
        count = len(self.rows)
        return list(log_likelihoods)[:count], list(greedy_tokens)[:count]


def task_of(longest: int) -> Task:
    """Seven rows of 2 to `longest` tokens, of which 1 to all but the first are scored."""
    random = np.random.default_rng(longest)
    rows = []
    for number in range(7):
        length = longest if number == 0 else int(random.integers(2, longest + 1))
        tokens = tuple(random.integers(0, 64, length).tolist())
        rows.append(Row(tokens, int(random.integers(1, length))))
    questions = (Question((("a", "b"),), 0, (1,), is_cloze=True),) * 7
    return RecordedTask(str(longest), questions, tuple(rows))


def score_here(
    ctx: ParallelContext, folder: Path, kinds: Sequence[str], lengths: Sequence[int], flags: str
) -> dict[tuple[str, int], Any]:
    """The scores of kinds on tasks, on this rank."""
    line = f"--seq-length {SEQ_LENGTH} --micro-batch-size 1 {flags}"
    loaded = load_line(parse(line.split()), to_train=False)
    world_size = ctx.topology.world_size
    scores = {}
    for kind in kinds:
        model = open_model(folder / kind)
        config = evaluation_config(model.config, loaded, world_size=world_size)
        plan = plan_run(config, world_size, rank=ctx.rank)
        stages = load_stages(model, plan=plan, context=ctx)
        pipeline = build_pipeline(plan, ctx)
        for longest in lengths:
            scores[kind, longest] = score_task(
                task_of(longest), plan=plan, stages=stages, pipeline=pipeline, context=ctx
            )
    return scores


def write_kinds(folder: Path) -> Path:
    """Write one run of every kind."""
    for kind, options in KINDS.items():
        write_run(folder / kind, **SIZES, **options)
    return folder


def kinds_of(layout: str) -> list[str]:
    """The kinds that a layout can share."""
    has_experts = "ep" in LAYOUTS[layout][1]
    return [kind for kind, options in KINDS.items() if "moe" in options or not has_experts]


def check_layout(
    folder: Path, layout: str, kinds: Sequence[str], lengths: Sequence[int], expected: Any
) -> None:
    """Compare the scores of every rank with those of one rank."""
    flags, sizes = LAYOUTS[layout]
    for scores in run_ranks(4, score_here, folder, kinds, lengths, flags, **sizes):
        for key, (values, greedy) in scores.items():
            assert values == pytest.approx(expected[key][0], abs=1e-5, rel=1e-5), (layout, key)
            assert greedy == expected[key][1], (layout, key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kinds(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The scores on one rank."""
    (scores,) = run_ranks(1, score_here, folder, list(KINDS), SAMPLED, "")
    return scores


@pytest.mark.parametrize("layout", [*IN_SUITE, *with_mark(MORE_LAYOUTS)])
def test_rows_have_the_values_of_one_rank(folder: Path, expected: Any, layout: str) -> None:
    kinds = kinds_of(layout)
    first = 2 * list(LAYOUTS).index(layout) - 1
    chosen = {kinds[first % len(kinds)], kinds[(first + 1) % len(kinds)]}
    check_layout(folder, layout, sorted(chosen), SAMPLED, expected)


def test_rows_leave_room_for_what_a_convolution_sees(folder: Path, expected: Any) -> None:
    """In 64 tokens rows could be as short as 8, so 1 token in each of two chunks of four ranks; a
    convolution sees 3 tokens before its chunk.
    """
    kinds, lengths = ["mamba with experts", "short convolutions", "kda"], (3, 12)
    flags = f"{CP} 4 --seq-length 64"
    for scores in run_ranks(4, score_here, folder, kinds, lengths, flags, cp=4):
        for key, (values, greedy) in scores.items():
            assert values == pytest.approx(expected[key][0], abs=1e-5, rel=1e-5), key
            assert greedy == expected[key][1], key


def test_lengths_of_a_schedule_that_a_convolution_cannot_reach_over_are_refused(
    tmp_path: Path,
) -> None:
    flags = (
        "--linear-attention-type gated_delta_net --context-parallel-size 4 --seq-length 48 "
        "--step-seq-length-schedule"
    )
    with pytest.raises(
        ConfigError,
        match="the length 8 of step_seq_length_schedule has 1 token in each of the two chunks of "
        "cp=4 ranks(.|\n)*use lengths of at least 24",
    ):
        load_line(parse([*flags.split(), "0:8 192:48"]), to_train=True)
    load_line(parse([*flags.split(), "0:24 192:48"]), to_train=True)


def main() -> None:
    """Check every layout with every kind and length, and print the number of comparisons."""
    with TemporaryDirectory() as path:
        folder = write_kinds(Path(path))
        (expected,) = run_ranks(1, score_here, folder, list(KINDS), LONGEST, "")
        total = 0
        for layout in LAYOUTS:
            check_layout(folder, layout, kinds_of(layout), LONGEST, expected)
            total += len(kinds_of(layout)) * len(LONGEST)
            print(f"{layout:20} {len(kinds_of(layout))} kinds of layers, equal to one rank")
    print(f"{total} tasks of 7 rows in {len(LAYOUTS)} layouts, 0 differences")


if __name__ == "__main__":
    main()

"""Numbers of `nanotrain plan` in the docs are those of the planner."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest

from nanotrain.config.load import load
from nanotrain.planner.expert_overlap import decide_expert_overlap
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.scenario import scenario_of
from tests.harness import ROOT


@dataclass(frozen=True)
class Planned:
    """A plan of a command line."""

    prediction: Prediction
    overlap: str  # why the overlap of experts is on or off

    @property
    def tokens_per_s(self) -> str:
        return f"{self.prediction.time.tokens_per_s_per_gpu:,.0f}"

    @property
    def speed_and_memory(self) -> str:
        return f"{self.tokens_per_s}, {self.memory} GB"

    @property
    def memory(self) -> str:
        return f"{self.prediction.memory.reserved / 1e9:.1f}"

    @property
    def both_times(self) -> str:
        """The planned times with the overlap and without it, as the docs have them."""
        on, off = re.findall(r"([\d.]+) s", self.overlap)[:2]
        return f"{on} for {off} s"


@cache
def plan(recipe: str, *, gpu: str = "h100", packages: tuple[str, ...] = ()) -> Planned:
    """The plan of `RECIPE GPUS FLAGS`."""
    name, world_size, *flags = recipe.split()
    row = replace(gpu_of(gpu), kernel_packages=frozenset(packages))
    config = load([f"+config={name}", "--mock-data", *flags]).config
    choice = decide_expert_overlap(config, int(world_size), gpu=row)
    scenario = scenario_of(choice.config, int(world_size), gpu=row)
    return Planned(predict(scenario), choice.text)


def speed(recipe: str, *, gpu: str = "h100", packages: tuple[str, ...] = ()) -> Callable[[], str]:
    return lambda: plan(recipe, gpu=gpu, packages=packages).tokens_per_s


def speed_and_memory(recipe: str) -> Callable[[], str]:
    return lambda: plan(recipe).speed_and_memory


def both_times(recipe: str) -> Callable[[], str]:
    return lambda: plan(recipe).both_times


FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
LLAMA = "llama3_8b 8 --bf16"
MXFP8 = f"{LLAMA} --fp8-format e4m3 --fp8-recipe mxfp8"
NVFP4 = f"{LLAMA} --fp4-format e2m1"
NEXT, NANO = "qwen3_next_80b_a3b", "nemotron3_nano_30b_a3b"
MAMBA = ("mamba_ssm", "causal_conv1d")
# page, a sentence with # in place of each number, and the numbers
SENTENCES: tuple[tuple[str, str, tuple[Callable[[], str], ...]], ...] = (
    (
        "planner.md",
        f"{NEXT} has # tokens/s per GPU with fla and # without",
        (speed(f"{NEXT} 64", packages=("fla",)), speed(f"{NEXT} 64")),
    ),
    (
        "planner.md",
        f"{NANO} # with mamba_ssm and causal_conv1d and # without",
        (speed(f"{NANO} 64", packages=MAMBA), speed(f"{NANO} 64")),
    ),
    (
        "precision.md",
        "bf16 # and #, `mxfp8` # and #, `nvfp4` # and #.",
        tuple(speed(line, gpu=gpu) for line in (LLAMA, MXFP8, NVFP4) for gpu in ("b200", "gb300")),
    ),
    (
        "parallel/ep.md",
        "on for `deepseek_v3` on 2,048 H100 (#), `qwen3_30b_a3b_512` (#), `mixtral_8x7b_512` (#) "
        f"and `{NANO}` on 64 (#)",
        (
            both_times("deepseek_v3 2048"),
            both_times("qwen3_30b_a3b_512 512"),
            both_times("mixtral_8x7b_512 512"),
            both_times(f"{NANO} 64"),
        ),
    ),
    (
        "parallel/tp.md",
        "trains # instead of # tokens/s per H100",
        (speed("llama70b_512 512"), speed("llama70b_512 512 --no-tp-comm-overlap")),
    ),
    ("recompute.md", "| `deepseek_v3` | 2,048 | # |", (speed_and_memory("deepseek_v3 2048"),)),
    (
        "recompute.md",
        "`pointwise mla_up_proj moe mlp` needs # GB of 84.9",
        (lambda: plan(f"deepseek_v3 2048 {SELECTIVE} pointwise mla_up_proj moe mlp").memory,),
    ),
    (
        "recompute.md",
        "| `qwen3_30b_a3b_64` | 64 | # | `pointwise moe` | # |",
        (
            speed_and_memory(f"qwen3_30b_a3b_64 64 {FULL}"),
            speed_and_memory("qwen3_30b_a3b_64 64"),
        ),
    ),
    (
        "recompute.md",
        "| `kimi_linear_48b_a3b` | 64 | # | full: `pointwise mla_up_proj moe` fits with "
        "micro-batch 4 and is slower there (#)",
        (
            speed_and_memory("kimi_linear_48b_a3b 64"),
            speed(
                f"kimi_linear_48b_a3b 64 --micro-batch-size 4 {SELECTIVE} pointwise mla_up_proj moe"
            ),
        ),
    ),
    (
        "recompute.md",
        "| `qwen3_5_35b_a3b` | 64 | # | full: `pointwise moe` needs # GB with micro-batch 8, and "
        "is slower with 4 (#)",
        (
            speed_and_memory("qwen3_5_35b_a3b 64"),
            lambda: (
                plan(f"qwen3_5_35b_a3b 64 --micro-batch-size 8 {SELECTIVE} pointwise moe").memory
            ),
            speed(f"qwen3_5_35b_a3b 64 --micro-batch-size 4 {SELECTIVE} pointwise moe"),
        ),
    ),
    (
        "recompute.md",
        f"| `{NEXT}` | 64 | # | full: `pointwise moe` fits with micro-batch 4 and is slower there "
        "(#)",
        (
            speed_and_memory(f"{NEXT} 64"),
            speed(f"{NEXT} 64 --micro-batch-size 4 {SELECTIVE} pointwise moe"),
        ),
    ),
)
NAMES = [f"{page}-{sentence[:40]}" for page, sentence, _ in SENTENCES]  # alike in every worker


@pytest.mark.parametrize(("page", "sentence", "numbers"), SENTENCES, ids=NAMES)
def test_a_planned_number_is_that_of_the_planner(
    page: str, sentence: str, numbers: tuple[Callable[[], str], ...]
) -> None:
    text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
    pattern = re.escape(sentence).replace(r"\#", r"(\d[^|()]*?)")
    (found,) = re.findall(pattern, text)
    found = (found,) if isinstance(found, str) else found
    assert found == tuple(number() for number in numbers)

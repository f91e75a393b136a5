"""Rules of data-parallel sharding, of dtypes and of fp8: every contradiction is one error."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.load import load_config
from nanotrain.config.rules.check import check_rules
from nanotrain.errors import ConfigError, ConfigErrors, ErrorCollector, NanotrainError
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import FORMATS, RECIPES
from tests.config.asking import config_of, validate

FP8 = {"fp8_format": "hybrid"}
SHARDED = {"fp8_param_gather": True, "data_parallel_sharding_strategy": "optim"}
FITTING = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}


def error_of(config: Config) -> str:
    """The only error."""
    with pytest.raises(ConfigError) as caught:
        validate(config, to_train=True)
    assert not isinstance(caught.value, ConfigErrors), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (FP8 | {"params_dtype": "fp16"}, "fp8_format with params_dtype fp16"),
        (FP8 | {"fp8_recipe": "blockwise"}, "fp8_recipe blockwise with fp8_format hybrid"),
        (FP8 | {"fp8_recipe": "mxfp8"}, "fp8_recipe mxfp8 with fp8_format hybrid"),
        (FP8 | SHARDED | {"fp8_recipe": "rowwise"}, "fp8_param_gather with fp8_recipe rowwise"),
        (SHARDED, "precision.fp8.param_gather = true has no effect"),
        (FP8 | {"fp8_param_gather": True}, "no_shard gathers no parameters"),
        ({"fp8_recipe": "tensorwise"}, "precision.fp8.recipe = tensorwise has no effect"),
        (
            {"fp8_margin": 1},
            "precision.fp8.margin = 1 has no effect",
        ),
        (
            FP8 | {"fp8_recipe": "tensorwise", "fp8_margin": 1},
            "only fp8_recipe delayed keeps an amax history",
        ),
        (
            FP8 | {"fp8_recipe": "rowwise", "fp8_amax_history_len": 4},
            "only fp8_recipe delayed keeps an amax history",
        ),
        (FP8 | {"fp8_amax_compute_algo": "max"}, "the history has one step"),
        (FP8 | {"num_layers_at_end_in_bf16": 2}, "it belongs to first_last_layers_bf16"),
        (
            FP8 | {"first_last_layers_bf16": True, "num_layers": 4, "num_layers_at_end_in_bf16": 3},
            "1 layer at the start and 3 at the end of 4 without fp8",
        ),
    ],
)
def test_each_contradiction_is_one_error(fields: dict[str, object], text: str) -> None:
    assert text in error_of(config_of(**FITTING | fields))


def test_what_fits_together_passes() -> None:
    for name, recipe in RECIPES.items():
        validate(config_of(**FITTING, fp8_format=recipe.formats[0], fp8_recipe=name), to_train=True)
    validate(
        config_of(
            **FITTING, **FP8, fp8_amax_history_len=16, fp8_amax_compute_algo="max", fp8_margin=1
        )
    )
    validate(
        config_of(**FITTING, **FP8, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0),
        to_train=True,
    )


def refused(**fields: object) -> list[str]:
    """The fp8 recipes that contradict some fields."""
    names = []
    for name in RECIPES:
        errors = ErrorCollector()
        check_rules(config_of(fp8_recipe=name, **fields), "run", errors=errors)
        if errors.errors:
            names.append(name)
    return names


@pytest.mark.parametrize("name", FORMATS)
def test_a_recipe_has_the_formats_of_the_table(name: str) -> None:
    expected = [recipe for recipe, row in RECIPES.items() if name not in row.formats]
    assert refused(fp8_format=name) == expected


def test_the_recipes_that_are_not_gathered_are_those_of_the_table() -> None:
    gathered = [
        name for name, recipe in RECIPES.items() if recipe.weight_block[0] != recipe.weight_block[1]
    ]
    assert refused(fp8_format="e4m3", fp8_param_gather=True) == [*gathered, "nvfp4"]
    assert "nvfp4" in refused(fp8_format="e2m1", fp8_param_gather=True)


def test_fp8_means_the_hybrid_format() -> None:
    arguments = [
        "--mock-data",
        "--vocab-size",
        "512",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--fp8",
    ]
    assert load_config(arguments).precision.fp8.format == "hybrid"
    with pytest.raises(ConfigError, match="--fp8 contradicts --fp8-format e4m3"):
        load_config([*arguments, "--fp8-format", "e4m3"])


MODEL = ["--vocab-size", "256", "--global-batch-size", "8"]
GATHERED = "--data-parallel-sharding-strategy optim_grads_params"
MISTAKES = {
    "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32": "reduced in fp32 and in bf16",
    "--bf16 --grad-reduce-in-bf16 --grad-reduce-in-fp32": "reduced in fp32 and in bf16",
    "--grad-reduce-in-bf16": "grad_reduce_in_bf16 with params_dtype fp32",
    "--fp16 --grad-reduce-in-bf16": "set --no-accumulate-allreduce-grads-in-fp32 for fp16 gradients",
    "--no-accumulate-allreduce-grads-in-fp32": "params_dtype is fp32, and so are the gradients",
    "--main-grads-dtype bf16": "main_grads_dtype bf16 with params_dtype fp32",
    "--bf16 --main-grads-dtype bf16 --grad-reduce-in-fp32": "and gradients accumulated in fp32",
    "--main-grads-dtype fp16": "it takes one of fp32, bf16",
    "--bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation": "no_shard all-reduces gradients",
    "--bf16 --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation --use-distributed-optimizer "
    "--force-all-reduce": "force_all_reduce all-reduces gradients",
    "--force-all-reduce --data-parallel-sharding-strategy optim_grads": "it keeps whole gradients on every rank",
    "--outer-dp-sharding-strategy optim": "with data_parallel_sharding_strategy no_shard",
    "--outer-dp-sharding-strategy optim --use-distributed-optimizer": "there is nothing to shard across",
    "--fsdp-double-buffer": "only data_parallel_sharding_strategy optim_grads_params gathers units",
    "--use-distributed-optimizer --no-reshard-after-forward": "optim_grads_params gathers units",
    f"{GATHERED} --fsdp-prefetch-depth 2": "with overlap_param_gather gathers units ahead",
    f"{GATHERED} --fsdp-double-buffer --no-reshard-after-forward": "units take turns in fixed memory",
}
SHARDED_BF16 = "--bf16 --use-distributed-optimizer"
ACCEPTED = {
    "--grad-reduce-in-fp32 --accumulate-allreduce-grads-in-fp32": ("fp32", "fp32"),
    "--reduce-scatter-with-fp32-accumulation": ("fp32", "fp32"),
    "--bf16 --force-all-reduce": ("fp32", "fp32"),
    f"{SHARDED_BF16} --grad-reduce-in-bf16 --reduce-scatter-with-fp32-accumulation": (
        "bf16",
        "fp32",
    ),
    f"{SHARDED_BF16} --main-grads-dtype bf16": ("bf16", "bf16"),
    f"{SHARDED_BF16} --grad-reduce-in-bf16 --main-grads-dtype bf16": ("bf16", "bf16"),
    f"{SHARDED_BF16} --outer-dp-sharding-strategy optim --num-distributed-optimizer-instances 2": (
        "fp32",
        "fp32",
    ),
    "--fp16 --no-accumulate-allreduce-grads-in-fp32 --ddp-average-in-collective": ("fp16", "fp32"),
}
NAMES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_contradiction_is_one_error(line: str) -> None:
    with pytest.raises(NanotrainError) as caught:
        load_config([*MODEL, *line.split()])
    assert MISTAKES[line] in str(caught.value)
    assert str(caught.value).count("\n  - ") <= 1, "one mistake is one error"


@pytest.mark.parametrize("line", ACCEPTED)
def test_dtypes_of_gradients(line: str) -> None:
    precision = Precision.of(load_config([*MODEL, *line.split()]).precision)
    assert (str(precision.grads), str(precision.main_grads)) == tuple(
        NAMES[name] for name in ACCEPTED[line]
    )

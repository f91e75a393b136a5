"""Recipes have the sizes of the published models."""

import pytest

from nanotrain.config.compose import config_dir
from nanotrain.config.config import Config
from nanotrain.config.load import load, load_config
from nanotrain.config.rules.check import check_layout, validate_for_world
from nanotrain.config.schedules import global_batch_size
from nanotrain.config.schema import value_of
from nanotrain.errors import TopologyError
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.topology import Topology

# Published numbers of parameters; for mixtures also those a token meets, and the fewest ranks the
# layout needs.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "llama1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama70b": 68_976_648_192,
    "llama7b": 6_738_415_616,
    "qwen3_5_27b": 26_895_998_464,  # without the vision encoder and multi-token prediction
    "qwen3_8b": 8_190_735_360,
}
MIXTURES = {
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248, 16),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704, 16),
    # 671,026,404,352 and a layer of multi-token prediction: a block, three norms and 2 x 7168^2
    "deepseek_v3": (682_636_472_320, 38_240_382_976, 128),
    # an indexer of 13,960,448 in each of 62 layers
    "deepseek_v32": (683_501_956_608, 39_105_867_264, 128),
    "nemotron3_nano_30b_a3b": (31_577_937_344, 3_580_073_408, 32),
    # these without multi-token prediction
    "qwen3_next_80b_a3b": (79_674_391_296, 3_874_929_408, 1),
    "qwen3_5_35b_a3b": (34_660_610_688, 3_454_988_928, 1),
    "kimi_linear_48b_a3b": (49_122_675_072, 3_484_453_248, 1),
}
SMALL = ("tiny", "tiny_moe")
# layouts for more GPUs
LARGER = (
    "llama3_8b_64",
    "llama70b_512",
    "mixtral_8x7b_512",
    "qwen3_30b_a3b_64",
    "qwen3_30b_a3b_512",
    "qwen3_8b_64",
)
TUNING = ("sft",)  # of whatever model it begins with
RECIPES = (*PUBLISHED, *MIXTURES, *LARGER, *SMALL, *TUNING)


def test_every_recipe_is_known_here():
    assert sorted(path.stem for path in (config_dir() / "config").glob("*.yaml")) == sorted(RECIPES)


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_has_the_size_of_the_published_model(recipe):
    config = load_config([f"+config={recipe}"])
    assert num_parameters(ModelShape.of(config.model)) == PUBLISHED[recipe]
    assert config.precision.params_dtype == "bf16"
    validate_for_world(config, 8 if PUBLISHED[recipe] < 10e9 else 64)


@pytest.mark.parametrize("recipe", MIXTURES)
def test_a_mixture_has_the_size_of_the_published_model_and_fills_its_ranks(recipe):
    parameters, active, world = MIXTURES[recipe]
    config = load([f"+config={recipe}"], to_train=False).config
    shape = ModelShape.of(config.model)
    assert (num_parameters(shape), num_active_parameters(shape)) == (parameters, active)
    check_layout(config)
    for multiple in (1, 2):
        validate_for_world(config, multiple * world)
        assert Topology.of(config.parallel, multiple * world).size("expert_dp") == multiple
    with pytest.raises(TopologyError):
        Topology.of(config.parallel, world // 2)


@pytest.mark.parametrize("recipe", LARGER)
def test_a_recipe_for_more_gpus_differs_in_layout_alone(recipe):
    larger, base = (
        load([f"+config={name}"], to_train=False).config
        for name in (recipe, recipe.rpartition("_")[0])
    )
    assert (
        larger.model == base.model
        and larger.optim == base.optim
        and larger.precision == base.precision
    )
    assert larger.train.global_batch_size == base.train.global_batch_size
    assert larger.parallel != base.parallel


def test_deepseek_routes_as_published():
    """Three dense layers, 256 sigmoid experts in 8 groups of which 4, one shared, weights scaled by
    2.5.
    """
    model = load(["+config=deepseek_v3"], to_train=False).config.model
    assert [index for index, has_experts in enumerate(model.moe_layers) if not has_experts] == [
        0,
        1,
        2,
    ]
    assert model.head_dim == 192
    assert (model.moe.num_experts, model.moe.router_topk, model.moe.router_topk_scaling_factor) == (
        256,
        8,
        2.5,
    )
    assert (model.moe.router_num_groups, model.moe.router_group_topk) == (8, 4)
    assert model.moe.router_score_function == "sigmoid" and model.moe.router_enable_expert_bias


def test_a_recipe_says_only_what_differs():
    """Only a model names its whole shape, defaults or not; elsewhere a field set to its default
    says nothing.

    A layout for more GPUs sets what differs from the recipe that it starts from.
    """
    for recipe in RECIPES:
        loaded = load([f"+config={recipe}"], to_train=False)
        bare = load_config([f"+config={recipe.rpartition('_')[0]}"] if recipe in LARGER else [])
        files = f"config/{recipe}.yaml" if recipe in LARGER else ".yaml"
        for key, origin in loaded.origins.items():
            if origin.endswith(files) and not key.startswith("model."):
                value, default = (value_of(config, key) for config in (loaded.config, bare))
                assert value != default, f"{key} in {origin} is {default!r} anyway"


@pytest.mark.parametrize("recipe", SMALL)
def test_a_quick_start_is_small_and_shared_by_any_small_world(recipe):
    config = load_config([f"+config={recipe}"])
    assert config.model.vocab_size is None, "the tokenizer of whatever data is read says it"
    for world in (1, 2, 3, 4, 6):
        validate_for_world(config, world)
        assert global_batch_size(config.train, world) == global_batch_size(config.train, 1)


@pytest.mark.parametrize("start", ["--load runs/base", "++checkpoint.pretrained_checkpoint=folder"])
def test_fine_tuning_takes_any_model_and_whole_conversations(start: str) -> None:
    line = f"+config=sft {start} ++data.data_path=[talks] ++optim.lr=2e-5 --train-iters 30"
    config = load(line.split()).config
    assert not config.is_model_known and config.optim.lr == 2e-5
    assert (config.data.packing, config.data.reset_attention_mask) == ("best_fit", True)
    assert config.data.reset_position_ids and config.precision.params_dtype == "bf16"
    validate_for_world(config, 8)


def test_recipes_that_are_as_in_a_paper_are() -> None:
    """Llama 2: table 1 and section 2.2; DeepSeek-V3: section 4.2, and where the comment says so not."""
    for name, lr in (("llama7b", 3e-4), ("llama70b", 1.5e-4)):
        config = load_config([f"+config={name}", "--mock-data"])
        optim = config.optim
        assert (optim.lr, optim.lr_decay_style, optim.lr_warmup_iters) == (lr, "cosine", 2000)
        assert optim.min_lr == pytest.approx(lr / 10)
        assert (optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (0.9, 0.95, 1e-5)
        assert (optim.weight_decay, optim.clip_grad) == (0.1, 1.0)
        assert tokens_of(config) == pytest.approx(2e12, rel=0.01)
    config = load_config(["+config=deepseek_v3", "--mock-data"])
    optim = config.optim
    assert (optim.lr, optim.lr_warmup_iters, optim.weight_decay) == (2.2e-4, 2000, 0.1)
    assert (optim.adam_beta1, optim.adam_beta2, optim.clip_grad) == (0.9, 0.95, 1.0)
    assert config.model.init_method_std == 0.006
    assert config.parallel.pipeline_model_parallel_size == 16
    assert tokens_of(config) == pytest.approx(14.8e12, rel=0.001)
    assert (optim.lr_decay_style, optim.lr_wsd_decay_style) == ("WSD", "cosine")
    assert optim.min_lr == pytest.approx(optim.lr / 10)
    step_tokens = config.train.global_batch_size * config.data.seq_length
    end = optim.lr_decay_iters
    assert end * step_tokens == pytest.approx(14.3e12, rel=0.001)
    assert (end - optim.lr_wsd_decay_iters) * step_tokens == pytest.approx(10e12, rel=0.001)
    assert (config.model.mtp.num_layers, config.model.mtp.loss_scaling_factor) == (1, 0.3)
    assert (config.precision.fp8.format, config.precision.fp8.recipe) == ("e4m3", "blockwise")
    # otherwise than there
    assert config.train.rampup_batch_size == []
    assert config.parallel.expert_model_parallel_size == 8
    assert config.parallel.pipeline_schedule == "1f1b"


def tokens_of(config: Config) -> float:
    return float(config.train.train_iters * config.train.global_batch_size * config.data.seq_length)

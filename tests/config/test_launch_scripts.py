"""Published launch scripts: their arguments load as they stand."""

import shlex

import pytest

from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.load import Loaded, flag_lines, load
from nanotrain.config.megatron import megatron
from nanotrain.config.rules.check import validate_for_world
from nanotrain.config.schema import value_of
from tests.config.launch_scripts import SCRIPTS
from tests.harness import ROOT

GOAL, ACCEPTED = 145, 150  # of the 150 flags used most
# By how many of 231 GPT and MoE command lines of Megatron-LM's examples and functional tests use
# them (August 2026), without the flags of torchrun; dashes left out.
MOST_USED = """
eval-iters eval-interval tensorboard-dir split clip-grad lr num-layers num-attention-heads micro-batch-size
log-interval max-position-embeddings seq-length hidden-size save-interval data-path tensor-model-parallel-size
data-cache-path global-batch-size save transformer-impl load log-validation-ppl-to-tensorboard
log-memory-to-tensorboard log-timers-to-tensorboard log-num-zeros-in-grad log-params-norm
pipeline-model-parallel-size lr-decay-style min-lr weight-decay use-mcore-models bf16 train-iters merge-file
vocab-file ckpt-format lr-warmup-fraction no-gradient-accumulation-fusion timing-log-level distributed-backend
async-save use-persistent-ckpt-worker lr-decay-iters dist-ckpt-strictness deterministic-mode
attention-softmax-in-fp32 sequence-parallel attention-backend use-distributed-optimizer
use-checkpoint-opt_param-scheduler disable-bias-linear num-experts moe-router-load-balancing-type
moe-router-topk overlap-grad-reduce hidden-dropout attention-dropout expert-model-parallel-size
untie-embeddings-and-output-weights overlap-param-gather dist-ckpt-optim-fully-reshardable
position-embedding-type context-parallel-size moe-grouped-gemm no-bias-gelu-fusion swiglu normalization
adam-beta1 adam-beta2 moe-token-dispatcher-type moe-router-dtype moe-ffn-hidden-size expert-tensor-parallel-size
ffn-hidden-size ckpt-fully-parallel-load manual-gc group-query-attention num-query-groups rotary-percent
log-throughput init-method-std no-rope-fusion moe-aux-loss-coeff exit-interval kv-channels
num-layers-per-virtual-pipeline-stage distributed-timeout-minutes lr-warmup-samples
moe-shared-expert-intermediate-size no-mmap-bin-files rotary-base tokenizer-type exit-duration-in-mins
no-create-attention-mask-in-dataloader make-vocab-size-divisible-by tokenizer-model moe-permute-fusion
calculate-per-token-loss qk-head-dim multi-latent-attention qk-layernorm q-lora-rank qk-pos-emb-head-dim
v-head-dim kv-lora-rank lr-decay-samples num-workers train-samples cross-entropy-loss-fusion
moe-router-enable-expert-bias moe-router-score-function moe-router-pre-softmax moe-layer-freq
ckpt-assume-constant-structure no-check-for-nan-in-loss-and-grad logging-level apply-query-key-layer-scaling
moe-router-bias-update-rate moe-router-topk-scaling-factor norm-epsilon manual-gc-interval moe-router-group-topk
wandb-exp-name wandb-project rotary-scaling-factor mscale mscale-all-dim moe-router-num-groups fp16 wandb-entity
wandb-save-dir no-ckpt-fully-parallel-save fp8-format apply-layernorm-1p mtp-num-layers use-tp-pp-dp-mapping
use-flash-attn cross-entropy-fusion-impl decoupled-lr recompute-granularity mtp-loss-scaling-factor
auto-detect-ckpt-format rerun-mode adam-eps use-megatron-fsdp data-parallel-sharding-strategy
save-retain-interval num-distributed-optimizer-instances fp8-recipe pipeline-model-parallel-layout
"""


def run(name: str) -> Loaded:
    ranks, arguments = SCRIPTS[name]
    loaded = load([*shlex.split(arguments), "--megatron-defaults"])
    validate_for_world(loaded.config, ranks)
    return loaded


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_loads(name):
    run(name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_a_script_becomes_something(name):
    """A field is set, or --explain says what became of the flag."""
    arguments = shlex.split(SCRIPTS[name][1])
    line = parse(arguments)
    settings = {word for setting in line.settings for word in setting.text.split()[:1]}
    named = {text.split()[0] for text in flag_lines(line)}
    assert {
        word.partition("=")[0] for word in arguments if word.startswith("--")
    } == settings | named and not line.errors.errors
    assert not settings & named


def test_the_numbers_in_the_docs_are_those_of_these_tables():
    readme = " ".join((ROOT / "README.md").read_text().split())
    page = " ".join((ROOT / "docs" / "from_megatron.md").read_text().split())
    assert f"the {ACCEPTED} that its own command lines use most are accepted" in readme
    assert f"Of the {len(MOST_USED.split())} flags that 231 command lines" in page
    assert len(MOST_USED.split()) == ACCEPTED, "'all are accepted', the page says"
    for text in (readme, page):
        assert f"{len(SCRIPTS)} published" in text


def test_the_goal_of_accepted_flags_is_met():
    flags, table = [f"--{name}" for name in MOST_USED.split()], megatron().flags
    assert len(set(flags)) == 150
    unknown = [
        flag for flag in flags if flag not in {*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS, *table}
    ]
    missing = [flag for flag in flags if flag in table and table[flag].kind == "not yet"]
    assert not unknown and 150 - len(missing) == ACCEPTED >= GOAL, missing


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "gpt3_full_recompute",  # GPT-3 is trained, though the line names none of this
            {
                "model.normalization": "LayerNorm",
                "model.activation": "gelu_tanh",
                "model.position_embedding_type": "learned_absolute",
                "model.add_bias_linear": True,
                "model.num_query_groups": None,
                "optim.adam_beta2": 0.999,
                "optim.lr_warmup_fraction": 0.01,
                "data.vocab_file": "data/text/common_pile/v01_filtered_data/bpe/vocab.json",
                "train.run_dir": "ck",
                "train.tensorboard_dir": "tb",
            },
        ),
        (
            "llama3_8b_fp8",
            {
                "train.train_iters": 15258789,
                "optim.lr_decay_samples": 1949218748,
                "optim.lr_warmup_samples": 3906252,
                "data.split": "99,1,0",
                "model.num_query_groups": 8,
                "model.add_bias_linear": False,
                "precision.params_dtype": "bf16",
                "parallel.data_parallel_sharding_strategy": "optim",
                "parallel.sequence_parallel": False,
            },
        ),
        ("deepseek_v3_fsdp", {"model.mtp.num_layers": 1, "model.mtp.loss_scaling_factor": 0.1}),
        (
            "gpt_oss_20b",
            {
                "model.position_embedding_type": "yarn",
                "model.yarn.rotary_scaling_factor": 32.0,
                "model.yarn.original_max_position_embeddings": 131072,
                "model.yarn.correction_range_round_to_int": False,
                "model.window_size": 127,
            },
        ),
        (
            "qwen3_30b_a3b",
            {
                "model.moe.ffn_hidden_size": 768,
                "model.qk_layernorm": True,
                "model.moe.num_experts": 128,
            },
        ),
        (
            "qwen3_235b_mxfp8",
            {
                "parallel.num_virtual_stages_per_pipeline_rank": 12,
                "parallel.account_for_loss_in_pipeline_split": True,
                "precision.fp8.param_gather": False,
                "precision.exp_avg_dtype": "bf16",
            },
        ),
        (
            "mixtral_8x7b_interleaved",
            {
                "parallel.num_virtual_stages_per_pipeline_rank": 8,
                "parallel.pipeline_schedule": "interleaved",
                "train.train_iters": 200,
                "train.wandb": True,
                "train.wandb_exp_name": "name",
            },
        ),
    ],
)
def test_a_script_means_what_it_means_to_megatron(name, values):
    config = run(name).config
    assert {key: value_of(config, key) for key in values} == values

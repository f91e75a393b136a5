"""From words and YAML files to a checked configuration."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from nanotrain.config.config import Config
from nanotrain.config.flags import parse
from nanotrain.config.load import configure, load, load_config, reply, to_yaml
from nanotrain.config.parallel import ShardingStrategy
from nanotrain.config.schema import KEYS
from nanotrain.errors import ConfigError, ConfigErrors


def origins(*argv: str) -> dict[str, str]:
    return load(argv, to_train=False).origins


def printed(*argv: str) -> str:
    return reply(parse(argv)) or ""


def explain(*argv: str) -> str:
    return printed(*argv, "--explain")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_without_words_everything_is_a_default_but_the_folder_of_the_run():
    config = load_config([])
    assert config == replace(Config(), train=replace(Config().train, run_dir="runs/train"))


def test_the_promised_command_line_works_as_written():
    words = (
        "+config=tiny train.train_iters=50 --data-parallel-sharding-strategy optim_grads --overlap-grad-reduce "
        "--ddp-bucket-size 500000 --micro-batch-size=4 --bf16"
    )
    loaded = load(words.split())
    config = loaded.config
    assert (config.train.train_iters, config.train.micro_batch_size, config.train.run_dir) == (
        50,
        4,
        "runs/tiny",
    )
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads"
    assert config.parallel.ddp_bucket_size == 500_000 and config.precision.params_dtype == "bf16"
    assert loaded.recipe == "tiny" and "parallel.ddp_bucket_size" in loaded.explicit
    assert not [key for key in loaded.explicit if key.startswith("model.")]


def test_the_fixed_order_run_from_hugging_face_weights_works_as_written():
    words = (
        "+config=tiny --pretrained-checkpoint DIR --data-path PREFIX --split 1,0,0 data.shuffle=false --seq-length 64 "
        "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --lr-decay-style constant "
        "--lr-warmup-iters 0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 0.5 --eval-interval 0 "
        "--save-interval 3 --seed 1 precision.params_dtype=fp32 --data-parallel-sharding-strategy optim_grads "
        "train.run_dir=OUT"
    )
    config = load_config(words.split())
    assert (
        config.data.data_path == ["PREFIX"]
        and config.data.split == "1,0,0"
        and not config.data.shuffle
    )
    assert config.optim.lr_decay_style == "constant" and config.optim.lr == 1e-2
    assert config.train.run_dir == "OUT" and config.train.eval_interval == 0


@pytest.mark.parametrize("strategy", get_args(ShardingStrategy))
def test_a_recipe_goes_with_every_sharding_strategy(strategy):
    config = load_config(["+config=tiny", "--data-parallel-sharding-strategy", strategy])
    assert config.parallel.overlap_param_gather == (strategy != "no_shard")


def test_the_command_line_beats_the_recipe_beats_the_group_beats_the_default(tmp_path):
    # given a group file, a recipe on top of it, and words on top of both
    write(tmp_path / "optim" / "mine.yaml", "lr: 1.0e-3\nclip_grad: 2.0\nweight_decay: 0.3\n")
    defaults = "defaults:\n  - override /optim: mine\n  - _self_\n"
    recipe = f"# @package _global_\n{defaults}optim:\n  lr: 2.0e-3\n  clip_grad: 3.0\n"
    write(tmp_path / "config" / "my.yaml", recipe)
    # when they meet
    loaded = load(["--lr", "4e-3", "+config=my", "--config-dir", str(tmp_path)])
    # then each layer wins over the one below, and is named
    optim = loaded.config.optim
    assert (optim.lr, optim.clip_grad, optim.weight_decay, optim.adam_beta1) == (
        4e-3,
        3.0,
        0.3,
        0.9,
    )
    assert loaded.origins["optim.lr"] == "command line: --lr 4e-3"
    assert loaded.origins["optim.clip_grad"] == str(tmp_path / "config" / "my.yaml")
    assert loaded.origins["optim.weight_decay"] == str(tmp_path / "optim" / "mine.yaml")
    assert loaded.origins["optim.adam_beta1"] == "default"


def test_a_chosen_group_replaces_the_one_of_the_recipe():
    config = load_config(["model=llama7b", "+config=tiny"])
    assert config.model.num_layers == 32 and config.train.generate_tokens > 0


def test_a_recipe_may_start_from_another(tmp_path):
    write(
        tmp_path / "config" / "big.yaml",
        "# @package _global_\ndefaults:\n  - tiny\n  - _self_\ntrain:\n  seed: 5\n",
    )
    config = load_config(["+config=big", f"hydra.searchpath=[file://{tmp_path}]"])
    tiny = load_config(["+config=tiny"])
    assert config == replace(tiny, train=replace(tiny.train, seed=5, run_dir="runs/big"))


def test_recipes_may_lie_in_folders(tmp_path):
    write(tmp_path / "config" / "study" / "a.yaml", "# @package _global_\ntrain:\n  seed: 5\n")
    train = load_config(["+config=study/a", "--config-dir", str(tmp_path)]).train
    assert (train.seed, train.run_dir) == (5, "runs/a")


def test_a_group_of_ones_own_needs_no_plus(tmp_path):
    write(tmp_path / "cluster" / "mine.yaml", "# @package _global_\ntrain:\n  seed: 6\n")
    assert load_config(["cluster=mine", "--config-dir", str(tmp_path)]).train.seed == 6


def test_a_value_may_refer_to_another(tmp_path):
    write(tmp_path / "config" / "ref.yaml", "# @package _global_\noptim:\n  min_lr: ${optim.lr}\n")
    assert (
        load_config(["+config=ref", "--config-dir", str(tmp_path), "--lr", "2e-4"]).optim.min_lr
        == 2e-4
    )


@pytest.mark.parametrize(
    "words", [["--data-path", "0.7", "a", "0.3", "b"], ["data.data_path=[0.7,a,0.3,b]"]]
)
def test_a_list_is_said_by_flag_or_in_hydras_form(words):
    assert load_config(words).data.data_path == ["0.7", "a", "0.3", "b"]


def test_text_with_commas_needs_no_quotes():
    assert (
        load_config(["data.split=1,2,3"]).data.split
        == load_config(["--split", "1,2,3"]).data.split
        == "1,2,3"
    )
    assert load_config(["data.split='1,2,3'"]).data.split == "1,2,3"


@pytest.mark.parametrize(
    "words",
    [
        "+config=tiny --data-path 1e3 a 07 b --lr-decay-style inverse-square-root --tokenizer-model 1e3",
        "+config=gpt2_124m --lr-decay-style WSD --lr-wsd-decay-iters 10 --adam-eps 1e-12",
        "+config=tiny --data-parallel-sharding-strategy no_shard --run-dir /tmp/a,b",
    ],
)
def test_the_yaml_of_a_run_is_a_valid_input_and_gives_the_same_run(words, tmp_path):
    # given the resolved configuration of a run, as its folder keeps it
    config = load_config(words.split())
    path = write(tmp_path / "config.yaml", to_yaml(config))
    # when it is read back
    again = load([f"+config={path}"])
    # then nothing differs, down to the text
    assert again.config == config and to_yaml(again.config) == path.read_text()
    # and words still win over it
    assert load_config([f"+config={path}", "--seed", "9"]).train.seed == 9


def test_explain_names_the_origin_of_every_value():
    lines = explain(
        "+config=tiny", "--no-shuffle", "--data-parallel-sharding-strategy", "no_shard"
    ).splitlines()
    reply = {line.split()[0]: line for line in lines}
    assert set(reply) == set(KEYS) and len(lines) == len(KEYS)
    is_default = [line.endswith(" default") for line in lines]
    assert is_default == sorted(is_default) and not is_default[0], "what something sets comes first"
    assert reply["model.hidden_size"].endswith("model/tiny.yaml")
    assert reply["optim.lr"].endswith("config/tiny.yaml")
    assert reply["data.shuffle"].endswith("command line: --no-shuffle")
    assert reply["optim.adam_eps"].endswith("default")
    assert "default, not the YAML's true" in reply["parallel.overlap_param_gather"]


def test_explain_keeps_a_text_of_several_lines_on_one():
    lines = explain("+config=tiny", "--generate-prompt", "import os\n\ndef").splitlines()
    assert len(lines) == len(KEYS)
    assert any('"import os\\n\\ndef"' in line for line in lines)


def test_help_job_and_explanation_are_texts():
    arguments = ["+config=tiny", "--bf16"]
    assert reply(parse(arguments)) is None
    assert printed(*arguments, "--cfg", "job") == to_yaml(load_config(arguments)).rstrip()
    assert "--lr NUMBER" in printed("--help")
    assert "--lr NUMBER" in printed("--unknown-flag", "--help")


def test_all_mistakes_of_a_command_line_are_in_one_error():
    line = "--hiden-size 64 --layers 2 optim.lrr=3 --lr fast --seq-length 0 +config=tiny"
    with pytest.raises(ConfigErrors) as caught:
        load(line.split())
    text = str(caught.value)
    assert text.startswith("5 mistakes") and len(caught.value.errors) == 5
    for what in (
        "--hiden-size",
        "--layers",
        "optim.lrr",
        "optim.lr is 'fast'",
        "data.seq_length is 0",
    ):
        assert what in text
    assert "did you mean --hidden-size?" in text and "'64'" not in text


def test_all_broken_rules_of_a_command_line_are_in_one_error():
    line = "--hidden-size 100 --num-attention-heads 3 --min-lr 1 --split 0 --moe-aux-loss-coeff 1"
    with pytest.raises(ConfigErrors) as caught:
        load(line.split())
    text = str(caught.value)
    for what in (
        "hidden_size 100 cannot be split",
        "min_lr 1 is above",
        "split is '0'",
        "moe.aux_loss_coeff = 1.0 has no",
    ):
        assert what in text


def test_an_override_of_a_nested_section_is_no_value_of_a_flag():
    config = load_config(
        [
            "--data-path",
            "a",
            "b",
            "model.moe.router_topk=1",
            "model.moe.num_experts=2",
            "--moe-router-pre-softmax",
        ]
    )
    assert config.data.data_path == ["a", "b"] and config.model.moe.router_topk == 1


def test_planning_takes_layouts_that_training_refuses():
    words = ["--tensor-model-parallel-size", "8"]
    assert load(words, to_train=False).config.parallel.tensor_model_parallel_size == 8
    with pytest.raises(ConfigError, match="num_attention_heads 4 cannot be shared by tp=8 ranks"):
        load_config(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "+config=tinny",
            "there is no recipe 'tinny'; did you mean +config=tiny? There are deepseek_v3, ",
        ),
        ("+config=tinny", "did you mean +config=tiny?"),
        ("modle=tiny", "did you mean model?"),
        ("+optm=x", "unknown key optm"),
        ("--config-dir /nowhere", "config folder /nowhere cannot be read: there is no such folder"),
        ("--config-name trian", "no trian.yaml in"),
        ("+config=/nowhere/config.yaml", "there is no file /nowhere/config.yaml"),
        ("data.data_path=[a,", "data.data_path=[a, cannot be read"),
        ("optim.lr=", "optim.lr= has no value"),
        (
            "optim.min_lr=${optim.lrr}",
            "optim.min_lr=${optim.lrr} refers to a value that cannot be found",
        ),
        (
            "+config=tiny --overlap-param-gather --data-parallel-sharding-strategy no_shard",
            "has no effect",
        ),
        ("--lr-wsd-decay-iters 5", "optim.lr_wsd_decay_iters = 5 has no effect"),
    ],
)
def test_bad_input_is_one_error_with_its_cure(words, message):
    with pytest.raises(ConfigError) as caught:
        load_config(words.split())
    assert message in str(caught.value)


def test_configure_takes_flags_for_one_value():
    assert configure("tiny", bf16=True) == load(["+config=tiny", "--bf16"]).config
    for wrong in ({"bf16": True, "params_dtype": "fp16"}, {"bf16": False}, {"bf61": True}):
        with pytest.raises(ConfigError, match="bf16"):
            configure("tiny", **wrong)
    with pytest.raises(ConfigError, match="--bf16 takes no value; write bf16=True"):
        configure("tiny", bf16=False)


def test_synthetic_tokens_have_the_vocabulary_of_the_recipes_tokenizer():
    loaded = load(["+config=tiny", "--mock-data"])
    assert (
        loaded.config.model.vocab_size == 2048
        and "quickstart_vocab_size" in loaded.origins["model.vocab_size"]
    )
    assert load(["+config=tiny", "--mock-data", "--vocab-size=64"]).config.model.vocab_size == 64
    assert load(["+config=tiny"]).config.model.vocab_size is None
    assert (
        load(["+config=tiny", "--mock-data", "--tokenizer-model=bytes"]).config.model.vocab_size
        is None
    )


def test_a_quick_start_recipe_on_an_own_corpus_has_no_prompt_of_python():
    on_own = load(["+config=tiny", "--data-path=corpus"])
    assert on_own.config.train.generate_prompt == "" and not on_own.config.data.quickstart
    assert "quick start" in on_own.origins["train.generate_prompt"]
    with_prompt = load(["+config=tiny", "--data-path=corpus", "--generate-prompt=A"])
    assert with_prompt.config.train.generate_prompt == "A"
    assert load(["+config=tiny"]).config.train.generate_prompt == "class Reader"


def test_the_prompt_of_an_own_recipe_stays(tmp_path):
    (tmp_path / "config").mkdir()
    own = "# @package _global_\ndefaults: [tiny, _self_]\ndata: {data_path: [corpus]}\ntrain: {generate_prompt: Once}\n"
    (tmp_path / "config" / "mine.yaml").write_text(own)
    loaded = load([f"--config-dir={tmp_path}", "+config=mine"])
    assert loaded.config.train.generate_prompt == "Once" and not loaded.config.data.quickstart

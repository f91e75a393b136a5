"""Composition of YAML files: bad files by name, shadowed files, files by path, the folder of
recipes.
"""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nanotrain.config.compose import compose_files, config_dir
from nanotrain.config.flags import parse
from nanotrain.config.load import load_config
from nanotrain.config.merge import merge_settings
from nanotrain.config.recipe_files import read_yaml
from nanotrain.config.schema import nest
from nanotrain.config.train import TrainConfig
from nanotrain.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_nested_sections_are_composed_with_their_file():
    values, files = compose_files(parse(["model=deepseek_v3"]))
    assert values["model.moe.router_topk"] == 8
    assert (
        files["model.moe.router_topk"] == files["model.mla.q_lora_rank"] == "model/deepseek_v3.yaml"
    )


def test_settings_are_merged_over_the_files_in_order():
    line = parse(["--lr", "1", "optim.lr=2", "model.moe.num_experts=4"])
    values = merge_settings({"optim.clip_grad": 3.0}, line.settings)
    assert values["optim.lr"] == "2" and values["optim.clip_grad"] == 3.0
    assert values["model.moe.num_experts"] == "4"


def test_the_sections_of_an_old_run_are_read_and_a_flag_overrides_them(tmp_path):
    path = write(
        tmp_path / "config.yaml",
        "model:\n  moe_router_topk: 2\n  num_experts: 4\n  moe_aux_loss_coeff: 0.1\n",
    )
    config = load_config([f"+config={path}", "--moe-router-topk", "3"])
    assert (config.model.moe.router_topk, config.model.moe.aux_loss_coeff) == (3, [0.1])
    with pytest.raises(ConfigError, match="did you mean model.moe.router_topk?"):
        load_config(["model.moe_router_topk=2"])


def test_the_recipes_are_found():
    assert (config_dir() / "config" / "tiny.yaml").is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# @package _global_\noptim:\n  lrr: 1\n", "unknown key optim.lrr in {path}"),
        ("# @package _global_\noptm:\n  lr: 1\n", "unknown section optm in {path}"),
        ("optim:\n  lr: 1\n", "begin it with the line: # @package _global_"),
        (
            "# @package _global_\noptim: [\n",
            "cannot be read: line 3: while parsing a flow node, expected the node",
        ),
        (
            "# @package _global_\ndefaults: [tinyy, _self_]\n",
            "there is no config/tinyy.yaml: a defaults list names it; ",
        ),
        ("# @package _global_\ndefaults: [tinyy, _self_]\n", "; did you mean tiny?"),
        (
            "# @package _global_\noptim:\n  lrr: 1\n  mrr: 2\n",
            "2 mistakes:\n  - unknown key optim.lrr in {path}; ",
        ),
        (
            "# @package _global_\noptim:\n  lr: fast\n",
            "optim.lr is 'fast' in {path}: it takes a number",
        ),
        (
            "# @package _global_\noptim:\n  lr: ${\n",
            "optim.lr in {path} has a ${{...}} that cannot be read: a reference is",
        ),
        (
            "# @package _global_\noptim:\n  lr: '${oc.create:{a: 1}}'\n",
            "lr in {path} refers to ${{oc.create:",
        ),
        (
            "# @package _global_\noptim:\n\tlr: 1\n",
            "it is indented with spaces, and each key is set once",
        ),
        ("# @package _global_\noptim: {lr: 1\n", "line 3: while parsing a flow mapping"),
        (
            "# @package _global_\nOptim:\n  lr: 1\n",
            "unknown key Optim in {path}; did you mean optim?",
        ),
        (
            "# @package _global_\noptim:\n  lr: ${optim.min_lr}\n  min_lr: ${optim.lr}\n",
            "the value of optim.lr refers to itself: ${{...}} of several fields lead back to it; give one of",
        ),
        (
            "# @package _global_\noptim:\n  lr: ${oc.env:SLURM_NO_SUCH}\n",
            "optim.lr refers to a value that cannot be found: SLURM_NO_SUCH is not in the environment; export it, or write",
        ),
    ],
)
def test_a_bad_recipe_is_named(text, message, tmp_path):
    path = write(tmp_path / "config" / "bad.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(["+config=bad", "--config-dir", str(tmp_path)])
    assert message.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["+config=tiny.yaml"],
            "there is no file tiny.yaml: +config=tiny.yaml names one; did you mean +config=tiny,",
        ),
        (
            ["+config=no/where.yaml"],
            "there is no file no/where.yaml: +config=no/where.yaml names one; check the path",
        ),
        (["+config=tini"], "did you mean +config=tiny?"),
        (["--config-dir", ""], "--config-dir is empty: it takes a folder"),
        (["--config-dir", __file__], "cannot be read: it is a file"),
        (["--config-dir", "/nowhere"], "cannot be read: there is no such folder"),
        (["--load", ""], "checkpoint.load is empty: it takes text"),
        (["--data-path", ""], "data.data_path is empty"),
    ],
)
def test_what_names_no_file_is_one_error(arguments, message):
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    assert message in str(caught.value)


def test_a_recipe_that_sets_nothing_or_is_elsewhere_is_one_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "none.yaml", "# nothing yet\n")
    with pytest.raises(
        ConfigError, match=r"none.yaml sets nothing: it is empty, or has comments alone"
    ):
        load_config(["+config=none.yaml"])
    with pytest.raises(
        ConfigError, match=r"there is no recipe 'none'.*write \+config=none.yaml for the file"
    ):
        load_config(["+config=none"])
    with pytest.raises(
        ConfigError, match=rf"write \+config={tmp_path}/none.yaml for the file of that name"
    ):
        load_config(["+config=none", "--config-dir", str(tmp_path)])


def test_a_key_that_is_set_twice_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "my.yaml", "optim:\n  lr: 1\n  clip_grad: 1\n  lr: 2\n")
    with pytest.raises(
        ConfigError, match="line 4: .*found duplicate key lr; .*each key is set once"
    ):
        load_config([f"+config={path}"])


def test_a_file_that_would_be_shadowed_is_an_error(tmp_path):
    write(tmp_path / "config" / "tiny.yaml", "# @package _global_\ntrain:\n  seed: 3\n")
    with pytest.raises(ConfigError, match="only the first would be read; rename yours"):
        load_config(["+config=tiny", "--config-dir", str(tmp_path)])


def test_a_recipe_named_by_its_path_stands_alone(tmp_path):
    path = write(tmp_path / "my.yaml", "defaults: [tiny]\n")
    with pytest.raises(ConfigError, match="defaults list"):
        load_config([f"+config={path}"])


def test_the_folder_of_recipes_can_be_moved(tmp_path, monkeypatch):
    write(tmp_path / "train.yaml", "train:\n  seed: 77\n")
    monkeypatch.setenv("NANOTRAIN_CONFIG_DIR", str(tmp_path))
    assert load_config([]).train.seed == 77
    monkeypatch.setenv("NANOTRAIN_CONFIG_DIR", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="unset NANOTRAIN_CONFIG_DIR"):
        load_config([])


def test_files_that_are_written_again_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOTRAIN_CONFIG_DIR", str(tmp_path))
    write(tmp_path / "train.yaml", "defaults: [{config: null}, _self_]\n")
    (tmp_path / ".#train.yaml").symlink_to("of.an.editor")
    for seed, size in ((3, "small"), (4, "small"), (4, "medium")):  # values, then a defaults list
        write(
            tmp_path / "config" / "mine.yaml",
            f"# @package _global_\ndefaults: [{size}, _self_]\ntrain: {{seed: {seed}}}\n",
        )
        write(
            tmp_path / "config" / f"{size}.yaml",
            f"# @package _global_\ntrain: {{run_dir: {size}}}\n",
        )
        train = load_config(["+config=mine"]).train
        assert (train.seed, train.run_dir) == (seed, size)


@pytest.mark.parametrize(
    "words", [["+config=tiny_moe"], ["+config=llama7b", "parallel=zero2"], []], ids=" ".join
)
def test_files_are_merged_as_hydra_merges_them(words):
    line = parse(words)
    overrides = [f"{group}={name}" for group, name in line.choices.items()]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        composed = OmegaConf.to_container(compose("train", overrides))
    assert nest(compose_files(line)[0]) == composed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xfc", "can't decode byte 0xfc in position 3"),
        (b"a: [", "line 1[:,]"),
        (b"a:\n\tb: 1\n", "line 2[:,]"),
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "found duplicate key b"),
        (b"- {a: 1}\n- {b: 1, b: 2}\n", "found duplicate key b"),
    ],
)
@pytest.mark.parametrize(
    "argument", ["+config=r", "+config=through", "+config=FOLDER/config/r.yaml"]
)
def test_a_file_that_is_no_yaml_is_named_with_the_line(content, message, argument, tmp_path):
    write(tmp_path / "config" / "r.yaml", "").write_bytes(content)
    write(tmp_path / "config" / "through.yaml", "# @package _global_\ndefaults: [r]\n")
    with pytest.raises(ConfigError, match=message):
        load_config(["--config-dir", str(tmp_path), argument.replace("FOLDER", str(tmp_path))])


@pytest.mark.parametrize(
    "content", ["a: {b: 1}\nc: {b: 1}\n", "x: &x {b: 1}\na: *x\nc: {<<: *x, b: 2}\n"]
)
def test_one_key_in_two_sections_is_no_duplicate(content, tmp_path):
    assert read_yaml(write(tmp_path / "r.yaml", content))["c"]["b"] in (1, 2)


def test_a_recipe_with_what_only_looks_like_a_date_is_read(tmp_path):
    content = read_yaml(write(tmp_path / "r.yaml", "train: {wandb_exp_name: 2026-02-30}\n"))
    assert content["train"]["wandb_exp_name"] == "2026-02-30"


def test_a_recipe_composes_several_files_and_groups_as_hydra_does(tmp_path):
    """Later files win, a group is overridden once, and `key=value` wins over all of them."""
    write(
        tmp_path / "config" / "first.yaml", "# @package _global_\noptim: {lr: 1.0, min_lr: 0.5}\n"
    )
    write(tmp_path / "config" / "second.yaml", "# @package _global_\noptim: {lr: 2.0}\n")
    write(tmp_path / "model" / "own.yaml", "num_layers: 7\nhidden_size: 64\n")
    write(
        tmp_path / "config" / "both.yaml",
        "# @package _global_\ndefaults: [first, second, {override /model: own}, _self_]\n"
        "train: {seed: 5}\n",
    )
    words = ["--config-dir", str(tmp_path), "+config=both", "--mock-data", "--vocab-size", "64"]
    config = load_config([*words, "++train.seed=6"])
    assert (config.optim.lr, config.optim.min_lr, config.train.seed) == (2.0, 0.5, 6)
    assert (config.model.num_layers, config.model.hidden_size) == (7, 64)
    assert load_config([*words, "~train.seed"]).train.seed == TrainConfig().seed
    assert load_config([*words, "model=tiny"]).model.num_layers != 7

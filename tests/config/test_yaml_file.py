"""A YAML file is checked before it is composed."""

import pytest

from nanotrain.config.load import load_config
from nanotrain.config.yaml_file import MAX_BYTES, check_recipe, check_yaml
from nanotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: \xfc", "it is not UTF-8: byte 3 is 0xfc"),
        (b"#" * (MAX_BYTES + 1), "it is larger than 1,048,576 bytes"),
        (b"a: [", "cannot be read"),
        (b"a: " + b"[" * 2000, "it is nested too deeply"),
        (b"a: " + b"[" * 200_000, "it is nested too deeply"),  # at which the parser written in C ends the process
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "b is set twice in one section, the second time in line 4"),
        (b"- {a: 1}\n- {b: 1, b: 2}\n", "b is set twice in one section, the second time in line 2"),
    ],
)
def test_what_is_no_configuration_is_one_error(content, message, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_yaml(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"a: {b: 1}\nc: {b: 1}\n", b"x: &x {b: 1}\na: *x\nc: {<<: *x, b: 2}\n"])
def test_one_key_in_two_sections_is_no_duplicate(content, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    check_yaml(path)


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    "entry",
    [
        "bomb",
        "/config/bomb",
        "config/bomb.yaml",
        "{/config: bomb}",
        "{override /config: [bomb]}",
        "bomb@model",
        "'b${oc.env:HOME}'",
        "through",
    ],
)
def test_a_file_that_a_defaults_list_names_is_checked_before_it_is_read(entry, tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    for name, content in (("bomb", BOMB), ("r", f"defaults: [{entry}]\n"), ("through", "defaults: [through, bomb]\n")):
        (folder / f"{name}.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"bomb.yaml cannot be read: its aliases stand for [0-9,]{10,} values"):
        check_recipe(folder / "r.yaml", [tmp_path])


def test_a_recipe_with_a_bomb_in_its_defaults_list_is_one_error(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "bomb.yaml").write_text(BOMB)
    (tmp_path / "config" / "r.yaml").write_text("# @package _global_\ndefaults: [bomb]\n")
    with pytest.raises(ConfigError, match="its aliases stand for"):
        load_config(["--config-dir", str(tmp_path), "+config=r"])


def test_a_recipe_with_what_only_looks_like_a_date_is_read(tmp_path):
    (tmp_path / "r.yaml").write_text("# @package _global_\ntrain: {wandb_exp_name: 2026-02-30}\n")
    check_recipe(tmp_path / "r.yaml", [tmp_path])

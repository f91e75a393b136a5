"""docs/megatron_tests.md: the script on a small checkout, and the sums of the page."""

import re

import pytest
import yaml

from scripts.megatron_tests import CASES, RECIPES, main, page, read_sets, reasons_of, words_of
from tests.harness import ROOT

SIZES = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--micro-batch-size": 1,
    "--global-batch-size": 8,
    "--bf16": True,
    "--data-path": "${DATA_PATH}/text",
}
SPEC = {"model": "gpt", "nodes": 1, "gpus": 8}


@pytest.fixture
def checkout(tmp_path):
    def add(case: str, **content) -> None:
        file = tmp_path / CASES / case / "model_config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump({"ENV_VARS": {}, **content}))

    add("gpt/fits", MODEL_ARGS=SIZES, MODEL_ARGS_2={**SIZES, "--mtp-detach-heads": True})
    add("gpt/two_ranks", MODEL_ARGS=SIZES, MODEL_ENV_VARS={"MODEL_ARGS": {"GPUS_PER_NODE": 2}})
    add("gpt/too_large", MODEL_ARGS={**SIZES, "--tensor-model-parallel-size": 16})
    add("gpt/no_recipe", MODEL_ARGS={**SIZES, "--pipeline-model-parallel-size": 2})
    add("gpt/generates", MODE="inference", MODEL_ARGS=SIZES)
    add("gpt/other", MODEL_ARGS=SIZES)
    add("t5/translates", MODEL_ARGS=SIZES)
    recipes = tmp_path / RECIPES / "h100"
    recipes.mkdir(parents=True)
    products = [
        {"test_case": ["fits"], "products": [{"gpus": [4]}, {}]},
        {"test_case": ["too_large"]},
    ]
    script = 'run "TRAINING_SCRIPT_PATH={}"'
    recipe = {"spec": {**SPEC, "script": script.format("pretrain_gpt.py")}, "products": products}
    (recipes / "gpt.yaml").write_text(yaml.safe_dump(recipe))
    other = {
        "spec": {**SPEC, "script": script.format("flex.py")},
        "products": [{"test_case": ["other"]}],
    }
    (recipes / "other.yaml").write_text(yaml.safe_dump(other))
    return tmp_path


def test_sets_have_their_ranks_and_only_pretraining_is_counted(checkout):
    sets = {one.name: one for one in read_sets(checkout)}
    assert {name: one.scope for name, one in sets.items() if one.scope} == {
        "gpt/generates": "inference",
        "gpt/other": "another program (flex.py)",
        "t5/translates": "T5",
    }
    assert sets["gpt/fits"].ranks == (4, 8)
    assert sets["gpt/two_ranks"].ranks == (2,)
    assert "/DATA_PATH/text" in sets["gpt/fits"].arguments
    assert sets["gpt/no_recipe"].ranks == ()
    assert not reasons_of(sets["gpt/fits"])
    (missing,) = reasons_of(sets["gpt/fits MODEL_ARGS_2"])
    assert missing.text == "`--mtp-detach-heads`"
    (layout,) = reasons_of(sets["gpt/too_large"])
    assert layout.text == "num_attention_heads N cannot be shared by tp=N ranks"


def test_values_become_words():
    arguments = {"--bf16": True, "--window-size": "[8 0]", "--seed": "${REPEAT}", "--lr": 0.1}
    assert " ".join(words_of(arguments)) == "--bf16 --window-size 8 0 --seed 1 --lr 0.1"
    sizes = {"--hierarchical-context-parallel-sizes": "2 2", "--data-path": '"a b" c'}
    words = ["--hierarchical-context-parallel-sizes", "2", "2", "--data-path", "a b", "c"]
    assert list(words_of(sizes)) == words


def test_the_page_counts_sets_and_reasons(checkout, capsys):
    text = page(list(read_sets(checkout)), commit="abc")
    assert re.search(r"^3 of 5 argument sets", text, re.MULTILINE)
    assert "| `gpt` | 5 | 3 | 2 |" in text
    assert main([str(checkout)]) == 0
    assert capsys.readouterr().out.replace("unknown", "abc") == text + "\n"


def test_a_folder_without_tests_ends_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert CASES in capsys.readouterr().err


def test_the_sums_of_the_committed_page_agree():
    text = (ROOT / "docs" / "megatron_tests.md").read_text()
    loaded, total = map(int, re.search(r"^(\d+) of (\d+) argument sets", text, re.M).groups())
    folders = re.findall(r"^\| `\w+` \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    assert total == sum(int(row[0]) for row in folders)
    assert loaded == sum(int(row[1]) for row in folders)
    refused = text.partition("## Refused sets")[2].count("\n| ") - 1
    assert total - loaded == sum(int(row[2]) for row in folders) == refused
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{loaded} of {total} argument sets of its functional tests load" in readme

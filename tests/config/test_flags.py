"""The words of a command line, in any order, mean what they say."""

from itertools import permutations

import pytest

from nanotrain.config.arguments import ALIASES, FLAGS, NEGATIONS, SWITCHES
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.load import load
from nanotrain.config.schema import ENTRIES, KEYS


def reply(*argv: str) -> dict[str, object]:
    return {setting.key: setting.value for setting in parse(argv).settings}


def test_every_field_has_a_flag_that_sets_it():
    for entry in ENTRIES.values():
        value = entry.choices[0] if entry.choices else "7"
        words = [entry.flag] if entry.kind is bool else [entry.flag, value]
        expected = "true" if entry.kind is bool else [value] if entry.kind is list else value
        assert reply(*words) == {entry.key: expected}


@pytest.mark.parametrize("words", [["--lr", "1e-3"], ["--lr=1e-3"], ["optim.lr=1e-3"]])
def test_three_ways_say_the_same(words):
    assert reply(*words) == {"optim.lr": "1e-3"}


@pytest.mark.parametrize(
    ("words", "value"),
    [(["--shuffle"], "true"), (["--no-shuffle"], "false"), (["--shuffle=false"], "false")],
)
def test_a_boolean_is_on_off_or_spelled_out(words, value):
    assert reply(*words) == {"data.shuffle": value}


def test_words_mean_the_same_in_any_order():
    # given a recipe, an override, flags with one, no and many values
    groups = [
        ["+config=tiny"],
        ["train.train_iters=50"],
        ["--overlap-grad-reduce"],
        ["--data-path", "0.7", "a", "0.3", "/some/b=c/d"],
        ["--micro-batch-size=4"],
        ["--bf16"],
    ]
    # when they come in every order
    lines = [parse([word for group in order for word in group]) for order in permutations(groups)]
    # then they say the same
    first = {setting.key: setting.value for setting in lines[0].settings}
    assert first["data.data_path"] == ["0.7", "a", "0.3", "/some/b=c/d"] and len(first) == 5
    for line in lines:
        assert {setting.key: setting.value for setting in line.settings} == first
        assert line.choices == {"config": "tiny"}


def test_the_later_of_two_words_for_a_field_comes_later():
    assert [setting.value for setting in parse(["--lr", "1", "optim.lr=2"]).settings] == ["1", "2"]


def test_a_negative_number_is_a_value():
    assert reply("--exit-interval", "-1") == {"train.exit_interval": "-1"}


def test_yaml_is_chosen_with_and_without_a_plus():
    assert parse(["config=tiny"]).choices == parse(["+config=tiny"]).choices == {"config": "tiny"}
    assert parse(["model=llama7b", "config=x"]).choices == {"model": "llama7b", "config": "x"}


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (["--lr", "1e-4", "--lr", "2e-4"], "--lr 2e-4 replaces --lr 1e-4: "),
        (["optim.lr=1e-4", "--lr=2e-4"], "--lr 2e-4 replaces optim.lr=1e-4: "),
        (["--shuffle", "--no-shuffle"], "--no-shuffle replaces --shuffle: "),
        (["--data-path", "a", "--data-path", "b"], "--data-path b replaces --data-path a: "),
    ],
)
def test_a_setting_that_replaces_another_one_is_noted(argv, note):
    (line,) = parse(argv).overruled
    assert line.startswith(note)


def test_a_setting_that_is_repeated_is_not_noted():
    assert not parse(["--lr", "1e-4", "optim.lr=1e-4", "--shuffle", "data.shuffle=True"]).overruled


def test_a_secret_that_is_replaced_is_not_shown():
    secret = next(entry for entry in KEYS.values() if entry.secret)
    (line,) = parse([f"{secret.key}=first", f"{secret.key}=second"]).overruled
    assert secret.flag in line and "first" not in line and "second" not in line


def test_a_second_recipe_replaces_the_first_and_the_log_says_so():
    line = parse(["+config=tiny", "--lr", "1", "config=x"])
    assert line.choices == {"config": "x"}
    (note,) = line.overruled
    assert note.startswith("+config=x replaces +config=tiny: one file of a group is read")
    assert not parse(["+config=tiny", "model=llama7b", "+config=tiny"]).overruled


def test_folders_of_yaml_add_up():
    line = parse(["--config-dir", "a", "hydra.searchpath=[file:///b,'/c']", "--config-dir=d"])
    assert line.search_path == ["a", "file:///b", "/c", "d"]


def test_data_parallel_size_sets_nothing():
    line = parse(["--data-parallel-size", "4"])
    assert line.data_parallel_size == 4 and line.settings == []


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        ("--use-distributed-optimizer", "optim"),
        (
            "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads",
            "optim_grads",
        ),
        (
            "--data-parallel-sharding-strategy optim_grads --use-distributed-optimizer",
            "optim_grads",
        ),
    ],
)
def test_use_distributed_optimizer_means_at_least_optim(words, strategy):
    assert reply(*words.split()) == {"parallel.data_parallel_sharding_strategy": strategy}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data-path web -lr 3", "unknown flag -lr; did you mean --lr?"),
        (
            "--data-path web tensor_model_parallel_size=2",
            "did you mean parallel.tensor_model_parallel_size?",
        ),
        ("--lr -infinity", "optim.lr"),
    ],
)
def test_what_follows_a_list_is_none_of_its_values(words, message):
    line = parse(words.split())
    texts = [*map(str, line.errors.errors), *(setting.key for setting in line.settings)]
    assert any(message in text for text in texts)
    assert "--data-path" not in words or line.settings[0].value == ["web"]


def test_a_path_may_look_like_a_setting():
    words = ["--data-path", "lang=en", "/a/model=b", "x/lr=1"]
    assert parse(words).settings[0].value == words[1:]
    assert parse([*words, "model=tiny"]).choices == {"model": "tiny"}


@pytest.mark.parametrize(
    "words",
    [
        "--cpu-optimizer --optimizer-cpu-offload=1",
        "--grad-reduce-in-fp32 --accumulate-allreduce-grads-in-fp32=yes",
        "--use-distributed-optimizer --data-parallel-sharding-strategy 2",
    ],
)
def test_an_alias_agrees_with_every_spelling_of_its_value(words):
    assert not parse(words.split()).errors.errors


def test_a_contradiction_of_two_aliases_is_one_mistake():
    assert len(parse(["--bf16", "--fp16"]).errors.errors) == 1


@pytest.mark.parametrize("words", ["--help=optim", "--help optim", "-h optim --lr 1"])
def test_a_topic_of_help_may_be_a_word_of_its_own(words):
    assert parse(words.split()).help_topic == "optim"
    assert parse(["--help", "tiny"]).help_topic == ""


def test_torchrun_hands_every_flag_through():
    """A word that abbreviates several options of torchrun is a mistake to it, even behind the
    module's name.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    words = [f"{flag}=1" for flag in [*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS]] + [
        *SWITCHES,
        *FLAGS,
        *ALIASES,
    ]
    for word in words:
        parsed = parser.parse_args(["--nproc-per-node", "2", "-m", "nanotrain.train", word])
        assert parsed.training_script_args == [word]


def test_no_flag_abbreviates_an_option_of_torchrun():
    from torch.distributed.run import get_args_parser

    theirs = [option for action in get_args_parser()._actions for option in action.option_strings]
    ours = [*FLAGS, *NEGATIONS, *ALIASES, *OWN_FLAGS]
    assert not [(flag, option) for flag in ours for option in theirs if option.startswith(flag)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "full", [["--recompute-granularity", "full"], ["memory.recompute_granularity=full"]]
)
def test_recompute_activations_wins_over_a_granularity_as_in_megatron_lm(first, full):
    words = ["--recompute-activations", *full] if first else [*full, "--recompute-activations"]
    loaded = load(["--mock-data", "--vocab-size", "64", *words])
    assert loaded.config.memory.recompute_granularity == "selective"
    replaced = f"--recompute-activations replaces {' '.join(full)}, as in Megatron-LM"
    assert replaced in loaded.notes

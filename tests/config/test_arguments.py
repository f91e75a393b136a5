"""The tables of arguments agree with the fields and with the parser; every wrong word is named with
its cure.
"""

import pytest

from nanotrain.config.arguments import ALIASES, ARGUMENTS, FLAGS, NEGATIONS, SWITCHES, VALUES
from nanotrain.config.flags import OWN_FLAGS, parse
from nanotrain.config.schema import ENTRIES
from nanotrain.errors import ConfigError


def test_every_argument_that_sets_no_field_is_described() -> None:
    described = {text.split()[0].partition("[")[0] for text in ARGUMENTS if text.startswith("--")}
    assert described == {*OWN_FLAGS, *SWITCHES, "--help"}


def test_no_flag_has_two_meanings() -> None:
    tables = (FLAGS, NEGATIONS, ALIASES, SWITCHES, OWN_FLAGS)
    assert len(set().union(*tables)) == sum(map(len, tables))


@pytest.mark.parametrize("flag", ALIASES)
def test_an_alias_stands_for_a_value_of_its_field(flag: str) -> None:
    alias = ALIASES[flag]
    entry = ENTRIES[alias.name]
    allowed = entry.choices or (("true", "false") if entry.kind is bool else (alias.value,))
    assert alias.value in alias.agrees and set(alias.agrees) <= set(allowed)


def test_other_spellings_lead_to_values_of_their_field() -> None:
    for name, spellings in VALUES.items():
        choices = ENTRIES[name].choices
        assert not choices or set(spellings.values()) <= set(choices), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--train-iter 5", "unknown flag --train-iter; did you mean --train-iters?"),
        ("--no-lr", "unknown flag --no-lr; nanotrain train --help=all lists the flags"),
        ("--learning-rat 1", "unknown flag --learning-rat; did you mean --lr?"),
        ("optim.learning_rat=1", "unknown key optim.learning_rat; did you mean optim.lr?"),
        ("--learning-rate 1", "unknown flag --learning-rate; did you mean --lr?"),
        # no refused flag
        ("--s3-path x", "unknown flag --s3-path; nanotrain train --help=all lists the flags"),
        ("--no-shufle", "did you mean --no-shuffle?"),
        (
            "model.hybrid_override_pattern=M",
            "model.hybrid_override_pattern; write --hybrid-override-pattern",
        ),
        ("trian.lr=3", "unknown key trian.lr; did you mean"),
        ("optim.lrr=3", "unknown key optim.lrr; did you mean optim.lr?"),
        ("lr=3", "unknown key lr: a key names its section; did you mean optim.lr?"),
        ("+optim.lr=3", "+optim.lr=3 begins with +: every field exists already; write optim.lr=3"),
        ("++zzz.a=1", "unknown key zzz.a"),
        ("++zzz=1", "++zzz=1 begins with ++"),
        ("~model=tiny", "~model=tiny begins with ~"),
        ("hydra.run.dir=x", "only hydra.searchpath"),
        ("--lr", "--lr has no value: it takes one; --lr is peak learning rate"),
        ("--lr --bf16", "--lr has no value"),
        ("--lr train.seed=3", "--lr has no value"),
        ("--data-path --bf16", "--data-path has no value"),
        ("--config-dir", "--config-dir has no value: it takes one; write --config-dir DIR"),
        ("--cfg", "--cfg has no value: it takes one; write --cfg job"),
        (
            "--shuffle true",
            "unexpected argument 'true': --shuffle takes no value; write --shuffle=true",
        ),
        ("tiny", "unexpected argument 'tiny': it is neither a flag nor key=value"),
        (
            "--num-layers 2 \\",
            "unexpected argument '\\\\': a backslash goes on to the next line only at the end",
        ),
        (
            "\u2014lr 1e-3",
            "a typographic dash in place of hyphens, as some programs write it; write --lr",
        ),
        ("--LR 1e-3", "unknown flag --LR; did you mean --lr?"),
        (
            "$GPT_MODEL_ARGS",
            "unexpected argument '$GPT_MODEL_ARGS': the shell has not replaced the variable",
        ),
        ("optim.lr = 1e-3", "a key, = and its value are one argument; write optim.lr=1e-3"),
        (
            "optim.lr 1e-3 --bf16",
            "unexpected argument 'optim.lr 1e-3': a key, = and its value are one argument",
        ),
        (
            "+config tiny",
            "unexpected argument '+config tiny': a key, = and its value are one argument; write +config=tiny",
        ),
        ("+config", "write +config=NAME"),
        (
            "--lr 1e-3 3e-4",
            "unexpected argument '3e-4': --lr takes one value; leave it out; nanotrain sweep --over lr=V1",
        ),
        (
            "--lr 1e-3 tiny",
            "unexpected argument 'tiny': it is neither a flag nor key=value; write +config=tiny",
        ),
        ("--betas 0.9 0.95", "write --adam-beta1 0.9 --adam-beta2 0.95"),
        ("-x", "unknown flag -x"),
        ("--data-parallel-size two", "--data-parallel-size is 'two'"),
        ("--data-parallel-size ²", "--data-parallel-size is '²'"),
        ("++config=tiny", "write +config=NAME"),
        ("-lr 3", "did you mean --lr?"),
        ("---lr 3", "did you mean --lr?"),
        (
            "--master-port 1",
            "write it before -m nanotrain.train, where it is an option of torchrun",
        ),
        ("--cfg hydra", "write --cfg job"),
        ("--bf16 --params-dtype fp32", "--bf16 contradicts --params-dtype fp32"),
        (
            "--bf16 --fp16",
            "--fp16 contradicts --bf16: --fp16 means precision.params_dtype=fp16; leave one of them out",
        ),
        ("train_gpt.py", "leave it out: the program is python -m nanotrain.train"),
        ("llama.toml", "write its settings into a YAML file, and +config=FILE.yaml"),
        ("my.yaml", "write +config=my.yaml"),
        ("data/corpus_text", "write the flag that it belongs to before it"),
        (
            "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
            "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy no_shard: "
            "--use-distributed-optimizer means parallel.data_parallel_sharding_strategy=optim; leave one of them out",
        ),
    ],
)
def test_bad_words_are_named_with_their_cure(words, message):
    with pytest.raises(ConfigError) as caught:
        parse(words.split()).errors.raise_errors()
    assert message in str(caught.value)


@pytest.mark.parametrize("words", ["--zzzzz", "two words"])
def test_a_command_without_recipes_names_its_own_help(words):
    with pytest.raises(ConfigError, match="nanotrain generate --help lists"):
        parse([words], listed_by="nanotrain generate --help").errors.raise_errors()


def test_no_error_names_a_flag_that_is_refused():
    (error,) = parse(["--s3-path", "x"]).errors.errors
    assert "--help=all lists the flags" in str(error)

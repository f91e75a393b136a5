"""Values from the environment are used, and written as references."""

import pickle

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.load import compose_line, load_config, load_object, to_yaml
from nanotrain.config.schema import config_from_dict, to_dict
from nanotrain.errors import ConfigError, ErrorCollector


def test_a_value_from_the_environment_is_used_and_its_reference_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PROJECT_OF_TEST", "secret")
    monkeypatch.setenv("NANOTRAIN_RECIPE_VARIABLES", "PROJECT_OF_TEST")
    config = load_config(
        ["--mock-data", "train.wandb=true", "train.wandb_project=a-${oc.env:PROJECT_OF_TEST}"]
    )
    assert config.train.wandb_project == "a-secret"
    assert to_dict(config)["train"]["wandb_project"] == "a-${oc.env:PROJECT_OF_TEST}"
    assert to_dict(pickle.loads(pickle.dumps(config))) == to_dict(config)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config([f"+config={tmp_path / 'again.yaml'}"]) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train.notify=${oc.env:KEY_OF_TEST}"],
            "train.notify is ${oc.env:KEY_OF_TEST}: it must begin with",
        ),
        (
            ["train.notify=a-${oc.env:KEY_OF_TEST}"],
            "train.notify is a-${oc.env:KEY_OF_TEST}: it must",
        ),
        (
            ["train.train_iters=${oc.env:KEY_OF_TEST}"],
            "train.train_iters is '${oc.env:KEY_OF_TEST}': it takes",
        ),
        (
            ["data.data_path=${oc.env:KEY_OF_TEST}"],
            "data.data_path = ${oc.env:KEY_OF_TEST} has no effect",
        ),
        (["train.lr=1", "train.train_iters=${oc.env:KEY_OF_TEST}"], "'${oc.env:KEY_OF_TEST}'"),
    ],
)
def test_no_error_shows_a_value_from_the_environment(arguments, message, monkeypatch):
    monkeypatch.setenv("KEY_OF_TEST", "sec\\ret")
    with pytest.raises(ConfigError) as caught:
        load_config(["--mock-data", "--vocab-size", "64", *arguments])
    assert (
        message in str(caught.value)
        and "ret:" not in str(caught.value)
        and "sec\\" not in str(caught.value)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('notify: "http://host/${oc.env:HF_TOKEN}"', "notify in .* only its own variable"),
        ('notify: "http://host/"', "write ..oc.env:NANOTRAIN_NOTIFY,null. there"),
        ('notify: "${oc.env:OTHER}"', "only its own variable"),
        ('wandb_project: "${oc.env:HF_TOKEN}"', "is that of a secret"),
        ('wandb_project: "a-${oc.env:NANOTRAIN_NOTIFY}"', "is that of a secret"),
        ('wandb_project: "${oc.env:SLURM_NO,${oc.env:HF_TOKEN}}"', "refers to ..oc.env:HF_TOKEN"),
        ('wandb_project: "${oc.env:HF_${train.device}}"', "refers to"),
        ("wandb_project: \"${oc.env:'HF_TOKEN'}\"", "refers to"),
        ('wandb_project: "${oc.create:[1]}"', "refers to ..oc.create"),
        ('wandb_project: "${oc.decode:x}"', "refers to ..oc.decode"),
        (
            'step_batch_size_schedule: ["${oc.env:HF_TOKEN}"]',
            "step_batch_size_schedule in .* refers to",
        ),
    ],
)
def test_a_file_reads_no_secret(text, message, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "sec-ret")
    (tmp_path / "a.yaml").write_text(f"train: {{{text}}}")
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(["--mock-data", f"+config={tmp_path / 'a.yaml'}"])
    assert "sec-ret" not in str(caught.value)


def test_a_file_refers_to_fields_and_to_variables_that_are_meant_for_it(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOTRAIN_NOTIFY", "https://hooks.example/x")
    lines = (
        "notify: ${oc.env:NANOTRAIN_NOTIFY}",
        "wandb_project: a-${train.seed}-${oc.env:SLURM_NO,b}",
        "wandb: true",
    )
    (tmp_path / "a.yaml").write_text("train:\n  " + "\n  ".join(lines))
    train = load_config(["--mock-data", f"+config={tmp_path / 'a.yaml'}"]).train
    assert (train.notify, train.wandb_project) == ("https://hooks.example/x", "a-1234-b")


@pytest.mark.parametrize("name", ["GH_PAT", "DATABASE_URL", "SENTRY_DSN", "HF_TOKEN", "SLURM_JWT"])
@pytest.mark.parametrize(
    "text",
    [
        "data: {data_path: [s3://host/$NAME/web]}",
        "data: {data_path: ['s3://host/${oc.env:NAME}/web']}",
        "data: {data_path: ['s3://host/${oc.env:SLURM_NO,$NAME}/web']}",
        "data: {tokenizer_model: 's3://host/${.vocab_file}', vocab_file: $NAME}",
        "train: {wandb_project: $, wandb_exp_name: x}\ndata: {data_path: ['${train.wandb_project}NAME']}",
        "data: {stages: ['a@0: s3://host/$NAME']}",
        "train: {eval_tasks: ['a=${oc.env:NAME}']}",
        "checkpoint: {load: s3://host/$NAME}",
    ],
)
def test_a_recipe_reads_no_variable_outside_the_allow_list(text, name, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "CANARY")
    (tmp_path / "a.yaml").write_text(text.replace("NAME", name))
    with pytest.raises(ConfigError, match=name) as caught:
        load_config([f"+config={tmp_path / 'a.yaml'}", "--vocab-size", "64"])
    assert "CANARY" not in str(caught.value)


def test_a_user_adds_variables_that_recipes_may_read(monkeypatch, tmp_path):
    monkeypatch.setenv("CORPORA", "/corpora")
    monkeypatch.setenv("NANOTRAIN_RECIPE_VARIABLES", "OTHER,CORPORA")
    (tmp_path / "a.yaml").write_text("data: {data_path: [$CORPORA/web], vocab_file: null}")
    arguments = [f"+config={tmp_path / 'a.yaml'}", "--vocab-size", "64"]
    assert load_config(arguments).data.data_path == ["/corpora/web"]


def test_the_command_line_reads_variables_of_any_name_but_secrets(monkeypatch):
    monkeypatch.setenv("CORPORA", "/corpora")
    monkeypatch.setenv("HOME", "/home/me")
    words = ["--data-path", "0.5", "$CORPORA/a", "0.5", "~/b", "--vocab-size", "64"]
    assert load_config(words).data.data_path == ["0.5", "/corpora/a", "0.5", "/home/me/b"]
    stages = ["data.stages=['a@0: ~/a', 'b@9: 0.5 ${CORPORA}/a 0.5 ~/b']", "--vocab-size", "64"]
    assert load_config(stages).data.stages == [
        "a@0: /home/me/a",
        "b@9: 0.5 /corpora/a 0.5 /home/me/b",
    ]


@pytest.mark.parametrize("reference", ["${train.notify}", "${.notify}", "a-${train[notify]}"])
def test_a_hidden_value_is_copied_nowhere(reference, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOTRAIN_NOTIFY", "https://hooks.example/CANARY")
    lines = ("notify: ${oc.env:NANOTRAIN_NOTIFY}", f"wandb_project: {reference}", "wandb: true")
    (tmp_path / "a.yaml").write_text("train:\n  " + "\n  ".join(lines))
    with pytest.raises(ConfigError, match="wandb_project refers to a hidden value") as caught:
        load_config(["--mock-data", f"+config={tmp_path / 'a.yaml'}"])
    assert "CANARY" not in str(caught.value)
    line = ["--notify", "https://hooks.example/CANARY", f"train.wandb_project={reference}"]
    with pytest.raises(ConfigError, match="wandb_project refers to a hidden value"):
        load_config(["--mock-data", "train.wandb=true", *line])


def test_what_refers_to_a_value_from_the_environment_is_written_as_its_reference(monkeypatch):
    monkeypatch.setenv("PROJECT_OF_TEST", "CANARY")
    line = [
        "train.wandb_exp_name=${oc.env:PROJECT_OF_TEST}",
        "train.wandb_project=a-${train.wandb_exp_name}",
    ]
    train = load_config(["--mock-data", "train.wandb=true", *line]).train
    assert train.wandb_project == "a-CANARY"
    assert to_dict(train)["wandb_project"] == "a-${train.wandb_exp_name}"


def test_origins_show_no_value_from_the_environment(monkeypatch):
    monkeypatch.setenv("FOLDER_OF_TEST", "/CANARY")
    line = ["--mock-data", "--vocab-size", "64", "train.wandb_project=${oc.env:FOLDER_OF_TEST}"]
    errors = ErrorCollector()
    loaded = compose_line(parse(line), errors=errors)
    shown = [*loaded.origins.values(), *loaded.notes, *map(str, errors.errors)]
    assert not any("CANARY" in text for text in shown)


def test_stored_texts_are_taken_as_they_are(monkeypatch):
    monkeypatch.setenv("GH_PAT", "CANARY")
    data = {
        "data_path": ["s3://host/$GH_PAT", "~/a", "${oc.env:GH_PAT}"],
        "tokenizer_model": "$GH_PAT/${oc.env:GH_PAT}",
        "valid_data_path": ["a=$GH_PAT"],
        "stages": ["a@0: $GH_PAT"],
    }
    assert (
        to_dict(config_from_dict({"data": data}))["data"] | data
        == to_dict(config_from_dict({"data": data}))["data"]
    )


def test_a_config_made_in_python_is_not_expanded(monkeypatch):
    monkeypatch.setenv("GH_PAT", "CANARY")
    config = config_from_dict({"data": {"data_path": ["s3://host/$GH_PAT"]}})
    with pytest.raises(ConfigError, match=r"s3://host/\$GH_PAT is not expanded: a Config may be"):
        load_object(config)

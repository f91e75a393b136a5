"""lm-eval on a local task: the numbers of the task are those of the model by hand. Needs lm-eval."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from nanotrain.cli.main import main
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.inference import lm_eval
from nanotrain.inference.checkpoint import load_checkpoint
from nanotrain.inference.generate import Sampling, generate
from nanotrain.inference.lm_eval import NanotrainLM
from tests.cli.test_generate_chat import TEMPLATE
from tests.inference.test_checkpoint import write_run
from tests.inference.tiny_folders import write_folder

ANSWERS = [" two", " many", " none"]
QUESTIONS = [
    {"question": f"{n} and {n} make", "choices": ANSWERS, "answer": n % 3} for n in range(4)
]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
validation_split: validation
output_type: {kind}
{more}
"""
CHOICES = """doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_bytes}]
fewshot_split: validation
fewshot_config: {sampler: first_n}"""
TEXTS = "doc_to_text: ''\ndoc_to_target: question\nmetric_list: [{metric: word_perplexity}]"


def request(*arguments) -> Instance:
    return Instance("loglikelihood", {}, arguments, 0)


def test_the_class_scores_and_generates_as_the_model_does(tmp_path):
    write_run(tmp_path)
    model, loaded = (
        NanotrainLM(str(tmp_path), max_length=16, batch_size="3"),
        load_checkpoint(tmp_path),
    )
    pairs = [("a cat ", "sat"), ("", "b"), ("a cat", " sat")]
    scores = model.loglikelihood([request(*pair) for pair in pairs])
    assert scores[0] == scores[2], "blanks at the end of a context belong to the continuation"
    assert all(score < 0 for score, _ in scores)
    text = "a text that is longer than sixteen tokens"
    (whole,) = model.loglikelihood_rolling([request(text)])
    assert whole == pytest.approx(-math.log(257) * len(text), rel=0.5), (
        "a model that was not trained knows nothing"
    )
    (made,) = model.generate_until([request("ab", {"until": [], "max_gen_toks": 5})])
    new = generate(
        loaded.model,
        loaded.tokenizer.encode("ab"),
        num_tokens=5,
        sampling=Sampling(temperature=0.0),
    )
    assert made == loaded.tokenizer.decode(new)
    assert (
        model.max_length == 16
        and NanotrainLM(str(tmp_path)).max_length == loaded.config.data.seq_length
    )
    (long,) = model.generate_until([request("many words " * 9, {"until": [], "max_gen_toks": 99})])
    assert len(loaded.tokenizer.encode(long)) <= 8, "half of the input is the context"
    (cut,) = model.generate_until(
        [request("ab", {"until": [made[1]], "max_gen_toks": 5, "do_sample": False})]
    )
    assert cut == made[: made.index(made[1])]


def test_a_local_task_runs_from_the_command_line(tmp_path, capsys, monkeypatch):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    # its 14,000 files take 4 s to read: here lm-eval has no task of its own
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "tasks/manager.py"))
    write_run(tmp_path / "run")
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, kind, more in (
        ("pick", "multiple_choice", CHOICES),
        ("read", "loglikelihood_rolling", TEXTS),
    ):
        (tmp_path / f"{name}.yaml").write_text(
            TASK.format(name=name, file=file, kind=kind, more=more)
        )
    line = [
        "evaluate",
        str(tmp_path / "run"),
        "--tasks",
        "pick,read",
        "--include-path",
        str(tmp_path),
        "--json",
    ]
    assert main(line) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main([*line[:3], "pick,unknown_task", *line[4:]]) == 2
    assert "there is no task unknown_task" in capsys.readouterr().err

    model = NanotrainLM(str(tmp_path / "run"))
    scores = [
        [
            model.loglikelihood([request(each["question"], choice)])[0][0]
            for choice in each["choices"]
        ]
        for each in QUESTIONS
    ]
    right = [
        row.index(max(row)) == each["answer"] for row, each in zip(scores, QUESTIONS, strict=True)
    ]
    assert metrics["pick"]["acc,none"] == sum(right) / len(right)
    texts = [each["question"] for each in QUESTIONS]
    words = sum(len(text.split()) for text in texts)
    total = sum(model.loglikelihood_rolling([request(text)])[0] for text in texts)
    assert metrics["read"]["word_perplexity,none"] == pytest.approx(
        math.exp(-total / words), rel=1e-6
    )


@pytest.mark.parametrize(("num_fewshot", "is_chat"), [(0, False), (2, False), (2, True)])
def test_our_own_tasks_give_the_numbers_of_lm_eval(
    tmp_path, capsys, monkeypatch, num_fewshot, is_chat
):
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if is_chat:
        write_folder("bos", tmp_path / "run")
        (tmp_path / "run" / "chat_template.jinja").write_text(TEMPLATE)
    else:
        write_run(tmp_path / "run")
    questions, task = tmp_path / "questions.jsonl", tmp_path / "task.jsonl"
    ours = [
        {
            "query": each["question"],
            "choices": [c.strip() for c in each["choices"]],
            "gold": each["answer"],
        }
        for each in QUESTIONS
    ]
    questions.write_text(
        "\n".join(
            json.dumps(each | {"choices": [c.strip() for c in each["choices"]]})
            for each in QUESTIONS
        )
    )
    task.write_text("\n".join(map(json.dumps, ours)))
    (tmp_path / "pick.yaml").write_text(
        TASK.format(name="pick", file=questions, kind="multiple_choice", more=CHOICES)
    )
    line = [
        "evaluate",
        str(tmp_path / "run"),
        "--num-fewshot",
        str(num_fewshot),
        "--json",
        *(["--chat"] if is_chat else []),
        "--tasks",
    ]
    assert main([*line, "pick", "--include-path", str(tmp_path)]) == 0
    theirs = json.loads(capsys.readouterr().out.splitlines()[-1])["pick"]
    assert main([*line, f"pick={task}"]) == 0
    score = json.loads(capsys.readouterr().out.splitlines()[-1])["pick"]
    assert (
        score["accuracy"] == theirs["acc,none"]
        and score["accuracy_per_byte"] == theirs["acc_bytes,none"]
    )


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True}, 0.0),
        ({"temperature": None}, 0.0),
    ],
)
def test_a_task_is_greedy_unless_it_samples_at_a_temperature(tmp_path, options, temperature):
    write_run(tmp_path)
    model = NanotrainLM(str(tmp_path), max_length=16)
    sampling = model._sampling({**options, "top_k": 3})
    assert (sampling.temperature, sampling.top_k) == (temperature, 3)
    assert model.loaded.tokenizer.eod in sampling.ends


@pytest.mark.parametrize("most", [1, 4, 5, 50])
def test_a_context_leaves_room_for_the_tokens_that_are_generated(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a context that is too long is kept, as in lm-eval."""
    given: dict[str, Any] = {}

    def generation(model: object, prompts: list[list[int]], **options: Any) -> object:
        given.update(options, prompt=prompts[0])
        return None

    monkeypatch.setattr(lm_eval, "Generation", generation)
    monkeypatch.setattr(lm_eval, "stream_texts", lambda *args, **options: iter([]))
    loaded = SimpleNamespace(tokenizer=ByteTokenizer(), model=None)
    model: Any = SimpleNamespace(
        loaded=loaded, max_length=11, _start=256, _sampling=lambda options: None
    )
    num_tokens = min(most, 5)  # at least half of the positions are the context's
    for length in (0, 1, 10 - num_tokens, 11 - num_tokens, 12 - num_tokens, 11, 12, 30):
        context = bytes(range(65, 65 + length)).decode()
        lm_eval.NanotrainLM._generate(model, context, {"max_gen_toks": most})
        assert given["num_tokens"] == num_tokens
        assert given["prompt"] == (list(context.encode()) or [256])[-(11 - num_tokens) :]

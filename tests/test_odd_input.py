"""Odd input: each is one clear error, or works, within seconds and without a traceback."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nanotrain.cli.main import main
from tests.train.conftest import logging_as_before  # noqa: F401 a fixture
from tests.train.small_run import arguments

# Of processor time, which a busy machine does not lengthen. 2 s are the aim; torch is imported in
# some.
SOON_S = 30.0
pytestmark = pytest.mark.usefixtures("logging_as_before")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def recipe(content: str | bytes) -> Callable[[Path], list[str]]:
    return lambda folder: ["config", f"+config={write(folder / 'r.yaml', content)}"]


def training(*more: str) -> Callable[[Path], list[str]]:
    return lambda folder: ["train", *arguments(folder / "run", "--train-iters", "1", *more)]


def self_including(folder: Path) -> list[str]:
    write(folder / "config" / "loop.yaml", "# @package _global_\ndefaults:\n  - loop\n  - _self_\n")
    return ["config", "--config-dir", str(folder), "+config=loop"]


def hugging_face(**changes: object) -> Callable[[Path], list[str]]:
    sizes = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    values = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 1e4, **sizes, **changes}

    def line(folder: Path) -> list[str]:
        text = json.dumps(values).replace('"NaN"', "NaN")
        write(folder / "hf" / "config.json", text)
        wanted = ["--mock-data", "--num-workers", "0", "--eval-interval", "0", "--seq-length", "16"]
        return [
            "train",
            *wanted,
            "--run-dir",
            str(folder / "run"),
            "--pretrained-checkpoint",
            str(folder / "hf"),
        ]

    return line


def damaged_parquet(folder: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    path = folder / "in.parquet"
    table = pyarrow.table({"text": [f"document {number} " * 50 for number in range(500)]})
    pyarrow.parquet.write_table(table, path, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200:5000] = b"\xff" * 4800
    path.write_bytes(content)
    return prepare(folder, path)


def prepare(folder: Path, source: Path, *more: str) -> list[str]:
    options = ["--output", str(folder / "out"), "--tokenizer", "bytes", "--workers", "1"]
    return ["prepare", "--input", str(source), *options, *more]


ODD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "nested sections": (recipe("model: " + "[" * 5000), "r.yaml cannot be read"),
    "self-including recipe": (self_including, "cannot be composed|includes itself"),
    "latin-1 recipe": (
        recipe("train: {run_dir: f\xfcr}".encode("latin-1")),
        "r.yaml cannot be read",
    ),
    "binary recipe": (recipe(b"\x00\x01\xff"), "r.yaml cannot be read"),
    "a list for a recipe": (recipe("[1, 2]"), "r.yaml"),
    "layers": (
        training("--num-layers", "1000000000"),
        "num_layers is 1000000000: it must be at least 1 and at most",
    ),
    "hidden size": (training("--hidden-size", "9" * 5000), "hidden_size"),
    "steps": (training("--train-iters", "9" * 27), "train_iters is too large: numbers are at most"),
    "batch": (
        training("--global-batch-size", "9" * 11),
        "global_batch_size is 9+: it must be at least 1 and at most",
    ),
    "microbatches": (
        training("--global-batch-size", "1000000"),
        "microbatches per rank: at most 65,536",
    ),
    "timeout": (
        training("--distributed-timeout-minutes", "9" * 12),
        "it must be above 0 and at most 525600",
    ),
    "seed": (training("--seed", str(2**70)), "seed is too large: numbers are at most"),
    "workers": (
        training("--num-workers", "100000"),
        "num_workers is 100000: it must be at least 0 and at most",
    ),
    "empty run folder": (training("--run-dir", ""), "run_dir is empty|--run-dir has no value"),
    "empty run folder in Hydra's form": (training("train.run_dir=''"), "run_dir is empty"),
    "world size": (
        lambda folder: ["topology", "--world-size", "1000000000"],
        "--world-size: .* is no whole number|at most",
    ),
    "weight of a corpus": (
        training("data.mock_data=false", "--data-path", "1e99999999", "x"),
        "1e99999999",
    ),
    "empty output": (
        lambda folder: ["prepare", "--input", "x", "--output", "", "--tokenizer", "bytes"],
        "--output",
    ),
    "damaged parquet page": (damaged_parquet, "in.parquet cannot be read: "),
    "text as a size": (
        hugging_face(hidden_size="big"),
        "Field 'hidden_size' expected int, got str",
    ),
    "negative size": (hugging_face(num_hidden_layers=-1), "num_(hidden_)?layers is -1"),
    "NaN as a size": (hugging_face(vocab_size="NaN"), "Field 'vocab_size' expected int"),
    "fraction as a size": (
        hugging_face(num_attention_heads=2.5),
        "Field 'num_attention_heads' expected int",
    ),
    "a list as a family": (hugging_face(model_type=["llama"]), "model_type"),
    "nested config.json": (
        lambda folder: [
            *hugging_face()(folder)[:-1],
            str(write(folder / "deep" / "config.json", "[" * 100_000).parent),
        ],
        "config.json",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_input_is_one_clear_error(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line, says = ODD[name]
    argv = line(tmp_path)
    capfd.readouterr()
    start = time.process_time()
    code = main(argv)
    seconds = time.process_time() - start
    out, err = capfd.readouterr()
    assert code == 2, out + err
    assert "Traceback" not in err and err.count("error:") == 1 and len(err) < 2000, err[:3000]
    assert re.search(says, err), err
    assert seconds < SOON_S, f"{seconds:.1f} s"


@pytest.mark.parametrize("text", ["²", "٣", "1_0", " 2", "+2", "9" * 5000])
def test_a_world_size_in_other_digits_is_an_error(
    text: str, tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    assert main(training()(tmp_path)) == 2
    assert "WORLD_SIZE is" in capfd.readouterr().err


def test_a_data_path_may_contain_a_space(tmp_path: Path, capfd) -> None:
    write(tmp_path / "my corpus" / "in.txt", "some text\n" * 300)
    assert main(prepare(tmp_path / "my corpus", tmp_path / "my corpus" / "in.txt")) == 0
    line = arguments(
        tmp_path / "run", "--train-iters", "1", "--data-path", str(tmp_path / "my corpus" / "out")
    )
    assert main(["train", *(word for word in line if word != "--mock-data"), "--split", "1"]) == 0


def test_secrets_of_the_environment_are_in_no_file_and_no_message(
    tmp_path: Path, capfd, monkeypatch
) -> None:
    monkeypatch.setenv("NANOTRAIN_TEST_KEY", "hunter2")
    reference = "${oc.env:NANOTRAIN_TEST_KEY}"
    line = [
        *training()(tmp_path),
        f"train.wandb_project={reference}",
        f"train.generate_prompt='x {reference}'",
    ]
    line += ["train.wandb=true", "train.generate_tokens=0"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main([*line, "--no-save"]) in (0, 2)
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    main(["config", *line[1:], "--explain"])
    main(["config", *line[1:]])
    out, err = capfd.readouterr()
    assert "hunter2" not in out + err

"""Generation follows the files of a folder as transformers does: ends, penalties, defaults."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanotrain.cli.generate import sampling_of
from nanotrain.errors import DataError
from nanotrain.inference.checkpoint import LoadedModel, load_checkpoint
from nanotrain.inference.generate import Generation, encode_prompts
from nanotrain.inference.generation_config import defaults_of_run, parse_defaults, read_defaults
from nanotrain.inference.sampling import Sampling
from tests.inference.test_checkpoint import write_run
from tests.inference.tiny_folders import edit_json, write_folder

PROMPT = "the quick"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder("bos", tmp_path_factory.mktemp("folder"))


@pytest.fixture
def files(folder: Path) -> Any:
    """The folder; its two files are restored after the test."""
    names = ("generation_config.json", "config.json")
    before = {name: (folder / name).read_bytes() for name in names}
    yield folder
    for name, content in before.items():
        (folder / name).write_bytes(content)


def tokens_of_transformers(folder: Path) -> list[int]:
    """The greedy tokens after the prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        text = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0].tolist()
    return text[ids.shape[1] :]


def greedy_tokens(loaded: LoadedModel) -> list[int]:
    """Ours, with the ends and penalties of the folder."""
    (prompt,) = encode_prompts([PROMPT], loaded.tokenizer, max_tokens=32)
    sampling = replace(loaded.sampling(), temperature=0)
    generation = Generation(loaded.model, [prompt], num_tokens=NUM_TOKENS, sampling=sampling)
    for _ in range(NUM_TOKENS):
        if generation.running:
            generation.step()
    return generation.texts[0][len(prompt) :]


def edit(folder: Path, generation: dict[str, Any] | None, config: dict[str, Any]) -> None:
    file = folder / "generation_config.json"
    if generation is None:
        file.unlink()
    else:
        edit_json(file, **generation)
    edit_json(folder / "config.json", **config)


def test_ends_and_penalties_are_those_of_transformers(files: Path) -> None:
    free = tokens_of_transformers(files)
    assert len(set(free[:6])) == 6, "each end stops at another place"
    cases: list[tuple[dict[str, Any] | None, dict[str, Any], int]] = [
        ({"eos_token_id": [1, free[3], free[5]]}, {}, 4),
        ({"eos_token_id": free[5]}, {"eos_token_id": free[3]}, 6),
        (None, {"eos_token_id": [free[5], free[2]]}, 3),
        ({"eos_token_id": None}, {"eos_token_id": None}, NUM_TOKENS),
        ({"repetition_penalty": 1.3}, {}, NUM_TOKENS),
        ({"repetition_penalty": 0.7}, {}, NUM_TOKENS),
    ]
    for generation, config, count in cases:
        files.joinpath("generation_config.json").write_text("{}")
        edit(files, generation, config)
        assert greedy_tokens(load_checkpoint(files)) == tokens_of_transformers(files)
        assert len(greedy_tokens(load_checkpoint(files))) == count, (generation, config)


def test_a_penalty_is_that_of_transformers(folder: Path) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2))
    prompt = list(range(0, 300, 7))
    penalize = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = penalize(torch.tensor([prompt]), logits[None])[0]
    model = load_checkpoint(folder).model
    sampling = Sampling(temperature=0, repetition_penalty=1.7)
    generation = Generation(model, [prompt], num_tokens=1, sampling=sampling)
    assert torch.equal(generation._penalize(logits, 0), expected)


def test_the_end_of_the_tokenizer_counts_where_no_file_names_one(files: Path) -> None:
    edit(files, None, {"eos_token_id": None})
    assert load_checkpoint(files).defaults.ends == (1,)
    edit_json(files / "config.json", text_config={"eos_token_id": [7, 8]})
    assert read_defaults(files).ends == (7, 8)


def test_an_end_that_is_no_special_token_is_not_part_of_the_text(files: Path) -> None:
    loaded = load_checkpoint(files)
    free = tokens_of_transformers(files)
    edit(files, {"eos_token_id": [free[2]]}, {})
    ended = load_checkpoint(files)
    text = ended.generate(PROMPT, sampling=replace(ended.sampling(), temperature=0))
    assert text == PROMPT + loaded.tokenizer.decode(free[:2])


def options(**given: Any) -> Namespace:
    """The parsed arguments of a command line."""
    unset = dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty"))
    return Namespace(**{**unset, **given}, seed=3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (0.8, None, None)),
        ({"do_sample": False}, (0.0, None, None)),
        ({"do_sample": True}, (1.0, None, None)),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, (0.6, None, 0.9)),
        ({"temperature": 0.6, "top_k": 20}, (0.0, 20, None)),
        ({"top_p": 0.9}, (0.0, None, 0.9)),
        ({"temperature": 1.0}, (0.8, None, None)),
        ({"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}, (0.8, None, None)),
    ],
)
def test_what_the_command_line_leaves_out_is_the_folders(
    fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    defaults = parse_defaults(json.dumps(fields).encode(), source="it")
    sampling = sampling_of(options(), defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
    assert sampling.seed == 3 and sampling.repetition_penalty is None
    given = sampling_of(options(temperature=0.1, top_k=5, top_p=0.5), defaults)
    assert (given.temperature, given.top_k, given.top_p) == (0.1, 5, 0.5)


def test_what_is_not_applied_is_named() -> None:
    fields = {"min_p": 0.05, "num_beams": 4, "typical_p": 1.0, "max_new_tokens": 9}
    defaults = parse_defaults(json.dumps(fields).encode(), source="it")
    assert defaults.describe() == [
        "generation_config.json: max_new_tokens 9, where no flag says else",
        "generation_config.json also sets min_p 0.05, num_beams 4: not applied",
    ]


def test_the_number_of_tokens_and_stop_strings_are_the_folders(files: Path) -> None:
    edit(files, {"max_new_tokens": 3, "do_sample": False}, {})
    loaded = load_checkpoint(files)
    whole = loaded.generate(PROMPT)
    assert whole == PROMPT + loaded.tokenizer.decode(tokens_of_transformers(files)[:3])
    new = whole.removeprefix(PROMPT)
    edit(files, {"stop_strings": [new[-1]]}, {})
    stopped = load_checkpoint(files).generate(PROMPT)
    assert stopped == PROMPT + new[: new.index(new[-1])] != whole


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "it is a list"),
        (b"{", "Expecting"),
        (b'{"eos_token_id": "</s>"}', "eos_token_id is"),
        (b'{"eos_token_id": [1, true]}', "eos_token_id is"),
        (b'{"eos_token_id": ' + b"[1," * 400 + b"1" + b"]" * 400 + b"}", "eos_token_id|deep|nest"),
        (b'{"temperature": -1}', "temperature -1 is no number of at least 0"),
        (b'{"top_p": NaN}', "top_p nan is no probability"),
        (b'{"max_new_tokens": 0}', "max_new_tokens is 0"),
        (b'{"stop_strings": [3]}', "stop_strings"),
    ],
)
def test_a_damaged_file_is_one_error(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"it.json cannot be read(.|\n)*({message})"):
        parse_defaults(content, source="it.json")


def test_a_run_ends_at_its_documents_end_too(tmp_path: Path) -> None:
    write_run(tmp_path)
    assert load_checkpoint(tmp_path).defaults.ends == (256,)


@pytest.mark.parametrize(
    ("listed", "eod", "ends"),
    [
        ([5, 6], 3, (5, 6, 3)),
        ([5, 3], 3, (5, 3)),
        (5, None, (5,)),
        (None, 3, (3,)),
        ("no file", 3, (3,)),
        ("no file", None, ()),
    ],
)
def test_texts_of_a_run_end_where_its_documents_and_the_folder_of_its_tokenizer_do(
    listed: Any, eod: int | None, ends: tuple[int, ...]
) -> None:
    content = {"generation_config.json": json.dumps({"eos_token_id": listed}).encode()}
    files = {} if listed == "no file" else content
    tokenizer: Any = Namespace(files=files, eod=eod)
    assert defaults_of_run(Path("step-00000001"), tokenizer).ends == ends

"""The documents that are listed for a step are those that its ranks really read."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.config.schedules import batch_schedule
from nanotrain.data.build import build_data, starting_stages
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.order import ORDER_NAME, DataOrder, OrderStart
from nanotrain.data.sampler import SamplerConfig
from nanotrain.errors import DataError, EnvironmentFault
from tests.data.conftest import random_documents, write_documents

VOCAB_SIZE = 5000
SENTINELS = (4997, 4998, 4999)  # in no document
LENGTHS = ((3, 40, 0, 17, 90, 5, 61), (120, 8, 33), (7,) * 25)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return [
        write_documents(
            folder / f"c{i}",
            [
                document + 1
                for document in random_documents(lengths, vocab_size=SENTINELS[0] - 1, seed=i)
            ],
        )
        for i, lengths in enumerate(LENGTHS)
    ]


def random_config(draw: random.Random, prefixes: list[Path], *, consumed: int) -> Config:
    """A blend by weight or size, or stages; a constant batch, a ramp-up or steps; with or without
    shuffle.
    """
    chosen = draw.sample(prefixes, draw.randint(1, 3))
    blend = " ".join(f"{draw.randint(1, 9)} {prefix}" for prefix in chosen)
    data: dict[str, object] = {"train_data_path": [blend]}
    if draw.random() < 0.3:
        data = {"train_data_path": list(map(str, chosen))}
    elif draw.random() < 0.4:
        starts = draw.choice([draw.randint(1, 6), f"{draw.randint(1, 3)}..{draw.randint(4, 9)}"])
        data = {"stages": [f"a@0: {blend}", f"b@{starts}: {draw.choice(prefixes)}"]}
    seq_length, size = draw.choice([4, 8]), draw.randint(2, 6)
    train = TrainConfig(
        global_batch_size=size, micro_batch_size=1, seed=draw.randint(0, 9), train_iters=12
    )
    kind = draw.random()
    if kind < 0.3:
        train = replace(train, rampup_batch_size=[2, 2, 9], global_batch_size=6)
    elif kind < 0.5:
        steps = [f"0:{size}", f"{(consumed + 5) * seq_length}:{size + 3}"]
        train = replace(train, step_batch_size_schedule=steps, global_batch_size=size + 3)
    split = draw.choice(["100", "70,20,10"])
    data |= {"packing": draw.choice(["stream", "best_fit"]), "shuffle": draw.random() < 0.8}
    if draw.random() < 0.3:
        names = ("fim_prefix_token", "fim_suffix_token", "fim_middle_token")
        data |= {"fim_data": True} | dict(zip(names, map(str, SENTINELS), strict=True))
    return Config(data=DataConfig(seq_length=seq_length, split=split, **data), train=train)


def tokens_read(start: OrderStart, *, dp_size: int, num_steps: int) -> list[dict[int, list[int]]]:
    """By step, the tokens of every sample that the data-parallel ranks of a run read after a start."""
    config, data = start.config, start.config.data
    samples = build_data(
        data, vocab_size=VOCAB_SIZE, seed=config.train.seed, required=("train",)
    ).train
    assert samples is not None
    samples = starting_stages(samples, data, samples_of=lambda steps: stage_start(start, steps))
    by_step: list[dict[int, list[int]]] = [{} for _ in range(num_steps)]
    size = config.train.global_batch_size
    assert size is not None
    for rank in range(dp_size):
        sampler = SamplerConfig(rank, dp_size, 1, size, schedule=batch_schedule(config))
        with GlobalBatchLoader(
            samples,
            sampler=sampler,
            consumed_samples=start.consumed_samples,
            skipped_samples=start.skipped_samples,
        ) as loader:
            for tokens in by_step:
                for batch in (batch for batch in next(loader) if not batch.is_padding):
                    assert batch.sample_ids is not None
                    rows = zip(
                        (batch.sample_ids + start.skipped_samples).tolist(),
                        batch.tokens.tolist(),
                        strict=True,
                    )
                    # no padding
                    tokens |= {sample: [token for token in row if token] for sample, row in rows}
    return by_step


def without_gap(tokens: list[int], part: list[int], *, is_end: bool) -> list[int]:
    """The tokens of a part of a document as they are stored; what sentinels replaced is taken from
    the corpus.
    """
    if SENTINELS[0] not in tokens:
        return tokens
    before, after, middle = map(tokens.index, SENTINELS)
    last = len(tokens) - is_end
    stored = tokens[before + 1 : after] + tokens[middle + 1 : last] + tokens[after + 1 : middle]
    return stored + part[len(stored) : len(stored) + len(SENTINELS)] + tokens[last:]


def stage_start(start: OrderStart, steps: int) -> int:
    """Samples of the first steps, counted one by one."""
    schedule, consumed = batch_schedule(start.config), 0
    for _ in range(steps):
        consumed += schedule.size_at(consumed) if schedule else start.curve_batch_size
    return consumed


@pytest.mark.parametrize("seed", range(8))
def test_the_documents_of_a_step_are_those_that_its_ranks_read(
    seed: int, prefixes: list[Path], tmp_path: Path
) -> None:
    num_rewritten = 0
    for case in range(15):
        draw = random.Random(f"{seed} {case}")
        folder = tmp_path / str(case)
        folder.mkdir()
        # given a run that starts, and starts again with other settings, on other ranks, after a
        # spike
        expected: dict[int, dict[int, list[int]]] = {}
        step = consumed = skipped = curve = 0
        for _ in range(draw.randint(1, 3)):
            config = random_config(draw, prefixes, consumed=consumed)
            curve = curve or config.train.global_batch_size or 0
            start = OrderStart(step, consumed, skipped, curve, VOCAB_SIZE, config)
            start.append_to(folder)
            num_steps = draw.randint(1, 4)
            read = tokens_read(start, dp_size=draw.randint(1, 2), num_steps=num_steps)
            expected = {n: tokens for n, tokens in expected.items() if n <= step}
            expected |= dict(enumerate(read, start=step + 1))
            back = draw.randint(0, num_steps - 1)
            consumed += sum(map(len, read[: num_steps - back]))
            step, skipped = step + num_steps - back, skipped + draw.choice([0, 0, 5])
        order = DataOrder.read(folder)
        for number, samples in expected.items():
            # then the parts of its documents are the tokens of every sample
            uses = list(order.documents(number))
            assert {use.sample for use in uses} == samples.keys()
            for use in uses:
                stored = np.fromfile(use.corpus.bin_file, dtype=use.corpus.dtype)
                size = use.corpus.dtype.itemsize
                part = stored[use.first_byte // size : use.last_byte // size].tolist()
                assert len(part) == use.tokens > 0
                is_end = use.last_byte == use.corpus.document_start(use.document + 1) * size
                read, samples[use.sample] = (
                    samples[use.sample][: len(part)],
                    samples[use.sample][len(part) :],
                )
                num_rewritten += SENTINELS[0] in read
                assert without_gap(read, part, is_end=is_end) == part, (case, number)
            assert not any(samples.values()), (case, number)
    assert num_rewritten > 12


def test_a_document_is_found_in_every_step_that_reads_it(
    prefixes: list[Path], tmp_path: Path
) -> None:
    draw, found = random.Random(1), 0
    for case in range(40):
        start = OrderStart(0, 0, 0, 4, VOCAB_SIZE, random_config(draw, prefixes, consumed=0))
        second = replace(
            start, step=4, consumed_samples=start.samples(4).stop + 1, skipped_samples=3
        )
        order = DataOrder([start, second])
        uses = Counter(
            (use.corpus.prefix, use.document, step, use.sample)
            for step in range(1, 9)
            for use in order.documents(step)
        )
        for prefix in prefixes:
            for document in range(len(LENGTHS[int(prefix.name[1:])])):
                named = {key[2:] for key in uses if key[:2] == (prefix, document)}
                assert set(order.samples_of(prefix, document, last_step=8)) == named, (
                    case,
                    prefix,
                    document,
                )
                found += len(named)
        counted = order.tokens_by_corpus(8)
        read = Counter()
        for step in range(1, 9):
            for use in order.documents(step):
                read[str(use.corpus.prefix)] += use.tokens
        assert {name: tokens for name, (tokens, _) in counted.items() if tokens} == dict(read)
    assert found > 500


def test_a_folder_without_an_order_a_step_before_it_and_random_tokens_are_errors(
    tmp_path: Path,
) -> None:
    with pytest.raises(EnvironmentFault, match="does not exist"):
        DataOrder.read(tmp_path)
    config = Config(data=DataConfig(mock_data=True), train=TrainConfig(global_batch_size=2))
    OrderStart(3, 6, 0, 2, VOCAB_SIZE, config).append_to(tmp_path)
    with pytest.raises(DataError, match="step 3 is not in the run: its first step is 4"):
        list(DataOrder.read(tmp_path).documents(3))
    with pytest.raises(DataError, match="random"):
        list(DataOrder.read(tmp_path).documents(4))
    row = json.loads((tmp_path / ORDER_NAME).read_text())
    (tmp_path / ORDER_NAME).write_text(json.dumps(row | {"step": "three"}))
    with pytest.raises(EnvironmentFault, match="step is 'three', it must be a whole number"):
        DataOrder.read(tmp_path)


def test_excluded_documents_are_neither_read_nor_listed(
    prefixes: list[Path], tmp_path: Path
) -> None:
    # given a file with one document as it is written and one as `data find --json` prints it
    file = tmp_path / "excluded"
    file.write_text(f'{prefixes[0]}:1\n\n{{"corpus": "{prefixes[0]}", "document": 4, "step": 2}}\n')
    plain = DataConfig(train_data_path=[str(prefixes[0])], seq_length=8)
    train = TrainConfig(global_batch_size=2)
    starts = [
        OrderStart(0, 0, 0, 2, VOCAB_SIZE, Config(data=data, train=train))
        for data in (plain, replace(plain, exclude_documents=str(file)))
    ]
    # then samples are as before but for the tokens of both, which are not targets either
    full, without = (start.dataset for start in starts)
    corpus = starts[0].corpora[0].corpus
    masked = 0
    for index in range(2 * full.samples_per_epoch):
        before, after = full[index], without[index]
        first = next(starts[0].corpora[0].parts(index)).start
        for place in range(9):
            document, *_ = next(corpus.documents_in(first + place, first + place + 1))
            ids = [np.append(sample.tokens, sample.labels[-1])[place] for sample in (before, after)]
            last = corpus.read(
                corpus.document_start(document + 1) - 1, corpus.document_start(document + 1)
            )[0]
            assert ids[1] == (last if document in (1, 4) else ids[0])
            if place > 0:
                assert after.loss_mask[place - 1] == (document not in (1, 4))
                masked += document in (1, 4)
    assert masked > 100
    read = {use.document for step in range(1, 30) for use in DataOrder([starts[1]]).documents(step)}
    assert read == {0, 3, 5, 6}
    assert not list(DataOrder([starts[1]]).samples_of(prefixes[0], 4, last_step=30))
    # and lines that name nothing of the run are refused
    for line in ("c9:1", f"{prefixes[0]}:7", "web", '{"corpus": 1}'):
        file.write_text(line)
        with pytest.raises(DataError, match="excluded cannot be used"):
            _ = replace(starts[1]).dataset


def test_an_excluded_document_may_be_of_a_corpus_with_an_odd_name(tmp_path: Path) -> None:
    documents = random_documents(LENGTHS[0], vocab_size=VOCAB_SIZE, seed=0)
    prefix = write_documents(
        tmp_path / "a\u2028b\x85c", documents
    )  # str.splitlines ends lines there
    file = tmp_path / "excluded"
    file.write_text(f"{prefix}:0\n")
    data = DataConfig(train_data_path=[str(prefix)], seq_length=8, exclude_documents=str(file))
    config = Config(data=data, train=TrainConfig(global_batch_size=2))
    order = DataOrder([OrderStart(0, 0, 0, 2, VOCAB_SIZE, config)])
    assert not list(order.samples_of(prefix, 0, last_step=30))
    assert list(order.samples_of(prefix, 1, last_step=30))


def test_a_document_is_named_by_the_end_of_its_prefix(prefixes: list[Path]) -> None:
    config = Config(data=DataConfig(train_data_path=[str(prefixes[1])], seq_length=8))
    order = DataOrder([OrderStart(0, 0, 0, 2, VOCAB_SIZE, config)])
    assert order.document("c1:2") == order.document(f"{prefixes[1]}:2") == (prefixes[1], 2)
    for text, why in (
        ("c1:3", "has 3 documents"),
        ("c0:1", "the corpora are"),
        ("c1", "PREFIX:INDEX"),
    ):
        with pytest.raises(DataError, match=why):
            order.document(text)


@pytest.mark.parametrize(
    "data",
    [
        {"data_path": ["s3://host/web"]},
        {"data_path": ["0.5 a 0.5 http://host/web"]},
        {"stages": ["a@0: hf://host/web"]},
        {"train_data_path": ["a"], "valid_data_path": ["web=gs://host/web"]},
    ],
)
def test_addresses_of_a_stored_order_are_opened_at_the_user_s_word_alone(
    data: dict[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(data=DataConfig(**data), train=TrainConfig(global_batch_size=2))
    OrderStart(0, 0, 0, 2, VOCAB_SIZE, config).append_to(tmp_path)
    opened: list[DataConfig] = []

    def build(data: DataConfig, **options: object) -> None:
        opened.append(data)
        raise ValueError("opened")

    monkeypatch.setattr("nanotrain.data.order.build_data", build)
    with pytest.raises(DataError, match="host/web of data-order.jsonl is not opened.*--open-addr"):
        next(DataOrder.read(tmp_path).documents(1))
    assert not opened
    with pytest.raises(ValueError, match="opened"):
        next(DataOrder.read(tmp_path, opens_addresses=True).documents(1))


def test_a_row_without_a_batch_size_is_an_error(tmp_path: Path) -> None:
    config = Config(data=DataConfig(mock_data=True), train=TrainConfig())
    OrderStart(0, 0, 0, 2, VOCAB_SIZE, config).append_to(tmp_path)
    with pytest.raises(EnvironmentFault, match="global_batch_size is None"):
        DataOrder.read(tmp_path)


def test_settings_without_a_corpus_are_an_error(tmp_path: Path) -> None:
    config = Config(data=DataConfig(), train=TrainConfig(global_batch_size=2))
    OrderStart(0, 0, 0, 2, VOCAB_SIZE, config).append_to(tmp_path)
    with pytest.raises(DataError, match="the settings of the run name no corpus"):
        next(DataOrder.read(tmp_path).documents(1))

"""Gaps in documents: where they are, that a sample keeps its length and documents, and which
settings are errors.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.config.load import load
from nanotrain.data.batch import Sample
from nanotrain.data.build import build_data
from nanotrain.data.fim import FillInTheMiddle
from nanotrain.data.token_format import mask_path
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import ConfigError
from tests.data.conftest import WriteCorpus, random_documents

PREFIX, SUFFIX, MIDDLE = 97, 98, 99
FIM = FillInTheMiddle((PREFIX, SUFFIX, MIDDLE), 0.5, 0.5, seed=3)
IDS = {"fim_prefix_token": "97", "fim_suffix_token": "98", "fim_middle_token": "99"}


def samples(prefix: Path, *, number: int = 40, **options: object) -> list[Sample]:
    data = DataConfig(
        train_data_path=[str(prefix)], seq_length=16, **{"fim_data": True, **IDS, **options}
    )
    train = build_data(data, vocab_size=100, seed=5, required=("train",)).train
    assert train is not None
    return [train[index] for index in range(number)]


def test_rates_are_shares_and_all_gaps_occur() -> None:
    ids, gaps = np.arange(10), set()
    rewritten = [FIM.rewritten(ids, key=str(key)).tolist() for key in range(4000)]
    with_gap = [tokens for tokens in rewritten if tokens != ids.tolist()]
    assert 0.47 < len(with_gap) / 4000 < 0.53
    # or no prefix
    assert 0.58 < sum(tokens[:2] == [PREFIX, SUFFIX] for tokens in with_gap) / len(with_gap) < 0.66
    for tokens in with_gap:
        before, after, middle = map(tokens.index, (PREFIX, SUFFIX, MIDDLE))
        prefix, suffix, gap = (
            tokens[before + 1 : after],
            tokens[after + 1 : middle],
            tokens[middle + 1 :],
        )
        assert sorted(prefix + suffix + gap) == list(range(7)) and prefix + gap == sorted(
            prefix + gap
        )
        gaps.add((len(suffix), len(prefix)))
    assert {size for size, _ in gaps} == set(range(8)), "a suffix may be empty or everything"
    assert {len(FIM.rewritten(ids[:n], key="1")) for n in range(10)} == set(range(10))
    assert replace(FIM, rate=0.0).rewritten(ids, key="1") is ids
    assert replace(FIM, rate=1.0, spm_rate=0.0).rewritten(ids, key="0")[0] == PREFIX


def test_samples_are_a_function_of_seed_and_epoch_and_keep_their_documents(
    write_corpus: WriteCorpus,
) -> None:
    prefix = write_corpus(random_documents([7, 30, 1, 50, 3, 12, 60, 2], vocab_size=97))
    common = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    num_cut = 0
    for packing in ("stream", "best_fit"):
        plain = samples(prefix, fim_data=False, packing=packing, **common)
        once, again = (samples(prefix, packing=packing, fim_rate=1.0, **common) for _ in range(2))
        changed = 0
        for before, sample, same in zip(plain, once, again, strict=True):
            assert np.array_equal(sample.tokens, same.tokens) and np.array_equal(
                sample.loss_mask, same.loss_mask
            )
            assert (
                np.array_equal(sample.labels[:-1], sample.tokens[1:])
                and sample.labels[-1] == before.labels[-1]
            )
            assert np.array_equal(sample.position_ids, before.position_ids)
            assert np.array_equal(sample.segment_ids, before.segment_ids)
            assert np.array_equal(sample.loss_mask[:-1], before.loss_mask[:-1])
            num_cut += sample.loss_mask[-1] < before.loss_mask[-1]
            ends = np.flatnonzero(np.diff(before.segment_ids))
            assert np.array_equal(sample.tokens[ends], before.tokens[ends]), (
                "a document ends with its last token"
            )
            changed += not np.array_equal(sample.tokens, before.tokens)
        assert changed > 30
    assert num_cut > 5, (
        "after the gap of a document that goes on in another sample, the next label is no target"
    )
    first, second = (
        samples(prefix, shuffle=False, number=10),
        samples(prefix, shuffle=False, number=20)[10:],
    )
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


def test_validation_and_corpora_with_a_loss_mask_are_left_as_they_are(
    write_corpus: WriteCorpus,
) -> None:
    prefix = write_corpus(random_documents([40] * 20, vocab_size=97))
    data = DataConfig(
        data_path=[str(prefix)], split="1,1", seq_length=16, fim_data=True, fim_rate=1.0, **IDS
    )
    built = build_data(data, vocab_size=100, seed=5)
    assert built.train is not None and PREFIX in built.train[0].tokens
    assert built.valid is not None and not any(
        PREFIX in built.valid[index].tokens for index in range(20)
    )
    mask_path(prefix).write_bytes(bytes(800))
    assert not any(PREFIX in sample.tokens for sample in samples(prefix, fim_rate=1.0))


SPLIT = 96
FRAGMENTS = replace(FIM, rate=0.7, split_token=SPLIT, fragment_rate=0.5)


def chosen(fim: FillInTheMiddle, key: str, rate: float) -> bool:
    return fim._draw_numbers(key)[0] < rate * 2**64


def rewritten_by_hand(fim: FillInTheMiddle, ids: list[int], *, key: str, rate: float) -> list[int]:
    """A fragment with a gap, by the draws of the key."""
    kept = len(ids) - 3
    if kept < 1 or not chosen(fim, key, rate):
        return ids
    _, order, *ends = fim._draw_numbers(key)
    first, last = sorted(end * (kept + 1) // 2**64 for end in ends)
    prefix, gap, suffix = ids[:first], ids[first:last], ids[last:kept]
    if order < fim.spm_rate * 2**64:
        return [PREFIX, SUFFIX, *suffix, MIDDLE, *prefix, *gap]
    return [PREFIX, *prefix, SUFFIX, *suffix, MIDDLE, *gap]


def fragments_by_hand(fim: FillInTheMiddle, ids: list[int], *, key: str) -> list[int]:
    """Divide at the token, rewrite what is between, and join again."""
    if SPLIT not in ids:
        return rewritten_by_hand(fim, ids, key=key, rate=fim.rate)
    if not chosen(fim, key, fim.rate):
        return ids
    texts = "".join(map(chr, ids)).split(chr(SPLIT))
    fragments = [
        rewritten_by_hand(fim, list(map(ord, text)), key=f"{key} {number}", rate=fim.fragment_rate)
        for number, text in enumerate(texts)
    ]
    joined = fragments[0]
    for fragment in fragments[1:]:
        joined = [*joined, SPLIT, *fragment]
    return joined


def test_fragments_between_tokens_are_rewritten_in_their_place() -> None:
    rng = np.random.default_rng(0)
    changed = []
    for number in range(300):
        ids = rng.integers(1, 90, size=40)
        ids[rng.random(40) < 0.1] = SPLIT
        tokens = FRAGMENTS.rewritten_part(ids, key=str(number))
        assert tokens.tolist() == fragments_by_hand(FRAGMENTS, ids.tolist(), key=str(number))
        assert np.array_equal(tokens == SPLIT, ids == SPLIT)
        changed.append(not np.array_equal(tokens, ids))
    assert 0.3 < np.mean(changed) < 0.8


def test_a_part_without_the_token_is_rewritten_as_a_whole() -> None:
    ids = np.arange(20)
    keys = [str(key) for key in range(50)]
    parts = [FRAGMENTS.rewritten_part(ids, key=key).tolist() for key in keys]
    assert parts == [FRAGMENTS.rewritten(ids, key=key).tolist() for key in keys]


def test_what_begins_with_a_text_is_not_rewritten(tmp_path: Path) -> None:
    ByteTokenizer().as_fast().save(tmp_path)
    data = DataConfig(fim_rate=1.0, fim_no_prefix="#!/bin", fim_split_sample="10", **IDS)
    fim = FillInTheMiddle.of(data, tokenizer=str(tmp_path), vocab_size=300, seed=0)
    encode = ByteTokenizer().as_fast().encode
    script = np.array(encode("#!/bin/sh, and what it runs"))
    prose = np.array(encode("What #!/bin/sh is, and more"))
    line = np.array(encode("\n"))
    assert fim.split_token is not None
    line[:] = fim.split_token
    tokens = fim.rewritten_part(np.concatenate([script, line, prose]), key="0")
    assert np.array_equal(tokens[: len(script)], script)
    assert not np.array_equal(tokens[len(script) + 1 :], prose)
    with pytest.raises(ConfigError, match="--fim-no-prefix '#!/bin' without a tokenizer"):
        FillInTheMiddle.of(data, tokenizer=None, vocab_size=300, seed=0)


def test_fragments_reach_the_samples(write_corpus: WriteCorpus) -> None:
    documents = random_documents([40] * 20, vocab_size=97)
    prefix = write_corpus(documents)
    plain = samples(prefix, fim_rate=1.0)
    split = samples(prefix, fim_rate=1.0, fim_split_sample=str(SPLIT), fim_fragment_rate=0.0)
    has_split = [SPLIT in sample.tokens for sample in split]
    assert any(has_split)
    assert not all(has_split)
    assert any(
        not np.array_equal(one.tokens, other.tokens)
        for one, other in zip(plain, split, strict=True)
    )


def test_the_label_after_a_fragment_without_a_gap_is_a_target(write_corpus: WriteCorpus) -> None:
    """The document goes on in the next sample; its last fragment here is too short for a gap."""
    document = np.array([*range(1, 14), SPLIT, 1, 2, *range(20, 40)])
    prefix = write_corpus([document] * 20)
    options = {"fim_rate": 1.0, "fim_split_sample": str(SPLIT), "fim_fragment_rate": 1.0}
    found = 0
    for sample in samples(prefix, **options):
        if sample.tokens[-3:].tolist() == [SPLIT, 1, 2]:
            found += 1
            assert PREFIX in sample.tokens and sample.loss_mask[-1] == 1.0
    assert found > 0


def test_sentinels_are_tokens_of_the_tokenizer_or_ids(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer().as_fast()
    tokenizer.backend.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    tokenizer.save(tmp_path)
    fim = FillInTheMiddle.of(
        DataConfig(fim_suffix_token="7"), tokenizer=str(tmp_path), vocab_size=300, seed=0
    )
    assert fim.sentinels == (257, 7, 259)
    for name, size in (("bytes", 300), (None, 300), (str(tmp_path), 258)):
        with pytest.raises(ConfigError, match=r"--fim-middle-token <fim_middle>: no token"):
            FillInTheMiddle.of(DataConfig(), tokenizer=name, vocab_size=size, seed=0)


def test_settings_without_fim_data_and_random_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="it belongs to fim_data"):
        load(["+config=tiny", "--fim-rate", "0.3"])
    with pytest.raises(ConfigError, match="mock_data has no text"):
        load(["+config=tiny", "--mock-data", "--fim-data"])

"""Corpora of conversations: a mask where one is needed, one chat template, its tokenizer."""

import logging
from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import DataConfig
from nanotrain.data.build import build_data
from nanotrain.data.corpus_info import CorpusInfo, write_info
from nanotrain.data.run_tokenizer import tokenizer_of
from nanotrain.errors import DataError
from nanotrain.prepare.token_writer import TokenWriter


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    """A text, and the same conversations by two templates of one vocabulary."""
    for name, template in (("text", ""), ("talks", "a"), ("others", "b")):
        documents = [list(range(20))] * 5
        mask = (np.arange(20) > 14).astype(np.uint8)
        with TokenWriter(tmp_path / name, np.dtype("uint16"), has_mask=bool(template)) as writer:
            writer.add_documents(documents, [mask] * 5 if template else [])
            writer.complete()
        (tmp_path / f"{name}.tokenizer").mkdir()
        info = CorpusInfo(f"{name}.tokenizer", 20, chat_template_sha256=template)
        write_info(tmp_path / name, info)
    return tmp_path


def data_of(root: Path, *names: str, sft: bool) -> DataConfig:
    paths = [str(root / name) for name in names]
    return DataConfig(
        data_path=paths, seq_length=20, sft=sft, packing="best_fit", reset_attention_mask=True
    )


def test_fine_tuning_needs_masks(corpora: Path) -> None:
    def open_training(*names: str, sft: bool) -> np.ndarray:
        data = data_of(corpora, *names, sft=sft)
        samples = build_data(data, vocab_size=20, seed=0, required=("train",)).train
        assert samples is not None
        return samples[0].loss_mask

    assert open_training("talks", sft=True).sum() == 5
    with pytest.raises(DataError, match=r"text has no loss mask, .* write --no-sft --packing"):
        open_training("talks", "text", sft=True)
    assert open_training("text", "talks", sft=False).sum() in (5, 19)


def test_other_templates_are_named(corpora: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("nanotrain").propagate = True
    for names, is_named in ((("text", "talks", "talks"), False), (("talks", "others"), True)):
        data = data_of(corpora, *names, sft=False)
        build_data(data, vocab_size=20, seed=0, required=("train",))
        assert ("were prepared with different chat templates" in caplog.text) is is_named


def test_the_tokenizer_of_a_run_has_the_template_of_its_conversations(corpora: Path) -> None:
    data = data_of(corpora, "text", "others", "talks", sft=False)
    assert tokenizer_of(data) == str(corpora / "others.tokenizer")
    assert tokenizer_of(data_of(corpora, "text", sft=False)) == str(corpora / "text.tokenizer")

"""A text is found in every document that holds it, wherever blocks of the search end."""

from pathlib import Path

import numpy as np
import pytest

from nanotrain.config.config import Config, DataConfig, TrainConfig
from nanotrain.data import find
from nanotrain.data.order import DataOrder, OrderStart
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import DataError
from tests.data.conftest import write_documents

TEXTS = ("the frog sang", "a frog", "", "sang the frog sang the frog sang", "the frogs sing")


@pytest.fixture
def order(tmp_path: Path) -> DataOrder:
    documents = [np.array([*ByteTokenizer().encode(text), 256]) for text in TEXTS]
    prefix = write_documents(tmp_path / "tales", documents)
    data = DataConfig(train_data_path=[str(prefix)], seq_length=8, tokenizer_model="bytes")
    train = TrainConfig(global_batch_size=2)
    return DataOrder(
        [OrderStart(0, 0, 0, 2, vocab_size=257, config=Config(data=data, train=train))]
    )


@pytest.mark.parametrize("block", [3, 16, 1000])
def test_every_document_with_the_text_is_found(
    order: DataOrder, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_BLOCK_TOKENS", block)
    for text in ("the frog", " frog sang", "frogs", "the frog sang", "g sang the f"):
        documents = [number for _, number in find.documents_with(text, order, run=tmp_path)]
        assert sorted(documents) == [number for number, each in enumerate(TEXTS) if text in each], (
            text
        )


def test_a_short_text_and_an_unknown_tokenizer_are_errors(order: DataOrder, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too short"):
        find.documents_with("frog", order, run=tmp_path)
    object.__setattr__(order.starts[0].config.data, "tokenizer_model", None)
    with pytest.raises(DataError, match="has no tokenizer"):
        find.documents_with("the frog", order, run=tmp_path)

"""The files of tasks: where they are read, and rows that are too long."""

import logging

import pytest

from nanotrain.config.config import TrainConfig
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import ConfigError
from nanotrain.train.open_tasks import read_tasks


def test_a_task_is_a_file_of_this_machine():
    with pytest.raises(ConfigError, match=r"s3://bucket/qa\.jsonl is no path: files are read"):
        read_tasks(TrainConfig(eval_tasks=["qa=s3://bucket/qa.jsonl"]), ByteTokenizer())


def test_rows_longer_than_a_sequence_are_counted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("nanotrain"), "propagate", True)
    caplog.set_level(logging.INFO, logger="nanotrain")
    file = tmp_path / "qa.jsonl"
    file.write_text(
        '{"context": "abcdef", "continuation": "g"}\n{"context": "a", "continuation": "b"}\n'
    )
    train = TrainConfig(eval_tasks=[f"qa={file}"])
    read_tasks(train, ByteTokenizer(), seq_length=7)
    assert not caplog.text
    read_tasks(train, ByteTokenizer(), seq_length=6)
    assert "task qa: of 1 of 2 rows only the last 6 tokens are read" in caplog.text

"""`nanotrain prepare`: its arguments, and an address as the output."""

import pytest

from nanotrain.cli.prepare import prepare, prepare_parser
from nanotrain.errors import ConfigError
from nanotrain.prepare.inputs import Limits
from nanotrain.prepare.options import PrepareOptions

LINE = ["--input", "a.txt", "--output", "b", "--tokenizer", "bytes"]


def test_the_arguments_are_the_options():
    args = prepare_parser().parse_args(LINE)
    assert vars(args).keys() >= PrepareOptions.__dataclass_fields__.keys()
    assert args.append_eod and args.max_inflation == Limits.inflation


def test_documents_may_end_without_a_token():
    assert not prepare_parser().parse_args([*LINE, "--no-append-eod"]).append_eod


@pytest.mark.parametrize("more", [["--part", "1/2"], ["--executor", "slurm"]])
def test_several_machines_write_into_a_folder_that_all_of_them_see(more):
    line = ["--input", "a.txt", "--output", "s3://bucket/b", "--tokenizer", "bytes"]
    with pytest.raises(ConfigError, match="on several machines"):
        prepare([*line, *more])

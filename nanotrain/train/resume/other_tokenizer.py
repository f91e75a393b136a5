"""A warning if weights and corpus come from different tokenizers, for which the same id is different text."""

from contextlib import suppress
from pathlib import Path

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.config.config import DataConfig
from nanotrain.config.schema import config_from_dict
from nanotrain.data.build import first_blend, uses_quickstart
from nanotrain.data.corpus_info import may_be_same_tokenizer, recorded_tokenizer
from nanotrain.data.data_path import parse_data_path
from nanotrain.errors import NanotrainError
from nanotrain.inference.checkpoint import OpenedCheckpoint, tokenizer_name
from nanotrain.log import get_logger

log = get_logger(__name__)


def warn_of_other_tokenizer(weights: str | None, data: DataConfig, *, path: Path) -> None:
    """Log a warning if the corpus was prepared with a tokenizer other than that of the weights.

    Args:
        weights: tokenizer of the weights, as `load_tokenizer` takes it; None if unknown.
        data: of the run.
        path: of the weights.
    """
    if weights is None or uses_quickstart(data) or data.mock_data:
        return
    prefix = parse_data_path(first_blend(data))[0].prefix
    corpus = recorded_tokenizer(prefix)
    if corpus is not None and corpus != weights and not may_be_same_tokenizer(weights, corpus):
        log.info(  # of the first rank; a warning would be one of each rank
            "warning: the weights of %s belong to the tokenizer %s, but %s was prepared with %s, in which the same id"
            " is different text: the loss starts high; prepare the corpus with --tokenizer %s",
            *(path, weights, prefix, corpus, weights),
        )


def warn_after_restore(manifest: Manifest, data: DataConfig, *, path: Path) -> None:
    """`warn_of_other_tokenizer` for a checkpoint that was loaded."""
    with suppress(NanotrainError, OSError):  # files of another run may be gone, damaged or private, and are not needed
        opened = OpenedCheckpoint(path, config_from_dict(manifest.config), manifest)
        warn_of_other_tokenizer(tokenizer_name(opened), data, path=path)


def warn_after_import(folder: Path, data: DataConfig) -> None:
    """`warn_of_other_tokenizer` for the weights of a Hugging Face folder, which may have a tokenizer."""
    if (folder / "tokenizer.json").is_file():
        warn_of_other_tokenizer(str(folder), data, path=folder)

"""Checks of corpora of conversations, which have a loss mask beside their tokens."""

from collections.abc import Sequence
from pathlib import Path

from nanotrain.config.config import DataConfig
from nanotrain.data.corpus_info import read_info
from nanotrain.data.remote import open_file
from nanotrain.data.token_format import mask_path
from nanotrain.errors import DataError
from nanotrain.log import get_logger
from nanotrain.paths import Address

log = get_logger(__name__)


def check_masks(data: DataConfig, prefixes: Sequence[Path]) -> None:
    """Check the corpora of training: with `sft` each has a mask, and their chat templates agree.

    Raises:
        DataError: a corpus without a mask, of which every token would be a target.
    """
    if data.sft:
        without = [prefix for prefix in prefixes if open_file(mask_path(prefix)) is None]
        if without:
            raise DataError(
                f"{without[0]} has no loss mask, and --sft trains on the assistant's tokens alone",
                why="it was prepared as text, so every token of it would be a target",
                fix="prepare conversations with nanotrain prepare --format chat; to mix them with "
                "text write --no-sft --packing best_fit --reset-attention-mask "
                "--reset-position-ids",
            )
    warn_of_other_templates(prefixes)


def warn_of_other_templates(prefixes: Sequence[Path]) -> None:
    """Warn of conversations that were written with different chat templates."""
    templates = {}
    for prefix in dict.fromkeys(prefixes):
        if isinstance(prefix, Address):
            continue  # a request for a warning
        template = read_info(prefix).chat_template_sha256
        if template:
            templates[prefix] = template
    if not templates:
        return
    first = next(iter(templates))
    for prefix, template in templates.items():
        if template != templates[first]:
            log.warning(
                "%s and %s were prepared with different chat templates: the run keeps that of %s, "
                "and the model learns both",
                first,
                prefix,
                first,
            )
            return

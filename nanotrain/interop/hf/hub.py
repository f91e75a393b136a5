"""The hub: the model card of an exported folder, README.md, and upload of the folder."""

from pathlib import Path

from nanotrain.config.model import ModelConfig
from nanotrain.data.pretrained import first_line, go_offline_if_unreachable
from nanotrain.errors import ConfigError, EnvironmentFault
from nanotrain.runs.files import write_text
from nanotrain.spec.counts import num_active_parameters, num_parameters
from nanotrain.spec.shape import ModelShape


def check_repository(repository: str, *, flag: str = "--push") -> None:
    """Check the name of a repository on the hub.

    Args:
        repository: the name, OWNER/NAME.
        flag: the argument that has the name, for the error.

    Raises:
        ConfigError: the hub allows no such name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(
            f"{flag} {repository}", why=first_line(error), fix=f"write {flag} OWNER/NAME"
        ) from None


def require_hub(*, fix: str) -> None:
    """Check that the hub can be reached.

    Raises:
        EnvironmentFault: there is no network, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants

    go_offline_if_unreachable()
    if constants.HF_HUB_OFFLINE:
        raise EnvironmentFault(
            f"{constants.ENDPOINT} cannot be reached",
            why="there is no network, or HF_HUB_OFFLINE is set",
            fix=fix,
        )


def push_folder(folder: Path, repository: str, *, is_private: bool = True) -> str:
    """Upload a folder to a repository of the hub; returns a summary line.

    A new repository is private or public, as `is_private` says. Without a network nothing is
    uploaded, and the line has the command that does it later.

    Raises:
        EnvironmentFault: the hub refuses it.
    """
    from huggingface_hub import HfApi, constants

    go_offline_if_unreachable()
    if constants.HF_HUB_OFFLINE:
        return f"no network, so nothing is uploaded; later: hf upload {repository} {folder}"
    try:
        api = HfApi()
        api.create_repo(repository, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # the network, the hub or a missing login
        raise EnvironmentFault(
            f"{folder} cannot be uploaded to {repository}",
            why=first_line(error),
            fix=f"log in (hf auth login), then: hf upload {repository} {folder}",
        ) from None
    return f"uploaded to {constants.ENDPOINT}/{repository}"


CARD_FILE = "README.md"


def model_card(
    model_config: ModelConfig, *, name: str, family: str, dtype: str, has_tokenizer: bool
) -> str:
    """The text of a model card: metadata for the hub, sizes of the model, and how to load it."""
    shape = ModelShape.of(model_config)
    total = num_parameters(shape)
    active = num_active_parameters(shape)
    sizes = f"{total:,} parameters"
    if active < total:
        sizes += f" ({active:,} active per token)"
    sizes += f", {shape.num_layers} layers of width"
    positions = model_config.max_position_embeddings
    vocabulary = f"a vocabulary of {shape.vocab_size:,} tokens"
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanotrain
- {family}
---

# {name}

A language model trained with nanotrain: {sizes}
{shape.hidden_size:,}, {vocabulary} and up to {positions:,} positions.
The weights are {dtype}, with the names of the family `{family}`.

{loading_code(name, has_tokenizer=has_tokenizer)}
"""


def loading_code(name: str, *, has_tokenizer: bool) -> str:
    """The code block of a card that loads the model, and the tokenizer if there is one."""
    classes = "AutoModelForCausalLM"
    lines = [f"model = AutoModelForCausalLM.{_load_call(name)}"]
    if has_tokenizer:
        classes += ", AutoTokenizer"
        lines.append(f"tokenizer = AutoTokenizer.{_load_call(name)}")
    return "\n".join(["```python", f"from transformers import {classes}", "", *lines, "```"])


def name_card(folder: Path, name: str) -> None:
    """Give the model card of an exported folder the name of a repository on the hub."""
    before = folder.resolve().name
    card = folder / CARD_FILE
    text = card.read_text()
    text = text.replace(f"\n# {before}\n", f"\n# {name}\n")
    text = text.replace(_load_call(before), _load_call(name))
    write_text(card, text)


def _load_call(name: str) -> str:
    return f'from_pretrained("{name}")'

"""Upload of a Hugging Face folder to the hub."""

from pathlib import Path

from nanotrain.data.tokenizer import first_line, go_offline_if_unreachable
from nanotrain.errors import ConfigError, EnvironmentFault


def check_repository(repository: str) -> None:
    """Check the name of a repository on the hub.

    Raises:
        ConfigError: the hub allows no such name.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"--push {repository}", why=first_line(error), fix="write --push OWNER/NAME") from None


def push_folder(folder: Path, repository: str) -> str:
    """Upload a folder to a repository of the hub, created private if it does not exist; returns a summary line.

    Without a network nothing is uploaded, and the line has the command that does it later.

    Raises:
        EnvironmentFault: the hub refuses it.
    """
    from huggingface_hub import HfApi, constants

    go_offline_if_unreachable()
    if constants.HF_HUB_OFFLINE:
        return f"no network, so nothing is uploaded; later: hf upload {repository} {folder}"
    try:
        api = HfApi()
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # the network, the hub or a missing login
        raise EnvironmentFault(
            f"{folder} cannot be uploaded to {repository}",
            why=first_line(error),
            fix=f"log in (hf auth login), then: hf upload {repository} {folder}",
        ) from None
    return f"uploaded to {constants.ENDPOINT}/{repository}"

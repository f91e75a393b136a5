"""Rows of Hugging Face datasets, from the hub or from local files of other types.

`datasets` takes seconds to import, so it is imported only when such rows are read; no other file imports it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanotrain.data.tokenizer import first_line, go_offline_if_unreachable
from nanotrain.errors import DataError, NanotrainError


@dataclass(frozen=True)
class HubDataset:
    """The arguments of `datasets.load_dataset`."""

    name: str  # hub name, a folder, or a file type ("csv") with `files`
    subset: str | None  # configuration of the dataset; None for its only one
    split: str  # split of the dataset, usually "train"
    files: tuple[str, ...] = ()  # local files, for a file type


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote the folder: one dataset, or one per split."""
    one = ("state.json", "dataset_info.json")
    return (folder / "dataset_dict.json").is_file() or all((folder / name).is_file() for name in one)


def load_rows(dataset: HubDataset, *, streaming: bool = False) -> Any:
    """Load a random-access `datasets.Dataset`, or an iterable one that stores nothing on disk.

    Raises:
        DataError: the dataset cannot be loaded.
    """
    if not dataset.files and not Path(dataset.name).is_dir():
        go_offline_if_unreachable()
    import datasets

    _leave_pickles_unread()
    if not streaming:
        datasets.disable_progress_bars()
    files = list(dataset.files) or None
    try:
        if is_saved_dataset(Path(dataset.name)):
            rows = _saved_rows(datasets.load_from_disk(dataset.name), dataset)
            return rows.to_iterable_dataset() if streaming else rows
        return datasets.load_dataset(
            dataset.name, dataset.subset, split=dataset.split, data_files=files, streaming=streaming
        )
    except NanotrainError:
        raise
    except Exception as error:  # a loader may raise anything; its first line is what the user needs
        raise DataError(
            f"the dataset {dataset.files[0] if dataset.files else dataset.name} cannot be loaded",
            why=f"it is no local file or folder of text, and Hugging Face datasets reports: {first_line(error)}",
            fix="check the spelling, --subset and --split-name; without a network give local files",
        ) from None


def _leave_pickles_unread() -> None:
    """Leave `.pth` files within tar files as bytes: they are the only pickles that `datasets` reads."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    WebDataset.DECODERS.pop("pth", None)


def _saved_rows(saved: Any, dataset: HubDataset) -> Any:
    """The rows of a dataset that `save_to_disk` wrote, or of a split where it wrote several."""
    what = f"{dataset.name} has no split {dataset.split}"
    if not isinstance(saved, dict):
        if dataset.split not in ("train", str(saved.split)):  # "train" is the default
            raise DataError(what, why="it is one dataset without splits", fix="leave --split-name out")
        return saved
    if dataset.split not in saved:
        raise DataError(what, why=f"its splits are {', '.join(saved)}", fix="name one with --split-name")
    return saved[dataset.split]

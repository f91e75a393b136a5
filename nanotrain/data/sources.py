"""The names of the corpora that a dataset blends."""

from nanotrain.data.batch import SampleDataset
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.gpt import GPTDataset
from nanotrain.data.staged import StagedDataset


def source_names(dataset: SampleDataset) -> tuple[str, ...]:
    """One name per corpus, in the order of `source_of`: the shortest path endings that differ; () if not a blend."""
    if not isinstance(dataset, BlendedDataset | StagedDataset):
        return ()
    paths = [part.corpus.prefix if isinstance(part, GPTDataset) else None for part in dataset.datasets]
    parts = [("source", str(index)) if path is None else path.parts for index, path in enumerate(paths)]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return tuple(names)
    return tuple(f"{name} ({index})" for index, name in enumerate(names))  # one corpus twice

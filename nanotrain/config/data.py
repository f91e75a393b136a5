"""The section of the datasets."""

from dataclasses import dataclass
from typing import Literal

from nanotrain.config.option import above, at_least, option

Packing = Literal["stream", "best_fit"]


@dataclass(frozen=True)
class DataConfig:
    """The datasets, the tokenizer and how samples are read."""

    data_path: list[str] = option([], is_path=True)
    """prefixes of token files, each with an optional weight before it: 0.7 a 0.3 b; with quickstart
    it may be empty
    """

    train_data_path: list[str] = option([], is_path=True)
    """instead of data_path: prefixes for training, with or without weights, not divided by split"""

    valid_data_path: list[str] = option([], is_path=True)
    """with train_data_path: prefixes for validation; or NAME=PREFIX entries: validation sets with a
    loss each, instead of split's
    """

    test_data_path: list[str] = option([], is_path=True)
    """with train_data_path: prefixes for testing"""

    stages: list[str] = option([], name="data_stages", is_path=True)
    """instead of data_path: NAME@START: BLEND entries such as 'anneal@9000: 0.5 web 0.5 math', each
    the blend from a step on, or from a sample on (START with 'samples' after it)
    """

    loss_weights: list[str] = option([], name="data_loss_weights")
    """NAME=WEIGHT for every corpus of the blend: its weight in the loss, whatever its share of the
    samples is, if their numbers of targets are equal; unset: its share of the samples
    """

    split: str = option("969,30,1")
    """proportions of training, validation and test documents"""

    exclude_documents: str | None = option(None, is_path=True)
    """file of training documents that are not read from the start of this process on: lines
    PREFIX:INDEX, or those that nanotrain data find --json prints
    """

    seq_length: int = option(256, check=at_least(1))
    """sequence length: tokens per sample"""

    tokenizer_model: str | None = option(None, is_path="or address")
    """Hugging Face name or folder, tokenizer.json, or 'bytes'; unset: the one next to the data"""

    vocab_file: str | None = option(None, is_path=True)
    """GPT-2's vocab.json, with merge_file instead of tokenizer_model"""

    merge_file: str | None = option(None, is_path=True)
    """GPT-2's merges.txt, with vocab_file instead of tokenizer_model"""

    mock_data: bool = option(False)
    """train on synthetic tokens, for benchmarks"""

    shuffle: bool = option(True)
    """shuffle the samples; off: sample i is tokens [i*S, i*S+S+1)"""

    packing: Packing = option("stream")
    """what a sample is: stream (a window over all tokens) or best_fit (whole documents and padding;
    longer ones are divided)
    """

    sft: bool = option(False)
    """fine-tune on conversations: every corpus of training needs a loss mask (nanotrain prepare
    --format chat); implies packing best_fit, reset_attention_mask and reset_position_ids
    """

    fim_data: bool = option(False)
    """fill-in-the-middle: rewrite parts of training documents as prefix, suffix and middle, each
    after its sentinel
    """

    fim_rate: float = option(0.5, check=at_least(0, at_most=1))
    """fim_data: share of the parts that are rewritten"""

    fim_spm_rate: float = option(0.5, check=at_least(0, at_most=1))
    """fim_data: share of those that begin with the suffix"""

    fim_split_sample: str | None = option(None)
    """fim_data: token at which a part is split into fragments, such as the files of a repository, a
    token of the tokenizer or an id; of fim_rate of these parts every fragment is rewritten or not;
    unset: a part is rewritten as a whole
    """

    fim_fragment_rate: float | None = option(None, check=at_least(0, at_most=1))
    """fim_split_sample: share of the fragments that are rewritten"""

    fim_no_prefix: str | None = option(None)
    """fim_data: a part or fragment whose text begins with this is not rewritten"""

    fim_prefix_token: str = option("<fim_prefix>")
    """fim_data: sentinel before the prefix, a token of the tokenizer or an id"""

    fim_suffix_token: str = option("<fim_suffix>")
    """fim_data: sentinel before the suffix"""

    fim_middle_token: str = option("<fim_middle>")
    """fim_data: sentinel before the middle"""

    object_storage_cache_path: str | None = option(None, is_path=True)
    """folder for parts of token files in object storage, on a disk of the host, shared by its
    processes; unset: in the folder for temporary files
    """

    object_storage_cache_gib: float = option(16.0, check=above(0))
    """GiB of object_storage_cache_path that token files may take; their indices come on top"""

    num_workers: int = option(1, check=at_least(0, at_most=256))
    """data loader processes; 0: load in the training process"""

    reset_position_ids: bool = option(False)
    """restart position ids at each document"""

    reset_attention_mask: bool = option(False)
    """mask attention between documents"""

    eod_mask_loss: bool = option(False)
    """mask the loss of tokens that follow an end-of-document token"""

    quickstart: bool = option(False)
    """without data_path, train on the quick-start corpus: the source files of Python's standard
    library
    """

    quickstart_vocab_size: int = option(8192, check=at_least(300))
    """quick-start corpus: size of its BPE vocabulary"""

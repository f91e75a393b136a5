"""Training-time reading: token files to batches.

Holds datasets, blending, sampling, the batch loader and tokenizers; it does not prepare corpora
(see prepare/).

    token_format.py, indexed.py    token files as a stream of tokens
    checksums.py, remote.py        their checksums; local files and objects
    gpt.py, packing.py, fim.py     samples from a stream: windows, whole documents, gaps to fill
    blend.py, data_path.py         several corpora as one; `--data-path` and `--split`
    build.py                       the datasets of a run from its data section
    batch.py, sampler.py, loader.py, worker.py   microbatches of a rank
    order.py, find.py              the documents that a run reads
    mix.py                         another blend for a running job
    tasks.py                       questions with continuations
    tokenizer.py, token_bytes.py   text to ids and back; bytes of text per token
    pretrained.py, tokenizer_files.py   AutoTokenizer's tokenizer; the files in a folder
    corpus_info.py, same_tokenizer.py   how a corpus was prepared, with which tokenizer
"""

"""Checkpoints: chunks of global tensors in one safetensors file per rank, and a manifest.

    manifest.py             the chunks of every global tensor and their files, as data and as JSON
    plan.py                 pure plans of writes and reads: boxes and manifests in, frozen data out
    write.py, read.py       shard files, chunk by chunk, with a checksum per chunk
    checkpointer.py         save and restore over all ranks, in phases (`all_ranks.py`)
    background.py           a save that goes on while training does
    commit.py               the shards of all ranks become one complete checkpoint
    compatibility.py        what a run and a checkpoint lack of each other
    store.py, retention.py  the folder of checkpoints: which are complete, which are kept
    stored.py, remote_checkpointer.py   runs in object storage
    memory_checkpointer.py, memory_start.py   in the memory of the hosts, with copies on partners;
                            `host_folder.py` their folders, `peers.py` servers, `run_memory.py` both
    rewrite.py, export_folder.py        checkpoints and folders made from other values
    report.py               what `nanotrain checkpoint inspect`, `verify` and `diff` print

What is saved and when is decided in `train/`; Hugging Face files are in `interop/hf`.
"""

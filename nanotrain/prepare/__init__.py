"""Offline corpus preparation: text files and Hugging Face datasets to `.bin/.idx` token files.

Holds `nanotrain prepare` and the quick-start corpus; training-time reading is in data/, which never
imports this.

    options -> chunks (splits the inputs) -> parts (one file per chunk) -> corpus (merges them)
    inputs, readers, chat: chunk -> documents      encoder: documents -> token ids
    token_writer: token ids -> .bin/.idx           text_counts: what the ids do not say
    executors: where parts are written             bpe, quickstart
"""

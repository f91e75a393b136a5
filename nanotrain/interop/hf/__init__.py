"""Hugging Face folders: config.json to and from a model configuration, weights to and from files.

    families.py, tables.py, families.yaml   the families, one row each
    layout.py, canonical.py                 config.json of a family as tables
    parts.py, layer_types.py, positions.py  entries of config.json that need code
    names.py, weights.py                    tensor names, and the files by box
    import_weights.py, export.py            weights in and out
    companions.py, hub.py                   files beside the weights; the hub

Tokenizers are in `data/`, checkpoints of training runs in `checkpoint/`.
"""

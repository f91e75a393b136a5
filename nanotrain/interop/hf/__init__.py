"""Hugging Face folders: config.json to and from a model configuration, weights to and from files.

    families.py, tables.py, families.yaml   the families, one row each
    layout.py, canonical.py                 config.json of a family as tables
    parts.py                                entries of config.json that need code, from
                                            layer_types.py, experts.py, positions.py, windows.py
    names.py, tensor_mapping.py             tensor names, and a parameter in the tensors
    weights.py, mxfp4.py                    the files by box, dequantized
    import_weights.py, export.py            weights in and out
    companions.py, hub.py                   tokenizer and config.json of an export; the hub

Tokenizers are in `data/`, checkpoints of training runs in `checkpoint/`.
"""

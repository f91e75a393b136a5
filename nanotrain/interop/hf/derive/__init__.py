"""A row of families.yaml derived from a folder of Hugging Face: its config.json, the names and
shapes of its tensors, and the text of its modeling code.

    source.py     modeling code as text: classes, norms, order of a block; nothing is run
    tensors.py    names of tensors -> modules of a layer
    findings.py   what a folder says, and the kinds that nanotrain lacks for it
    experts.py    rows for routers and experts
    row.py        the row, and others where the text leaves a choice
    written.py    a row as YAML, and rows that lie in a folder

Known families serve as the dictionary of names. What no rule understands is named with the entry,
the tensor or the line of code that asks for it, and no row is made.
"""

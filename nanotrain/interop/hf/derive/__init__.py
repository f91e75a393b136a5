"""A row of families.yaml derived from a folder of Hugging Face: its config.json, the names and
shapes of its tensors, and the text of its modeling code.

    source.py          modeling code as text: classes, norms, order of a block; nothing is run
    configuration.py   the configuration class as text: defaults of entries
    tensors.py         names of tensors -> modules of a layer
    findings.py        what a folder says, and the kinds that nanotrain lacks for it
    module_names.py    rows for the names of tensors
    experts.py         rows for routers and experts
    row.py             the row, and others where the text leaves a choice
    folder.py          all of it for one folder; each entry of config.json is accounted for

Known families serve as the dictionary of names. What no rule understands is named with the entry,
the tensor or the line of code that asks for it, and no row is made.
"""

"""`nanotrain parity`: compare the training of a layout with that of one rank, on a shrunk model.

    shrink.py        the same structure and layout in a model for a few CPU processes
    check.py         train both and compare losses, gradient norms and weights
    local_ranks.py   a function on every rank of a world of CPU processes
    report.py        the result, as text and as JSON
    conversion.py    a family beside transformers in fp64
    added_family.py  `nanotrain family add`: a derived row, checked and written
    card.py          `nanotrain card`: all checks of a recipe or a family
    card_checks.py   their names

It trains through `train/` and holds no training code of its own.
"""

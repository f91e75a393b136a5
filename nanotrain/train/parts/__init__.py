"""Parts that features add to every training step: a file and a row of `PARTS` (`table.py`) each.

    part.py   `StepPart`: the moments at which a part is called
    others    losses by corpus, norms, router balance, QK-clip, moving average, fp8, rank capacity

The step that calls them, `train/step.py`, names none of them.
"""

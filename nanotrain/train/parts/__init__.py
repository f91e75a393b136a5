"""What features add to every training step: one file and one row of `PARTS` (`table.py`) each.

`part.py` has the moments at which a part is called.
"""

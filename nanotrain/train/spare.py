"""`python -m nanotrain.train.spare`: a process that waits to take the place of a rank that died."""

from nanotrain.train.main import stand_by

if __name__ == "__main__":
    stand_by()

"""`python -m nanotrain.train`, and one rank of `torchrun -m nanotrain.train`."""

from nanotrain.system import run_program
from nanotrain.train.main import main

if __name__ == "__main__":
    run_program(main)

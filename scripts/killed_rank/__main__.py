"""One rank of `scripts/restart_kills`."""

from nanotrain.system import run_program
from scripts.killed_rank import train

if __name__ == "__main__":
    run_program(train)

"""`python -m nanotrain COMMAND ...`, as `nanotrain COMMAND ...`."""

import sys

from nanotrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

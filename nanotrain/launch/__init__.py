"""Start the ranks of a run on this machine."""

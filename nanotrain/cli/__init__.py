"""The command line: `nanotrain COMMAND`, one file per command that needs one."""

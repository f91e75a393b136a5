"""The command line `nanotrain COMMAND`: one function per command, in a file of its own where it is
long.

It holds no logic of the commands: each parses its arguments and calls another package.
"""

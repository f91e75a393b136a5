"""The command line `nanotrain COMMAND`: one function and one parser per command.

It holds no logic of the commands: each parses its arguments and calls another package.
"""

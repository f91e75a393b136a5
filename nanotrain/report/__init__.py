"""What a person looks at after training: an HTML report of runs, a list of runs, a comparison in the terminal.

Reads run folders only; nothing here needs torch, a process group or a model.
"""

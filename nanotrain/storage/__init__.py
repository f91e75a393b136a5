"""Files beyond this machine: objects of s3://, gs://, az:// and hf:// through fsspec, and their
local copies.

What the files hold is not known here: checkpoints are in `nanotrain/checkpoint`, token files in
`nanotrain/data`.
"""

"""Files beyond this machine: objects of s3://, gs://, az:// and hf://, through fsspec.

What the files hold is decided elsewhere: checkpoints in `checkpoint/`, token files in `data/`.
"""

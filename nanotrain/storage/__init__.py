"""Files beyond this machine: objects of s3://, gs://, az:// and hf://, through fsspec (`remote.py`).

What the files hold is decided elsewhere: checkpoints in `checkpoint/`, token files in `data/`.
"""

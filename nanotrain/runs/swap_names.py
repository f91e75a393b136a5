"""`swap_names`: swap two names in a folder in one atomic operation of the file system."""

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# the kernel, the C library or the file system (NFS, some FUSE) has no such operation
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)


def swap_names(first: Path, second: Path) -> bool:
    """Swap two existing files or folders, so that neither name is missing at any moment.

    Returns:
        False if the system does not support it; then nothing has changed.

    Raises:
        OSError: one of them is missing, or the folder cannot be written.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))

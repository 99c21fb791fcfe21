"""Locks between the processes of one machine that end with their holder (flock(2)).

Some file systems have none (Lustre and NFS as they are sometimes mounted, some of FUSE). There
nobody can be kept out, and the work goes on without.
"""

from __future__ import annotations

import errno
import fcntl
import logging

# What a file system without locks says to one.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_log = logging.getLogger(__name__)


def taken(descriptor: int, what: str) -> bool:
    """Take the lock on an open file, unless another process holds it; it is freed by closing.

    Args:
        what: the file is for, as a warning calls it where there are no locks.

    Returns:
        False where another holds it.

    Raises:
        OSError: the disk fails.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        _log.warning("%s is on a file system without locks: let no two runs use it at once", what)
    return True

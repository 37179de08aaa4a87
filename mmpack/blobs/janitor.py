"""Removes a folder in memory when the last process that used it has ended, however it ended.

Each user holds a shared lock on the file `users`, and the kernel ends it with the process. This module is also run as a
program, by a bare Python: `janitor.py FOLDER` leaves a process behind that waits for that lock. It imports nothing of
mmpack.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
import time

USERS, GONE = "users", ".gone"
SECONDS = 60  # to wait for a process that removes a folder; it takes milliseconds


def is_ours(folder: str) -> bool:
    """Return whether `folder` is this user's and closed to others.

    In /dev/shm another account may have made one of that name.

    Raises: FileNotFoundError.
    """
    status = os.lstat(folder)
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )


def shared(file: int) -> bool:
    """Take a shared lock. False if a process that should be removing the folder keeps it for itself."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        else:
            return True


def removed_if_unused(folder: str, wait: bool = False) -> bool:
    """Remove `folder` if nobody uses it, and return whether it did. `wait`: until nobody does."""
    try:
        file = os.open(os.path.join(folder, USERS), os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone, or not ours
        return False
    try:
        if not _got(file, wait):
            shared(file)  # at once, but where it is being removed now
            return False
        if not is_users(
            folder, file
        ):  # another one removed it, and perhaps there is a new one by now
            return False
        # the name goes first: who finds the folder half empty must not use it; nobody can take the new one before
        gone = f"{folder}-{os.urandom(4).hex()}{GONE}"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _got(file: int, wait: bool) -> bool:
    """Take the exclusive lock of the folder; return whether it is ours."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def is_users(folder: str, file: int) -> bool:
    """Return whether the open `file` is still the folder's."""
    try:
        return os.path.samestat(os.stat(os.path.join(folder, USERS)), os.fstat(file))
    except OSError:
        return False


def main() -> None:
    if os.fork():
        return
    os.setsid()  # what is sent to the terminal's processes is not for this one
    os.chdir("/")
    removed_if_unused(sys.argv[1], wait=True)


if __name__ == "__main__":
    main()

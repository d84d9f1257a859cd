"""Tries a file system: takes a lock without waiting, then appends lines to a shared file.

Several processes, or nodes, run it in one folder at a time. It is also a script that needs only
the standard library: python file_trial.py FOLDER LINE NUM_LINES.
"""

import fcntl
import os
import sys


def lock_and_append(folder: str, line: str, num_lines: int) -> str:
    """Appends lines, and returns whether the file `lock` is locked by another process.

    The result is "held", "free", or the error of a file system without locks. Raises OSError if it
    cannot append.
    """
    with open(os.path.join(folder, "lock")) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            answer = "free"
        except BlockingIOError:
            answer = "held"
        except OSError as error:
            answer = str(error)
    descriptor = os.open(os.path.join(folder, "appended"), os.O_WRONLY | os.O_APPEND)
    # One write for each line: O_APPEND promises that lines of several writers do not mix.
    for _ in range(num_lines):
        os.write(descriptor, line.encode() + b"\n")
    os.close(descriptor)
    return answer


if __name__ == "__main__":
    print(lock_and_append(sys.argv[1], sys.argv[2], int(sys.argv[3])))

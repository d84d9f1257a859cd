"""What a user typed and cannot be used: one line and exit code 2."""

from __future__ import annotations

import os
import sys
import time
import typing


class ConfigError(ValueError):
    """What a user typed (config, command line or data) cannot be used; the command ends with exit code 2.

    Its text is one line, also where it quotes another library's message or a value with line breaks.
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().split("\n"))


def refuse(error: ConfigError) -> typing.NoReturn:
    """End this rank with one line and exit code 2.

    Under torchrun all ranks see the same mistake, the first of the node says so, and torchrun ends the others once it
    is gone. They wait for that; one that is still there afterwards was alone with its mistake (a file that only its
    node lacks) and says it itself.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)

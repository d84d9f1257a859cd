"""What a user typed and cannot be used: one line and exit code 2."""

from __future__ import annotations

import os
import sys
import time
import typing


class ConfigError(ValueError):
    """Config, command line or data cannot be used. One line, also where it quotes a message or value of several."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split("\n"))


def refuse(error: ConfigError) -> typing.NoReturn:
    """End this rank with one line and exit code 2.

    Under torchrun all ranks see the same mistake. The first of a node says so, and torchrun then ends the others, who
    wait for that; one that is left was alone with its mistake (a file that only its node lacks), and says it itself.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)

"""Hosts that are none: network namespaces on one wire."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def two_hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces on one wire, each with an address of its own: what to put before a
    command to run it
    there."""
    names = [f"grpo{os.getpid()}{letter}" for letter in "ab"]
    commands = [f"ip netns add {name}" for name in names] + [
        f"ip link add {names[0]} type veth peer name {names[1]}"
    ]
    for number, name in enumerate(names):
        commands += [
            f"ip link set {name} netns {name}",
            f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev {name}",
        ]
        commands += [f"ip -n {name} link set {name} up", f"ip -n {name} link set lo up"]
    try:
        for command in commands:
            try:
                subprocess.run(command.split(), check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(
                    f"needs two network namespaces, which takes root and iproute2: {command}: "
                    f"{error}"
                )
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

"""The command: python -m grpo_spmd.checkup [--config x.yaml] [section.key=value ...]"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from types import FrameType
from typing import Any, NoReturn

from grpo_spmd.config.command_line import OverridesParser, number_of_ranks
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.config.load import gpus_are_hidden, load_config_with_sources, num_gpus, trains_on_cpu
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.tools.checkup.checks import CHECKS
from grpo_spmd.tools.checkup.disk import remove_scratch
from grpo_spmd.tools.checkup.exchange import (
    Exchange,
    Ranks,
    ask_clock,
    launched,
    of_clocks,
    of_missing,
    shared_folder,
    try_folder,
)
from grpo_spmd.tools.checkup.page import Page
from grpo_spmd.tools.checkup.reduce import Children, measure_within, open_store
from grpo_spmd.tools.checkup.results import Check, Place, Result, run_check
from grpo_spmd.tools.checkup.together import Rank, merged, of_reports

_GROUPS = (*dict.fromkeys(check.group for check in CHECKS), "links")
_SHORT_S = 20.0  # for what is quick once all ranks are there
_SLOW_S = 300.0  # more than all checks of rank 0 together may take


def main() -> None:
    hold_standard_streams()
    args = _parser().parse()
    code, ranks = 1, None
    try:
        signal.signal(signal.SIGTERM, _stop)
        ranks = launched(os.environ)
        place = _place(args, ranks)
        checks = [check for check in CHECKS if check.group in args.only]
        code = (
            _alone(args, place, checks) if ranks is None else _together(args, place, checks, ranks)
        )
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:  # torchrun too ends ranks that are slower to leave
        if ranks is None or ranks.rank == 0:
            say("checkup: stopped by a signal")
    finally:
        remove_scratch()
    exit_process(code)  # a check that hangs may hold a thread


def _stop(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _place(args: argparse.Namespace, ranks: Ranks | None) -> Place:
    gpus = 0 if gpus_are_hidden() else num_gpus()
    if ranks is not None:
        size, local = ranks.num_ranks, ranks.local_ranks
    else:
        local = args.ranks or max(1, gpus)
        size = max(local, number_of_ranks())
    if not args.config and args.overrides:
        raise ConfigError(
            f"{args.overrides[0]}: there is no config to override; --config x.yaml names it"
        )
    config = (
        load_config_with_sources(args.config, args.overrides, on_cpu=trains_on_cpu())[0]
        if args.config
        else None
    )
    return Place(
        num_ranks=size,
        local_ranks=local,
        num_gpus=gpus,
        is_launched=ranks is not None,
        config=config,
        words=("--config", args.config, *args.overrides) if args.config else (),
        run_dir=Path(config.run_dir) if config else Path.cwd(),
    )


def _page(args: argparse.Namespace) -> Page:
    return Page(args.json, min(100, max(60, shutil.get_terminal_size().columns)))


def _alone(args: argparse.Namespace, place: Place, checks: Sequence[Check]) -> int:
    began, page = time.monotonic(), _page(args)
    show(
        f"checkup of {gethostname()}, for a run of {place.num_ranks} rank{'s' * (place.num_ranks > 1)}\n"
    )
    children = Children(place, args.deadline) if "links" in args.only else None
    try:
        for check in checks:
            for result in run_check(check, place):
                page.add(check.group, result)
        if children is not None:
            of = {rank: Rank(gethostname(), []) for rank in range(children.num_ranks)}
            for result in of_reports(children.reports(), [range(len(of))], of, args.deadline):
                page.add("links", result)
    finally:
        if children is not None:
            children.end()
    return page.close(time.monotonic() - began)


def _together(args: argparse.Namespace, place: Place, checks: Sequence[Check], ranks: Ranks) -> int:
    """Each rank looks, rank 0 speaks for all. A rank without a store says so itself."""
    began, whose = (
        time.monotonic(),
        {"rank": True, "machine": ranks.local_rank == 0, "run": ranks.rank == 0},
    )
    page = _page(args) if ranks.rank == 0 else None
    if page is not None:
        show(f"checkup of {ranks.num_ranks} ranks, by {gethostname()}\n")
    own_checks, found = [check for check in checks if whose[check.of]], list[tuple[str, Result]]()
    try:
        exchange = (
            _exchange(args, ranks) if ranks.serves_store else None
        )  # before others lose patience
        found += ((check.group, line) for check in own_checks for line in run_check(check, place))
        exchange = exchange or _exchange(args, ranks)
        if page is None:
            return _follow(args, place, exchange, ranks, found)
        return _lead(args, place, exchange, ranks, found, page, began)
    except (ImportError, RuntimeError, TimeoutError, OSError) as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        where = f"{ranks.environ.get('MASTER_ADDR')}:{ranks.environ.get('MASTER_PORT')}"
        if page is None:
            say(f"checkup: rank {ranks.rank} on {gethostname()} lost rank 0 at {where}: {text}")
            return 2
        found = found or [
            (check.group, line) for check in own_checks for line in run_check(check, place)
        ]
        for group, line in () if page.counts else found:
            page.add(group, line)
        remedy = (
            "MASTER_ADDR is rank 0's host, MASTER_PORT a free port of it, and torch must be there"
        )
        page.add(
            "links", Result("ranks", "bad", f"no way to the other ranks by {where}: {text}", remedy)
        )
        return page.close(time.monotonic() - began)


def _exchange(args: argparse.Namespace, ranks: Ranks) -> Exchange:
    """Raises RuntimeError, ImportError."""
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "FATAL"
    )  # a page of C++ frames where a host is not reached
    from torch.distributed import PrefixStore

    store = open_store(ranks.environ, args.deadline, serves=ranks.serves_store)
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Exchange(PrefixStore(f"checkup/{attempt}", store), ranks.rank, ranks.num_ranks)


def _follow(
    args: argparse.Namespace,
    place: Place,
    exchange: Exchange,
    ranks: Ranks,
    found: Sequence[tuple[str, Result]],
) -> int:
    from grpo_spmd.distributed.machine import host_identity

    lines = [[group, asdict(line)] for group, line in found]
    exchange.post(
        "found",
        {
            "host": gethostname(),
            "node": host_identity(),
            "local_rank": ranks.local_rank,
            "lines": lines,
        },
    )
    patience = args.deadline + _SLOW_S
    plan = exchange.hear("plan", patience)
    if ranks.rank in plan["leaders"]:
        ask_clock(exchange.store, ranks.rank)
        if plan["tries_folder"] and (folder := exchange.hear("folder", patience)):
            exchange.post("folder", try_folder(folder, ranks.rank))
    if plan["nodes"]:
        report = measure_within(
            args.deadline, exchange.store, ranks.rank, plan["nodes"], ranks.local_rank
        )
        exchange.post("report", report)
    code = int(exchange.hear("code", patience + args.deadline))
    exchange.post("heard", True)
    return code


def _lead(
    args: argparse.Namespace,
    place: Place,
    exchange: Exchange,
    ranks: Ranks,
    found: Sequence[tuple[str, Result]],
    page: Page,
    began: float,
) -> int:
    from grpo_spmd.distributed.machine import host_identity

    exchange.post(
        "found",
        {
            "host": gethostname(),
            "node": host_identity(),
            "local_rank": ranks.local_rank,
            "lines": [],
        },
    )
    came = exchange.gather("found", args.deadline)
    of = {
        rank: Rank(said["host"], [(at, Result(**line)) for at, line in said["lines"]])
        for rank, said in came.items()
    }
    of[0] = Rank(gethostname(), [*found])
    for group, line in merged(of):
        page.add(group, line)
    missing = [rank for rank in range(ranks.num_ranks) if rank not in came]
    nodes: dict[str, list[int]] = {}
    for rank, said in came.items():
        nodes.setdefault(said["node"], []).append(rank)
    leaders = [members[0] for members in nodes.values()][1:]
    tries_folder, measures = (
        bool(leaders) and "disk" in args.only,
        not missing and "links" in args.only,
    )
    plan: dict[str, Any] = {
        "leaders": leaders,
        "tries_folder": tries_folder,
        "nodes": [*nodes.values()] if measures else [],
    }
    exchange.say("plan", plan)
    for line in of_clocks(exchange.store, leaders, of):
        page.add("links", line)
    for line in shared_folder(exchange, place, leaders, of, _SHORT_S) if tries_folder else ():
        page.add("links", line)
    if missing:
        page.add("links", of_missing(missing, args.deadline, ranks))
    elif measures:
        own = measure_within(args.deadline, exchange.store, 0, plan["nodes"], ranks.local_rank)
        reports = {**exchange.gather("report", 5.0, range(1, ranks.num_ranks)), 0: own}
        for line in of_reports(reports, [*nodes.values()], of, args.deadline):
            page.add("links", line)
    code = page.close(time.monotonic() - began)
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # all is said; torchrun ends the others when the first leaves with 2
    exchange.say("code", code)
    exchange.gather(
        "heard", 5.0, [rank for rank in came if rank]
    )  # the store may be this process's
    return code


def _parser() -> OverridesParser:
    parser = OverridesParser(
        allow_abbrev=False,
        prog="python -m grpo_spmd.checkup",
        description="Is this machine fit for a run? Each line is ok, warning or bad, and says what helps. Under "
        "torchrun or srun it speaks for all ranks, once, and names those that differ. Exit code 2: a line is bad.",
    )
    add = parser.add_argument
    add(
        "--config",
        metavar="FILE",
        help="a YAML file: its run_dir, model, data and memory are looked at too",
    )
    add(
        "--ranks", type=_number, metavar="N", help="ranks of this machine (default: its GPUs, or 1)"
    )
    groups = ", ".join(_GROUPS)
    add("--only", type=_groups, default=_GROUPS, metavar="GROUP,...", help=f"some of {groups}")
    patience = "how long ranks and their all-reduces are waited for (default: 60)"
    add("--deadline", type=float, default=60.0, metavar="SECONDS", help=patience)
    add("--json", type=Path, metavar="FILE", help="write each line there too, as a JSON object")
    add("overrides", nargs="*", metavar="section.key=value", help="values that replace the file's")
    return parser


def _number(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _groups(text: str) -> tuple[str, ...]:
    if unknown := [name for name in text.split(",") if name not in _GROUPS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(_GROUPS)}")
    return tuple(text.split(","))


if __name__ == "__main__":
    main()

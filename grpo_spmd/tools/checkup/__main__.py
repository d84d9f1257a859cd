"""The command: python -m grpo_spmd.checkup [--config x.yaml] [section.key=value ...]"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from socket import gethostname
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from grpo_spmd.config.command_line import OverridesParser, number_of_ranks
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.config.load import gpus_are_hidden, load_config_with_sources, num_gpus, trains_on_cpu
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.distributed.processes import format_ranks, host_identity
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.tools.checkup import devices, disk, network
from grpo_spmd.tools.checkup.exchange import (
    Exchange,
    RankFindings,
    Report,
    check_clocks,
    check_reports,
    check_shared_folder,
    merge_findings,
    try_folder,
)
from grpo_spmd.tools.checkup.launch import Launch, LocalRanks, find_launch
from grpo_spmd.tools.checkup.results import Check, Page, Result, Target, bad, plural, run_check
from grpo_spmd.tools.terminal import find_terminal

if TYPE_CHECKING:
    import torch.distributed as dist

_MAX_COLUMNS = 100
_SHORT_S = 20.0  # for what is quick once all ranks are there
_REPORT_S = 5.0
_ALL_CHECKS_S = 300.0  # more than all checks of rank 0 together may take

# What a machine, or a rank, checks alone, in the order of the page: quick checks first.
CHECKS = (
    Check("python", "versions", devices.check_python, scope="rank"),
    Check("packages", "versions", devices.check_packages, scope="rank"),
    Check("torch's build", "versions", devices.check_build, scope="rank"),
    Check("tested set", "versions", devices.check_tested_set),
    Check("torchrun", "versions", network.check_torchrun),
    Check("GPUs", "devices", devices.check_gpus, 20.0),
    Check("topology", "devices", devices.check_topology, 10.0),
    Check("memory", "memory", devices.check_memory),
    Check("swap", "memory", devices.check_swap),
    Check("/dev/shm", "memory", devices.check_shared_memory),
    Check("threads", "memory", devices.check_threads, scope="rank"),
    Check("ulimit", "memory", devices.check_limits, scope="rank"),
    Check("run_dir", "disk", disk.check_run_folder, 20.0),
    Check("/tmp", "disk", disk.check_temporary),
    Check("environment", "network", network.check_environment, scope="rank"),
    Check("host name", "network", network.check_host_name, 10.0),
    Check("port", "network", network.check_port),
    Check("hub", "network", network.check_hub),
    Check("job", "network", network.check_slurm, 25.0, scope="run"),
    Check("sandbox", "config", devices.check_sandbox, 15.0),
    Check("--check", "config", devices.check_config, devices.CHECK_S + 5),
    Check("planner", "config", devices.check_plan, devices.PLAN_S + 20, scope="run"),
)
_GROUPS = (*dict.fromkeys(check.group for check in CHECKS), "links")


def main() -> None:
    hold_standard_streams()
    args = _parser().parse()
    code, launch = 1, None
    try:
        signal.signal(signal.SIGTERM, _stop)
        launch = find_launch(os.environ)
        target = _find_target(args, launch)
        if launch is None:
            code = _check_alone(args, target)
        else:
            code = _RankCheckup(args, target, launch).run()
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:
        # torchrun too ends ranks that are slower to leave than the first.
        if launch is None or launch.rank == 0:
            say("checkup: stopped by a signal")
    finally:
        disk.remove_scratch()
    # A check that hangs may hold a thread, which an ordinary exit would wait for.
    exit_process(code)


def _stop(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _find_target(args: argparse.Namespace, launch: Launch | None) -> Target:
    gpus = 0 if gpus_are_hidden() else num_gpus()
    local_ranks = max(1, args.ranks or gpus)
    num_ranks = max(local_ranks, number_of_ranks())
    if launch is not None:
        num_ranks, local_ranks = launch.num_ranks, launch.local_ranks
    config = None
    if args.config:
        on_cpu = trains_on_cpu()
        config, _ = load_config_with_sources(args.config, args.overrides, on_cpu=on_cpu)
    elif args.overrides:
        raise ConfigError(
            f"{args.overrides[0]}: there is no config to override; --config x.yaml names it"
        )
    return Target(
        num_ranks=num_ranks,
        local_ranks=local_ranks,
        num_gpus=gpus,
        is_launched=launch is not None,
        config=config,
        arguments=("--config", args.config, *args.overrides) if args.config else (),
        run_dir=Path(config.run_dir) if config else Path.cwd(),
    )


def _open_page(args: argparse.Namespace) -> Page:
    terminal = find_terminal()
    return Page(args.json, terminal.resized(min(_MAX_COLUMNS, terminal.columns)))


def _check_alone(args: argparse.Namespace, target: Target) -> int:
    start, page = time.monotonic(), _open_page(args)
    show(f"checkup of {gethostname()}, for a run of {plural(target.num_ranks, 'rank')}\n")
    ranks = LocalRanks(target, args.deadline) if "links" in args.only else None
    try:
        for check in CHECKS:
            for result in run_check(check, target) if check.group in args.only else ():
                page.add(check.group, result)
        if ranks is not None:
            findings = {rank: RankFindings(gethostname(), []) for rank in range(ranks.num_ranks)}
            reports = ranks.reports()
            for result in check_reports(reports, [[*findings]], findings, args.deadline):
                page.add("links", result)
    finally:
        if ranks is not None:
            ranks.end()
    return page.close(time.monotonic() - start)


class _RankCheckup:
    """Runs the checkup of one launched rank. Every rank checks, and rank 0 prints for all."""

    def __init__(self, args: argparse.Namespace, target: Target, launch: Launch) -> None:
        self._args, self._target, self._launch = args, target, launch
        self._start = time.monotonic()
        self._results: list[tuple[str, Result]] = []
        self._page = _open_page(args) if launch.rank == 0 else None

    def run(self) -> int:
        """Returns the exit code."""
        if self._page is not None:
            show(f"checkup of {self._launch.num_ranks} ranks, by {gethostname()}\n")
        try:
            # The rank that serves the store opens it before the others lose patience.
            serves = self._launch.serves_store
            exchange = self._open_exchange() if serves else None
            self._look()
            exchange = exchange or self._open_exchange()
            findings = RankFindings(gethostname(), self._results, node=host_identity())
            exchange.post("found", asdict(findings))
            if self._page is None:
                return self._follow(exchange)
            return self._lead(exchange, self._page)
        except (ImportError, RuntimeError, TimeoutError, OSError) as error:
            return self._finish_alone(error)

    def _look(self) -> None:
        is_first = {"rank": True, "machine": self._launch.local_rank == 0}
        is_first["run"] = self._launch.rank == 0
        for check in CHECKS:
            if check.group in self._args.only and is_first[check.scope]:
                self._results += [(check.group, line) for line in run_check(check, self._target)]

    def _finish_alone(self, error: Exception) -> int:
        """Ends the checkup if the store cannot be reached, and returns the exit code.

        Every rank prints the error itself. Rank 0 also prints what it has found.
        """
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"
        rank = f"rank {self._launch.rank} on {gethostname()}"
        finding = f"{rank} lost rank 0 at {self._launch.address}: {text}"
        if self._page is None:
            say(f"checkup: {finding}")
            return 2
        if not self._results:
            self._look()
        # Unless they were printed before the store was lost.
        for group, line in () if self._page.counts else self._results:
            self._page.add(group, line)
        remedy = "MASTER_ADDR is rank 0's host, MASTER_PORT a free port of it; torch must be there"
        self._page.add("links", bad("ranks", finding, remedy))
        return self._page.close(time.monotonic() - self._start)

    def _open_exchange(self) -> Exchange:
        """Returns the exchange over torch's store. Raises RuntimeError or ImportError."""
        # torch would print a page of C++ frames if a host cannot be reached.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from torch.distributed import PrefixStore

        from grpo_spmd.tools.checkup.reduce import open_store

        launch = self._launch
        store = open_store(launch.environ, self._args.deadline, serves=launch.serves_store)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Exchange(
            PrefixStore(f"checkup/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{restart}", store),
            launch.rank,
            launch.num_ranks,
        )

    def _measure(self, store: dist.Store, nodes: Sequence[Sequence[int]]) -> dict[str, Any]:
        from grpo_spmd.tools.checkup.reduce import Measurement

        launch, deadline_s = self._launch, self._args.deadline
        measurement = Measurement()
        return measurement.measure_within(deadline_s, store, launch.rank, nodes, launch.local_rank)

    def _follow(self, exchange: Exchange) -> int:
        """Does what rank 0's plan asks for. Returns the exit code.

        Every rank except rank 0 calls it.
        """
        patience_s = self._args.deadline + _ALL_CHECKS_S
        plan = exchange.hear("plan", patience_s)
        if exchange.rank in plan["leaders"]:
            exchange.post("clock", time.time())
            folder = exchange.hear("folder", patience_s)
            if folder is not None:
                exchange.post("folder", try_folder(folder, exchange.rank))
        if plan["nodes"]:
            exchange.post("report", self._measure(exchange.store, plan["nodes"]))
        code = int(exchange.hear("code", patience_s + self._args.deadline))
        exchange.post("heard", True)
        return code

    def _lead(self, exchange: Exchange, page: Page) -> int:
        """Gathers and prints the findings, then leads the measurements. Returns the exit code.

        Only rank 0 calls it.
        """
        args = self._args
        posted = exchange.gather("found", args.deadline)
        findings = msgspec.convert(posted, dict[int, RankFindings])
        nodes: dict[str, list[int]] = {}
        for rank, rank_findings in findings.items():
            nodes.setdefault(rank_findings.node, []).append(rank)
        for group, line in merge_findings(findings):
            page.add(group, line)
        # A collective with missing ranks would hang: it is not tried.
        missing = [rank for rank in range(exchange.num_ranks) if rank not in posted]
        measures = "links" in args.only and not missing
        # The first rank of each other node speaks for the node.
        leaders = [ranks[0] for ranks in nodes.values()][1:]
        asked = time.time()
        plan: dict[str, Any] = {"leaders": leaders, "nodes": [*nodes.values()] if measures else []}
        exchange.post("plan", plan)
        lines = [*check_clocks(exchange, leaders, findings, asked)]
        if leaders and "disk" in args.only:
            lines += check_shared_folder(exchange, self._target, leaders, findings, _SHORT_S)
        else:
            exchange.post("folder", None)
        if missing:
            remedy = "see their output; do their hosts reach MASTER_ADDR:MASTER_PORT? --deadline"
            finding = f"{format_ranks(missing)} did not come within {args.deadline:g} s"
            lines.append(bad("ranks", finding, f"{remedy} waits longer"))
        for line in lines:
            page.add("links", line)
        if measures:
            report = self._measure(exchange.store, plan["nodes"])
            posted = exchange.gather("report", _REPORT_S, range(1, exchange.num_ranks))
            reports = msgspec.convert({0: report, **posted}, dict[int, Report])
            for line in check_reports(reports, [*nodes.values()], findings, args.deadline):
                page.add("links", line)
        code = page.close(time.monotonic() - self._start)
        # All is said. torchrun ends the other ranks when the first leaves with code 2.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exchange.post("code", code)
        # This process may serve the store: it waits until the others have heard.
        exchange.gather("heard", _REPORT_S, [rank for rank in findings if rank])
        return code


def _parser() -> OverridesParser:
    parser = OverridesParser(
        allow_abbrev=False,
        prog="python -m grpo_spmd.checkup",
        description="Is this machine fit for a run? Each line is ok, warning or bad, and says what "
        "helps. Under torchrun or srun it speaks for all ranks, once, and names those that differ. "
        "Exit code 2: a line is bad.",
    )
    add = parser.add_argument
    config_help = "a YAML file: its run_dir, model, data and memory are looked at too"
    ranks_help = "ranks of this machine (default: its GPUs, or 1)"
    only_help = f"some of {', '.join(_GROUPS)}"
    deadline_help = "how long ranks and their all-reduces are waited for (default: 60)"
    json_help = "write each line there too, as a JSON object"
    overrides_help = "values that replace the file's"
    add("--config", metavar="FILE", help=config_help)
    add("--ranks", type=_parse_number, metavar="N", help=ranks_help)
    add("--only", type=_parse_groups, default=_GROUPS, metavar="GROUP,...", help=only_help)
    add("--deadline", type=float, default=60.0, metavar="SECONDS", help=deadline_help)
    add("--json", type=Path, metavar="FILE", help=json_help)
    add("overrides", nargs="*", metavar="section.key=value", help=overrides_help)
    return parser


def _parse_number(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _parse_groups(text: str) -> tuple[str, ...]:
    groups = tuple(text.split(","))
    for name in groups:
        if name not in _GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_GROUPS)}")
    return groups


if __name__ == "__main__":
    main()

"""The command: python -m grpo_spmd.checkup [--config x.yaml] [section.key=value ...]"""

from __future__ import annotations

import argparse
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import msgspec

from grpo_spmd.config.command_line import OverridesParser, number_of_ranks
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.config.load import gpus_are_hidden, load_config_with_sources, num_gpus, trains_on_cpu
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.distributed.processes import format_ranks, host_identity
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.tools.checkup import devices, disk, network
from grpo_spmd.tools.checkup.exchange import (
    Launch,
    RankFindings,
    Report,
    check_clocks,
    check_links,
    check_reports,
    check_shared_folder,
    find_launch,
    merge_findings,
    try_folder,
)
from grpo_spmd.tools.checkup.results import (
    Check,
    Page,
    Result,
    Target,
    bad,
    end_programs,
    plural,
    run_check,
)
from grpo_spmd.tools.terminal import find_terminal

if TYPE_CHECKING:
    from grpo_spmd.tools.checkup.reduce import RankExchange

_MAX_COLUMNS = 100
_REPORT_S = 5.0  # how long rank 0 waits for posts that are due, after the ranks' own deadline
_ALL_CHECKS_S = 300.0  # more than all checks of rank 0 together may take

# The checks that need no other rank of the launch, in the order of the page: quick ones first.
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
    # The ranks that it starts keep --deadline themselves; this is only a last resort.
    Check("all-reduce", "links", check_links, 3600.0),
)
_GROUPS = tuple(dict.fromkeys(check.group for check in CHECKS))


def main() -> None:
    """Runs the checkup and ends the process with its exit code."""
    hold_standard_streams()
    args = _parser().parse()
    code, launch = 1, None
    try:
        signal.signal(signal.SIGTERM, _stop)
        launch = find_launch(dict(os.environ))
        target = _find_target(args, launch)
        code = _RankCheckup(args, target, launch).run() if launch else _check_alone(args, target)
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:
        # Only rank 0 says it: torchrun also signals ranks that have not ended when another has.
        if launch is None or launch.rank == 0:
            say("checkup: stopped by a signal")
    finally:
        end_programs()
        disk.remove_scratch()
    # A check that hangs may hold a thread, which an ordinary exit would wait for.
    exit_process(code)


def _stop(_: int, __: FrameType | None) -> NoReturn:
    """Makes SIGTERM stop the checkup as Ctrl-C does."""
    raise KeyboardInterrupt


def _find_target(args: argparse.Namespace, launch: Launch | None) -> Target:
    """Returns the machine and the run that are to be checked, according to the options.

    Raises ConfigError if the config cannot be read."""
    gpus = 0 if gpus_are_hidden() else num_gpus()
    local_ranks = launch.local_ranks if launch else max(1, args.ranks or gpus)
    config = None
    if args.config:
        on_cpu = trains_on_cpu()
        config, _ = load_config_with_sources(args.config, args.overrides, on_cpu=on_cpu)
    elif args.overrides:
        raise ConfigError(
            f"{args.overrides[0]}: there is no config to override; --config x.yaml names it"
        )
    return Target(
        num_ranks=launch.num_ranks if launch else max(local_ranks, number_of_ranks()),
        local_ranks=local_ranks,
        num_gpus=gpus,
        is_launched=launch is not None,
        config=config,
        arguments=("--config", args.config, *args.overrides) if args.config else (),
        run_dir=Path(config.run_dir) if config else Path.cwd(),
        deadline_s=args.deadline,
    )


def _open_page(args: argparse.Namespace) -> Page:
    """Returns a page of the terminal's width, but of at most 100 columns."""
    terminal = find_terminal()
    return Page(args.json, replace(terminal, columns=min(_MAX_COLUMNS, terminal.columns)))


def _check_alone(args: argparse.Namespace, target: Target) -> int:
    """Checks this machine without other ranks, prints the results and returns the exit code."""
    start, page = time.monotonic(), _open_page(args)
    show(f"checkup of {gethostname()}, for a run of {plural(target.num_ranks, 'rank')}\n")
    # The last check measures links by ranks that it starts, which takes long. It runs in a thread
    # while the other checks run here.
    pool, links_check = ThreadPoolExecutor(1), CHECKS[-1]
    links = pool.submit(run_check, links_check, target) if "links" in args.only else None
    for check in CHECKS[:-1]:
        for result in run_check(check, target) if check.group in args.only else ():
            page.add(check.group, result)
    for result in links.result() if links else ():
        page.add("links", result)
    return page.close(time.monotonic() - start)


class _RankCheckup:
    """Runs the checkup of one launched rank. Every rank checks, and rank 0 prints for all."""

    def __init__(self, args: argparse.Namespace, target: Target, launch: Launch) -> None:
        """Opens the page of results on rank 0; the other ranks print nothing."""
        self._args, self._target, self._launch = args, target, launch
        self._start = time.monotonic()
        self._results: list[tuple[str, Result]] = []
        self._page = _open_page(args) if launch.rank == 0 else None

    def run(self) -> int:
        """Runs this rank's checks, exchanges the results and returns the exit code."""
        if self._page is not None:
            show(f"checkup of {self._launch.num_ranks} ranks, by {gethostname()}\n")
        try:
            # Otherwise torch prints a page of C++ frames if a host cannot be reached.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            from grpo_spmd.tools.checkup.reduce import RankExchange

            # Opened before the checks, which take long: if this rank serves the store, the others
            # wait for it.
            exchange = RankExchange(self._launch, self._args.deadline)
            self._run_checks()
            exchange.post("found", RankFindings(gethostname(), self._results, node=host_identity()))
            if self._page is None:
                return self._follow(exchange)
            return self._lead(exchange, self._page)
        except (ImportError, RuntimeError, TimeoutError, OSError) as error:
            return self._finish_alone(error)

    def _run_checks(self) -> None:
        """Runs the checks whose scope includes this rank, and keeps their results."""
        # This rank's index within each scope. The rank with index 0 runs the checks of the scope.
        scopes = {"rank": 0, "machine": self._launch.local_rank, "run": self._launch.rank}
        for check in CHECKS:
            if check.group in self._args.only and not scopes[check.scope]:
                self._results += [(check.group, line) for line in run_check(check, self._target)]

    def _finish_alone(self, error: Exception) -> int:
        """Ends the checkup of a rank that cannot reach the store, and returns the exit code.

        `error` says why. Every rank prints the error itself. Rank 0 also prints what it has found.
        """
        first_line = next(iter(str(error).strip().splitlines()), "")
        text = f"{type(error).__name__}: {first_line[:300]}"
        rank, environ = f"rank {self._launch.rank} on {gethostname()}", self._launch.environ
        address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        finding = f"{rank} lost rank 0 at {address}: {text}"
        if self._page is None:
            say(f"checkup: {finding}")
            return 2
        if not self._results:
            self._run_checks()
        # The store may have been lost after the results were printed.
        if not self._page.counts:
            for group, line in self._results:
                self._page.add(group, line)
        remedy = (
            "MASTER_ADDR is rank 0's host, MASTER_PORT a free port of it; rank 0 must run, with "
            "torch installed"
        )
        self._page.add("links", bad("ranks", finding, remedy))
        return self._page.close(time.monotonic() - self._start)

    def _follow(self, exchange: RankExchange) -> int:
        """Waits for rank 0's plan, does this rank's part of it, and returns rank 0's exit code.

        Every rank except rank 0 calls it. The plan says which ranks compare clocks and try the run
        folder ("leaders", the first ranks of the other nodes), and whether all-reduces are measured
        ("nodes" is not empty).
        """
        patience_s = self._args.deadline + _ALL_CHECKS_S
        plan = exchange.wait_for_rank0("plan", patience_s)
        if exchange.rank in plan["leaders"]:
            exchange.post("clock", time.time())
            if plan["folder"] is not None:
                exchange.post("folder", try_folder(plan["folder"], exchange.rank))
        if plan["nodes"]:
            exchange.post("report", exchange.measure(plan["nodes"]))
        code = int(exchange.wait_for_rank0("code", patience_s + self._args.deadline))
        exchange.post("heard", True)
        return code

    def _lead(self, exchange: RankExchange, page: Page) -> int:
        """Gathers and prints the findings of all ranks, and leads the measurements between ranks.

        It posts a plan of what the ranks measure together, and prints the results. Returns the exit
        code. Only rank 0 calls it."""
        args = self._args
        posted = exchange.gather("found", args.deadline)
        findings = msgspec.convert(posted, dict[int, RankFindings])
        ranks_of: dict[str, list[int]] = {}
        for rank, rank_findings in findings.items():
            ranks_of.setdefault(rank_findings.node, []).append(rank)
        nodes = [*ranks_of.values()]
        # The first rank of each other node speaks for the node.
        leaders = [ranks[0] for ranks in nodes[1:]]
        for group, line in merge_findings(findings):
            page.add(group, line)
        # All-reduces are not tried if ranks are missing, since they would hang.
        missing = [rank for rank in range(exchange.num_ranks) if rank not in posted]
        is_measured = "links" in args.only and not missing
        with ExitStack() as stack:
            scratch = None
            if leaders and "disk" in args.only:
                with suppress(OSError):  # which the check "run_dir" has already reported
                    folder = disk.nearest_folder(self._target.run_dir)
                    scratch = stack.enter_context(disk.scratch_in(folder))
                    stack.enter_context(disk.locked_for_trial(scratch))
            posted_at = time.time()
            exchange.post(
                "plan",
                {
                    "leaders": leaders,
                    "folder": scratch and str(scratch),
                    "nodes": nodes if is_measured else [],
                },
            )
            lines = [*check_clocks(exchange, leaders, findings, posted_at)]
            if scratch is not None:
                lines += check_shared_folder(exchange, scratch, leaders, findings)
        if missing:
            remedy = "see their output; do their hosts reach MASTER_ADDR:MASTER_PORT? --deadline"
            finding = f"{format_ranks(missing)} did not come within {args.deadline:g} s"
            lines.append(bad("ranks", finding, f"{remedy} waits longer"))
        for line in lines:
            page.add("links", line)
        if is_measured:
            exchange.post("report", exchange.measure(nodes))
            reports = msgspec.convert(exchange.gather("report", _REPORT_S), dict[int, Report])
            for line in check_reports(reports, nodes, findings, args.deadline):
                page.add("links", line)
        code = page.close(time.monotonic() - self._start)
        # The results are printed. When a rank has left with code 2, torchrun sends SIGTERM to all
        # others, which must not interrupt what follows.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exchange.post("code", code)
        # This process may serve the store, so it waits until the other ranks have read the code.
        exchange.gather("heard", _REPORT_S, [rank for rank in findings if rank])
        return code


def _parser() -> OverridesParser:
    """Returns the parser of the command line."""
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
    add("--config", metavar="FILE", help=config_help)
    add("--ranks", type=_parse_number, metavar="N", help=ranks_help)
    add("--only", type=_parse_groups, default=_GROUPS, metavar="GROUP,...", help=only_help)
    add("--deadline", type=float, default=60.0, metavar="SECONDS", help=deadline_help)
    add("--json", type=Path, metavar="FILE", help=json_help)
    return parser


def _parse_number(text: str) -> int:
    """Parses an option's value that must be a positive integer."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _parse_groups(text: str) -> tuple[str, ...]:
    """Parses the value of --only: names of groups, separated by commas."""
    groups = tuple(text.split(","))
    for name in groups:
        if name not in _GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(_GROUPS)}")
    return groups


if __name__ == "__main__":
    main()

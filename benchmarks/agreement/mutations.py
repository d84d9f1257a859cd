"""Mutation trials: a fault is planted in a copy of this repository; do the running proofs of a
short training, or the tests, see it?

    benchmarks/run.sh mutations [--json FILE]        about 8 minutes on 2 cores
    python -m benchmarks.agreement.mutations [--only WORDS ...] [--check]

A row a fault. "running proofs": what stopped a training of four steps on two ranks at the default
settings, or refused it before its first step; for faults of the weight sync also with
proofs.every_steps=1, which names the tensor. "tests": the first that fails of those listed with the
fault, the fast ones first; not the whole suite. The first row, without a fault, goes through all of
these trainings and tests and must pass. The exit code is 1 if it does not, or if a fault was seen
by neither. A fault whose source is no
longer there exactly once, or which simply crashes, is a broken trial that shows nothing; that ends
with 1 too. --check looks only whether every fault can be planted, in a second.

Trainings and pytest are forked from a server of ranks that has imported libraries and nothing of
ours: each imports its copy.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.agreement.mutations_faults import FAULTS, SHORTER, Fault, plant, problems
from benchmarks.agreement.trained_weights import CASES, REWARD, make_case
from benchmarks.support.report import Row, arguments_parser, read_lines, report
from grpo_spmd.demo.countdown import make_demo
from tests.support.models import make_model
from tests.support.ranks import SHARED_SERVER, RanksJob

_ROOT = Path(__file__).resolve().parents[2]
_AT_ONCE = 2  # trials side by side: a good part of each waits for something
_TIMEOUT_S = 600
_NOT_SEEN, _PASSES, _NOT_RUN, _BROKEN = "not seen", "passes", "-", "broken trial: "
# What may stop a training as a proof. The last is the count of the tokens that were trained on,
# each epoch.
_PROOFS = (
    r"WeightProofError|MismatchError|UpdateCheckError|EngineStateError|RewardError|TokenScoresError"
    r"|RuntimeError(?=: step \d+: trained on )"
)


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="WORDS",
        help="faults whose names hold one of these",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="say whether every fault can be planted, and run nothing",
    )
    parser.add_argument(
        "--trained-weights",
        action="store_true",
        help="train a Qwen2 with a key bias of 605 in bfloat16, and run no tests",
    )
    args = parser.parse_args()
    if actual := problems(_ROOT):
        sys.exit("\n".join(actual))
    chosen = [fault for fault in FAULTS if any(words in fault.name for words in args.only)]
    print(f"{len(chosen)} of {len(FAULTS)} faults, each can be planted", flush=True)
    if args.check:
        return
    with tempfile.TemporaryDirectory() as folder, _server(), ThreadPoolExecutor(_AT_ONCE) as pool:

        def end(*_: object) -> None:
            """At once: jobs end with their sockets, and the server with this process. The pool
            would wait for all."""
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        created = Path(folder, "made")
        _make_models_and_data(created)
        model = _make_trained(created) if args.trained_weights else ()
        trials = [(None, chosen), *((fault, [fault]) for fault in chosen)]
        jobs = [
            pool.submit(_row, *trial, created, Path(folder, str(number)), model=model)
            for number, trial in enumerate(trials)
        ]
        rows = [job.result() for job in jobs]
    if args.trained_weights:
        # Not judged: some faults are smaller than the rounding of such a model.
        report("mutations_trained_weights", rows, args.json)
        return
    report("mutations", rows, args.json)
    if faulty := [row["fault"] for row in rows if not row["as it should be"]]:
        sys.exit(
            "without a fault something failed, or a fault was seen by neither, or a trial is "
            f"broken: {faulty}"
        )


@contextmanager
def _server() -> Iterator[None]:
    """A server of ranks for the copies, which all that runs in them uses too."""
    local, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.environ[SHARED_SERVER] = str(local.fileno())
    fds = (local.fileno(), theirs.fileno())
    # -P, and by its file: neither this repository nor its packages shall be there when a copy is
    # imported.
    command = [sys.executable, "-P", str(_ROOT / "tests/support/server.py"), str(theirs.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    server = subprocess.Popen(
        command,
        pass_fds=fds,
        env=environment,
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    try:
        yield
    finally:
        server.kill()
        server.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _make_models_and_data(made: Path) -> None:
    make_demo(made, seed=0)
    make_model(
        made / "wide", "qwen3", tied=True, intermediate_size=4096
    )  # 6 MiB: several of the smallest buckets
    make_model(made / "experts", "glm4_moe", tied=False, seed=1)
    make_model(made / "routed", "qwen3_moe", tied=True)
    make_model(made / "hybrid", "qwen3_5_text", tied=True)
    rows = read_lines(made / "train.jsonl")[:8]
    longer = [row | {"prompt": "1,2,3,4,5,6,7,8,9," * 2 + row["prompt"]} for row in rows]
    (made / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longer))
    rows = read_lines(made / "train.jsonl")[:64]  # every second one is dropped for its length
    mixed = [
        row if n % 2 else row | {"prompt": "1,2,3,4,5,6,7," + row["prompt"]}
        for n, row in enumerate(rows)
    ]
    (made / "some_long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    shutil.copytree(made / "model", made / "two_stops")
    (made / "two_stops/generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))


def _make_trained(made: Path) -> tuple[str, ...]:
    """Makes a model with weights like trained ones, and returns the overrides that train it."""
    make_case(made / "trained", CASES["Qwen2, 12 layers, key bias 605"])
    (made / "reward.py").write_text(REWARD)
    return (
        f"model.path={made}/trained",
        "model.dtype=bfloat16",
        # Braces are doubled once more: `_train` fills in {made}.
        f"rewards=[{{{{function: '{made}/reward.py:even'}}}}]",
        "optimizer.lr=1e-4",
    )


def _row(
    fault: Fault | None,
    used: Sequence[Fault],
    made: Path,
    copy: Path,
    *,
    model: tuple[str, ...] = (),
) -> Row:
    """Plant a fault, or none, in a new copy, and see what notices: the trainings and tests of the
    faults in `used`.

    With `model`, the overrides of a model to train, no tests are run."""
    start = time.perf_counter()
    _copy_repository(copy)
    for edit in (SHORTER, fault):
        if edit is not None:
            plant(copy, edit)
    proofs = _train(copy, made, [(*f.overrides, *model) for f in used])
    every_step = _train(
        copy, made, [(*f.overrides, *model, "proofs.every_steps=1") for f in used if f.of_sync]
    )
    tests = _test(copy, [] if model else list(dict.fromkeys(t for f in used for t in f.tests)))
    shutil.rmtree(copy)
    cells = [cell for cell in (proofs, every_step, tests) if cell != _NOT_RUN]
    if fault is None:
        good = all(cell == _PASSES for cell in cells)
    else:
        good = any(cell != _PASSES for cell in cells) and not any(
            cell.startswith(_BROKEN) for cell in cells
        )
        proofs, every_step, tests = (
            _NOT_SEEN if cell == _PASSES else cell for cell in (proofs, every_step, tests)
        )
    row: Row = {
        "fault": "no fault" if fault is None else fault.name,
        "planted in": "-" if fault is None else fault.file,
        "running proofs": proofs,
        "with proofs.every_steps=1": every_step,
        "tests": tests,
        "as it should be": good,
        "seconds": round(time.perf_counter() - start),
    }
    print("  ".join(str(value) for value in row.values()), flush=True)
    return row


def _copy_repository(to: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, to / name)

    (to / "which.py").write_text(
        "import grpo_spmd, tests\nprint(grpo_spmd.__file__, tests.__file__)\n"
    )
    _, message = _run(to, 1, "which")
    expected = f"{to}/grpo_spmd/__init__.py {to}/tests/__init__.py"
    if message.strip() != expected:
        raise RuntimeError(
            f"a process of the copy does not import the copy, which is at {to}, but {message}"
        )


def _train(copy: Path, made: Path, variants: Sequence[tuple[str, ...]]) -> str:
    """What stopped the first of these short trainings that did not come to its end."""
    short = (
        "training.num_steps=4",
        "rollout.num_prompts_per_step=8",
        "logging.rollouts_every_steps=0",
    )
    for overrides in dict.fromkeys(variants):
        paths = (
            "model.path={made}/model",
            "data.train={made}/train.jsonl",
            f"run_dir={tempfile.mkdtemp(dir=copy)}/run",
        )
        values = [value.format(made=made) for value in (*short, *paths, *overrides)]
        # A variant's value replaces the one before it: a key that is given twice is refused.
        by_key = {value.partition("=")[0]: value for value in values}
        code, output = _run(
            copy, 2, "grpo_spmd.train", "--config", "configs/demo.yaml", *by_key.values()
        )
        if code == 0:
            continue
        # The copy without a fault trains under the same settings, so that it is the fault which the
        # checks before the first step refuse.
        refusal = re.search(r"^error: (.*)", output, re.MULTILINE)
        if code == 2 and refusal is not None:
            return f"refused at the start: {refusal[1].replace(str(made), '')[:80]}"
        error = re.search(rf"({_PROOFS}): (?:step (\d+): )?(.*)", output)
        if error is None:
            return _broken(output)
        name, step, message = error.groups()
        if tensors := re.search(r"in (\d+ of \d+ tensors).*?: (\S+) \(", message):
            message = f"{tensors[1]}, first {tensors[2]}"
        message = message.removeprefix("the update is not what a plain recomputation of it gives: ")
        return f"step {step}, {name}: {message.partition(' on the tokens')[0][:80]}"
    return _PASSES if variants else _NOT_RUN


def _test(copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails."""
    if not tests:
        return _NOT_RUN
    arguments = ("-x", "-q", "-p", "no:cacheprovider", f"--basetemp={copy / 'tmp'}")
    code, output = _run(copy, 1, "pytest", *arguments, *tests)
    if code == 0:
        return _PASSES
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+?::.*?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if code == 1 and failed is not None else _broken(output)


def _broken(output: str) -> str:
    print(output, file=sys.stderr)
    return (
        _BROKEN
        + ([line for line in output.splitlines() if "Error" in line] or ["see the output"])[-1][:80]
    )


def _run(copy: Path, num_ranks: int, module: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of a module in the copy."""
    try:
        return RanksJob(num_ranks, module, *arguments, env={"COLUMNS": "300"}, cwd=copy).wait(
            _TIMEOUT_S
        )
    except AssertionError as error:  # still running, or processes left
        return -1, f"AssertionError: {error}"


if __name__ == "__main__":
    main()

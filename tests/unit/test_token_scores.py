"""token_scores/: what is kept of a step's tokens, as it is written, removed and read again;
tokenizer.json beside it.
tests/ranks/test_partition.py and test_episodes.py hold the values against plain transformers."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import (
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.reductions import Max, Reductions
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.update import PolicyUpdater, attach_logprobs
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters, load_weights
from grpo_spmd.observe.rollout_writer import RolloutDump, RolloutWriter, save_tokenizer
from grpo_spmd.observe.run_folder import ReadErrors, RunFolder
from grpo_spmd.observe.token_scores import KeptScores, TokenScores, TokenScoresError
from grpo_spmd.records import MicroBatch, Rollout, RolloutBatch, Segment
from tests.support.dumps import scored as read
from tests.support.models import make_model

_CPU = torch.device("cpu")
_SESSION: list[Session] = []


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    _SESSION.append(start_session())
    yield
    end_session()
    _SESSION.clear()


@dataclass
class Scored:
    """A rollout, and what the policy is to say of it."""

    rollout: Rollout
    logprobs: list[float]
    entropy: list[float]


def scored(rollout_id: int, size: int, advantages: Any = 0.5, loss_mask: Any = True) -> Scored:
    rng = random.Random(rollout_id)
    logprobs, engine, entropy = (
        [rng.uniform(low, 2.0 * (low == 0)) for _ in range(size)] for low in (-5, -5, 0)
    )
    ids = [rng.randrange(90) for _ in range(size)]
    return Scored(
        Rollout(rollout_id, advantages, loss_mask, [7, 8], ids, engine), logprobs, entropy
    )


def of_segments(rollout_id: int, *sampled: list[int]) -> Scored:
    """Of an episode: in each segment these tokens are sampled, between others that were given."""
    segments, ids = [], list[int]()
    for segment_values in sampled:
        token_ids = [t for token in segment_values for t in (90, token)] + [91]
        is_sampled = [False, True] * len(segment_values) + [False]
        segments.append(Segment(np.array(token_ids, np.int32), np.array(is_sampled)))
        ids += segment_values
    single = scored(rollout_id, len(ids))
    rollout = episode_rollout(
        rollout_id, 0.5, True, tuple(segments), single.rollout.rollout_logprobs
    )
    assert list(rollout.completion_ids) == ids
    return Scored(rollout, single.logprobs, single.entropy)


def row_of(*rows: Scored) -> tuple[MicroBatch, Tensor, Tensor]:
    micro_batch = pack_rollouts([single.rollout for single in rows], _CPU)
    if not micro_batch.rollout_ids:  # a row that only keeps step
        return micro_batch, torch.tensor([-1.0]), torch.tensor([1.0])
    logprobs, entropy = (
        [value for single in rows for value in getattr(single, name)]
        for name in ("logprobs", "entropy")
    )
    return micro_batch, torch.tensor(logprobs), torch.tensor(entropy)


ROWS = [
    scored(9, 3, advantages=np.array([0.5, -1.25, 3.0])),
    scored(2, 4, loss_mask=np.array([True, False, True, False])),
    scored(5, 0),
    scored(4, 1, loss_mask=False),
    scored(0, 300, advantages=-2.0),
    of_segments(3, [5, 6, 7], [8], [9, 10]),
]


def kept(*rows: tuple[MicroBatch, Tensor, Tensor]) -> KeptScores:
    scores = KeptScores()
    for row in rows:
        scores(*row)
    return scores


def test_a_line_a_rollout_in_the_order_of_ids_with_each_tokens_values() -> None:
    lines = read(kept(row_of(ROWS[0], ROWS[1]), row_of(), row_of(*ROWS[2:])).lines())
    assert [line["rollout_id"] for line in lines] == [
        0,
        2,
        3,
        4,
        9,
    ]  # 5 has no token, and the empty row no rollout
    by_id = {single.rollout.rollout_id: single for single in ROWS}
    for line in lines:
        single = by_id[line["rollout_id"]]
        expected = [
            local - its
            for local, its in zip(single.logprobs, single.rollout.rollout_logprobs, strict=True)
        ]
        assert line["difference"] == pytest.approx(
            expected, rel=1e-3, abs=1e-6
        )  # float16 has eleven bits
        assert line["entropy"] == pytest.approx(single.entropy, rel=1e-3)
        sizes = [abs(value) for value in expected]
        assert line["difference_mean"] == pytest.approx(
            sum(sizes) / len(sizes), rel=1e-5
        )  # of float32
        assert line["difference_max"] == pytest.approx(max(sizes), rel=1e-5)
    report = {line["rollout_id"]: (line.get("advantages"), line.get("loss_mask")) for line in lines}
    assert report == {
        0: (None, None),
        2: (None, [1, 0, 1, 0]),
        3: (None, None),
        4: (None, [0]),
        9: ([0.5, -1.25, 3.0], None),
    }


def test_of_a_micro_batch_the_first_scores_stay() -> None:
    """Those of the pass over old logprobs, and not those of the update's later epochs."""
    initial, second = row_of(ROWS[0]), row_of(ROWS[1])
    scores = kept(initial, second)
    scores(initial[0], initial[1] - 1, initial[2] - 1)
    assert scores.lines() == kept(second, initial).lines()
    assert KeptScores().lines() == []


class Waits(TorchFunctionMode):
    """The calls that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = (
            "cpu",
            "to",
            "item",
            "tolist",
            "nonzero",
            "unique",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
        )
        if (name := getattr(func, "__name__", "")) in waiting:
            self.names.append(name)
        return func(*args, **kwargs or {})


def test_to_keep_scores_waits_for_nothing_and_to_write_them_once() -> None:
    with Waits() as control:
        torch.tensor([1.0]).cpu().item()
    assert control.names == ["cpu", "item"]
    rows = [row_of(single) for single in ROWS] * 2
    with Waits() as waits:
        scores = kept(*rows)
        assert waits.names == []
        lines = scores.lines()
        assert waits.names == ["cpu"]
    assert len(lines) == 5
    row = row_of(ROWS[0])
    with_graph = row[1].requires_grad_()
    scores = kept((row[0], with_graph * 1, row[2]))
    assert not any(
        values.requires_grad for values in next(iter(scores._kept.values()))[1:]
    )  # nor what made them


def test_what_is_not_finite_is_written_and_read() -> None:
    single = scored(3, 4)
    single.logprobs[:2] = [float("nan"), float("-inf")]
    single.entropy[2] = 1e6
    (line,) = read(kept(row_of(single)).lines())
    assert (line["difference_mean"], line["difference_max"]) == (None, None)
    assert np.isnan(line["difference"][0])
    assert line["difference"][1] == float("-inf")
    assert line["entropy"][2] == float("inf")  # beyond float16


def dump_of(
    run_dir: Path, every_steps: int = 1, **options: Any
) -> tuple[RolloutDump, RolloutWriter]:
    logging_options = LoggingConfig(**options)
    writers = [
        RolloutWriter(run_dir, logging_options, _SESSION[0], name)
        for name in ("rollouts", "token_scores")
    ]
    return RolloutDump(writers[0], every_steps, writers[1]), writers[0]


_NONE_SKIPPED: Reductions = {"optim/skipped_updates": Max(0.0)}
_NOT_NEEDED: Any = None


def write(dump: tuple[RolloutDump, RolloutWriter], step: int, *rows: Scored) -> None:
    """As the loop does."""
    dump[1].write_step(step, [b"{}"])
    scores = dump[0].keep_scores_if_due(step)
    assert scores is not None
    scores(*row_of(*(rows or ROWS)))
    dump[0].write_updated(step, _NOT_NEEDED, _NOT_NEEDED, _NONE_SKIPPED, scores)


def names(run_dir: Path, folder: str = "token_scores") -> list[str]:
    return sorted(path.name for path in (run_dir / folder).iterdir())


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_what_was_written_is_read(tmp_path: Path, compression: str) -> None:
    write(dump_of(tmp_path, rollouts_compression=compression), 12)
    assert names(tmp_path) == ["step_000012.jsonl" + ".gz" * (compression == "gzip")]
    result = scores_by_id(tmp_path, 12)
    assert list(result) == [0, 2, 3, 4, 9]
    lines = {line["rollout_id"]: line for line in read(kept(row_of(*ROWS)).lines())}
    for rollout_id, scores in result.items():
        line = lines[rollout_id]
        for name in ("difference", "entropy", "advantages", "loss_mask"):
            values = getattr(scores, name)
            assert (None if values is None else values.tolist()) == line.get(name), name
            assert values is None or values.dtype == (
                np.bool_ if name == "loss_mask" else np.float32
            )
        assert scores.difference_mean == line["difference_mean"]
        assert scores.difference_max == line["difference_max"]
    assert scores_by_id(tmp_path, 13) == {}
    assert scores_by_id(tmp_path / "nowhere", 12) == {}


def test_they_go_with_the_rollouts_of_their_step(tmp_path: Path) -> None:
    dump = dump_of(tmp_path, rollouts_keep=2)
    for step in (1, 2, 3):
        write(dump, step)
        dump[1].write(f"eval_held_step_00000{step}", [b"{}"])
    dump[1].write_step(4, [b"{}"])  # killed, or refused, before there were scores
    assert names(tmp_path) == ["step_000003.jsonl"]
    assert names(tmp_path, "rollouts")[-2:] == ["step_000003.jsonl", "step_000004.jsonl"]
    again = dump_of(tmp_path, rollouts_compression="gzip")
    again[1].write_step(3, [b"{}"])  # of another attempt than the scores that are there
    assert names(tmp_path) == []
    write(again, 3, ROWS[0])
    write(dump_of(tmp_path), 3, ROWS[1])
    assert names(tmp_path) == ["step_000003.jsonl"]
    assert list(scores_by_id(tmp_path, 3)) == [2]


def test_nothing_is_kept_of_a_step_that_is_not_dumped(tmp_path: Path) -> None:
    dump, _ = dump_of(tmp_path, every_steps=5)
    assert [step for step in range(1, 12) if dump.keep_scores_if_due(step) is not None] == [5, 10]
    for every_steps, writers in ((0, 2), (1, 1)):
        writer = RolloutWriter(tmp_path, LoggingConfig(), _SESSION[0])
        assert (
            RolloutDump(writer, every_steps, *[writer] * (writers - 1)).keep_scores_if_due(5)
            is None
        )
    dump.write_updated(3, _NOT_NEEDED, _NOT_NEEDED, _NONE_SKIPPED, None)
    assert not (tmp_path / "token_scores").exists()


def test_a_full_disk_and_a_folder_that_is_none_cost_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    dump = dump_of(tmp_path)
    limit, ignored = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        write(dump, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (
        f"{tmp_path}/token_scores/step_000001.jsonl is not written: File too large (on rank 0)"
        in caplog.text
    )
    assert names(tmp_path) == []
    (tmp_path / "token_scores").rmdir()
    os.mkfifo(tmp_path / "token_scores")
    write(dump, 2)
    assert (
        f"{tmp_path}/token_scores/step_000002.jsonl is not written: File exists (on rank 0)"
        in caplog.text
    )
    assert names(tmp_path, "rollouts") == ["step_000001.jsonl", "step_000002.jsonl"]


def _replaced(**changes: Any) -> bytes:
    good = json.loads(kept(row_of(ROWS[1])).lines()[0])
    return (
        json.dumps(
            {name: value for name, value in (good | changes).items() if value is not ...}
        ).encode()
        + b"\n"
    )


def scores_by_id(run_dir: Path, step: int) -> dict[int, TokenScores]:
    return {scores.rollout_id: scores for _, scores in RunFolder(run_dir).scores(step)}


BAD: list[tuple[Callable[[], bytes], str]] = [
    (lambda: b"\n", "Input data was truncated"),
    (lambda: b"[]\n", "Expected `object`, got `array`"),
    (lambda: b"[" * 100_000, "Expected `object`, got `array`"),
    (lambda: _replaced()[:-20], "Input data was truncated"),
    (lambda: _replaced(rollout_id=-1), "Expected `int` >= 0 - at `$.rollout_id`"),
    (lambda: _replaced(rollout_id=True), "Expected `int`, got `bool` - at `$.rollout_id`"),
    (lambda: _replaced(rollout_id=...), "missing required field `rollout_id`"),
    (lambda: _replaced(difference=...), "missing required field `difference`"),
    (lambda: _replaced(difference=[1.0]), "Expected `bytes`, got `array` - at `$.difference`"),
    (lambda: _replaced(entropy="AAA\n"), "Invalid base64 encoded string - at `$.entropy`"),
    (lambda: _replaced(entropy="AAAA"), "buffer size must be a multiple of element size"),
    (lambda: _replaced(entropy="AAAAA"), "Invalid base64 encoded string - at `$.entropy`"),
    (
        lambda: _replaced(entropy=""),
        "tokens differ: {'difference': 4, 'entropy': 0",
    ),
    (
        lambda: _replaced(difference="AAAA"),
        "buffer size must be a multiple of element size",
    ),
    (
        lambda: _replaced(advantages="AAA="),
        "'advantages': 1",
    ),
    (lambda: _replaced(loss_mask="AAA="), "{'difference': 4, 'entropy': 4, 'loss_mask': 2}"),
    (lambda: _replaced(difference_mean=float("nan")), "JSON is malformed"),
    (lambda: _replaced(difference_max=-1), "Expected `float` >= 0.0 - at `$.difference_max`"),
    (lambda: _replaced(difference_max=10**400), "Number out of range"),
]


@pytest.mark.parametrize(("make", "reason"), BAD, ids=range(len(BAD)))
def test_what_is_broken_is_refused_in_one_line(
    tmp_path: Path, make: Callable[[], bytes], reason: str
) -> None:
    (tmp_path / "token_scores").mkdir()
    path = tmp_path / "token_scores/step_000001.jsonl"
    path.write_bytes(_replaced(rollout_id=7) + make())
    with pytest.raises(ConfigError) as refused:
        scores_by_id(tmp_path, 1)
    text = str(refused.value)
    assert reason in text
    assert text.startswith(f"{path}:2")
    assert "\n" not in text
    assert len(text) < 600
    path.write_bytes(_replaced(rollout_id=7))
    assert list(scores_by_id(tmp_path, 1)) == [7]


def test_what_is_no_file_or_larger_than_any_is_refused_and_not_held(tmp_path: Path) -> None:
    (tmp_path / "token_scores").mkdir()
    for step, make in (
        (1, os.mkfifo),
        (2, lambda path: path.symlink_to("/dev/zero")),
        (3, os.mkdir),
    ):
        make(tmp_path / f"token_scores/step_00000{step}.jsonl")
    for step in (1, 2, 3):
        with pytest.raises(ConfigError, match=r"not a regular file|cannot be read"):
            scores_by_id(tmp_path, step)
    # a link is refused for being one, though it leads to good scores
    (tmp_path / "elsewhere.jsonl").write_bytes(_replaced())
    (tmp_path / "token_scores/step_000006.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(ConfigError, match=r"step_000006\.jsonl is .* not a regular file"):
        scores_by_id(tmp_path, 6)
    errors = ReadErrors()
    assert list(RunFolder(tmp_path).scores(6, errors)) == []
    assert errors.num == 1
    (tmp_path / "token_scores/step_000004.jsonl.gz").write_bytes(gzip.compress(_replaced())[:-5])
    with pytest.raises(ConfigError, match="not a whole gzip file"):
        scores_by_id(tmp_path, 4)
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(33)) + packer.flush()
    (tmp_path / "token_scores/step_000005.jsonl.gz").write_bytes(bomb)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="no run writes a line of 32 MiB"):
        scores_by_id(tmp_path, 5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 25


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_model(tmp_path_factory.mktemp("scored") / "model", "qwen3", tied=True)
    return build_policy(ModelConfig(path=str(folder), dtype="float32"), 1.0, _SESSION[0])


def trained(
    policy: Policy, loss: LossConfig, num_mini_batches: int, num_epochs: int = 1
) -> dict[int, dict[str, Any]]:
    """What is kept of an update of four rollouts, a row each, that moves the policy by far more
    than rounding."""
    rows = [[scored(2 * number, 5), scored(2 * number + 1, 3)] for number in range(2)]
    batches = [[pack_rollouts([single.rollout], _CPU) for single in row] for row in rows]
    if num_mini_batches == 1:
        batches = [[row for mini_batch in batches for row in mini_batch]]
    tokens = [sum(len(row.target_ids) for row in mini_batch) for mini_batch in batches]
    batch = RolloutBatch(batches, tokens, [4 // num_mini_batches] * num_mini_batches)
    num_updates = num_mini_batches * num_epochs
    training = TrainingConfig(num_mini_batches=num_mini_batches, num_epochs=num_epochs)
    updater = PolicyUpdater(policy, OptimizerConfig(lr=0.1), loss, training, 8)
    scores = KeptScores()
    attach_logprobs(policy, None, batch, loss, num_updates, keep_scores=scores)
    sums = updater.update(batch, keep_scores=scores)
    updater.backward(
        batch.micro_batches[0], tokens[0], 2, True
    )  # the update check's own passes are not kept
    updater.optimizer.zero_grad()
    assert sums["optim/updates"].value == num_updates
    load_weights(hf_named_parameters(policy), Path(policy.model.config._name_or_path))
    squares = sums["tilt_squares"].value if num_updates == 1 else None
    if squares is not None:
        _shifted_ones_are_refused(scores, squares)
    return {line["rollout_id"]: line for line in read(scores.lines(squares))}


def _shifted_ones_are_refused(scores: KeptScores, squares: float) -> None:
    """Scores of the token before, and a neighbour's entropies."""
    kept = dict(scores._kept)
    for change in (
        lambda row, logprobs, entropy: (row, logprobs.roll(1), entropy),
        lambda row, logprobs, entropy: (row, logprobs, entropy.roll(1)),
    ):
        scores._kept = {key: change(*entry) for key, entry in kept.items()}
        with pytest.raises(TokenScoresError, match=r"the sum of .logprob . entropy"):
            scores.lines(squares)
    scores._kept = kept


@pytest.mark.parametrize(
    ("loss", "num_mini_batches", "num_epochs", "scored_ids"),
    [
        (LossConfig(), 1, 1, [0, 1, 2, 3]),
        (LossConfig(), 2, 2, [0, 1, 2, 3]),
        (LossConfig(), 1, 2, [0, 1, 2, 3]),
        (LossConfig(old_logprobs="engine", rollout_correction="none"), 1, 2, [0, 1, 2, 3]),
        # of the second mini-batch nobody knew the scores before the first update, and later ones
        # say something else
        (LossConfig(old_logprobs="engine", rollout_correction="none"), 2, 1, [0, 1]),
    ],
)
def test_scores_are_of_the_policy_before_the_first_update(
    policy: Policy, loss: LossConfig, num_mini_batches: int, num_epochs: int, scored_ids: list[int]
) -> None:
    result = trained(policy, loss, num_mini_batches, num_epochs)
    assert list(result) == scored_ids
    for rollout_id, line in result.items():
        rollout = scored(rollout_id, 5 if rollout_id % 2 == 0 else 3).rollout
        with torch.no_grad():
            logprobs, entropy = policy(pack_rollouts([rollout], _CPU))
            cast(FSDPModule, policy).reshard()
        expected = (logprobs - torch.tensor(rollout.rollout_logprobs)).tolist()
        assert line["difference"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert line["entropy"] == pytest.approx(entropy.tolist(), rel=1e-3)


def test_of_a_skipped_update_there_is_what_there_is(policy: Policy) -> None:
    rows = [scored(number, 4) for number in range(2)]
    rows[0].rollout.rollout_logprobs[1] = float("nan")
    batch = RolloutBatch([[pack_rollouts([single.rollout for single in rows], _CPU)]], [8], [2])
    updater = PolicyUpdater(policy, OptimizerConfig(), LossConfig(), TrainingConfig(), 8)
    scores = KeptScores()
    assert updater.update(batch, keep_scores=scores)["optim/skipped_updates"].value == 1
    initial, second = read(scores.lines())
    assert [np.isnan(value) for value in initial["difference"]] == [False, True, False, False]
    assert initial["difference_max"] is None
    assert second["difference_max"] > 0


def a_tokenizer(*words: str) -> Any:
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *words))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def read_tokenizer(folder: Path) -> Any:
    """As anybody reads it."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_the_runs_tokenizer_is_written(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    save_tokenizer(tmp_path, a_tokenizer("why", "\u00e4h"))
    assert read_tokenizer(tmp_path).encode("\u00e4h").ids == [2]
    assert read_tokenizer(tmp_path).decode([1, 2]) == "why \u00e4h"
    save_tokenizer(tmp_path, a_tokenizer("\u00e4h", "why"))  # as long, and not the same
    assert read_tokenizer(tmp_path).encode("\u00e4h").ids == [1]
    path.unlink()
    save_tokenizer(tmp_path, object())  # a slow one
    save_tokenizer(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_where_the_tokenizer_should_be_nothing_is_followed_or_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    local = tmp_path / "mine"
    local.write_text("mine")
    for number, name in enumerate(("tokenizer.json", "tokenizer.json.tmp")):
        for make in (lambda path: path.symlink_to(local), os.mkfifo):
            folder = tmp_path / f"{number}_{make.__name__}"
            folder.mkdir()
            make(folder / name)
            save_tokenizer(folder, a_tokenizer("why"))
            assert read_tokenizer(folder).encode("why").ids == [1]
            assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
            assert not (folder / "tokenizer.json").is_symlink()
            assert local.read_text() == "mine"
    (tmp_path / "tokenizer.json").mkdir()
    save_tokenizer(tmp_path, a_tokenizer("why"))
    assert f"{tmp_path}/tokenizer.json is not written: Is a directory" in caplog.text


def test_readers_import_no_torch(tmp_path: Path) -> None:
    write(dump_of(tmp_path), 1)
    code = (
        "import sys; from pathlib import Path; from grpo_spmd.observe.timeline import "
        "read_timeline; "
        "from grpo_spmd.observe.run_folder import RunFolder; "
        "folder = Path(sys.argv[1]); read_timeline(folder); "
        "print(len(list(RunFolder(folder).scores(1)))); "
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "5\n[]\n", done.stderr

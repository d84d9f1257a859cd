"""Dumps that several ranks write, on one node and on two: a reader finds what one rank would have
written."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.observe.run_folder import RunFolder
from tests.support.dumps import dumped, scored
from tests.support.ranks import RanksJob
from tests.support.workers import dump as worker

ONE, TWO = "step_{:06d}.jsonl", "step_{:06d}.node_1.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote."""
    folder = tmp_path_factory.mktemp("dump")
    code, output = RanksJob(2, "tests.support.workers.dump", str(folder)).wait(60)
    assert code == 0, output
    (folder / "output.txt").write_text(output)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one rank that had it all."""
    run_dir = tmp_path_factory.mktemp("alone")
    worker.dump(run_dir, start_session(), [1])
    end_session()
    return run_dir


def names(run_dir: Path, of: str = "rollouts") -> list[str]:
    return sorted(path.name for path in (run_dir / of).iterdir())


def lines(run_dir: Path, step: int) -> list[bytes]:
    """Of all files of the step, each read as what it is."""
    result = []
    for path in (run_dir / "rollouts").glob(f"step_{step:06d}*"):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert content.endswith(b"}\n")
        result += content.removesuffix(b"\n").split(b"\n")
    return sorted(result)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("one", [ONE]),
        ("two", [ONE, TWO]),
        ("one_gzip", [f"{ONE}.gz"]),
        ("two_gzip", [f"{ONE}.gz", f"{TWO}.gz"]),
    ],
)
def test_two_ranks_write_what_one_does(
    folder: Path, alone: Path, name: str, files: list[str]
) -> None:
    run_dir = folder / name
    assert names(run_dir) == sorted(file.format(1) for file in files)  # and nothing of another name
    assert len(lines(alone, 1)) == worker.NUM_GROUPS * worker.GROUP_SIZE
    assert lines(run_dir, 1) == lines(alone, 1)
    records = RunFolder(run_dir).complete_rollouts(1)
    assert [(r.position, r.sample) for r in records] == [(100 + i // 2, i % 2) for i in range(12)]
    assert [r.rollout_id for r in records] == list(range(12))
    assert [r.prompt for r in records] == [worker.TEXTS[i // 2 % 3] for i in range(12)]
    assert {r.num_rollouts for r in records} == {12}
    assert list(map(repr, records)) == list(
        map(repr, RunFolder(alone).complete_rollouts(1))
    )  # repr: NaN is not NaN
    if "gzip" not in name:
        assert dumped(run_dir, 1) == dumped(alone, 1)
    else:
        for path in (run_dir / "rollouts").iterdir():
            displayed = subprocess.run(
                ["gzip", "-dc", str(path)], capture_output=True, check=True, timeout=20
            ).stdout
            assert displayed == gzip.decompress(path.read_bytes())


def test_each_node_has_its_own_ranks_lines_in_the_order_of_the_stream(folder: Path) -> None:
    rank_values = [[100, 102, 104], [101, 103, 105]]
    for name, expected in (("one", [[*rank_values[0], *rank_values[1]]]), ("two", rank_values)):
        paths = sorted((folder / name / "rollouts").iterdir(), key=lambda path: len(path.name))
        for path, positions in zip(paths, expected, strict=True):
            result = [
                line.partition(b'"position":')[2][:3]
                for line in path.read_bytes().split(b"\n")
                if line
            ]
            assert result == [str(position).encode() for position in positions for _ in range(2)]


def test_a_disk_that_is_full_on_one_rank_costs_its_nodes_file_and_one_warning(
    folder: Path, alone: Path
) -> None:
    for name, warning in (("one_full", ONE), ("two_full", TWO)):
        run_dir = folder / name
        output = (folder / "output.txt").read_text()
        path = run_dir / "rollouts" / warning.format(2)
        assert output.count(f"{run_dir}/rollouts/step_000002") == 1  # on one rank, of one file
        assert f"{path} is not written: File too large (on rank 1)" in output
        for step in (1, 3):
            assert lines(run_dir, step) == lines(alone, 1)
    # neither half of it, nor what an earlier process wrote, which says something else
    assert names(folder / "one_full") == [ONE.format(step) for step in (1, 3)]
    full = [file.format(step) for step in (1, 2, 3) for file in (ONE, TWO)]
    assert names(folder / "two_full") == sorted(set(full) - {TWO.format(2)})
    missing = (
        r"step_000002\.jsonl: 6 rollouts are missing, .* ids \[2, 3, 6, 7, 10, 11\]; each node"
    )
    with pytest.raises(ConfigError, match=missing):
        RunFolder(folder / "two_full").complete_rollouts(2)


def test_the_newest_stay_with_all_their_parts(folder: Path) -> None:
    assert names(folder / "one_keep") == [ONE.format(step) for step in (3, 4)]
    assert names(folder / "two_keep") == sorted(
        file.format(step) for step in (3, 4) for file in (ONE, TWO)
    )
    assert names(folder / "shrunk_keep") == [
        ONE.format(3)
    ]  # also the parts of a node that is no more


def test_a_step_written_again_on_fewer_nodes_leaves_no_old_part(folder: Path, alone: Path) -> None:
    assert names(folder / "shrunk") == sorted([ONE.format(1), TWO.format(1), f"{ONE.format(2)}.gz"])
    assert lines(folder / "shrunk", 2) == lines(alone, 1)
    assert RunFolder(folder / "shrunk").dumped_steps == [1, 2]


def test_scores_of_tokens_are_beside_their_dumps_on_each_node(folder: Path) -> None:
    """Which rank trained on a rollout is another matter than which rank sampled it."""
    assert names(folder / "one_scored", "token_scores") == [ONE.format(step) for step in (2, 3)]
    two = sorted(file.format(step) for step in (2, 3) for file in (ONE, TWO))
    assert names(folder / "two_scored", "token_scores") == names(folder / "two_scored") == two
    # a step written again on one node, in the other form
    shrunk = sorted([ONE.format(1), TWO.format(1), f"{ONE.format(2)}.gz"])
    assert (
        names(folder / "shrunk_scored", "token_scores") == names(folder / "shrunk_scored") == shrunk
    )
    for name, step in (("one", 3), ("two", 2), ("two", 3), ("shrunk", 1), ("shrunk", 2)):
        recorded = RunFolder(folder / f"{name}_scored").scores(step)
        result = {scores.rollout_id: scores for _, scores in recorded}
        assert sorted(result) == list(range(12))
        for rollout_id, scores in result.items():
            assert scores.difference.tolist() == [rollout_id / 8] * (rollout_id + 1)
            assert scores.entropy.tolist() == [step] * (rollout_id + 1)
    for path in (folder / "two_scored/token_scores").iterdir():
        ids = [line["rollout_id"] for line in scored(path.read_bytes().splitlines())]
        rank = int("node_1" in path.name)
        assert ids == [i for i in range(12) if i * 7 % 5 % 2 == rank], path

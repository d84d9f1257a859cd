"""A dumped step, run again without vLLM, gives what the run recorded; what was changed shows, and
what is missing is
said."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.tools.replay.__main__ import replay, report
from grpo_spmd.tools.replay.read import Replay, read_step
from tests.support.dumps import dumped, logprobs_of
from tests.support.processes import ROOT, Job
from tests.support.ranks import RanksJob
from tests.support.recorded import ODD_REWARD

COMPARED = (
    "loss/policy",
    "loss/kl",
    "loss/entropy",
    "loss/clip_frac",
    "optim/grad_norm",
    "optim/lr",
    "reward/mean",
    "reward/odd/mean",
)


@pytest.fixture(autouse=True)
def _environment_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # replay sets it, and pytest puts it back


@pytest.fixture
def run(elaborate_run: Path) -> Path:
    return elaborate_run / "run"


def replayed(
    run: Path, step: int, *overrides: str, checkpoint: Path | None = None
) -> tuple[Replay, str]:
    recorded = read_step(run, step, overrides)
    result = replay(recorded, checkpoint)
    return result, "\n".join(report(recorded, result, 5))


def of_an_earlier_version(run: Path, step: int) -> list[dict[str, Any]]:
    """Its rollouts as dumps had them before there were columns, files of nodes and packed
    logprobs."""
    records = [record | {"rollout_logprobs": logprobs_of(record)} for record in dumped(run, step)]
    return [
        {name: record[name] for name in record.keys() - {"columns", "num_rollouts"}}
        for record in records
    ]


def copy_of(run: Path, target: Path, *without: str) -> Path:
    return Path(shutil.copytree(run, target, ignore=shutil.ignore_patterns(*without)))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_is_what_it_was(run: Path, step: int) -> None:
    """Step 1 from model.path, the others from their checkpoints with the optimizer's moments;
    recorded on two ranks,
    replayed on one."""
    old = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    result, text = replayed(run, step)
    assert [name for name in COMPARED if name not in result.metrics] == []
    for name, (recorded, again) in result.metrics.items():
        assert recorded is not None, name
        assert again is not None, name
        assert abs(recorded - again) <= 1e-6 * max(1.0, abs(recorded)), (name, recorded, again)
    assert len(result.rollouts) == len(dumped(run, step))
    for rollout in result.rollouts:
        was, current = rollout.recorded, rollout.replayed
        assert (current.reward, current.rewards, current.statuses) == (
            was.reward,
            was.rewards,
            was.statuses,
        )
        assert current.advantage == was.advantage
        if current.advantage is not None:
            assert rollout.logprobs == pytest.approx(was.rollout_logprobs, abs=1e-5)
    assert "differ: reward 0, advantage 0, reward format 0, reward odd 0, status format 0" in text
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == old  # nothing was written


def test_a_compressed_dump_is_replayed_and_the_gold_answer_shown(run: Path, tmp_path: Path) -> None:
    """And one of the versions before: without columns and their number, with logprobs as
    doubles."""
    copy = copy_of(run, tmp_path / "run")
    path = copy / "rollouts/step_000002.jsonl"
    expected = replayed(run, 2)[1].replace(str(run), str(copy))
    gold = dumped(run, 2)[0]["columns"]
    assert set(gold) == {"nums", "target", "answer"}
    assert f"  answer={gold['answer']!r}\n" in f"{expected}\n"
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())
    path.unlink()
    assert replayed(copy, 2)[1] == expected
    with pytest.raises(
        ConfigError,
        match=r"step_000009\.jsonl: No such file or directory; there are dumps of the steps",
    ):
        read_step(copy, 9)
    Path(f"{path}.gz").unlink()
    path.write_text("".join(f"{json.dumps(record)}\n" for record in of_an_earlier_version(run, 2)))
    assert replayed(copy, 2)[1] == expected  # the data set is there


def test_the_run_had_all_that_it_was_to_have(run: Path) -> None:
    records = [record for step in (1, 2, 3) for record in dumped(run, step)]
    assert {status for record in records for status in record["statuses"].values()} == {
        "ok",
        "not_applicable",
        "error",
    }
    assert any(record["rollout_id"] is None for record in records)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(
        m["loss/clip_frac"] > 0 and m["loss/kl"] > 0 and m["optim/updates"] == 2 for m in metrics
    )


def test_what_a_reward_logs_is_in_metrics_and_dump(run: Path) -> None:
    """Of each group that the function was called with once, whichever rank had it;
    test_a_step_is_what_it_was compares
    two ranks' metrics with one's."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    num_rows = len((run.parent / "train.jsonl").read_text().splitlines())
    for step, metrics in enumerate(lines, start=1):
        digits: dict[int, int] = {}
        for record in dumped(run, step):
            if record["statuses"]["odd"] == "error":
                assert "extra" not in record
            else:
                assert record["extra"] == {"odd": {"length": len(record["completion"])}}
                local = sum(c.isdigit() for c in record["completion"])
                digits[record["position"]] = digits.get(record["position"], 0) + local
        assert metrics["reward/odd/digits"] == sum(digits.values()) / len(digits)
        initial = min(record["position"] for record in dumped(run, step))
        assert metrics["reward/odd/progress"] == pytest.approx((step - 1) / 3 + initial / num_rows)
        assert metrics["reward/format/retried_frac"] == 0.0
        errors = {r["position"] for r in dumped(run, step) if r["statuses"]["odd"] == "error"}
        assert metrics["reward/odd/retried_frac"] == len(errors) / len(
            {r["position"] for r in dumped(run, step)}
        )


def test_a_changed_reward_shows(run: Path, tmp_path: Path) -> None:
    praised = next(r["completion"] for r in dumped(run, 3) if r["rewards"]["odd"] is not None)
    (tmp_path / "other.py").write_text(
        ODD_REWARD.replace("% 2)", f"% 2) + 10.0 * (text == {praised!r})")
    )
    result, text = replayed(run, 3, f"rewards.1.function={tmp_path}/other.py:odd")
    for rollout in result.rollouts:
        was, current = rollout.recorded.rewards, rollout.replayed
        if was["odd"] is not None:
            assert current.rewards["odd"] == was["odd"] + 10.0 * (
                rollout.recorded.completion == praised
            )
            assert current.reward == (was["format"] or 0.0) + 0.5 * (current.rewards["odd"] or 0.0)
    changed = [r for r in result.rollouts if r.replayed.rewards != r.recorded.rewards]
    assert changed
    assert f"reward odd {len(changed)}" in text
    assert f"  {changed[0].name:>9}  reward" in text
    assert result.metrics["reward/odd/mean"][0] != result.metrics["reward/odd/mean"][1]


def test_overrides_try_another_weight_and_another_clip_range(run: Path) -> None:
    result, text = replayed(
        run,
        1,
        "rewards.1.weight=0",
        "loss.clip_ratio_low=1",
        "loss.clip_ratio_high=1000",
        "loss.dual_clip=null",
    )
    assert result.metrics["loss/clip_frac"][1] == 0
    assert "override: rewards.1.weight=0" in text
    groups: dict[int, list[Any]] = {}
    for rollout in result.rollouts:
        groups.setdefault(rollout.recorded.position, []).append(rollout)
    for rollouts in groups.values():  # GRPO by hand
        expected_names = [r for r in rollouts if r.replayed.statuses["odd"] != "error"]
        late = [max(0, len(r.recorded.completion_ids) - 8) / 4 * 0.25 for r in expected_names]
        rewards = [
            r.recorded.rewards["format"] - penalty
            for r, penalty in zip(expected_names, late, strict=True)
        ]
        mean = sum(rewards) / max(len(rewards), 1)
        std = math.sqrt(sum((x - mean) ** 2 for x in rewards) / max(len(rewards) - 1, 1))
        for rollout, reward in zip(expected_names, rewards, strict=True):
            if (advantage := rollout.replayed.advantage) is not None:
                assert advantage == pytest.approx(
                    (reward - mean) / std if std > 1e-6 else 0.0, abs=1e-5
                )


def test_without_the_policy_the_engines_logprobs_stand_in(run: Path, tmp_path: Path) -> None:
    """The laptop has the run folder, and neither the checkpoints nor the data nor the model."""
    copy = copy_of(run, tmp_path / "run", "checkpoints")
    result, text = replayed(copy, 3, "data.train=/nowhere/train.jsonl", "model.path=/nowhere/model")
    assert (
        f"no {copy}/checkpoints/step_000002 (there are: none; --checkpoint takes another), so "
        "the engine's recorded "
        "logprobs stand in" in text
    )
    assert (
        "rewards are those that the run recorded, since the data set cannot be read as it was: "
        "data.train: cannot read "
        "/nowhere" in text
    )
    replayed_records = [r.replayed for r in result.rollouts]
    assert [(r.reward, r.rewards, r.statuses, r.advantage) for r in replayed_records] == [
        (r["reward"], r["rewards"], r["statuses"], r["advantage"]) for r in dumped(run, 3)
    ]
    assert not [
        name
        for name in result.metrics
        if name.startswith(("optim/", "weight_sync/", "loss/entropy"))
    ]
    trained = sorted(
        (r for r in dumped(run, 3) if r["rollout_id"] is not None), key=lambda r: r["rollout_id"]
    )
    expected = []
    for mini_batch in (trained[:8], trained[8:]):  # ratio 1: minus the token mean of the advantages
        tokens = [
            (r["advantage"], len(r["completion_ids"]))
            for r in mini_batch
            if r["statuses"]["odd"] != "error"
        ]
        expected.append(-sum(a * n for a, n in tokens) / sum(n for _, n in tokens))
    assert result.metrics["loss/policy"][1] == pytest.approx(sum(expected) / 2, abs=1e-6)
    assert "least likely token, -logprob of the engine:" in text


def test_a_checkpoint_needs_no_model_path_but_the_reference_does(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^model\.path: there is no folder /nowhere/model, and the reference or the "
        r"adapters need it",
    ):
        replayed(run, 2, "model.path=/nowhere/model")
    with pytest.raises(
        ConfigError,
        match=r"^model\.lora\.rank: 4 does not go with .*step_000001, which holds a whole model$",
    ):
        replayed(run, 2, "model.lora.rank=4")
    result, _ = replayed(run, 2, "model.path=/nowhere/model", "loss.kl_coef=0")
    # the KL moves the second update
    assert result.metrics["loss/entropy"][1] == pytest.approx(
        result.metrics["loss/entropy"][0], rel=0.1
    )
    assert result.metrics["weight_sync/mismatch_abs_max"][1] == pytest.approx(
        result.metrics["weight_sync/mismatch_abs_max"][0]
    )


def test_an_older_checkpoint_is_said_to_be_one(run: Path) -> None:
    result, text = replayed(run, 3, checkpoint=run / "checkpoints/step_000001")
    assert f"policy: {run}/checkpoints/step_000001, after 1 finished steps" in text
    assert (
        "that is not the policy that sampled step 3: loss, entropy, gradient and mismatch differ "
        "for this reason alone" in text
    )
    recorded, again = result.metrics["weight_sync/mismatch_abs_mean"]
    assert recorded is not None
    assert again is not None
    assert again > 1000 * recorded


def test_dynamic_sampling_that_would_have_gone_on_or_stopped_is_said(run: Path) -> None:
    _, text = replayed(
        run,
        1,
        "rewards.0.weight=1e-9",
        "rewards.1.weight=1e-9",
        "advantage.overlong_penalty=0",
        "loss.kl_coef=0",
    )
    assert "more prompts, of which there are no rollouts" in text
    step = next(step for step in (1, 2, 3) if len(dumped(run, step)) > 16)
    _, text = replayed(run, step, "rollout.dynamic_sampling=false", "loss.kl_coef=0")
    assert f"{len(dumped(run, step)) // 4 - 4} groups of the dump are not needed now" in text


def test_a_step_whose_rewards_are_refused_is_still_shown(run: Path) -> None:
    step = next(
        step
        for step in (1, 2, 3)
        if any("error" in r["statuses"].values() for r in dumped(run, step))
    )
    result, text = replayed(run, step, "reward_pool.max_error_frac=0.01")
    assert "the step is refused: RewardError: reward 'odd' raised ValueError: two twos (" in text
    assert "reward 'odd' gave no usable value for" in text
    assert result.rollouts
    assert not result.metrics


def test_what_is_not_finite_is_listed(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path / "run")
    records = of_an_earlier_version(run, 2)
    records[2]["rollout_logprobs"][1] = None  # as those dumps had what is not finite
    (copy / "rollouts/step_000002.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    result, text = replayed(copy, 2)
    assert "1 rollouts with a logprob that is not finite:\n" in text
    assert text.splitlines()[-1].split()[0] == f"{records[2]['position']}/2"
    assert result.metrics["optim/skipped_updates"] == (0, 1)
    packed = [
        record | {"num_rollouts": len(records)} for record in records
    ]  # and as they have it now
    for record in packed:
        values = [math.nan if x is None else x for x in record["rollout_logprobs"]]
        record["rollout_logprobs"] = base64.b64encode(np.array(values, "<f4").tobytes()).decode()
    (copy / "rollouts/step_000002.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in packed)
    )
    assert replayed(copy, 2)[1] == text


def _cut(lines: list[bytes]) -> None:
    lines[1] = lines[1][: len(lines[1]) // 2]


def _change(**values: Any) -> Callable[[list[bytes]], None]:
    def change(lines: list[bytes]) -> None:
        lines[1] = json.dumps({**json.loads(lines[1]), **values}).encode()

    return change


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (_cut, r"step_000002\.jsonl:2: not valid JSON: "),
        (
            _change(completion_ids=[1]),
            r"step_000002\.jsonl:2: 1 completion_ids, but \d+ rollout_logprobs",
        ),
        (
            _change(reward="high"),
            r"step_000002\.jsonl:2: Expected `float \| null`, got `str` - at `\$.reward`",
        ),
        (
            _change(sample=3),
            r"step_000002\.jsonl: \d+ rollouts of a step that had \d+, or some of them twice",
        ),
        (
            lambda lines: lines.__setitem__(0, b"[]"),
            r"step_000002\.jsonl:1: Expected `object`, got `array`",
        ),
        (
            _change(sample=7),
            r"step_000002\.jsonl: the group at position \d+ has the samples \[.*7\], and should "
            r"have 0 to 3",
        ),
        (
            lambda lines: lines.__delitem__(1),
            r"step_000002\.jsonl: 1 rollouts are missing.*all of them must be in one folder",
        ),
        (lambda lines: lines.clear(), r"step_000002\.jsonl: no rollouts"),
    ],
)
def test_a_broken_dump_is_one_line(
    run: Path, tmp_path: Path, damage: Callable[[list[bytes]], None], expected: str
) -> None:
    copy = copy_of(run, tmp_path / "run", "checkpoints")
    path = copy / "rollouts/step_000002.jsonl"
    lines = path.read_bytes().splitlines()
    damage(lines)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=expected) as refused:
        read_step(copy, 2)
    assert "\n" not in str(refused.value)


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^RUN_DIR: .* holds no config\.yaml, so it is no run folder$"
    ):
        read_step(tmp_path, 1)
    with pytest.raises(
        ConfigError,
        match=r"step_000010\.jsonl: No such file or directory; there are dumps of the steps "
        r"\[1, 2, 3\] ",
    ):
        read_step(run, 10)
    with pytest.raises(ConfigError, match=r"^rewards\.1\.function: there is no file /nowhere\.py$"):
        read_step(run, 1, ["rewards.1.function=/nowhere.py:odd"])
    copy = copy_of(run, tmp_path / "run", "checkpoints")
    (copy / "metrics.jsonl").write_text('{"step": 1, "loss/po')
    assert any("metrics.jsonl has no line of step 1" in note for note in read_step(copy, 1).notes)
    rows = [json.loads(line) for line in (run.parent / "train.jsonl").read_text().splitlines()]
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    notes = read_step(run, 1, [f"data.train={moved}"]).notes
    assert any(
        f"the prompt at {moved}:" in note
        and "is no longer the one that the run sampled from" in note
        for note in notes
    )
    config = (run / "config.yaml").read_text()
    assert config.count("  args: {}") == 1
    (copy / "config.yaml").write_text(config.replace("  args: {}", "  args: {api_key: <redacted>}"))
    assert (
        "rewards.1.args.api_key is redacted in config.yaml; give it as an override, if a reward "
        "needs it" in read_step(copy, 1).notes
    )
    assert not [
        note
        for note in read_step(copy, 1, ["rewards.1.args.api_key=x"]).notes
        if "redacted" in note
    ]


def test_the_command_stops_at_a_breakpoint_and_needs_no_vllm(run: Path, tmp_path: Path) -> None:
    (tmp_path / "stop.py").write_text(
        ODD_REWARD.replace("    if nums", "    breakpoint()\n    if nums")
    )
    script = (
        "import runpy, sys\n"
        "class NoVllm:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name.partition('.')[0] != 'vllm', 'vllm was imported'\n"
        "sys.meta_path.insert(0, NoVllm())\n"
        "runpy.run_module('grpo_spmd.replay', run_name='__main__')\n"
    )
    arguments = [
        str(run),
        "--step",
        "1",
        "--top",
        "2",
        f"rewards.1.function={tmp_path}/stop.py:odd",
    ]
    code, output = Job(
        [sys.executable, "-c", script, *arguments], stdin="p len(completions) * 1000\nc\n"
    ).wait(100)
    assert code == 0, output
    assert "(Pdb) 4000" in output
    assert "of 3" in output
    assert "differ: reward 0, advantage 0" in output
    assert "Traceback" not in output


def test_the_command_ends_with_2_and_one_line(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path / "run")
    shard = copy / "checkpoints/step_000001/state/shard_00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 64
    shard.write_bytes(content)
    (copy / "rollouts/step_000003.jsonl").write_text('{"rollout_id": 0,\n')
    for step, expected in [
        (2, "state/shard_00002.safetensors is damaged (its SHA-256 is not the manifest's)"),
        (3, "step_000003.jsonl:1: not valid JSON"),
    ]:
        code, output = RanksJob(1, "grpo_spmd.replay", str(copy), "--step", str(step)).wait(60)
        assert code == 2, output
        errors = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert expected in errors[0]
        assert "Traceback" not in output


def test_every_metric_of_a_line_is_documented(run: Path, plain_run: Path) -> None:
    """In the table of launch/METRICS.md; here, for these runs have most of them."""
    table = (ROOT / "launch/METRICS.md").read_text()
    keys = [
        key
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for key in re.findall(r"`([^`]+)`", row)
    ]
    patterns = [re.sub(r"<\w+>", "[^/]+", key) for key in keys]
    displayed = set()
    for metrics in (run / "metrics.jsonl", plain_run / "run/metrics.jsonl"):
        displayed |= {key for line in metrics.read_text().splitlines() for key in json.loads(line)}
    assert [
        key
        for key in sorted(displayed)
        if not any(re.fullmatch(pattern, key) for pattern in patterns)
    ] == []
    # and what the table promises is there, but for what takes a GPU, an option, or a set of another
    # name
    rare = (
        "throughput/mfu",
        "eval/<set>/reward",
        "memory/sleep",
        "memory/host",
        "reward/kl_penalty",
        "reward/<name>/call_s",
        "reward/<name>/retries",
        "reward/<name>/http_",
        "reward/<name>/reply_tokens",
        "rollout_correction",
        "loss/teacher",
        "loss/router_aux",
        "engine/",
        "loss/value",
        "teacher/",
        "critic/",
        "rollout/waiting_prompts",
        "rollout/tail_long",
        "rollout/tail_dropped",
        "rollout/tail_launched",
        "episode/",
        "environment/",
        "speculation/",
    )
    promised = [key for key in keys if not key.startswith(rare)]
    missing = [
        key
        for key in promised
        if not any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", key), name) for name in displayed)
    ]
    assert missing == []

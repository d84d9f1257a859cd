"""Mutation trials: a fault is planted in a copy of this repository; do the running proofs of a short training, or the
tests, see it?

    benchmarks/run.sh mutations [--json FILE]        about 20 minutes on 2 cores
A row a fault. "running proofs": what stopped a training of four steps on two ranks at the default settings; for faults
of the weight sync also with proofs.every_steps=1, which names the tensor. "tests": the first that fails of those listed
with the fault, the fast ones first; not the whole suite. The first row, without a fault, goes through all of these
trainings and tests and must pass. The exit code is 1 if it does not, or if a fault was seen by neither. A fault whose
source is no longer there exactly once, or which simply crashes, is a broken trial that shows nothing; that ends with 1
too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.demo import make_demo
from tests.support.models import make_model

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 600
_NOT_SEEN, _PASSES, _NOT_RUN, _BROKEN = "not seen", "passes", "-", "broken trial: "
# What may stop a training as a proof.
_PROOFS = "WeightProofError|MismatchError|EngineStateError|RewardError"

# Trainings that reach what the demo does not. {made} is the folder of models and data.
_LONG_PROMPTS = (  # longer than a block of the prefix cache (32 tokens on a CPU), and the same eight at every step
    "data.train={made}/long.jsonl",
    "data.max_prompt_tokens=48",
    "rewards=[{{name: format, args: {{pattern: '[0-4].*'}}}}]",
)
_SEVERAL_BUCKETS = ("model.path={made}/wide", "rollout.weight_sync_bucket_mib=1", "optimizer.lr=1e-4")
_COOL = ("rollout.temperature=0.7",)

_TIED, _UNTIED = (f"tests/ranks/test_weight_sync.py::test_engine_equals_transformers_after_each_of_20_updates[{of}]" for of in
                  ("qwen2-True-1", "granite-False-1"))  # fmt: skip
_GATHER = "tests/ranks/test_weight_sync.py::test_bucketed_gather_equals_full_tensor[3-1]"
_PARTITION = "tests/ranks/test_partition.py"
_LOSS, _ADVANTAGES, _BATCHING = (f"tests/unit/test_{name}.py" for name in ("loss", "advantages", "batching"))
_ROLLOUT = "tests/unit/test_rollout.py"
# Made in every copy, also in the one without a fault: the matrix of world sizes 1 to 4 takes three times as long as
# that of 1 and 2.
_SHORTER = ("tests/ranks/test_partition.py", "WORLD_SIZES = (1, 2, 3, 4)", "WORLD_SIZES = (1, 2)")


@dataclass(frozen=True)
class Fault:
    """An edit that somebody might make, what reaches it in a training, and the tests that should see it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    of_sync: bool = False


_YIELD = "            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)\n"
_TENSOR = "            tensor = full.view(-1)[: parameter.numel()].view(parameter.shape)\n"
_LOAD = "engine.load_weights(weights, policy_version)\n"
_SEED = "rollout_seed(config.seed, step, prompts[slot].position, sample)"

FAULTS = (
    Fault(
        "skipped sync: from the second step on",
        "weight_sync.py",
        f"            {_LOAD}",
        f"            if engine.proved_version is None:\n                {_LOAD}            engine.policy_version = "
        "policy_version\n",
        (_UNTIED,),
        of_sync=True,
    ),
    Fault(
        "one tensor stale: k_proj of layer 1 keeps its first value",
        "weight_sync.py",
        _YIELD,
        f"{_TENSOR}            kept = policy.__dict__.setdefault('kept', {{}})\n"
        "            yield name, kept.setdefault(name, tensor) if 'layers.1.self_attn.k_proj' in name else tensor\n",
        (_UNTIED,),
        of_sync=True,
    ),
    Fault(
        "tied head stale: its packed copy is not made anew",
        "rollout.py",
        '        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):\n'
        "            quant_method.process_weights_after_loading(module)\n",
        "",
        (_TIED,),
        of_sync=True,
    ),
    Fault(
        "transposed: square tensors, in the gather",
        "weight_sync.py",
        _YIELD,
        f"{_TENSOR}            yield name, tensor.T if tensor.ndim == 2 and len(tensor) == tensor.shape[1] else "
        "tensor\n",
        (_GATHER,),
        of_sync=True,
    ),
    Fault(
        "last bucket of the sync dropped: gathered only where full",
        "weight_sync.py",
        "        on_its_way.extend(start_all_gather(piece, group))\n",
        "        if columns == room:\n            on_its_way.extend(start_all_gather(piece, group))\n",
        (_GATHER,),
        _SEVERAL_BUCKETS,
        of_sync=True,
    ),
    Fault(
        "wrong temperature: the policy's logits",
        "logprobs.py",
        "return logits.div_(temperature)",
        "return logits",
        ("tests/unit/test_policy.py::test_chunked_logprob_gradients_equal_autograd",),
        _COOL,
    ),
    Fault(
        "wrong temperature: the policy is built without it",
        "train.py",
        "policy = build_policy(config.model, config.rollout.temperature, session",
        "policy = build_policy(config.model, 1.0, session",
        (),
        _COOL,
    ),
    Fault(
        "wrong temperature: the engine samples at 1",
        "rollout.py",
        "temperature=self._config.rollout.temperature if",
        "temperature=1.0 if",
        (_TIED,),
        _COOL,
    ),
    Fault(
        "prefix cache kept after the sync",
        "rollout.py",
        "        self.reset_prefix_cache()  # it holds keys and values of the old weights\n",
        "",
        (_TIED,),
        _LONG_PROMPTS,
    ),
    Fault(
        "prefix cache kept after an evaluation",
        "evaluate.py",
        "    engine.reset_prefix_cache()\n",
        "",
        ("tests/ranks/test_evaluate.py::test_greedy_evaluation_is_the_argmax_of_plain_transformers[two engines]",),
        (*_LONG_PROMPTS, "data.eval={{long: {made}/long.jsonl}}", "eval.every_steps=1"),
    ),
    Fault(
        "off by one: a token is scored by the place after the right one",
        "batching.py",
        "predict_index=on_device(completion_places - 1)",
        "predict_index=on_device(completion_places)",
        (_BATCHING,),
    ),
    Fault(
        "off by one: the mask leaves out the first token",
        "batching.py",
        "loss_mask=per_token([rollout.counts for rollout in rollouts], np.bool_)",
        "loss_mask=per_token([rollout.counts for rollout in rollouts], np.bool_) * "
        "on_device(np.diff(completion_places, prepend=-1) == 1)",
        (_BATCHING,),
    ),
    Fault(
        "sequences of a row see their neighbours",
        "policy.py",
        "PackedLayout(batch.sequence_lengths, batch.input_ids.device, self.attention)",
        "PackedLayout([sum(batch.sequence_lengths)], batch.input_ids.device, self.attention)",
        ("tests/unit/test_policy.py::test_a_sequence_does_not_see_its_neighbours_in_the_row",),
    ),
    Fault(
        "completions paired with another prompt",
        "rollout.py",
        "RolloutGroup(slot, prompts[slot], of_prompt)",
        "RolloutGroup(slot, prompts[slot - 1], of_prompt)",
        (_ROLLOUT,),
    ),
    Fault(
        "per-rank denominator",
        "update.py",
        "self._step(mini_batch, batch.num_loss_tokens[number],",
        "self._step(mini_batch, sum(int(m.loss_mask.sum()) for m in mini_batch),",
        (_PARTITION,),
    ),
    Fault(
        "gradients averaged over ranks, not summed",
        "policy.py",
        "            module.set_gradient_divide_factor(1.0)\n",
        "",
        (_PARTITION,),
    ),
    Fault(
        "group split over ranks: each part has its own mean",
        "assemble.py",
        "advantages=_advantages(rewards, config),",
        "advantages=_advantages(rewards.view(-1, group_size // self._session.world_size), config),",
        (_PARTITION,),
    ),
    Fault(
        "rank 1 leaves out a rollout of each row",
        "assemble.py",
        "pack_rollouts([mine[i] for i in row], session.device)",
        "pack_rollouts([mine[i] for i in row][session.rank :], session.device)",
        (_PARTITION,),
    ),
    Fault(
        "advantage sign",
        "advantages.py",
        "centered = torch.where(known, rewards - mean, 0.0)",
        "centered = torch.where(known, mean - rewards, 0.0)",
        (_ADVANTAGES,),
    ),
    Fault(
        "reward misaligned by one: on the way to rank 0",
        "assemble.py",
        '"rewards": scored.rewards[own],',
        '"rewards": (scored.rewards[-1:] + scored.rewards[:-1])[own],',
        (_PARTITION,),
    ),
    Fault(
        "reward misaligned by one: in the reward pool",
        "rewards/pool.py",
        "text = texts[len(self._keywords)]",
        "text = texts[len(self._keywords) - 1]",
        ("tests/faults/test_rewards.py",),
    ),
    Fault(
        "unscored sample taken for 0",
        "assemble.py",
        "[math.nan if reward is None else",
        "[0.0 if reward is None else",
        (_PARTITION,),
    ),
    Fault("seed ignored: samples of a group alike", "rollout.py", _SEED, _SEED.replace("sample", "0"), (_ROLLOUT,)),
    Fault("seed ignored: that of the config", "rollout.py", _SEED, _SEED.replace("config.seed", "0"), (_ROLLOUT,)),
    Fault(
        "seed ignored: the engine's own is used",
        "rollout.py",
        "            seed=request.seed,\n",
        "",
        (
            "tests/ranks/test_evaluate.py::test_two_ranks_and_tensor_parallelism_evaluate_exactly_as_one_rank[two "
            "engines]",
        ),
    ),
    Fault(
        "old logprobs taken after the first update",
        "update.py",
        "old_logprobs = logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs",
        "old_logprobs = logprobs.detach()",
        (_PARTITION,),
        ("training.num_mini_batches=2",),
    ),
    Fault(
        "clip bounds swapped",
        "update.py",
        "            clip_ratio_low=config.clip_ratio_low,\n            clip_ratio_high=config.clip_ratio_high,\n",
        "            clip_ratio_low=config.clip_ratio_high,\n            clip_ratio_high=config.clip_ratio_low,\n",
        (_LOSS, _PARTITION),
        ("training.num_mini_batches=2",),
    ),
    Fault(
        "a skipped update moves the optimizer: a step with gradient 0",
        "update.py",
        "            self._optimizer.zero_grad(set_to_none=True)\n            self._skipped_in_a_row += 1\n",
        "            self._optimizer.zero_grad(set_to_none=False)\n            self._optimizer.step()\n"
        "            self._optimizer.zero_grad(set_to_none=True)\n            self._skipped_in_a_row += 1\n",
        ("tests/ranks/test_nonfinite.py",),
    ),
    Fault(
        "KL sign",
        "loss.py",
        "total = policy_sum + kl_coef * kl_sum",
        "total = policy_sum - kl_coef * kl_sum",
        (_LOSS,),
        ("loss.kl_coef=0.01",),
    ),
    Fault(
        "rollout correction upside down",
        "loss.py",
        "policy_logprobs.detach() - rollout_logprobs, 0.0)",
        "rollout_logprobs - policy_logprobs.detach(), 0.0)",
        (_LOSS,),
    ),
)


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    for fault in FAULTS:
        _planted((_ROOT / "grpo_spmd" / fault.file).read_text(encoding="utf-8"), fault.file, fault.old, fault.new)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made")
        _make_models_and_data(made)
        rows = [_row(fault, made, Path(folder, str(number))) for number, fault in enumerate((None, *FAULTS))]
    report("mutations", rows, args.json)
    if wrong := [row["fault"] for row in rows if not row["as it should be"]]:
        sys.exit(f"without a fault something failed, or a fault was seen by neither, or a trial is broken: {wrong}")


def _make_models_and_data(made: Path) -> None:
    make_demo(made, seed=0)
    make_model(made / "wide", "qwen3", tied=True, intermediate_size=4096)  # 6 MiB: several of the smallest buckets
    rows = [json.loads(line) for line in (made / "train.jsonl").read_text().splitlines()[:8]]
    longer = [row | {"prompt": "1,2,3,4,5,6,7,8,9," * 2 + row["prompt"]} for row in rows]
    (made / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in longer))


def _row(fault: Fault | None, made: Path, copy: Path) -> Row:
    """Plant a fault, or none, in a new copy, and see what notices."""
    start = time.perf_counter()
    _copy_repository(copy)
    _replace(copy, *_SHORTER)
    if fault is not None:
        _replace(copy, f"grpo_spmd/{fault.file}", fault.old, fault.new)
    used = [fault] if fault is not None else FAULTS
    proofs = _train(copy, made, [f.overrides for f in used])
    every_step = _train(copy, made, [(*f.overrides, "proofs.every_steps=1") for f in used if f.of_sync])
    tests = _test(copy, list(dict.fromkeys(test for f in used for test in f.tests)))
    shutil.rmtree(copy)
    cells = [cell for cell in (proofs, every_step, tests) if cell != _NOT_RUN]
    if fault is None:
        good = all(cell == _PASSES for cell in cells)
    else:
        good = any(cell != _PASSES for cell in cells) and not any(cell.startswith(_BROKEN) for cell in cells)
        proofs, every_step, tests = (_NOT_SEEN if cell == _PASSES else cell for cell in (proofs, every_step, tests))
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
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / name, to / name)


def _replace(copy: Path, file: str, old: str, new: str) -> None:
    text = (copy / file).read_text(encoding="utf-8")
    (copy / file).write_text(_planted(text, file, old, new), encoding="utf-8")


def _planted(text: str, file: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(
            f"{file} holds what is to be replaced {text.count(old)} times, not once; adapt this benchmark:\n{old}"
        )
    return text.replace(old, new)


def _train(copy: Path, made: Path, variants: Sequence[tuple[str, ...]]) -> str:
    """What stopped the first of these short trainings that did not come to its end."""
    short = ("training.num_steps=4", "rollout.num_prompts_per_step=8", "logging.rollouts_every_steps=0")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "grpo_spmd.train"]
    for overrides in dict.fromkeys(variants):
        paths = (
            "model.path={made}/model",
            "data.train={made}/train.jsonl",
            f"run_dir={tempfile.mkdtemp(dir=copy)}/run",
        )
        values = [value.format(made=made) for value in (*paths, *overrides)]
        code, output = _run(copy, [*command, "--config", "configs/demo.yaml", *short, *values])
        if code == 0:
            continue
        error = re.search(rf"({_PROOFS}): (?:step (\d+): )?(.*)", output)
        if error is None:
            return _broken(output)
        name, step, message = error.groups()
        if tensors := re.search(r"in (\d+ of \d+ tensors).*?: (\S+) \(", message):
            message = f"{tensors[1]}, first {tensors[2]}"
        return f"step {step}, {name}: {message.partition(' on the tokens')[0][:80]}"
    return _PASSES if variants else _NOT_RUN


def _test(copy: Path, tests: Sequence[str]) -> str:
    """The first test that fails."""
    if not tests:
        return _NOT_RUN
    arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={copy / 'tmp'}"]
    code, output = _run(copy, ["-m", "pytest", *arguments, *tests])
    if code == 0:
        return _PASSES
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+?::.*?)(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if code == 1 and failed is not None else _broken(output)


def _broken(output: str) -> str:
    print(output, file=sys.stderr)
    return _BROKEN + ([line for line in output.splitlines() if "Error" in line] or ["see the output"])[-1][:80]


def _run(copy: Path, arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of Python in the copy, whose modules come before this repository's."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "300",
    }
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=_TIMEOUT_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGTERM)  # not SIGKILL: torchrun ends its ranks, which are in groups of their own
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):  # Ctrl-C
            raise
        output += f"\nTimeoutError: still running after {_TIMEOUT_S} s"
    return process.returncode, output


if __name__ == "__main__":
    main()

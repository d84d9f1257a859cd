"""The GPU's side of the trainer without a GPU: ours on fake CUDA tensors in a fake process group,
in one process.

tests/support/dry_run/ has the device, the cases and the planted faults.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import processes
from tests.support.dry_run.cases import CASES, RECOMPUTED
from tests.support.dry_run.engine import CACHE_BYTES
from tests.support.dry_run.faults import FAULTS
from tests.support.dry_run.figures import VARIANTS, check_step, check_sync, received
from tests.support.models import make_model, make_reward_model, write_config
from tests.support.nightly import selected_values
from tests.support.ranks import RanksJob

Results = dict[str, Any]
# The collectives in which a rank gets what others hold.
_GATHERS = ("c10d._allgather_base_", "c10d.recv_", "c10d.send")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry_run")
    model = make_model(folder / "model", "qwen3", tied=True, num_hidden_layers=1)
    for name in ("teacher", "critic"):
        make_model(folder / name, "qwen3", tied=False, num_hidden_layers=1, seed=1)
    make_reward_model(folder / "scores", "qwen3", num_hidden_layers=1, seed=2, pad_token_id=None)
    rows = [
        {"prompt": f"{a},2={a}:", "hint": f"{a}+{a}={a}:", "teacher": "ab"[a % 2]}
        for a in range(1, 9)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_config(
        folder,
        model,
        # Triton's kernels run on no fake device: tests/ranks/test_fused_logprobs.py has them.
        model={"path": str(model), "dtype": "float32", "logprob_kernel": "plain"},
        rollout={"num_prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 6},
    )


@pytest.fixture(scope="module")
def real(config: Path) -> Results:
    """Two ranks of a CPU, at the same sizes."""
    out = config.with_name("real.json")
    code, output = RanksJob(2, "tests.support.workers.dry_run_cpu", str(config), str(out)).wait(200)
    assert code == 0, output
    return dict(json.loads(out.read_text()))


@pytest.fixture(scope="module")
def results(config: Path, request: pytest.FixtureRequest) -> Results:
    """Of all faults and the selected cases, or all where none is selected by itself."""
    out = config.with_name("results.json")
    command = [
        "-m",
        "tests.support.workers.dry_run",
        str(built_shim(config.parent)),
        str(config),
        str(out),
        *(selected_values(request, "name") or CASES),
        *(fault.__name__ for fault in FAULTS),
    ]
    done = processes.run_command([sys.executable, *command])
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(out.read_text()))


def built_shim(folder: Path) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        reason = "no C++ compiler (g++): the shim of tests/support/dry_run/ cannot be built"
        if os.environ.get("CI"):  # there the compiler is part of the promise
            pytest.fail(reason)
        pytest.skip(reason)
    torch_folder, out = Path(torch.__file__).parent, folder / "shim.so"
    source = Path(__file__).parents[1] / "support" / "dry_run" / "shim.cpp"
    options = [
        "-O0",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{torch_folder}/include",
        f"-L{torch_folder}/lib",
    ]
    libraries = ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    built = subprocess.run(
        [compiler, *options, str(source), "-o", str(out), *libraries],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return out


def shapes(config: Path) -> list[list[int]]:
    """Of the model's parameters, by its file."""
    with (config.parent / "model/model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [of["shape"] for name, of in header.items() if name != "__metadata__"]


def found(results: Results, name: str) -> Any:
    assert "error" not in results[name], results[name]["error"]
    return results[name]["found"]


@pytest.mark.parametrize("name", CASES)
def test_ours_runs_on_a_cuda_device(results: Results, name: str) -> None:
    found(results, name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_mistake_that_only_a_gpu_would_show_is_seen(results: Results, fault: Any) -> None:
    result = results[fault.__name__]
    assert "error" in result, "nothing was seen"
    assert re.search(FAULTS[fault], result["error"].replace("\n", " ")), result["error"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_and_collectives_equal_those_of_real_ranks(
    results: Results, real: Results, config: Path, variant: str
) -> None:
    """What lives after each phase to the byte, and each collective with its sizes, in the same
    order. What lives for
    a moment differs by the kernels: within a tenth in the backward pass."""
    fake, cpu = found(results, "figures")[variant], real[variant]
    check_step(fake)
    check_sync(fake["sync"])
    assert fake.keys() == cpu.keys()
    for phase, fake_values in fake.items():
        cpu_values = cpu[phase]
        assert fake_values["live"] == cpu_values["live"], phase
        if (
            phase == "backward" and "bfloat16" in variant
        ):  # some CPUs pack bfloat16 weights for their products
            assert fake_values["peak"] < 1.1 * cpu_values["peak"]
        elif phase == "backward":
            assert fake_values["peak"] == pytest.approx(cpu_values["peak"], rel=0.1), phase
        # Gathers of uneven shards and of slices of a row are point to point on a CPU.
        if phase == "sync":
            assert received(fake_values["collectives"]) == received(cpu_values["collectives"])
            keys = ("bytes", "num_collectives", "peak")
            assert [fake_values[key] for key in keys] == [cpu_values[key] for key in keys]
        elif variant == "shared rows" and phase == "backward":
            received_bytes = []
            for values in (fake_values, cpu_values):
                gathers = [pair for pair in values["collectives"] if pair[0] in _GATHERS]
                others = [pair for pair in values["collectives"] if pair[0] not in _GATHERS]
                received_bytes.append((received(gathers), others))
            assert received_bytes[0] == received_bytes[1]
        else:
            assert fake_values["collectives"] == cpu_values["collectives"], phase
    if (
        "adapters" not in variant
    ):  # gradients in float32, moments of twice their size, and a count of steps for each
        numel = fake["backward"]["live"] // 4
        assert fake["first step"]["live"] == 8 * numel + 4 * len(shapes(config))


def test_a_rank_of_64_in_4_replicas_holds_its_share(results: Results, config: Path) -> None:
    of = found(results, "many_ranks")
    check_step(of)
    check_sync(of["sync"])
    assert any(shape[0] % 16 for shape in shapes(config))
    fraction = sum(
        -(-shape[0] // 16) * math.prod(shape[1:]) for shape in shapes(config)
    )  # of the first rank
    assert of["backward"]["live"] == 4 * fraction
    assert of["first step"]["live"] == 8 * fraction + 4 * len(shapes(config))
    kinds = Counter(name for name, _ in of["backward"]["collectives"])
    # the layer's parameters twice, the root's once; both gradients within a replica, then over
    # replicas
    assert kinds == {
        "c10d._allgather_base_": 3,
        "c10d._reduce_scatter_base_": 2,
        "c10d.allreduce_": 2,
    }
    assert of["sync"]["num_collectives"] == -(-of["sync"]["bytes"] // (1 << 14))


def test_values_equal_those_of_the_cpu_branches(results: Results) -> None:
    values = dict(found(results, "values"))
    # Grouped products beside the loop over experts, in bfloat16: a GPU has them in no other format.
    for name in ("experts", "routes"):
        experts = values.pop(name)
        assert max(experts["logprobs"], experts["gradient"]) < 0.05, name
    for name, of in values.items():
        assert of["logprobs"] < 1e-5, name
        assert of["gradient"] < 1e-5, name
        assert of["parameter"] < 1e-4, name  # AdamW divides by roots of squares of rounding
    assert max(found(results, "logprobs").values()) < 1e-5


def test_every_way_of_attention_runs_and_recomputation_changes_no_bit(results: Results) -> None:
    for backend, of in found(results, "back_ends").items():
        assert of["logprobs"] < 0.05, backend  # bfloat16
        assert of["gradient"] < 0.05, backend
        for recomputed in RECOMPUTED[backend]:
            assert of[f"equal, {recomputed}"], (backend, recomputed)
            # Scored once without a gradient and once with: a third time only where all is
            # recomputed.
            if backend != "sdpa":  # whose kernel is not the one of a GPU here
                assert of[f"calls, {recomputed}"] == (3 if recomputed is True else 2), (
                    backend,
                    recomputed,
                )


def test_every_way_of_attention_shares_prefixes(results: Results) -> None:
    for backend, of in found(results, "shared_prefixes").items():
        assert of["logprobs"] < 0.05, backend  # bfloat16
        assert of["gradient"] < 0.05, backend
        for recomputed in RECOMPUTED[backend]:
            assert of[f"equal, {recomputed}"], (backend, recomputed)
            if backend != "sdpa":
                assert of[f"calls, {recomputed}"] == (3 if recomputed is True else 2), (
                    backend,
                    recomputed,
                )


def test_the_host_never_waits_for_the_device_within_a_row(results: Results) -> None:
    """A copy that waits drains the device's queue: 10 ms of a micro-batch of an 8B model. Before
    rows brought their `sequence_starts` each pass made one, and packing 8 for each row."""
    of = found(results, "waits")
    assert of.pop("one copy") == {"aten._to_copy": 1}  # what is counted is seen
    # The scores of all rows of a reward model are read together.
    assert of.pop("rewards of two rows") == {"aten._to_copy": 1}
    assert len(of) == 9
    assert all(waits == {} for waits in of.values()), of


def test_what_waits_in_host_memory_is_pinned_to_the_byte(results: Results) -> None:
    of = found(results, "offload")
    assert of["held"] == of["freed"] == of["moved"] == of["pinned"] > 0
    assert of["unpinned"] == of["buffers"]
    assert of["unpinned_too_late"] == 0  # while the pages are still there
    of = found(results, "checkpoint")
    assert of["pinned"] == 3 * 4 * of["numel"]  # float32 weights and both moments


def test_a_whole_run_sleeps_wakes_evaluates_and_measures(results: Results) -> None:
    of = found(results, "whole_run")
    step = ["wake weights", "wake kv_cache", "sleep 2"]
    assert of["told"] == [
        "sleep 2",
        *step,
        *step,
        "wake weights",
        "wake kv_cache",
    ]  # the last to evaluate
    lines = [line for line in of["lines"] if "time/step_s" in line]
    assert len(lines) == 2
    assert of["scored"] == [4, 4]  # of each rollout the scores, copied from the device
    evaluations = [line["eval/held/mean"] for line in of["lines"] if "time/step_s" not in line]
    assert len(evaluations) == 3
    assert None not in evaluations
    for line in lines:
        assert line["throughput/mfu"] > 0
        assert line["memory/host/offloaded_gib"] > 0
        # the engine's float32 weights and its cache
        assert (
            line["memory/sleep/freed_gib"] * 2**30
            == 4 * found(results, "checkpoint")["numel"] + CACHE_BYTES
        )
        assert line["memory/update/peak_gib"] > line["memory/rollout/peak_gib"] > 0


def test_what_teaches_waits_in_host_memory_and_the_engine_rests_while_a_model_scores(
    results: Results,
) -> None:
    """The run looks at itself besides: the reward model's scores, teachers, critic and update,
    beside plain ones."""
    of = found(results, "signals")
    awake, scored = ["wake weights", "wake kv_cache"], ["sleep 1", "wake weights kv_cache"]
    # The evaluation's completions and the step's. The second rest goes on as the sleep: one wake
    # of the whole engine and one sleep fewer in each step.
    step = [*awake, *scored, "sleep 1"]
    assert of["told"] == ["sleep 2", *step, *step, *awake, "sleep 1"]
    initial, second = [line for line in of["lines"] if "time/step_s" in line]
    policy = found(results, "checkpoint")["numel"]
    # The critic is the teacher's decoder, of 97 x 64 less without the lm_head, and a head of 64 and
    # 1. The teacher b is
    # the reference, of the policy's size. There are no moments before the first update.
    teacher = policy + 97 * 64
    critic = teacher - 97 * 64 + 65
    parameters = policy + policy + teacher + critic
    for line, numel in ((initial, parameters), (second, parameters + 2 * (policy + critic))):
        assert line["memory/host/offloaded_gib"] * 2**30 == 4 * numel
        assert line["critic/loss"] > 0
        assert line["teacher/kl"] > 0


def test_a_value_head_on_the_policy_learns_alone_and_with_it(results: Results) -> None:
    """Float32 beside bfloat16, on a device; its 65 numbers and their moments wait with the
    policy's."""
    initial, second = [
        line for line in found(results, "value_head")["lines"] if "time/step_s" in line
    ]
    policy = found(results, "checkpoint")["numel"]
    assert (initial["optim/updates"], second["optim/updates"]) == (0.0, 1.0)
    assert "loss/value" not in initial
    for line in (initial, second):
        assert line["critic/loss"] > 0
        assert line["critic/grad_norm"] > 0
        assert line["proofs/update_check_s"] > 0
    assert second["loss/value"] == pytest.approx(0.1 * second["critic/loss"], rel=1e-5)
    # float32 policy and a reference of half its bytes; then the head's moments, the policy's not:
    # it was held
    retained = [round(line["memory/host/offloaded_gib"] * 2**30) for line in (initial, second)]
    assert retained == [4 * policy + 2 * policy + 4 * 65, 4 * policy + 2 * policy + 3 * 4 * 65]

"""benchmarks/gpu_day without a process: the table of steps, and what each step makes of its
figures."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from benchmarks.gpu_day.crash import compared, judged
from benchmarks.gpu_day.day import Day, DayError, Step
from benchmarks.gpu_day.gpu_tests import counted, naming
from benchmarks.gpu_day.page import page
from benchmarks.gpu_day.proofs import ledger_rows, proof_rows, sleep_row
from benchmarks.gpu_day.steps import DRY, GPU
from benchmarks.speed import gpu
from benchmarks.speed.gpu import (
    SIZES,
    Ceilings,
    Run,
    largest_that_fits,
    memory_rows,
    model_config,
    phase_rows,
    training_config,
)
from benchmarks.speed.gpu import make_model as make_gpu_model
from benchmarks.speed.kernels import Kernel, kind_of, kind_rows
from benchmarks.support.models import make_large_model
from benchmarks.support.ways import WAY
from tests.support.processes import ROOT


def test_the_day_fits_into_its_minutes_and_the_dry_form_has_every_step() -> None:
    """30 minutes of a device in all, in commands of 9; each step has run in its small form."""
    assert sum(step.limit_s for step in GPU) <= 29 * 60
    assert max(step.limit_s for step in GPU) <= 9 * 60
    assert [step.name for step in DRY] == [step.name for step in GPU]
    for step, dry in zip(GPU, DRY, strict=True):
        assert step.command[:2] == dry.command[:2], "the dry form is of another module"
        assert importlib.util.find_spec(step.command[1]) is not None
        assert step.command[-2:] == ("--json", "{json}")
        if "--size" in step.command:
            sizes = step.command[step.command.index("--size") + 1].split(",")
            assert set(sizes) <= set(SIZES)


def test_a_sleep_that_gives_back_too_little_or_less_each_time_is_a_problem() -> None:
    """The engine may take 70 GiB: 0.7 of it, 49, must come back; what is left may grow by 1, but
    for the first two
    steps."""

    def steps(freed: float, *remaining: float) -> list[dict[str, float]]:
        return [
            {"memory/sleep/freed_gib": freed + i, "memory/sleep/left_gib": item}
            for i, item in enumerate(remaining)
        ]

    row, problems = sleep_row(steps(60.0, 1.0, 2.0, 3.0, 3.5), 70.0)
    assert (row["least_freed_gib"], row["grown_gib"], problems) == (60.0, 0.5, [])
    [problem] = sleep_row(steps(48.0, 3.0, 3.0), 70.0)[1]
    assert problem == "a sleep freed 48.00 GiB, and at least 49.00 must come back"
    [problem] = sleep_row(steps(60.0, 3.0, 3.0, 3.0, 4.5), 70.0)[1]
    assert "grew by 1.50 GiB" in problem
    assert sleep_row(steps(0.0, 3.0), None)[1] == []  # a CPU, where sleep frees nothing


def test_the_ledger_stands_beside_the_plan_where_there_is_one() -> None:
    """Of two steps the larger: a peak of 20 beside 4 of others, where 16 were planned, is 1.5."""
    metrics = [
        {
            f"memory/update/{field}_gib": n
            for field, n in (("peak", peak), ("other", 4.0), ("reserved", 21.0))
        }
        | {"memory/update/driver_used_gib": 25.0}
        for peak in (10.0, 20.0)
    ]
    [row] = ledger_rows(metrics, {"phases": {"update": {"peak_gib": 16.0}}})
    assert (row["phase"], row["peak"], row["on_device"], row["to_planned"]) == (
        "update",
        20.0,
        24.0,
        1.5,
    )
    [row] = ledger_rows(metrics, {})
    assert (row["planned"], row["to_planned"]) == ("not there", "-")


def test_times_and_memory_of_a_run_stand_beside_the_plan() -> None:
    """The planner says 3 s for the update, 9 for the step and 16 GiB at most in the update."""
    metrics = {"time/update_s": 2.0, "time/step_s": 6.0, "memory/host/offloaded_gib": 0.0}
    metrics |= {
        f"memory/update/{field}_gib": 20.0
        for field in ("peak", "allocated", "reserved", "driver_used", "other")
    }
    metrics |= {"memory/sleep/freed_gib": 1.0, "memory/sleep/left_gib": 0.0}
    plan = {"step_s": 9.0, "step_s_by_phase": {"update": 3.0}}
    plan["phases"] = {"update": {"peak_gib": 16.0}}
    config = {"model": {"dtype": "float32"}}
    run = Run("plain", config, [metrics], [[(4, 8)]], plan)
    rows = phase_rows(run, 1000, SIZES["tiny"], Ceilings(1e12, 1e12, 1e10, 1e10))
    assert {row["phase"]: row["planned_s"] for row in rows} == {"update": 3.0, "step": 9.0}
    update, sleep = memory_rows(run)
    assert (update["peak"], update["planned"], sleep["planned"]) == (20.0, 16.0, "-")
    alone = Run("plain", config, [metrics], [[(4, 8)]], {})
    assert [row["planned"] for row in memory_rows(alone)] == ["-", "-"]
    row = proof_rows([{"time/step_s": 6.0}], 1, 9.0, retained=True)[-1]
    assert (row["what"], row["median"], row["planned"]) == ("time/step_s", 6.0, 9.0)


def test_the_largest_size_that_fits_by_the_planner_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3B's state alone is 16 bytes for each of 3.09 B parameters: 46 GiB, and no A100-40GB has
    that; an H200 has. The planner itself is asked."""
    monkeypatch.setattr("benchmarks.support.planned._card", lambda: "H200-141GB")
    assert largest_that_fits(tmp_path, ["3b", "1.5b"]) == "3b"
    monkeypatch.setattr("benchmarks.support.planned._card", lambda: "A100-40GB")
    assert largest_that_fits(tmp_path, ["3b", "1.5b"]) == "1.5b"
    monkeypatch.setattr(gpu, "planned", lambda config: {})
    assert largest_that_fits(tmp_path, ["3b", "1.5b"]) == "1.5b"
    assert largest_that_fits(tmp_path, ["0.5b"]) == "0.5b"


def _line(step: int, loss: float, seconds: float) -> dict[str, float]:
    same = {"reward/mean": 1.0, "completion/tokens_mean": 5.0, "optim/grad_norm": 2.0}
    return {"step": step, "loss/total": loss, "time/step_s": seconds, **same}


def test_where_a_second_start_went_on_is_seen_by_its_times() -> None:
    """Five lines before the kill; the second start kept two, and made steps 2, 3, 4 again, one with
    another loss."""
    old = [_line(i, 0.1 * i, 1.0) for i in range(5)]
    new = old[:2] + [_line(i, 0.1 * i + (0.75 if i == 3 else 0.0), 2.0) for i in range(2, 6)]
    row = compared(old, new)
    assert (row["went_on_at_step"], row["steps_made_twice"]) == (2, 3)
    assert (row["loss/total off by"], row["first loss off by"]) == (pytest.approx(0.75), 0.0)
    row |= {"exit_code_of_the_second": 0, "processes_left": 0}
    assert (
        judged(row, 6, exactly=True)
        == judged(row, 6, exactly=False)
        == ["steps that were made twice differ"]
    )
    good = row | {"loss/total off by": 0.0}
    assert judged(good, 6, exactly=True) == []
    for change, num_steps, message in (
        ({"exit_code_of_the_second": 1}, 6, "exit code 1"),
        ({}, 5, "ended at step 5 of 6"),
        ({"went_on_at_step": 0}, 6, "more than two intervals"),
        ({"processes_left": 3}, 6, "3 processes left"),
        ({"reward/mean off by": 1e-9}, 6, "differ"),
    ):
        [problem] = judged(good | change, num_steps, exactly=True)
        assert message in problem


def test_tests_are_counted_by_how_they_ended(tmp_path: Path) -> None:
    cases = "".join(
        f'<testcase classname="tests.a" name="{name}" time="0.5">{inner}</testcase>'
        for name, inner in (("p", ""), ("f", "<failure/>"), ("e", "<error/>"), ("s", "<skipped/>"))
    )
    path = tmp_path / "junit.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    row = counted(path)
    assert (row["passed"], row["failed"], row["skipped"], row["seconds"]) == (1, 2, 1, 2.0)
    assert row["failures"] == "tests.a::f tests.a::e"


def test_tests_for_a_gpu_are_found_by_their_mark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert "tests/unit/test_attention.py" in naming("gpu")
    (tmp_path / "tests/unit").mkdir(parents=True)
    for name, text in (
        ("test_a", "@pytest.mark.gpu"),
        ("test_b", "@pytest.mark.skip"),
        ("helper", "@pytest.mark.gpu"),
    ):
        (tmp_path / f"tests/unit/{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert naming("gpu") == ["tests/unit/test_a.py"]


def test_a_large_random_model_is_as_its_config_says(tmp_path: Path) -> None:
    """Its weights were drawn by threads, onto memory that was not initialised."""
    config = transformers.Qwen2Config(**model_config(SIZES["tiny"]), initializer_range=0.03)
    count = make_large_model(tmp_path / "a", config)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", trust_remote_code=False
    )
    assert model.num_parameters() == count == 361_600
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert weight.unique().tolist() == [0.0 if "bias" in name else 1.0], name
        else:
            assert float(weight.detach().float().std()) == pytest.approx(0.03, rel=0.05), name
            assert abs(float(weight.detach().float().mean())) < 0.001, name
    logits = model(torch.arange(1, 20)[None]).logits
    assert torch.isfinite(logits).all()
    make_large_model(tmp_path / "b", config)
    initial, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert initial == second


def _full_of_nan(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.full_like(tensor, math.nan, **options)


def test_the_day_models_stop_at_eight_tokens_and_have_biases_like_qwen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean length 10: one of the stop tokens is drawn with probability 0.1 at each place. The
    biases lie in the slowest rotary dimensions, of 32 the 2 at the end of each half."""
    size = SIZES["tiny"]
    # What memory that nobody wrote may hold. Left there, a buffer made the model's logits NaN.
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: _full_of_nan(*args, **options)
    )
    make_gpu_model(tmp_path, size, key_bias_norm=605.0)
    monkeypatch.undo()
    stop = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert stop == [0, *range(505, 512)]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, trust_remote_code=False, dtype=torch.float32
    )
    torch.manual_seed(0)
    probs = model(torch.randint(512, (4, 64))).logits.softmax(-1)[..., stop].sum(-1)
    assert float(probs.detach().mean()) == pytest.approx(1 / size.mean_tokens, rel=0.2)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        assert float(bias.norm()) == pytest.approx(605.0, rel=0.01)
        used = bias.reshape(2, 32).abs().sum(0).nonzero().flatten()
        assert used.tolist() == [14, 15, 30, 31]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "products"),
        (
            "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>",
            "attention",
        ),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies and casts"),
        ("void at::native::vectorized_elementwise_kernel<4, BinaryFunctor>", "elementwise"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("aten::mm", "products"),
        ("some_unheard_of_thing", "other"),
    ],
)
def test_the_kind_of_a_kernel(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_kinds_add_up_beside_the_wall_clock() -> None:
    """3 + 1 ms of kernels in an update of 8: the device was busy for a half."""
    rows = kind_rows(
        [Kernel("aten::mm", 0.002, 4), Kernel("gemm", 0.001, 1), Kernel("memcpy", 0.001, 2)], 0.008
    )
    assert [(row["kind"], row["calls"]) for row in rows] == [
        ("products", 5),
        ("copies and casts", 2),
        ("all", 7),
    ]
    assert [row["share"] for row in rows] == pytest.approx([0.75, 0.25, 1.0])
    assert rows[0]["busy"] == pytest.approx(0.5)


STEPS = [Step("one", "first", ("-c", ""), 60), Step("two", "second", ("-c", ""), 60)]


def test_the_page_says_what_did_not_run_and_that_a_dry_day_is_no_measurement() -> None:
    state: dict[str, Any] = {"form": "dry", "commit": "abc", "commands": [{"seconds": 120.0}]}
    state["steps"] = {
        "one": {
            "status": "failed",
            "seconds": 2.0,
            "said": "exit code 1; oh",
            "tail": ["before", "oh"],
        }
    }
    rows = [
        {"step": "one", "status": "failed", "form": "dry", "benchmark": "x", "phase": p, "s": 1.5}
        for p in "ab"
    ]
    text = page(STEPS, state, rows)
    for message in (
        "no figure is a measurement",
        "commit abc",
        "2.0 minutes",
        "not run",
        "| before",
        "all: s 1.5",
    ):
        assert message in text
    assert "two: " not in text


def test_a_day_is_refused_in_one_line(tmp_path: Path) -> None:
    day = Day(STEPS, tmp_path / "scratch", tmp_path / "out", "dry", "abc")
    with pytest.raises(DayError, match=r"another gpu_day is at work in .*scratch"):
        Day(STEPS, tmp_path / "scratch", tmp_path / "out", "dry", "abc")
    with pytest.raises(DayError, match="--again three: no such step; there are one, two"):
        day.run(9, ["three"])
    with pytest.raises(
        DayError, match=r"--minutes 0\.5 is less than the limit of step one, 1 minutes"
    ):
        day.run(0.5)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/state.json").write_text(
        json.dumps({"form": "dry", "steps": {}, "commands": []})
    )
    with pytest.raises(DayError, match="holds a day of form 'dry', and this one is 'gpu'"):
        Day(STEPS, tmp_path / "new", tmp_path / "out", "gpu", "abc", [tmp_path / "old"])


def test_the_manual_has_the_limits() -> None:
    manual = (ROOT / "benchmarks/README.md").read_text()
    for step in GPU:
        assert re.search(
            rf"^\| `{step.name}` \| .* \| {step.limit_s:g} \|$", manual, re.MULTILINE
        ), step.name


def test_later_steps_go_by_the_way_that_the_smoke_step_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on another machine, which has the rows alone; before the smoke step, by the default."""
    row = {"step": "smoke", "benchmark": "gpu_day_smoke", "form": "gpu"}
    rows = [row | {"way": "default", "passed": False}, row | {"way": "v1_runner", "passed": True}]
    old = tmp_path / "old"
    old.mkdir()
    (old / "state.json").write_text(json.dumps({"form": "gpu", "steps": {}, "commands": []}))
    (old / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    later = Day(STEPS, tmp_path / "new", tmp_path / "out", "gpu", "abc", [old])
    environment = later._environment("mark", tmp_path)
    assert (environment["VLLM_USE_V2_MODEL_RUNNER"], environment[WAY]) == ("0", "v1_runner")
    fresh = Day(STEPS, tmp_path / "fresh", tmp_path / "out", "gpu", "abc", [])
    assert fresh._environment("mark", tmp_path)[WAY] == "default"
    monkeypatch.setenv(WAY, "sleep_level_1")
    path = training_config(tmp_path, "run", SIZES["tiny"], 1, "float32", rollout={"seed": 3})
    rollout = yaml.safe_load(path.read_text())["rollout"]
    assert (rollout["sleep_level"], rollout["seed"]) == (1, 3)

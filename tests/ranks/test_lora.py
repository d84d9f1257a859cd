"""LoRA on real ranks: loss and gradient of plain peft; both ways into the engine."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.support.models import make_model, write_config
from tests.support.processes import run_command
from tests.support.ranks import run_worker, train
from tests.support.workers.lora import rollouts

RANK, ALPHA, TEMPERATURE = (
    5,
    7.0,
    0.7,
)  # a scale of 1.4, and rows that two ranks cannot share evenly
# (family, tied, sync, ranks, tensor parallel); FULL_MATRIX=1 runs all 12.
_ALL = [
    (f, t, s, n, tp)
    for f, t in (("qwen3", True), ("qwen2", False))
    for s in ("merged", "adapter")
    for n, tp in ((1, 1), (2, 1), (2, 2))
]
_SOME = [("qwen3", True, "merged", 1, 1), ("qwen3", True, "adapter", 2, 2)]
RUNS = _ALL if os.environ.get("FULL_MATRIX") else _SOME
TRAINED = [("merged", 2), ("adapter", 1)] + (
    [("merged", 1), ("adapter", 2)] if os.environ.get("FULL_MATRIX") else []
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """What tests/support/workers/lora.py found on real ranks with real vLLM; it has checked syncs,
    proofs and the file
    by then."""
    result = {}
    for run in RUNS:
        family, tied, sync, num_ranks, tensor_parallel = run
        folder = tmp_path_factory.mktemp("lora")
        rollout = {"temperature": TEMPERATURE, "tensor_parallel_size": tensor_parallel}
        kv_heads = (
            {"num_key_value_heads": 1} if family == "qwen3" else {}
        )  # with tensor parallel 2, both ranks hold it
        model = make_model(folder / "model", family, tied=tied, **kv_heads)
        config = write_config(
            folder, model, rollout=rollout, data={"max_prompt_tokens": 48}, loss={"kl_coef": 0.1}
        )
        lora = [f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}", f"model.lora.sync={sync}"]
        output = run_worker(num_ranks, "lora", str(config), str(folder / "out.pt"), *lora)
        assert "not proved" not in output
        result[run] = {**torch.load(folder / "out.pt", weights_only=True), "model": model}
    return result


def with_adapters(
    model: Path, adapters: dict[str, Tensor], alpha: float = ALPHA, rank: int = RANK
) -> peft.PeftModel:
    """peft's own layers on transformers' own model, filled with these adapters."""
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    targets = sorted({name.split(".")[-3] for name in adapters})
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)  # type: ignore[arg-type]
    plain = peft.get_peft_model(base, config)
    named = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
    outcome: Any = peft.set_peft_model_state_dict(plain, named)
    assert not outcome.unexpected_keys
    return plain


def plain_scores(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the rollouts' completions, one sequence at a time."""
    logprobs, entropies = [], []
    for rollout in rollouts():
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        log_p = (
            model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / TEMPERATURE
        ).log_softmax(-1)
        logprobs.append(log_p.gather(-1, ids[0, len(rollout.prompt_ids) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def test_adapters_start_alike_on_any_number_of_ranks_and_as_the_base(
    results: dict[Any, dict[str, Any]],
) -> None:
    initial, *rest = (result["initial"] for run, result in results.items() if run[0] == "qwen3")
    assert rest
    for second in rest:
        assert all(torch.equal(second[name], initial[name]) for name in initial)
    matrices = [tensor for name, tensor in initial.items() if name.endswith("lora_A.weight")]
    for matrix in matrices:
        bound = 1 / math.sqrt(matrix.shape[1])  # Kaiming with a = sqrt(5)
        assert 0.9 * bound < matrix.abs().max() <= bound
        assert abs(matrix.mean()) < 0.2 * bound
    assert len({tuple(matrix[0, :8].tolist()) for matrix in matrices}) == len(matrices)
    assert all(
        not tensor.any() for name, tensor in initial.items() if name.endswith("lora_B.weight")
    )


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_loss_and_gradient_equal_plain_peft(results: dict[Any, dict[str, Any]], run: Any) -> None:
    result = results[run]
    plain = with_adapters(result["model"], result["adapters"])
    logprobs, entropy = plain_scores(plain)
    loss = -(logprobs + 0.1 * entropy).sum() / len(logprobs)
    loss.backward()
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-6)
    expected = {
        name.replace(".default", ""): p.grad
        for name, p in plain.named_parameters()
        if p.requires_grad
    }
    assert len(expected) == len(result["gradients"]) == 2 * 2 * 7
    for name, gradient in result["gradients"].items():
        theirs = expected[f"base_model.model.{name}"]
        assert theirs is not None
        assert float((gradient - theirs).norm() / theirs.norm()) < 5e-6, name


def test_loss_and_gradient_do_not_depend_on_ranks(results: dict[Any, dict[str, Any]]) -> None:
    by_family: dict[str, list[dict[str, Any]]] = {}
    for run, result in results.items():
        by_family.setdefault(run[0], []).append(result)
    for initial, *rest in by_family.values():
        assert rest
        for second in rest:
            assert second["loss"] == pytest.approx(initial["loss"], rel=1e-6)
            for name, expected in initial["gradients"].items():
                assert (
                    float((second["gradients"][name] - expected).norm() / expected.norm()) < 2e-6
                ), name


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_reference_is_the_base_though_adapters_have_moved(
    results: dict[Any, dict[str, Any]], run: Any
) -> None:
    result = results[run]
    base = transformers.AutoModelForCausalLM.from_pretrained(
        result["model"], dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = plain_scores(base)[0]
    torch.testing.assert_close(result["of_reference"], expected, atol=1e-5, rtol=0)
    assert (result["of_policy"] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_the_engine_answers_as_peft_does_after_each_sync(
    results: dict[Any, dict[str, Any]], run: Any
) -> None:
    result = results[run]
    assert result["worst"] < 1e-4
    at_first, later = result["bytes"]
    if run[2] == "adapter":
        adapters = 4 * sum(tensor.numel() for tensor in result["adapters"].values())
        assert (later, result["num_collectives"]) == (adapters, 1)
    assert (
        at_first == later
    )  # of a base that stays nothing is counted: the first step of a process is as any other


@pytest.mark.parametrize(("sync", "num_ranks"), TRAINED)
def test_two_steps_of_the_real_loop(tmp_path: Path, sync: str, num_ranks: int) -> None:
    model = make_model(tmp_path / "model", "qwen2", tied=False)
    config = write_config(tmp_path, model, loss={"kl_coef": 0.05}, proofs={"every_steps": 1})
    lora = [f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}", f"model.lora.sync={sync}"]
    output = train(
        num_ranks,
        config,
        *lora,
        "training.num_steps=3",
        "model.activation_checkpointing=true",
        timeout_s=500,
    )
    assert "not proved" not in output
    metrics = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert all(m["weight_sync/mismatch_kl"] < 1e-6 for m in metrics)
    assert all(m["weight_sync/mismatch_abs_max"] < 1e-4 for m in metrics)
    assert all(m["optim/grad_norm"] > 0 for m in metrics)
    assert (
        metrics[0]["loss/kl"] == 0 < 1e-6 < metrics[1]["loss/kl"]
    )  # adapters start as nothing, then move away from the reference
    saved = tmp_path / "run/checkpoints/step_000003"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in saved.iterdir()
    }
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, saved)
    assert adapted.peft_config["default"].r == RANK
    ids = torch.tensor([[4, 9, 2, 7]])
    scores, base_values = (
        adapted(ids).logits,
        transformers.AutoModelForCausalLM.from_pretrained(model)(ids).logits,
    )
    assert not torch.allclose(scores, base_values, atol=1e-4)
    done = run_command(
        [
            sys.executable,
            "-m",
            "grpo_spmd.tools.export",
            str(saved),
            str(tmp_path / "merged"),
            "--merge",
        ]
    )
    assert done.stdout.endswith("MiB of weights after 3 steps, adapters merged\n"), done
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids).logits, scores, rtol=1e-5, atol=1e-5)

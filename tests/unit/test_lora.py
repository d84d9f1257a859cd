"""LoRA: adapters on a frozen base against plain peft and transformers; the file that peft loads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import LoraConfig, ModelConfig, OptimizerConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.lora import named_adapters
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.records import SyncStats
from tests.support.checkpoints import export_policy
from tests.support.full_tensors import gather_full_tensors
from tests.support.models import FAMILIES, make_model, write_config
from tests.support.workers.lora import rollouts

CPU = torch.device("cpu")
RANK, ALPHA, TEMPERATURE = (
    5,
    7.0,
    0.7,
)  # a scale of 1.4, and rows that two ranks cannot share evenly


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


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


def adapted(
    folder: Path,
    session: Session,
    *,
    seed: int = 0,
    dtype: str = "float32",
    lora: Any = None,
    **changes: Any,
) -> Policy:
    """A policy whose B are random, by a generator of their own."""
    adapters = LoraConfig(rank=RANK, alpha=ALPHA, **(lora or {}))
    config = ModelConfig(path=str(folder), dtype=dtype, lora=adapters, **changes)  # type: ignore[arg-type]
    policy = build_policy(config, TEMPERATURE, session, seed=seed)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in named_adapters(policy.model):
        if name.endswith("lora_B.weight"):
            local = parameter.to_local().detach()
            local.copy_(0.1 * torch.randn(local.shape, generator=generator))
    return policy


def adapters_of(policy: Policy) -> dict[str, Tensor]:
    return {
        name: parameter.full_tensor().detach() for name, parameter in named_adapters(policy.model)
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_scores_and_merged_weights_equal_peft(
    tmp_path: Path, session: Session, family: str, tied: bool
) -> None:
    folder = make_model(tmp_path, family, tied=tied)
    policy = adapted(folder, session)
    old = {name: parameter.to_local().clone() for name, parameter in hf_named_parameters(policy)}
    plain = with_adapters(folder, adapters_of(policy))
    scores, expected = policy(pack_rollouts(rollouts(), CPU)), plain_scores(plain)
    for local, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(local, theirs, atol=1e-5, rtol=0)
    cast(FSDPModule, policy).reshard()  # without a backward pass the embedding stays gathered
    merged: Any = plain.merge_and_unload()
    peft_values = merged.state_dict()
    sent = dict(gather_full_tensors(policy, torch.float32, 1 << 20, SyncStats()))
    assert ("lm_head.weight" in sent) != tied
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, peft_values[name], atol=1e-6, rtol=1e-6)
        assert torch.equal(tensor, old[name]) != name.endswith("_proj.weight"), name
    assert all(
        torch.equal(parameter.to_local(), old[name])
        for name, parameter in hf_named_parameters(policy)
    )


def test_a_bfloat16_base_is_frozen_and_adapters_are_float32(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "grpo_spmd"):
        policy = adapted(make_model(tmp_path, "qwen3", tied=True), session, dtype="bfloat16")
    adapters = dict(named_adapters(policy.model))
    base = dict(hf_named_parameters(policy))
    assert {p.dtype for p in adapters.values()} == {torch.float32}
    assert {p.dtype for p in base.values()} == {torch.bfloat16}
    trained = sum(p.numel() for p in adapters.values()) / 1e6
    assert f"{trained:.3g} M of them trained, over 1 ranks" in caplog.text
    optimizer, _ = build_optimizer(policy, OptimizerConfig(weight_decay=0.1))
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in adapters.values()
    }
    logprobs, _ = policy(pack_rollouts(rollouts(), CPU))
    logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in adapters.values())
    assert not any(p.grad is not None or p.requires_grad for p in base.values())
    sent = dict(gather_full_tensors(policy, torch.bfloat16, 1 << 20, SyncStats()))
    layer = "model.layers.0.self_attn.q_proj"
    full = {
        name: p.full_tensor().detach()
        for name, p in {**base, **adapters}.items()
        if name.startswith(layer)
    }
    product = full[f"{layer}.lora_B.weight"].double() @ full[f"{layer}.lora_A.weight"].double()
    exact = full[f"{layer}.weight"].double() + ALPHA / RANK * product
    torch.testing.assert_close(
        sent[f"{layer}.weight"].double(), exact, atol=0, rtol=2**-8
    )  # rounded once


def test_recomputed_activations_give_the_same_gradients(tmp_path: Path, session: Session) -> None:
    """The inputs of the first layer need no gradient: a reentrant checkpoint would leave its
    adapters without one."""
    folder, gradients = make_model(tmp_path, "qwen2", tied=False), []
    for recompute in (False, True):
        policy = adapted(folder, session, activation_checkpointing=recompute)
        policy(pack_rollouts(rollouts(), CPU))[0].sum().backward()
        assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
        gradients.append(
            {
                name: p.grad.full_tensor()
                for name, p in named_adapters(policy.model)
                if isinstance(p.grad, DTensor)
            }
        )
    assert gradients[0].keys() == gradients[1].keys() == adapters_of(policy).keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_named_layers_alone_get_adapters_and_another_seed_makes_others(
    tmp_path: Path, session: Session
) -> None:
    folder = make_model(tmp_path, "llama", tied=True)
    some = adapters_of(
        adapted(folder, session, lora={"target_modules": ("q_proj", "layers.1.mlp.down_proj")})
    )
    layers = {name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight") for name in some}
    assert layers == {
        f"model.layers.{position}"
        for position in ("0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.down_proj")
    }
    second = adapters_of(adapted(folder, session, seed=1))
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(some[name], second[name])


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prj", "input_layernorm", ""])
def test_a_target_that_is_no_linear_layer_of_the_decoder_is_refused(
    tmp_path: Path, session: Session, target: str
) -> None:
    folder = make_model(tmp_path, "qwen3", tied=False)
    expected = (
        rf"^model\.lora\.target_modules: '{target}' names no linear layer of Qwen3ForCausalLM's "
        r"decoder; it has "
        r"q_proj, k_proj"
    )
    with pytest.raises(ConfigError, match=expected) as refused:
        adapted(folder, session, lora={"target_modules": ("q_proj", target) if target else ()})
    assert "\n" not in str(refused.value)


def test_the_engines_own_lora_keys_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path)
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.enable_lora: set model\.lora\.sync instead"
    ):
        load_config(config, ["rollout.engine={enable_lora: true}"])


def test_a_rank_that_vllm_has_no_room_for_is_refused(tmp_path: Path) -> None:
    config, rank = write_config(tmp_path, tmp_path), "model.lora.rank=513"
    assert load_config(config, [rank]).model.lora.rank == 513
    with pytest.raises(
        ConfigError,
        match=r"^model\.lora\.rank: 513 is more than vLLM takes \(512\); set model\.lora\.sync: "
        r"merged$",
    ):
        load_config(config, [rank, "model.lora.sync=adapter"])


def test_exported_adapters_give_peft_the_same_logprobs(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path / "model", "granite", tied=False)
    policy = adapted(folder, session)
    export_policy(policy, folder, tmp_path / "saved", session)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = plain_scores(peft.PeftModel.from_pretrained(base, tmp_path / "saved"))[0]
        torch.testing.assert_close(
            policy(pack_rollouts(rollouts(), CPU))[0], expected, atol=1e-5, rtol=0
        )

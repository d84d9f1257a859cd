"""Worker: adapters from their initialisation over gradients, syncs, proofs and the reference to the
file on disk.

python -m tests.support.workers.lora CONFIG OUT [section.key=value ...]
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any, cast

import peft
import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.weight_proof import prove_weights
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.lora import adapter_shards, gather_adapters, named_adapters
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import build_policy, build_reference, hf_named_parameters
from grpo_spmd.records import Rollout, SyncStats
from tests.support.checkpoints import export_policy
from tests.support.full_tensors import gather_full_tensors
from tests.support.workers.sync import difference, refuses

NUM_ROLLOUTS = 6
LAYER = "model.layers.1."


def rollouts() -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 20, (NUM_ROLLOUTS, 2), generator=generator).tolist()
    ids = [torch.randint(1, 90, (sum(pair),), generator=generator).tolist() for pair in lengths]
    return [
        Rollout(i, 1.0, True, row[:p], row[p:], [0.0] * c)
        for i, (row, (p, c)) in enumerate(zip(ids, lengths, strict=True))
    ]


class Trials:
    def __init__(self, path: str, out: Path, overrides: list[str]) -> None:
        self.config, self.out = load_config(path, overrides), out
        self.session = start_session()
        self.engine = RolloutEngine(
            self.config.model,
            self.config.rollout,
            self.config.max_rollout_tokens,
            self.session,
            [0],
        )
        random_state = torch.get_rng_state()
        self.policy = build_policy(
            self.config.model, self.config.rollout.temperature, self.session, seed=self.config.seed
        )
        assert torch.equal(random_state, torch.get_rng_state())
        self.optimizer, _ = build_optimizer(self.policy, self.config.optimizer)
        self.weight_sync = WeightSync(self.policy, self.engine, 1 << 20, prove_every_steps=1)
        self.base = self.base_bytes()
        self.step = 0

    def base_bytes(self) -> dict[str, str]:
        """A digest of this rank's shard of every base tensor."""
        shards = {
            name: parameter.to_local().detach().contiguous()
            for name, parameter in hf_named_parameters(self.policy)
        }
        return {
            name: hashlib.sha256(shard.view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, shard in shards.items()
        }

    def adapters(self) -> dict[str, Tensor]:
        """By torch's own full_tensor(), not by the code under test."""
        return {
            name: parameter.full_tensor().detach().clone()
            for name, parameter in named_adapters(self.policy.model)
        }

    def backward(self) -> float:
        """The gradient of the mean negative logprob over all ranks' rollouts."""
        local = rollouts()[self.session.rank :: self.session.world_size]
        logprobs, entropy = self.policy(pack_rollouts(local, self.session.device))
        num_tokens = sum(len(rollout.completion_ids) for rollout in rollouts())
        loss = -(logprobs + 0.1 * entropy).sum() / num_tokens
        loss.backward()
        # the frozen root is sharded again too
        assert all(isinstance(parameter, DTensor) for parameter in self.policy.parameters())
        return on_rank0(sum, float(loss.detach()))

    def update(self) -> None:
        """A first step of a fresh Adam: every weight that has a gradient moves by the learning
        rate."""
        self.step += 1
        self.backward()
        self.optimizer.state.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sync(self) -> SyncStats:
        stats = self.weight_sync.sync(self.step)
        assert stats.proof_s > 0
        return stats

    def plain(self) -> peft.PeftModel:
        """transformers and peft, from the base on disk and the adapters as saved."""
        folder = self.out.with_name(f"{self.out.stem}_adapters_{self.step}")
        export_policy(self.policy, Path(self.config.model.path), folder, self.session)
        base = transformers.AutoModelForCausalLM.from_pretrained(
            self.config.model.path, dtype=torch.float32
        )
        return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)

    def engine_against(self, model: torch.nn.Module) -> float:
        prompts = [[5] * 40, [5] * 40, [7, 8, 9], [3]]
        requests = [
            Request(prompt, 1000 * self.engine.engine_rank + i) for i, prompt in enumerate(prompts)
        ]
        done = self.engine.generate(requests, self.step)
        temperature = self.config.rollout.temperature
        return max(
            difference(model, request.prompt_ids, c, temperature)
            for request, c in zip(requests, done, strict=True)
        )

    def proof_names(self, *names: str) -> None:
        """The proof must stop every rank and name these tensors and no other."""
        try:
            prove_weights(self.policy, self.engine, self.step)
        except Rank0Error as error:
            assert f" in {len(names)} of " in str(error), error  # noqa: PT017
            assert all(f"{name} (rank" in str(error) for name in names[:4]), error  # noqa: PT017
        else:
            raise AssertionError(f"was not seen: {names}")

    def stale_adapters(self) -> None:
        """No sync since an optimizer step; then each adapter of a layer left as it was, or in
        another's place."""
        old = self.sent_adapters()
        self.update()
        self.proof_names(*old)
        new = self.sent_adapters()
        for name in [name for name in new if name.startswith(LAYER)]:
            self.load({**new, name: old[name]})
            self.proof_names(name)
        gate, up = LAYER + "mlp.gate_proj.lora_B.weight", LAYER + "mlp.up_proj.lora_B.weight"
        self.load({**new, gate: new[up], up: new[gate]})
        self.proof_names(gate, up)
        left_out = [name for name in new if name.startswith(LAYER + "mlp.down_proj")]
        self.load({name: tensor for name, tensor in new.items() if name not in left_out})
        self.proof_names(*left_out)
        nowhere = {f"model.nowhere.lora_{selection}.weight": new[gate] for selection in "AB"}
        refuses(
            lambda: self.load({**new, **nowhere}),
            "2 adapters have no place in the engine, first model.nowhere.lora_A",
        )
        refuses(lambda: self.engine.generate([Request([1], 0)], self.step), "policy_version")
        self.sync()

    def sent_adapters(self) -> dict[str, Tensor]:
        return gather_adapters(
            list(adapter_shards(self.policy.model, self.policy.lora)), self.engine.dtype
        )

    def load(self, adapters: dict[str, Tensor]) -> None:
        self.engine.load_adapters(adapters, self.step)

    def stale_merged(self) -> None:
        """Every adapted layer, and no other tensor, differs after an optimizer step; then one of
        them stale."""
        old = dict(gather_full_tensors(self.policy, self.engine.dtype, 1 << 20, SyncStats()))
        self.update()
        adapted = [
            name.replace("lora_A.", "")
            for name, _ in named_adapters(self.policy.model)
            if "lora_A" in name
        ]
        self.proof_names(*adapted)
        new = dict(gather_full_tensors(self.policy, self.engine.dtype, 1 << 20, SyncStats()))
        assert {name for name in new if not torch.equal(new[name], old[name])} == set(adapted)
        self.engine.load_weights(iter({**new, adapted[-1]: old[adapted[-1]]}.items()), self.step)
        self.proof_names(adapted[-1])
        self.sync()


def main() -> None:
    trials = Trials(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    config, policy, engine = trials.config, trials.policy, trials.engine
    results: dict[str, Any] = {"initial": trials.adapters()}
    initial = trials.sync()
    trials.update()  # B is no longer zero
    results["loss"] = trials.backward()
    results["gradients"] = {
        name: cast(DTensor, parameter.grad).full_tensor().clone()
        for name, parameter in named_adapters(policy.model)
    }
    assert all(parameter.grad is None for _, parameter in hf_named_parameters(policy))
    trials.optimizer.zero_grad()
    results["adapters"] = trials.adapters()

    reference = build_reference(
        policy, config.model, config.rollout.temperature, config.loss.kl_coef, trials.session
    )
    assert reference is not None
    batch = pack_rollouts(rollouts(), trials.session.device)
    with torch.no_grad():
        results["of_reference"], results["of_policy"] = reference(batch)[0], policy(batch)[0]
    cast(FSDPModule, policy).reshard()

    worst = 0.0
    for _ in range(3):
        trials.update()
        stats = trials.sync()
        worst = max(worst, trials.engine_against(trials.plain()))
        assert trials.base_bytes() == trials.base, "the base has changed"
        engine.sleep()
        refuses(lambda: engine.generate([Request([1], 0)], trials.step), "asleep")
    results["worst"] = worst
    results["bytes"] = initial.bytes, stats.bytes
    assert initial.num_collectives == stats.num_collectives
    results["num_collectives"] = stats.num_collectives
    trials.sync()
    if engine.takes_adapters:
        trials.stale_adapters()
        with_file(trials)
    else:
        trials.stale_merged()
    assert trials.base_bytes() == trials.base
    if trials.session.is_rank0:
        torch.save(results, trials.out)
    engine.shutdown()
    end_session()


def with_file(trials: Trials) -> None:
    """vLLM's own loader reads the checkpoint, and answers as the policy does."""
    from vllm.lora.request import LoRARequest

    plain, engine = trials.plain(), trials.engine
    engine.load_adapters(
        {name: torch.randn_like(tensor) for name, tensor in trials.sent_adapters().items()},
        trials.step,
    )
    assert trials.engine_against(plain) > 0.1
    assert engine._adapters is not None
    engine._adapters.drop()
    engine.policy_version = trials.step
    engine.reset_prefix_cache()
    engine._adapters.request = LoRARequest(
        "policy", 1, str(trials.out.with_name(f"{trials.out.stem}_adapters_{trials.step}"))
    )
    assert trials.engine_against(plain) < 1e-4


if __name__ == "__main__":
    with exit_with_outcome():
        main()

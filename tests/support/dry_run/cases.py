"""The project's own code on the fake device, case by case. Each returns figures for the test, or
raises.

Where values are compared it is with the same code on the CPU, in this process; a fake process group
of several ranks answers as if all others were this one.
"""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_spmd import loop
from grpo_spmd.checkpoint.run_dir import checkpoint_path
from grpo_spmd.checkpoint.save import Checkpoints
from grpo_spmd.checkpoint.state import load_state
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.distributed.collectives import open_store
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, policy_mesh, sequence_group
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart
from grpo_spmd.engine.weight_proof import prove_weights
from grpo_spmd.learn.update import PolicyUpdater, attach_loads, attach_logprobs, compare_routes
from grpo_spmd.model.offload import HostOffload, optimizer_state
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.model.values import build_reward_model, build_value_model
from grpo_spmd.observe.run_folder import RunFolder
from grpo_spmd.records import RolloutBatch, SyncStats
from grpo_spmd.rollout.reward_models import score_over_ranks
from tests.support.checkpoints import checkpoints_of
from tests.support.dry_run import runtime
from tests.support.dry_run.device import FakeCuda
from tests.support.dry_run.engine import StandInLLM, install_vllm
from tests.support.dry_run.figures import (
    BUCKET_BYTES,
    VARIANTS,
    micro_batch,
    update_figures,
    with_model,
)
from tests.support.dry_run.kernels import install_flash_attn
from tests.support.full_tensors import gather_full_tensors
from tests.support.learn import updater_of
from tests.support.models import make_model
from tests.support.weights import name_of_weights

ATTENTION = {
    "varlen": "torch_attn._varlen_attn",
    "flash": "flash_attn._flash_attn_varlen_forward",
    "sdpa": "aten._softmax",
}
# Ours does it outside of attention: all ways of it with one back end are enough.
RECOMPUTED: dict[str, tuple[Any, ...]] = {
    "varlen": (False, True, "selective"),
    "flash": (False, "selective"),
    "sdpa": (False,),
}
CPU = torch.device("cpu")


class Trials:
    def __init__(self, config: Path, folder: Path) -> None:
        self.cuda, self.config, self.folder = FakeCuda(), load_config(config), folder
        self.config_path = config
        self._trained: tuple[Policy, PolicyUpdater, Session] | None = None
        runtime.install(self.cuda)
        install_flash_attn()
        install_vllm()

    def session(
        self,
        num_ranks: int = 1,
        num_replicas: int = 1,
        device: torch.device | None = None,
        sequence_ranks: int = 1,
    ) -> Session:
        """Of rank 0, in a new process group."""
        device = device or self.cuda.device
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        mesh = policy_mesh(device, num_replicas)
        group = sequence_group(device, sequence_ranks)
        return Session(0, num_ranks, 0, device, mesh, sequence_group=group)

    @contextmanager
    def attention(self, backend: str) -> Iterator[Config]:
        """The config, in bfloat16, where `backend` is what is chosen."""
        result = patch(
            "grpo_spmd.model.attention.can_import",
            lambda module, _: backend.startswith(module[:5]) or "varlen" in module,
        )
        with result:
            yield with_model(
                self.config, dtype="bfloat16", attention={"varlen": "auto"}.get(backend, backend)
            )

    def updated(
        self, config: Config, session: Session, steps: int = 1, **rows: Any
    ) -> tuple[Policy, PolicyUpdater, dict[str, Tensor]]:
        """A policy after some updates on one micro-batch, and its logprobs, gradients and
        parameters, by name. `rows` are options of `micro_batch`."""
        # Experts that are recomputed replay routes too, and learn from a load-balance loss.
        is_routed = "experts" in config.model.path and config.model.recompute is True
        policy = build_policy(
            config.model, config.rollout.temperature, session, replays_routes=is_routed
        )
        updater, batch, result = (
            updater_of(policy, config),
            micro_batch(session.device, is_routed=is_routed, **rows),
            dict[str, Tensor](),
        )
        if is_routed:
            attach_loads(policy, [[batch]], 0.5)
            compare_routes(policy, micro_batch(session.device, is_routed=True))
        if policy.lora.rank:  # B starts at 0, where A has no gradient
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_B" in name:
                        _local(parameter).fill_(0.01)
        with torch.no_grad():
            result["logprobs"] = self.cuda.values(policy(batch)[0])
        cast(FSDPModule, policy).reshard()
        for step in range(steps):
            updater.backward(batch, 24, 4, True)
            if not step:
                grads = {
                    name: p.grad for name, p in policy.named_parameters() if p.grad is not None
                }
                result |= {
                    f"gradient of {name}": self.cuda.values(_local(grad))
                    for name, grad in grads.items()
                }
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            updater.optimizer.step()
            updater.optimizer.zero_grad(set_to_none=True)
        result |= {
            name: self.cuda.values(_local(parameter))
            for name, parameter in policy.named_parameters()
        }
        return policy, updater, result

    # Cases

    def figures(self) -> Any:
        """As `workers/dry_run_cpu.py` takes them on two real ranks."""
        result = {}
        for variant, changes in VARIANTS.items():
            config = with_model(self.config, **changes)
            result[variant] = update_figures(
                config,
                self.session(
                    2,
                    config.model.num_replicas,
                    sequence_ranks=config.model.sequence_parallel_size,
                ),
                self.cuda,
            )
        return result

    def many_ranks(self) -> Any:
        """A rank of 64, in 4 replicas: more ranks than some tensors have rows."""
        return update_figures(
            with_model(self.config, num_replicas=4), self.session(64, 4), self.cuda
        )

    def values(self) -> Any:
        """Updates in float32, with adapters, with 8-bit moments, and of experts: distances from
        those on the CPU."""
        result = {}
        experts = make_model(Path(self.config.run_dir, "experts"), "qwen3_moe", tied=True)
        variants: dict[str, dict[str, Any]] = {
            "float32": {},
            "adapters": {"lora": {"rank": 4}},
            "8-bit moments": {},
            "experts": {"path": str(experts), "dtype": "bfloat16"},
            "routes": {"path": str(experts), "dtype": "bfloat16", "activation_checkpointing": True},
        }
        for name, changes in variants.items():
            config = with_model(self.config, **changes)
            if name == "8-bit moments":
                coded = dataclasses.replace(config.optimizer, name="adamw_8bit")
                config = dataclasses.replace(config, optimizer=coded)
            on_cpu = self.updated(config, self.session(device=CPU))[2]
            result[name] = _distances(on_cpu, self.updated(config, self.session())[2])
        return result

    def back_ends(self) -> Any:
        """Each way of attention in bfloat16: distances from a CPU's, and whether recomputation
        changes a bit."""
        result: dict[str, Any] = {}
        on_cpu = self.updated(with_model(self.config, dtype="bfloat16"), self.session(device=CPU))[
            2
        ]
        for backend, operator in ATTENTION.items():
            with self.attention(backend) as config:
                result[backend] = of = dict[str, Any]()
                plain = dict[str, Tensor]()
                for recomputed in RECOMPUTED[backend]:
                    changed = with_model(config, activation_checkpointing=recomputed)
                    start = len(self.cuda.operators)
                    policy, _, values = self.updated(changed, self.session())
                    assert policy.attention == backend, policy.attention
                    of[f"calls, {recomputed}"] = self.cuda.operators[start:].count(operator)
                    plain = plain or values
                    of[f"equal, {recomputed}"] = all(
                        torch.equal(value, plain[n]) for n, value in values.items()
                    )
                of |= _distances(on_cpu, plain)
        return result

    def shared_prefixes(self) -> Any:
        """Each way of attention in bfloat16 over rows that share prefixes: distances from rows of a
        CPU that share nothing, and whether recomputation changes a bit."""
        result: dict[str, Any] = {}
        config = with_model(self.config, dtype="bfloat16")
        session = self.session(device=CPU)
        on_cpu = self.updated(config, session, prefix_tokens=20)[2]
        rows = {"prefix_tokens": 20, "shares_prefixes": True}
        for backend in ATTENTION:
            with self.attention(backend) as config:
                result[backend] = of = dict[str, Any]()
                plain = dict[str, Tensor]()
                for recomputed in RECOMPUTED[backend]:
                    changed = with_model(config, activation_checkpointing=recomputed)
                    start = len(self.cuda.operators)
                    values = self.updated(changed, self.session(), **rows)[2]
                    # flash-attn's function keeps the gathered keys: torch's kernel stands in.
                    of[f"calls, {recomputed}"] = self.cuda.operators[start:].count(
                        ATTENTION["varlen"]
                    )
                    plain = plain or values
                    of[f"equal, {recomputed}"] = all(
                        torch.equal(value, plain[n]) for n, value in values.items()
                    )
                of |= _distances(on_cpu, plain)
        return result

    def offload(self) -> Any:
        """Away and back between updates, as in a step of the loop; the bytes that were pinned for
        it."""
        session, pinned = self.session(2), len(self.cuda.host.pinned)
        policy, updater, _ = self.updated(self.config, session)
        reference = build_reference(policy, self.config.model, 1.0, 0.1, session)
        offload = HostOffload(True, policy, reference, updater.optimizer)
        tensors = [
            *policy.parameters(),
            *cast(Policy, reference).parameters(),
            *optimizer_state(updater.optimizer),
        ]
        old = [self.cuda.values(_local(tensor)) for tensor in tensors]
        # Earlier cases' models are in reference cycles: they would else be freed at any later time.
        gc.collect()
        retained, live = offload.held_bytes, self.cuda.ledger.live
        offload.before_sync()
        sum(1 for _ in gather_full_tensors(policy, torch.bfloat16, BUCKET_BYTES, SyncStats()))
        offload.after_sync()
        freed = live - self.cuda.ledger.live
        moved = offload.to_device()["memory/host/offloaded_gib"] * 2**30
        assert all(
            torch.equal(b, self.cuda.values(_local(a))) for a, b in zip(tensors, old, strict=True)
        )
        updater.backward(micro_batch(session.device), 24, 4, True)
        updater.optimizer.step()
        buffers = list(self.cuda.host.pinned.values())[pinned:]
        result = {
            "held": retained,
            "freed": freed,
            "moved": moved,
            "pinned": sum(buffers),
            "buffers": len(buffers),
        }
        unpinned = self.cuda.host.unpinned
        del offload, policy, reference, updater, tensors  # whose hooks hold it
        gc.collect()
        result["unpinned"] = self.cuda.host.unpinned - unpinned
        return result | {"unpinned_too_late": self.cuda.host.unpinned_too_late}

    def trained(self) -> tuple[Policy, PolicyUpdater, Session]:
        """On one rank, after a step; one for all that look at it."""
        if self._trained is None:
            session = self.session()
            self._trained = *self.updated(self.config, session)[:2], session
        else:
            self.session()  # groups of the old one go with it, but one rank needs none
        return self._trained

    def staged(self) -> tuple[Checkpoints, list[int]]:
        """A checkpoint whose copies are made, and the bytes that were pinned for it."""
        policy, updater, session = self.trained()
        open_store(dist.HashStore())
        config = dataclasses.replace(self.config, run_dir=str(self.folder / "checkpointed"))
        checkpoints, pinned = (
            checkpoints_of(config, session, policy, updater),
            len(self.cuda.host.pinned),
        )
        checkpoints.stage(1, 0, {})
        self.cuda.host.check_idle()  # the thread that writes cannot know
        return checkpoints, list(self.cuda.host.pinned.values())[pinned:]

    def checkpoint(self) -> Any:
        """Staged, written, and read again by a policy that goes on from it as the first one
        does."""
        checkpoints, pinned = self.staged()
        checkpoints.write_staged()
        checkpoints.wait()
        policy, updater, session = self.trained()
        second = build_policy(self.config.model, 1.0, session, seed=1)
        its_updater = updater_of(second, self.config)
        self.restore(second, its_updater)
        for its in (updater, its_updater):
            its.backward(micro_batch(session.device), 24, 4, True)
            its.optimizer.step()
            its.optimizer.zero_grad(set_to_none=True)
        for (name, a), b in zip(policy.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(self.cuda.values(_local(a)), self.cuda.values(_local(b))), name
        return {"pinned": sum(pinned), "numel": sum(p.numel() for p in policy.parameters())}

    def restore(self, policy: Policy, updater: PolicyUpdater) -> None:
        path = checkpoint_path(self.folder / "checkpointed", 1)
        trainer = json.loads((path / "trainer.json").read_text())
        load_state(policy, updater, path, {**trainer, "num_updates": 1})

    def sync(self) -> Any:
        """Gathered, named and proved; rows that no number of ranks divides, replicas, adapters."""
        result = {}
        for name, (ranks, replicas, lora) in {"3": (3, 1, 0), "2 x 2, adapters": (4, 2, 4)}.items():
            config, session = (
                with_model(self.config, lora={"rank": lora}),
                self.session(ranks, replicas),
            )
            policy = build_policy(config.model, 1.0, session)
            engine = _Holder(
                dict(gather_full_tensors(policy, torch.bfloat16, BUCKET_BYTES, SyncStats()))
            )
            prove_weights(policy, cast(Any, engine), 0, is_first=True)
            result[name] = name_of_weights(policy)
            self.sees_a_flipped_bit(policy, engine)
        return result

    def sees_a_flipped_bit(self, policy: Policy, engine: _Holder) -> None:
        next(iter(engine.held.values())).view(torch.int16)[0, 0] += 1
        try:
            prove_weights(policy, cast(Any, engine), 0)
        except Rank0Error as error:
            assert "1 of its" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("a flipped bit on the device was not seen")

    def logprobs(self) -> Any:
        """Old and reference logprobs of a batch, on the device, and equal to a CPU's."""
        config, seen = (
            dataclasses.replace(
                self.config, loss=dataclasses.replace(self.config.loss, kl_coef=0.1)
            ),
            [],
        )
        for device in (CPU, self.cuda.device):
            session = self.session(2, device=device)
            policy = build_policy(config.model, 0.7, session)
            reference = build_reference(policy, config.model, 0.7, config.loss.kl_coef, session)
            batch = micro_batch(device)
            attach_logprobs(policy, reference, RolloutBatch([[batch]], [24], [4]), config.loss, 2)
            assert batch.old_logprobs is not None
            assert batch.ref_logprobs is not None
            assert batch.old_logprobs.device.type == batch.ref_logprobs.device.type == device.type
            seen += [self.cuda.values(batch.old_logprobs), self.cuda.values(batch.ref_logprobs)]
        return {
            "old": float((seen[0] - seen[2]).abs().max()),
            "reference": float((seen[1] - seen[3]).abs().max()),
        }

    def waits(self) -> Any:
        """Times that the host waits for the device: while rows are packed, and in each micro-batch
        of a pass without gradients by policy, reference, critic and reward model, and of an
        update."""
        result: dict[str, Any] = {}

        @contextmanager
        def counted(name: str) -> Iterator[None]:
            before = self.cuda.waits.copy()
            yield
            result[name] = dict(self.cuda.waits - before)

        with self.attention("varlen") as config:
            session = self.session()
            policy = build_policy(config.model, 1.0, session)
            value_model = build_value_model(
                str(self.folder / "critic"), config.model, session, 24, 97
            )
            reward = RewardConfig(model=str(self.folder / "scores"), name="scores")
            files = read_reward_model(0, reward, self.folder / "scores", 64)
            reward_model = build_reward_model(files, config.model, session)
            updater = updater_of(policy, config)
            with counted("one copy"):
                torch.tensor([0, 9], device=session.device)
            with counted("pack"):
                rows = [micro_batch(session.device) for _ in range(2)]
            for number, row in enumerate(rows):
                # What happens once is over after the first row.
                with counted(f"scores {number}"), torch.no_grad():
                    policy(row)
                with counted(f"values {number}"), torch.no_grad():
                    value_model(row)
                with counted(f"rewards {number}"), torch.no_grad():
                    reward_model(reward_model.row_of([[1, 2, 3], [4, 5]]))
            with counted("rewards of two rows"), torch.no_grad():
                texts, row_of = [[1, 2, 3], [4, 5], [6]], reward_model.row_of
                score_over_ranks([0, 1, 2], texts, 3, lambda row: reward_model(row_of(row)))
            cast(FSDPModule, policy).reshard()
            for number, row in enumerate(rows):
                with counted(f"update {number}"):
                    updater.backward(row, 24, 4, True)
        return result

    def signals(self) -> Any:
        """A whole run by a reward model, two teachers with prompts of their own, and a critic."""
        of = {name: str(self.folder / name) for name in ("scores", "teacher", "critic")}
        teacher = (
            f"path: {{a: {of['teacher']}, b: {self.config.model.path}}}, prompt_key: hint, "
            "loss: full"
        )
        gae = "advantage={estimator: gae, normalize_std: batch}", f"critic.path={of['critic']}"
        rewards = f"rewards=[{{model: {of['scores']}, name: scores}}]"
        return self.whole_run(rewards, f"teacher={{{teacher}}}", *gae, name="signals")

    def value_head(self) -> Any:
        """A whole run with a critic on the policy's layers, which in its first step trains
        alone."""
        rewards = f"rewards=[{{model: {self.folder / 'scores'}, name: scores}}]"
        of = (
            "advantage={estimator: gae, normalize_std: batch}",
            "critic={path: policy, warmup_steps: 1}",
        )
        return self.whole_run(rewards, *of, "model.dtype=bfloat16", name="value_head")

    def whole_run(self, *overrides: str, name: str = "run") -> Any:
        """Two steps of `grpo_spmd.train` with offload, a reference, evaluation, proofs and
        checkpoints; the metrics of
        each step, and what the engine was told."""
        run_dir = self.folder / name
        more = [
            "model.offload=true",
            "loss.kl_coef=0.1",
            "eval.every_steps=1",
            "eval.num_samples=1",
        ]
        more += [
            "checkpoint.every_steps=1",
            f"run_dir={run_dir}",
            f"data.eval.held={self.config.data.train}",
            *overrides,
        ]
        more += ["proofs.max_mismatch=1000", "reward_pool.num_workers=1"]
        more += [
            "rollout.num_prompts_per_step=2",
            "rollout.group_size=2",
            "rollout.max_completion_tokens=6",
        ]
        config = load_config(self.config_path, [*more, "training.num_steps=2"])
        if dist.is_initialized():
            dist.destroy_process_group()
        with patch.object(dist, "init_process_group", _fake_group):
            assert loop.train(config, check_inputs(config, num_ranks=1))
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        scored = [len(list(RunFolder(run_dir).scores(step))) for step in (1, 2)]
        return {"lines": lines, "told": StandInLLM.last.calls, "scored": scored}


class _Holder:
    """What `prove_weights` asks of an engine, which holds full tensors as they came."""

    takes_adapters, engine_rank, tp_rank, dtype = False, 0, 0, torch.bfloat16

    def __init__(self, retained: dict[str, Tensor]) -> None:
        self.held = retained

    def tensors(self, *_: Any) -> list[EngineTensor]:
        return [
            EngineTensor(name, (TensorPart(name, len(t), 0, 0, len(t)),), t)
            for name, t in self.held.items()
        ]

    def constants(self) -> dict[str, Tensor]:
        return {}


def _fake_group(backend: str, **options: Any) -> None:
    assert backend == "cpu:gloo,cuda:nccl", backend
    _init_process_group("fake", **options)


_init_process_group = dist.init_process_group


def _local(tensor: Any) -> Tensor:
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def _distances(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    """Of logprobs in nats, of gradients and of parameters as shares of their norms, the largest of
    each."""
    assert expected.keys() == found.keys()
    largest = dict.fromkeys(("logprobs", "gradient", "parameter"), 0.0)
    for name, value in expected.items():
        off = (found[name] - value).double()
        kind = (
            name
            if name == "logprobs"
            else "gradient"
            if name.startswith("gradient of")
            else "parameter"
        )
        size = (
            float(off.abs().max())
            if kind == "logprobs"
            else float(off.norm() / (value.double().norm() + 1e-12))
        )
        largest[kind] = max(largest[kind], size)
    return largest


CASES: dict[str, Callable[[Trials], Any]] = {
    name: getattr(Trials, name)
    for name in (
        "figures",
        "many_ranks",
        "values",
        "shared_prefixes",
        "back_ends",
        "offload",
        "checkpoint",
        "sync",
        "signals",
        "value_head",
        "logprobs",
        "waits",
        "whole_run",
    )
}

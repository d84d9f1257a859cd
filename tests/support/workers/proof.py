"""Worker: the weight-sync proof and the logprob check on clean syncs and on planted faults, many in
one process.

python -m tests.support.workers.proof CONFIG [section.key=value ...]
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import grpo_spmd.engine.engine
from grpo_spmd.checkpoint.run_dir import Start
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine import reload
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.weight_proof import prove_weights
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.losses import mismatch_sums
from grpo_spmd.learn.update import no_update
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import build_policy, hf_named_parameters
from grpo_spmd.parts import open_log, open_run_dir
from grpo_spmd.proofs.logprob_check import LogprobCheck
from grpo_spmd.records import BatchPlan, Decision, Rollout, StepDecision, SyncStats
from tests.support.full_tensors import gather_full_tensors
from tests.support.learn import merged_on_all
from tests.support.workers.sync import disturb

BUCKET_MIB = 1
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.1."
PROMPTS = [[5] * 40, [5] * 40, [7, 8, 9] * 13, [3] * 33]  # each fills a block of the prefix cache


class Trials:
    """One policy and its engine. A trial syncs cleanly or with one fault; the proof must see the
    fault and nothing
    else."""

    def __init__(self, path: str, overrides: list[str]) -> None:
        self.config = load_config(path, overrides)
        self.session = start_session()
        self.engine = RolloutEngine(
            self.config.model,
            self.config.rollout,
            self.config.max_rollout_tokens,
            self.session,
            [0],
        )
        self.policy = build_policy(self.config.model, self.config.rollout.temperature, self.session)
        self.weight_sync = WeightSync(self.policy, self.engine, BUCKET_MIB << 20)
        self.optimizer, _ = build_optimizer(self.policy, self.config.optimizer)
        self.shapes = {
            name: tuple(parameter.shape) for name, parameter in hf_named_parameters(self.policy)
        }
        self.tied = HEAD not in self.shapes
        self.step = self.num_faults = 0

    def weights(self) -> dict[str, Tensor]:
        """The policy's tensors as the sync sends them."""
        return dict(
            gather_full_tensors(self.policy, self.engine.dtype, BUCKET_MIB << 20, SyncStats())
        )

    def update(self, lr: float) -> None:
        """The first step of a fresh Adam, which moves every weight by about `lr`."""
        self.step += 1
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        disturb(self.policy, self.optimizer, self.step)

    def sync(self) -> SyncStats:
        return self.weight_sync.sync(self.step)

    def load(self, weights: dict[str, Tensor]) -> None:
        """A sync that brings these weights."""
        self.engine.wake_weights()
        self.engine.load_weights(iter(weights.items()), self.step)
        self.engine.wake_kv_cache()

    def passes(self) -> None:
        prove_weights(self.policy, self.engine, self.step)

    def fails(self, names: set[str], *expected: str) -> None:
        """The proof must stop every rank and name these tensors and no other."""
        try:
            self.passes()
        except Rank0Error as error:
            text = str(error)
        else:
            raise AssertionError(f"was not seen: {names}")
        seen = (
            f"step {self.step}: the engine does not hold the policy's weights in {len(names)} of "
        )
        for piece in (seen, *(f"{name} (rank" for name in names), *expected):
            assert piece in text, (piece, text)
        self.num_faults += 1

    def of_loaded(self, name: str) -> set[str]:
        """Where a wrong tensor must show: a tied embedding in the table and in the packed copy of
        it that the lm_head
        uses."""
        return {name, HEAD} if self.tied and name == EMBEDDING else {name}

    def stale_tensors(self, lr: float) -> None:
        """No sync since an optimizer step; then each kind of tensor left out of it alone."""
        old = self.weights()
        self.update(lr)
        self.fails_everywhere()
        new = self.weights()
        kinds = (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "input_layernorm",
            "k_norm",
        )
        names = [
            EMBEDDING,
            HEAD,
            "model.norm.weight",
            *(n for n in self.shapes if n.startswith(LAYER) and n.split(".")[-2] in kinds),
        ]
        for name in names:
            if name in self.shapes:
                self.load({**new, name: old[name]})
                self.fails(
                    self.of_loaded(name), "the sync left them stale, or put something else there"
                )
        self.load(new)
        self.passes()

    def fails_everywhere(self) -> None:
        try:
            self.passes()
        except Rank0Error as error:
            likely = (
                "likely because the last update did not reach it: model.embed_tokens.weight (rank"
            )
            assert likely in str(error), error  # noqa: PT017
        else:
            raise AssertionError("a skipped sync was not seen")

    def misplaced_tensors(self) -> None:
        """Right values in a wrong place."""
        new = self.weights()
        query, gate, up = (
            LAYER + name + ".weight"
            for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj")
        )
        down, key, norm = (
            LAYER + name + ".weight"
            for name in ("mlp.down_proj", "self_attn.k_proj", "input_layernorm")
        )
        assert new[query].shape[0] == new[query].shape[1]
        self.load({**new, query: new[query].T.contiguous()})
        self.fails({query})
        self.load({**new, gate: new[up], up: new[gate]})
        self.fails({gate, up})
        self.load({**new, down: new[down].roll(1, 0)})
        self.fails({down})
        self.load({**new, key: torch.cat([new[key][:-1], new[key][:1]])})
        self.fails({key}, "1 of its")
        self.load({**new, EMBEDDING: new[EMBEDDING].roll(1, 1)})
        self.fails(self.of_loaded(EMBEDDING))
        bits = new[norm].clone()
        bits.view(torch.int32 if bits.dtype == torch.float32 else torch.int16)[3] ^= 1
        self.load({**new, norm: bits})
        self.fails({norm}, f"1 of its {len(bits)} rows here differ")

    def stale_head(self) -> None:
        """A tied lm_head whose packed copy nobody renews (what vLLM does by itself on a CPU)."""
        repack = grpo_spmd.engine.reload.after_reload_on_cpu
        grpo_spmd.engine.reload.after_reload_on_cpu = lambda model: None
        self.update(1e-5 if self.engine.dtype == torch.float32 else 1e-3)
        self.load(self.weights())
        grpo_spmd.engine.reload.after_reload_on_cpu = repack
        self.fails({HEAD})
        self.sync()
        self.passes()

    def direct_faults(self) -> None:
        """Of what is copied without vLLM's loader: one tensor a row off, two in each other's place,
        a packed head that
        nobody renews. And after each, as after vLLM's loader, the same bits."""
        direct = self.weight_sync._direct
        assert direct is not None
        assert direct.names == set(self.shapes), direct.names ^ set(self.shapes)
        key, value, down = (
            LAYER + name
            for name in (
                "self_attn.k_proj.weight",
                "self_attn.v_proj.weight",
                "mlp.down_proj.weight",
            )
        )
        copy, pack, targets = reload._copy_part, reload._pack, direct._targets

        def a_row_off(
            tensor: Any, section: Any, rows: Tensor, matrix: Tensor, *, dtype: torch.dtype
        ) -> None:
            rolled = matrix.roll(1, 0) if section.name == down else matrix
            copy(tensor, section, rows, rolled, dtype=dtype)

        def not_packed(layer: Any) -> None:
            if not hasattr(layer, "org_vocab_size"):
                pack(layer)

        swapped = {**targets, key: targets[value], value: targets[key]}
        for location, label, planted, names in (
            (reload, "_copy_part", a_row_off, {down}),
            (direct, "_targets", swapped, {key, value}),
            (reload, "_pack", not_packed, {HEAD}),
        ):
            self.update(1e-5 if self.engine.dtype == torch.float32 else 1e-3)
            with patch.object(location, label, planted):
                self.sync()
            self.fails(names)
            self.sync()
            self.passes()
            copied = self.held()
            self.load(self.weights())
            assert copied.keys() == self.held().keys()
            assert all(torch.equal(tensor, copied[name]) for name, tensor in self.held().items())

    def held(self) -> dict[str, Tensor]:
        """All that this rank's engine has, what is packed as the layer's products with a unit
        matrix."""
        result = dict[str, Tensor]()
        for number, tensor in enumerate(self.engine.tensors(self.shapes, {})):
            values = tensor.values
            if values is None:
                layer: Any = tensor.layer
                columns = getattr(layer, "input_size_per_partition", 0) or layer.embedding_dim
                values = layer.quant_method.apply(
                    layer, torch.eye(columns, dtype=self.engine.dtype), None
                )
            result[f"{tensor.engine_name} {number}"] = values.detach().clone()
        return result

    def covers_everything(self) -> None:
        """The engine's ranks together hold every row and column slice of every HF tensor; KV heads
        also twice."""
        local = [
            [piece.name, row, tensor.column_slice, tensor.num_column_slices]
            for tensor in self.engine.tensors(self.shapes, {})
            for piece in tensor.parts
            for row in range(piece.hf_start, piece.hf_start + piece.num_rows)
        ]
        ranks = self.config.rollout.engine_ranks

        def check(rank_values: list[list[list[int | str]]]) -> None:
            retained = Counter(
                (name, row, piece, pieces)
                for retained in rank_values
                for name, row, piece, pieces in retained
            )
            for name, shape in self.shapes.items():
                slices = ranks if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                for row in range(shape[0]):
                    for piece in range(slices):
                        assert retained[name, row, piece, slices], (name, row, piece)
            expected = 2 if ranks == 2 and "qwen3" in self.config.model.path else 1
            assert retained[LAYER + "self_attn.k_proj.weight", 0, 0, 1] == expected

        on_rank0(check, local)

    def mismatch(self) -> Reductions:
        """|policy - engine| of all ranks on freshly sampled tokens."""
        requests = [Request(prompt, i) for i, prompt in enumerate(PROMPTS)]
        done = self.engine.generate(requests, self.step)
        rollouts = [
            Rollout(0, 1.0, True, r.prompt_ids, c.token_ids, c.logprobs)
            for r, c in zip(requests, done, strict=True)
        ]
        batch = pack_rollouts(rollouts, self.session.device)
        with torch.no_grad():
            logprobs, _ = self.policy(batch)
        cast(
            FSDPModule, self.policy
        ).reshard()  # without a backward pass the embedding stays gathered
        result = mismatch_sums(logprobs, batch.rollout_logprobs, batch.loss_mask)
        return merged_on_all({name: reduction.on_host() for name, reduction in result.items()})

    def logprob_check_faults(self) -> None:
        check = LogprobCheck(self.config.model.dtype, None)
        self.sync()
        clean = self.mismatch()
        check.check(self.step, *_mean_and_largest(clean))
        self.update(1e-2)
        self.sync()
        check.check(self.step, *_mean_and_largest(self.mismatch()))

        logits = self.policy.logits
        self.policy.logits = dataclasses.replace(logits, temperature=1.0)
        faulty = self.mismatch()
        self.policy.logits = logits
        self.stops(check, faulty, "rounding has grown")
        self.stops(LogprobCheck(self.config.model.dtype, None), faulty, "the temperatures differ")
        self.stops_every_rank(faulty)

        llm = self.engine._llm
        reset, llm.reset_prefix_cache = llm.reset_prefix_cache, lambda: True
        self.update(3e-2)
        self.sync()
        llm.reset_prefix_cache = reset
        self.passes()  # the weights are right
        self.stops(check, self.mismatch(), "old cached prefixes")

        self.sync()
        self.update(3e-2)
        self.engine.policy_version = self.step
        self.stops(check, self.mismatch(), "the engine answered from old weights")

    def stops_every_rank(self, sums: Reductions) -> None:
        """The step's end, where the sums of all ranks meet the logprob check, before anything is
        made of the step's
        decisions."""
        open_run_dir(self.config, self.session, 0, Start(), time.monotonic())
        check = LogprobCheck(self.config.model.dtype, None)
        _, log = open_log(self.config, self.session, time.monotonic(), 0, check)
        nothing = no_update(self.config.loss)
        none: Any = np.zeros(0)
        step = StepDecision(
            none,
            none,
            none,
            none,
            BatchPlan(none, []),
            none,
            none,
            [],
            [],
            0,
            0,
            {"reward/mean": 0.0},
        )
        decision = Decision(
            {}, {}, {}, {}, [], 0, [], [], 0, 0, step if self.session.is_rank0 else None
        )
        local = nothing | sums if self.session.is_rank0 else nothing
        try:
            log.check_step(self.step, decision, SyncStats(), local, [])
        except Rank0Error as error:
            message = str(error)
            assert f"MismatchError: step {self.step}: engine and policy differ by" in message
        else:
            raise AssertionError("check_step did not stop this rank")

    def stops(self, check: LogprobCheck, sums: Reductions, expected: str) -> None:
        try:
            check.check(self.step, *_mean_and_largest(sums))
        except RuntimeError as error:
            assert expected in str(error), error  # noqa: PT017
        else:
            raise AssertionError(f"was not seen: {expected}: {sums}")
        self.num_faults += 1


def _mean_and_largest(sums: Reductions) -> tuple[float, float]:
    return sums["weight_sync/mismatch_abs_mean"].value, sums["weight_sync/mismatch_abs_max"].value


def main() -> None:
    trials = Trials(sys.argv[1], sys.argv[2:])
    assert trials.sync().proof_s > 0
    trials.covers_everything()
    float32 = trials.engine.dtype == torch.float32
    for _ in range(3):
        trials.update(1e-2)
        trials.sync()
        trials.passes()
    trials.stale_tensors(1e-5 if float32 else 1e-3)
    trials.misplaced_tensors()
    if trials.tied:
        trials.stale_head()
    trials.direct_faults()
    trials.logprob_check_faults()
    print(f"rank {trials.session.rank}: {trials.num_faults} faults seen", flush=True)
    trials.engine.shutdown()
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()

"""One rank of the rollout_tail benchmark: samples from a model whose prompts decide how long their
completions are.

python -m benchmarks.speed.rollout_tail_worker FOLDER
"""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.models import make_model
from benchmarks.support.ranks import tell
from benchmarks.support.report import Row
from grpo_spmd.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.demo.making import model_config
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import Prompt
from grpo_spmd.rollout.sample import ExpectedLengths, Sampler, open_tail

NUM_PROMPTS, GROUP_SIZE, AT_ONCE, ROUNDS = 32, 4, 8, 5
EPOCH_PROMPTS, STEP_PROMPTS, EPOCHS, TAIL_BATCHING = 64, 8, 3, 1.5  # of tail batching
HIDDEN, VOCABULARY, EOS, MAX_TOKENS = 256, 97, 0, 160


def mean_tokens(token: int) -> float:
    """The mean length after a prompt that ends with `token`: drawn from a lognormal of mean 30 and
    sigma 1; from 80 on
    6 or 48."""
    if token >= 80:
        return 48.0 if token % 2 else 6.0
    return 30 * math.exp(random.Random(token).gauss(0, 1) - 0.5)


def make(folder: Path) -> None:
    """A Qwen3 in which attention and MLP add nothing, so that a token is followed by itself, or by
    the end with a chance of its own.

    Everything is computed all the same, as for any model of its size.
    """

    def change(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        length = math.sqrt(HIDDEN)  # of a one-hot vector behind the last norm
        logits = torch.full((VOCABULARY, HIDDEN), -30.0)
        for token in range(1, VOCABULARY):
            end = 1 / max(mean_tokens(token), 1.01)
            logits[token, token], logits[EOS, token] = math.log(1 - end), math.log(end)
        model.lm_head.weight.copy_(logits / length)
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY, HIDDEN))

    config = model_config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    make_model(folder, config, change=change)


def main() -> None:
    folder = sys.argv[1]
    config = Config(
        run_dir=f"{folder}/run",
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(train="none", max_prompt_tokens=8),
        rollout=RolloutConfig(
            num_prompts_per_step=NUM_PROMPTS,
            group_size=GROUP_SIZE,
            max_completion_tokens=MAX_TOKENS,
            engine={"max_num_seqs": AT_ONCE},
        ),
        rewards=(RewardConfig(name="exact"),),
    )
    static = dataclasses.replace(config.rollout, schedule="static")
    schedules = {"static": static, "shared_queue": config.rollout, "longest_first": config.rollout}
    cases = {
        "prompts of lognormal mean length, sigma 1": [token + 1 for token in range(NUM_PROMPTS)],
        "every second prompt 8 times as long": [80 + slot % 2 for slot in range(NUM_PROMPTS)],
    }
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [EOS])
    policy = build_policy(config.model, config.rollout.temperature, session)
    weight_sync = WeightSync(policy, engine, config.rollout.sync_bucket_bytes(session.device.type))
    num_steps = [0]  # of this rank's engine

    def step_of_engine() -> Any:
        num_steps[0] += 1
        return engine_step()

    engine_step, engine._engine.step = engine._engine.step, step_of_engine
    for label, tokens in cases.items():
        seconds: dict[str, list[list[float]]] = {name: [] for name in schedules}
        steps: dict[str, list[list[int]]] = {name: [] for name in schedules}
        lengths: list[dict[int, list[int]]] = []  # of each step, by row
        samplers = dict.fromkeys(schedules, Sampler(engine, GROUP_SIZE, config.seed))
        samplers["longest_first"] = Sampler(
            engine, GROUP_SIZE, config.seed, lengths=ExpectedLengths()
        )
        for step in range(1 + ROUNDS):  # the first warms up, and shows the prompts' lengths
            weight_sync.sync(step)
            order = list(range(NUM_PROMPTS))
            if "lognormal" in label:
                random.Random(step).shuffle(order)
            prompts = [
                Prompt(slot, position, [5, tokens[position]], "", {})
                for slot, position in enumerate(order)
            ]
            created = []
            for name in sorted(schedules, reverse=bool(step % 2)):
                engine._rollout = schedules[name]
                engine.reset_prefix_cache()
                barrier()
                num_steps[0] = 0
                groups, busy_s = samplers[name].sample(prompts, step, "")
                seconds[name].append(on_rank0(list, busy_s))
                steps[name].append(on_rank0(list, num_steps[0]))
                local = [[g.slot, [dataclasses.astuple(c) for c in g.completions]] for g in groups]
                created.append(
                    on_rank0(
                        lambda pieces: sorted(group for piece in pieces for group in piece), local
                    )
                )
            assert created[0] == created[1] == created[2], "the schedules sampled different tokens"
            assert [slot for slot, _ in created[0]] == list(range(NUM_PROMPTS))
            lengths.append(
                {prompts[slot].row: [len(ids) for ids, *_ in group] for slot, group in created[0]}
            )
        measured = {name: rounds_values[1:] for name, rounds_values in seconds.items()}
        counted = {name: rounds_values[1:] for name, rounds_values in steps.items()}
        trace = [
            {"lengths": list(current.values()), "last_time": [old[row] for row in current]}
            for old, current in pairwise(lengths)
        ]
        per_engine = NUM_PROMPTS * GROUP_SIZE // 2
        if session.is_rank0:
            sizes = {"at_once": AT_ONCE, "per_engine": per_engine}
            tell({"what": label, **sizes, "seconds": measured, "steps": counted, "trace": trace})
    tail = _epochs(
        engine,
        weight_sync,
        dataclasses.replace(config.rollout, num_prompts_per_step=STEP_PROMPTS),
        num_steps,
    )
    if session.is_rank0:
        tell(tail)
    engine.shutdown()
    end_session()


def _epochs(
    engine: RolloutEngine, weight_sync: WeightSync, rollout: RolloutConfig, num_steps: list[int]
) -> Row:
    """Collective. Epochs without tail batching and with it, in turn: seconds and decode steps of
    the engine that made
    most, added up over the epoch's rounds; equal on all ranks."""
    engine._rollout = rollout
    rows = [Prompt(0, row, [5, 1 + row % 79], "", {}) for row in range(EPOCH_PROMPTS)]
    result: Row = {
        "what": "tail",
        "factor": TAIL_BATCHING,
        "without": [],
        "with": [],
        "dropped": [],
        "short": [],
        "all": [],
    }
    lengths = ExpectedLengths()
    for epoch in range(1 + EPOCHS):  # the first shows the prompts' lengths
        for name in sorted(("without", "with"), reverse=bool(epoch % 2))[: 2 if epoch else 1]:
            factor = TAIL_BATCHING if name == "with" else 1.0
            fresh = PromptStream(rows, seed=epoch, shuffle=True)
            stream, tail = open_tail(
                fresh, EPOCH_PROMPTS, dataclasses.replace(rollout, tail_batching=factor), ()
            )
            sampler, trained = (
                Sampler(engine, GROUP_SIZE, epoch, lengths=lengths, tail=tail),
                list[Row](),
            )
            total_s, total_steps = 0.0, 0
            while stream.epoch < 1:
                weight_sync.sync(len(trained) + 1)
                prompts, num_steps[0] = stream.take(STEP_PROMPTS), 0
                barrier()
                groups, busy_s = sampler.sample(prompts, len(trained) + 1, "")
                slowest: list[float] = on_rank0(
                    lambda of: [max(item) for item in zip(*of, strict=True)], [busy_s, num_steps[0]]
                )
                total_s, total_steps = total_s + slowest[0], total_steps + int(slowest[1])
                local = [[g.prompt.row, [len(c.token_ids) for c in g.completions]] for g in groups]
                selected = on_rank0(
                    lambda pieces: sorted(group for piece in pieces for group in piece), local
                )
                assert len(selected) == STEP_PROMPTS, f"a step of {len(selected)} prompts"
                trained.append(
                    {
                        "is_short": len(prompts) > STEP_PROMPTS,
                        "groups": selected,
                        **stream.metrics(),
                    }
                )
            assert sorted(row for step in trained for row, _ in step["groups"]) == list(
                range(EPOCH_PROMPTS)
            ), "not each prompt once"
            if epoch:
                result[name].append([total_s, total_steps])
            if epoch and name == "with":
                of = {
                    kind: [
                        n
                        for step in trained
                        if step["is_short"] or kind == "all"
                        for _, group in step["groups"]
                        for n in group
                    ]
                    for kind in ("short", "all")
                }
                result["short"].append(sum(of["short"]) / len(of["short"]))
                result["all"].append(sum(of["all"]) / len(of["all"]))
                result["dropped"].append(
                    sum(step["rollout/tail_dropped_tokens_frac"] for step in trained) / len(trained)
                )
    return result


if __name__ == "__main__":
    with exit_with_outcome():
        main()

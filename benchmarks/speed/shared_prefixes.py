"""The update phase with and without `training.share_prefixes`, at several ratios of prompt to
completion and group sizes: tokens that the model reads, and time.

Random Qwen3 models and tokens; the completions of a group are from half to one and a half times as
long as their mean. Both updates are PolicyUpdater's over the rows that the planner makes, packing
included, of rows of at most 4,096 tokens. Loss and gradient norm of the first update are checked to
agree. One thread; every round runs each row once. `tokens_less` is the tokens of the plain rows
over those that are read, `faster` the time of plain rows over that of the row in the same round
(median, min, max). `auto_shares` says whether the default, `auto`, counts that sharing is cheaper
and so makes the shared row's update, or the plain one's.

    benchmarks/run.sh shared_prefixes [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers

from benchmarks.speed.update import MODELS, Update, base_config
from benchmarks.support.models import make_model
from benchmarks.support.ranks import time_in_turn
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from grpo_spmd.config.schema import Config
from grpo_spmd.demo.making import model_config
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.balance import StepPlan, StepTokens, attention_cost_ratio, plan_step
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import MicroBatch, Rollout, RolloutBatch

_ROUNDS = 3
# Tokens of a prompt and of a completion, on average.
_SHAPES = ((400, 100), (200, 200), (40, 400))
_GROUP_SIZES = (8, 16)
_NUM_GROUPS = 2
Initial = dict[str, tuple[float, float]]  # loss and gradient norm


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    session = start_session()
    name, sizes, _ = MODELS[0]
    with tempfile.TemporaryDirectory() as folder:
        shape = {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
        make_model(Path(folder), model_config(**sizes, **shape))
        config = base_config(folder)
        rows = [
            {"model": name, **row}
            for prompt, completion in _SHAPES
            for group_size in _GROUP_SIZES
            for row in _compare(
                config,
                session,
                _made_groups(prompt, completion, group_size, sizes["vocab_size"]),
                group_size,
                ratio=prompt / completion,
            )
        ]
    end_session()
    report("shared_prefixes", rows, args.json)


def _made_groups(
    num_prompt: int, num_completion: int, group_size: int, vocabulary: int
) -> list[Rollout]:
    rng = random.Random(0)
    rollouts = []
    for group in range(_NUM_GROUPS):
        prompt = [rng.randrange(1, vocabulary) for _ in range(num_prompt)]
        for sample in range(group_size):
            length = rng.randint(num_completion // 2, num_completion * 3 // 2)
            ids = [rng.randrange(1, vocabulary) for _ in range(length)]
            logprobs = [-rng.uniform(8.0, 10.0) for _ in ids]
            number = group * group_size + sample
            rollouts.append(Rollout(number, rng.uniform(-1, 1), True, prompt, ids, logprobs))
    return rollouts


def _compare(
    config: Config, session: Session, rollouts: list[Rollout], group_size: int, *, ratio: float
) -> Iterator[Row]:
    """A row of the plain update and one of the shared update."""
    made = {
        name: _SharedUpdate(config, session, rollouts, group_size, shares=name == "shared")
        for name in ("plain", "shared")
    }
    updates: dict[str, Update] = {name: update.run for name, update in made.items()}
    seconds, initial = _time_in_turn(updates)
    loss, norm = initial["plain"]
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    for name, update in made.items():
        assert abs(initial[name][0] / loss - 1) < 1e-5, (name, initial)
        assert abs(initial[name][1] / norm - 1) < 1e-5, (name, initial)
        yield {
            "ratio": ratio,
            "group_size": group_size,
            "update": name,
            "tokens": tokens,
            "auto_shares": update.plan("auto").shares_prefixes,
            "rows": len(update.rows),
            "tokens_less": tokens / update.num_forwarded_tokens,
            "seconds": statistics.median(seconds[name]),
            **spread("faster", ratios(seconds["plain"], seconds[name])),
        }


def _time_in_turn(updates: dict[str, Update]) -> tuple[dict[str, list[float]], Initial]:
    """Seconds of each update in each round, and what it returned in a round before them."""
    if torch.cuda.is_available():
        return time_in_turn(updates, _ROUNDS)
    seconds: dict[str, list[float]] = {name: [] for name in updates}
    initial = {name: update() for name, update in updates.items()}
    for _ in range(_ROUNDS):
        for name, update in updates.items():
            start = time.process_time()
            update()
            seconds[name].append(time.process_time() - start)
    return seconds, initial


class _SharedUpdate:
    """An update of its own policy on the rows of one plan."""

    def __init__(
        self,
        config: Config,
        session: Session,
        rollouts: list[Rollout],
        group_size: int,
        *,
        shares: bool,
    ) -> None:
        self._session = session
        self._rollouts = rollouts
        self._group_size = group_size
        self._shares = shares
        policy = build_policy(config.model, config.rollout.temperature, session)
        max_length = config.rollout.max_completion_tokens
        self._updater = PolicyUpdater(
            policy, config.optimizer, config.loss, config.training, max_length
        )
        self._cost_ratio = attention_cost_ratio(policy.num_parameters, policy.model.config)
        self._max_tokens = config.training.micro_batch_tokens
        self.rows: list[MicroBatch] = []

    @property
    def num_forwarded_tokens(self) -> int:
        return sum(len(row.input_ids if row.tree is None else row.tree.tokens) for row in self.rows)

    def plan(self, share_prefixes: bool | Literal["auto"]) -> StepPlan:
        rollouts = self._rollouts
        tokens = np.array([rollout.num_tokens for rollout in rollouts])
        prompts = np.array([len(rollout.prompt_ids) for rollout in rollouts])
        return plan_step(
            StepTokens(tokens, tokens, prompts[:: self._group_size]),
            share_prefixes,
            self._cost_ratio,
            num_ranks=1,
            mini_batch_sizes=[len(rollouts)],
            max_tokens=self._max_tokens,
        )

    def run(self) -> tuple[float, float]:
        """Returns loss and gradient norm of one update."""
        rollouts = self._rollouts
        step_plan = self.plan(self._shares)
        self.rows = [
            pack_rollouts(
                [rollouts[i] for i in row],
                self._session.device,
                shares_prefixes=step_plan.shares_prefixes,
            )
            for row in step_plan.plan[0][0]
        ]
        num_loss_tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        batch = RolloutBatch([self.rows], [num_loss_tokens], [len(rollouts)])
        sums = self._updater.update(batch)
        return sums["policy"].value, sums["optim/grad_norm"].value


if __name__ == "__main__":
    main()

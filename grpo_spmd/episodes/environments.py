"""This module sets up what the episodes of a run need, and reads the rewards of environments.

An episode is one conversation of the policy with an environment. `Environments` owns the processes
in which environments run, the chat format and the limits of episodes. `EnvironmentScorer` is one of
the run's scorers (rewards/scorers.py): it reads the rewards that environments have given to
finished episodes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, EvalConfig, RewardConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import (
    LATER,
    ConversationId,
    EpisodeTask,
    GenerationHooks,
    OnCompletion,
)
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.endpoint import Endpoint
from grpo_spmd.episodes.episodes import AgentEpisodes, Episodes
from grpo_spmd.episodes.open_episode import EpisodeLimits
from grpo_spmd.episodes.pool import EnvironmentPool
from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.protocol import Reward
from grpo_spmd.rewards.scorers import RewardColumn, merge_results

_log = logging.getLogger("grpo_spmd")


@dataclass(frozen=True)
class EnvironmentScorer:
    """Reads the rewards of environments from finished episodes, without any communication."""

    names: Collection[str]
    """The names of the rewards that the environments give."""

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Returns the environments' rewards by name; the texts and sums of the result are empty.

        Not collective. `scored` is not used; other scorers need it.
        """
        episodes = [completion.episode for group in groups for completion in group.completions]
        columns = [RewardColumn(name, len(episodes)) for name in self.names]
        for column in columns:
            for number, episode in enumerate(episodes):
                value = None if episode is None else episode.rewards.get(column.name)
                if isinstance(value, str):
                    # A string says why the environment's reward is unusable.
                    column.fail(number, value)
                elif value is not None:
                    column.give(number, value)
        return merge_results([column.scores for column in columns])


class Environments:
    """Holds the environments of one rank, with their processes and the chat format.

    Only the first rank of an engine starts processes. The other ranks of the engine sample the
    turns that the first rank requests.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        rewards: Sequence[RewardConfig],
        loaded: Sequence[Reward],
        tokenizer: Any,
        limits: EpisodeLimits,
        log_file: Path | None,
        check: Callable[[], None],
        secrets: Collection[str] = (),
    ) -> None:
        """`loaded` are the reward functions of `rewards`. What environments print goes to
        `log_file`; a rank that shall start no processes has None there. `check` and `secrets` are
        as in ProcessPool.

        Raises ConfigError for a file that cannot be imported, and for an unsuitable chat template.
        """
        self._config = config
        self._limits = limits
        self.other_rewards: list[RewardConfig] = []
        """The rewards that a reward pool computes."""
        self.looking_rewards: list[RewardConfig] = []
        """The rewards whose functions take `environments`; they run in the environments'
        processes."""
        self.weights: dict[str, float] = {}
        """The weights of all rewards by name, in the order in which they are summed."""
        # Only an environment's own process can pass the environment to a reward function.
        names = set[str]()
        for reward, function in zip(rewards, loaded, strict=True):
            self.weights[function.name] = function.weight
            if function.looks_at_environments:
                self.looking_rewards.append(reward)
            else:
                self.other_rewards.append(reward)
                names.add(function.name)
        self._pool: EnvironmentPool | None = None
        self._endpoint: Endpoint | None = None
        self._opened = ExitStack()
        self.scorer = EnvironmentScorer([])
        """The scorer of the rewards that environments give."""
        if log_file is None:
            return
        # The pool starts processes, so a failure below must end them.
        pool = EnvironmentPool(config, self.looking_rewards, log_file, check=check, secrets=secrets)
        with ExitStack() as stack:
            stack.callback(pool.close)
            facts = pool.facts
            duplicates = sorted(names.intersection(facts.weights))
            if duplicates:
                raise ConfigError(
                    f"environment: its reward is called {duplicates[0]!r}, as one of `rewards` "
                    "is; give that one another name"
                )
            self._chat = ChatFormat(
                tokenizer,
                config.history,
                facts.tools,
                environment=facts.kind,
                max_turns=config.max_turns,
            )
            _log.info("chat template: %s", self._chat.note)
            if facts.kind == "agent":
                self._endpoint = stack.enter_context(Endpoint())
                pool.connect(self._endpoint)
            self._opened = stack.pop_all()
        self._pool = pool
        self.scorer = EnvironmentScorer(list(facts.weights))
        # Rewards are summed in this order: first those of the config, then the environments' own.
        self.weights |= facts.weights
        doctor.describe_waiting_with(pool.where)

    def close(self) -> None:
        """Ends the environments' processes and the endpoint."""
        self._opened.close()

    def statuses(self, groups: Sequence[RolloutGroup]) -> dict[str, Counter[str]]:
        """Returns {"(environment)": number of episodes by status}.

        The statuses are those of rewards: "ok", "error" and "timeout". With them the caller stops
        an evaluation in which too many environments failed (check_error_rate).
        """
        words = {"env_error": "error", "env_timeout": "timeout"}
        statuses = Counter(
            words.get(completion.episode.status, "ok")
            for group in groups
            for completion in group.completions
            if completion.episode is not None
        )
        return {"(environment)": statuses}

    def generate(
        self,
        engine: RolloutEngine,
        job_sizes: Sequence[int],
        task: Callable[[ConversationId], EpisodeTask],
        policy_version: int,
        *,
        evaluation: EvalConfig | None = None,
        finished: OnCompletion | None = None,
        expected: Sequence[float] | None = None,
    ) -> dict[int, list[list[Completion]]]:
        """Collective. Samples an episode for each conversation.

        Returns a dict from job to a list that holds one list with one completion for each
        conversation, as RolloutEngine.generate_shared does. The first rank of an engine gets all
        jobs of the engine, the other ranks get none. `task` returns the prompt and the seeds of a
        conversation. `evaluation` has the settings of an evaluation; None for rollouts. `finished`
        is called with each completion. `expected` is as in `rollout.sample.generate`.
        """
        if self._pool is None:
            # Only the first rank of an engine runs episodes. The engine asks that rank alone for
            # late requests, so here any object will do.
            nobody: Any = object()
            hooks = GenerationHooks(lambda *_: LATER, late_requests=nobody)
            engine.generate_shared(job_sizes, hooks, policy_version, expected)
            return {}
        shared: dict[str, Any] = {
            "pool": self._pool,
            "chat": self._chat,
            "limits": self._limits,
            "task": task,
            "evaluation": evaluation,
            "discount": self._config.discount,
            "finished": finished,
        }
        # Agents request turns themselves; tools and gym environments answer the policy's turns.
        episodes = (
            AgentEpisodes(endpoint=self._endpoint, **shared)
            if self._endpoint is not None
            else Episodes(**shared)
        )
        try:
            hooks = GenerationHooks(episodes.next_request, late_requests=episodes)
            jobs = engine.generate_shared(job_sizes, hooks, policy_version, expected)
        finally:
            episodes.close()
        return {
            job: [[episodes.completions[job, number]] for number in range(len(completions))]
            for job, completions in jobs.items()
        }

"""What a run's episodes are made with: the processes of its environments, the chat format, the limits."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, RewardConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import ConversationId, EpisodeTask, GenerationHooks, OnCompletion
from grpo_spmd.episodes.agent_episodes import AgentEpisodes
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.endpoint import Endpoint
from grpo_spmd.episodes.episodes import Episodes, FollowerEpisodes
from grpo_spmd.episodes.open_episode import EpisodeLimits
from grpo_spmd.episodes.pool import EnvironmentPool
from grpo_spmd.episodes.scores import EnvironmentScorer
from grpo_spmd.records import Completion, RolloutGroup
from grpo_spmd.rewards.protocol import Reward

_log = logging.getLogger("grpo_spmd")


class Environments(AbstractContextManager["Environments"]):
    """Of one rank. On the ranks of an engine that are not its first, nothing is started: they sample what they are
    told."""

    def __init__(
        self,
        config: EnvironmentConfig,
        rewards: Sequence[RewardConfig],
        loaded: Sequence[Reward],
        tokenizer: Any,
        limits: EpisodeLimits,
        log_file: Path | None,
        check: Callable[[], None],
    ) -> None:
        """`rewards` of the config, and `loaded` what they are; `log_file` gets what environments print; None: nothing
        is started here. `check` as in ProcessPool. Raises ConfigError: a file that cannot be imported, a chat template
        that cannot do what is asked."""
        self._config, self._limits = config, limits
        pairs = list(zip(rewards, loaded, strict=True))
        self.other_rewards = [reward for reward, of in pairs if not of.looks_at_environments]
        self._weights = {
            of.name: of.weight for of in loaded
        }  # as the config lists them, then the environments' own
        self._looking = [reward for reward, of in pairs if of.looks_at_environments]
        self._given: list[str] = []
        self._pool: EnvironmentPool | None = None
        self._endpoint: Endpoint | None = None
        if log_file is None:
            return
        self._pool = EnvironmentPool(config, self._looking, log_file, check=check)
        try:
            facts = self._pool.facts
            own = {of.name for of in loaded if not of.looks_at_environments}
            if twice := sorted(set(facts.reward_names) & own):
                what = f"its reward is called {twice[0]!r}, as one of `rewards` is"
                raise ConfigError(f"environment: {what}; give that one another name")
            self._chat = ChatFormat(
                tokenizer, config.history, facts.tools,
                has_user_turns=facts.kind == "gym", has_tool_results=facts.kind == "tools",
            )  # fmt: skip
        except BaseException:
            self._pool.close()
            raise
        if note := self._chat.note:
            _log.info("chat template: %s", note)
        self._given = facts.reward_names
        self._weights |= zip(facts.reward_names, facts.weights, strict=True)
        doctor.describe_waiting_with(self._pool.where)
        if facts.kind == "agent":
            self._endpoint = Endpoint()
            self._pool.add_file(self._endpoint.fileno())
            self._pool.set_engine_clock(self._endpoint.engine_s)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._endpoint is not None:
            self._endpoint.stop()

    @property
    def looking_rewards(self) -> list[RewardConfig]:
        """The rewards of the config that look at environments."""
        return self._looking

    @property
    def scorer(self) -> EnvironmentScorer:
        """The scorer of the rewards that environments give."""
        return EnvironmentScorer(self._given)

    @property
    def weights(self) -> dict[str, float]:
        """Of all rewards by name, in the order in which they are summed."""
        return self._weights

    def statuses(self, groups: Sequence[RolloutGroup]) -> dict[str, Counter[str]]:
        """How environments did, counted as those of rewards are: an evaluation ends where too many failed."""
        episodes = [
            completion.episode
            for group in groups
            for completion in group.completions
            if completion.episode
        ]
        kinds = {"env_error": "error", "env_timeout": "timeout"}
        return {"(environment)": Counter(kinds.get(one.status, "ok") for one in episodes)}

    def generate(
        self,
        engine: RolloutEngine,
        job_sizes: Sequence[int],
        task: Callable[[ConversationId], EpisodeTask],
        policy_version: int,
        *,
        temperature: float | None = None,
        finished: OnCompletion | None = None,
        expected: Sequence[float] | None = None,
    ) -> dict[int, list[list[Completion]]]:
        """Collective. An episode for each place, as RolloutEngine.generate_shared makes completions: by job, a list of
        one for each. The first rank of an engine has all of its jobs, the others have none."""
        talks = self._episodes(task, temperature, finished)
        try:
            done = engine.generate_shared(
                job_sizes,
                GenerationHooks(talks.next_request, late_requests=talks),
                policy_version,
                expected,
            )
        finally:
            talks.close()
        if self._pool is None:
            return {}
        return {
            job: [[talks.completions[job, number]] for number in range(len(of_job))]
            for job, of_job in done.items()
        }

    def _episodes(
        self,
        task: Callable[[ConversationId], EpisodeTask],
        temperature: float | None,
        finished: OnCompletion | None,
    ) -> FollowerEpisodes:
        if self._pool is None:
            return FollowerEpisodes()
        if self._endpoint is not None:
            parts = self._endpoint, self._pool, self._chat, self._limits
            return AgentEpisodes(*parts, task, temperature=temperature, finished=finished)
        common, discount = (self._pool, self._chat, self._limits), self._config.discount
        return Episodes(
            *common, task, temperature=temperature, discount=discount, finished=finished
        )

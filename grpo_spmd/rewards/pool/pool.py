"""This module scores completions in worker processes, with a deadline for each call and exact
counts.

A *call* is one call of a reward function, for one completion or for a whole group. The processes
are those of processes.py; each call goes to any free worker, and a call past its deadline is killed
with its process. protocol.py says what becomes of failures. With W workers and h completions that
hang, scoring takes about (h + number of groups that they are in) / W + 1 deadlines.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.call_limits import Call, CallLimits
from grpo_spmd.rewards.pool.nursery import encode_frame
from grpo_spmd.rewards.pool.processes import HowItFailed, ProcessPool, WorkerProcess, allow_workers
from grpo_spmd.rewards.protocol import RewardError, RewardFacts, check_error_rate
from grpo_spmd.rewards.scorers import sum_rewards
from grpo_spmd.rewards.trl import FailedCallError, TrainerState

_log = logging.getLogger("grpo_spmd")
# Seconds of a worker's time for one completion. Slower rewards are called early.
_SLOW_S = 0.003
# How many reasons a warning shows.
_MAX_SHOWN = 3


class _Reply(msgspec.Struct):
    """The reply that worker.call_reward returns. User code runs in the process that sends it."""

    values: list[float | str | None] | None = None
    metrics: dict[str, tuple[float, int]] = {}
    extra: dict[str, list[Any]] = {}
    left_out: list[str] = []
    seconds: float = math.inf
    failed: str | None = None
    broken: str | None = None
    quit: bool = False
    failure: FailedCallError | None = None


class _Result(NamedTuple):
    """What a reward gave a completion."""

    # NaN marks a failed reward; None means that the reward does not apply.
    value: float | None
    status: str
    error: str = ""


@dataclass(eq=False)
class _Sample:
    """One completion to score. Dicts are indexed by the number of a reward."""

    text: str
    inputs: dict[str, Any]
    """The keyword arguments of the reward functions."""
    results: dict[int, _Result] = field(default_factory=dict)
    group_errors: dict[int, str] = field(default_factory=dict)
    """The errors of calls for a whole group, kept at the group's first completion."""
    notes: defaultdict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Notes as in ScoredRollouts, by kind and reward."""


class RewardPool(ProcessPool):
    """Scores rollouts in `pool.num_workers` processes, which `close()` ends.

    Only the thread that made the pool may use it.
    """

    _what = "reward"

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        pool: RewardPoolConfig,
        log_file: Path,
        *,
        columns: Collection[str] = (),
        check: Callable[[], None] = lambda: None,
        ranks: tuple[int, int] = (0, 1),
        watched: Collection[str] = (),
        secrets: Collection[str] = (),
    ) -> None:
        """Starts the nursery, which imports the rewards; `load_rewards` has checked them.

        What reward functions print goes to `log_file`; the file and its folder are made at the
        first scoring. `columns` are all columns of the data sets: a row that lacks one passes None
        for it. `check` is called twice a second during scoring; an exception from it ends the
        scoring. `ranks` is (this rank, number of ranks); the ranks share limits of calls.
        Timeouts of the rewards named in `watched` never end a scoring. `secrets` is as in
        ProcessPool.
        """
        allow_workers(pool.num_workers, "reward_pool.num_workers")
        # Servers are asked with secrets that the functions beside them do not inherit.
        names = {name for reward in rewards for name in reward.headers_env.values()}
        setup = {
            "timeout_s": pool.timeout_s,
            "secrets": {name: os.environ[name] for name in names if name in os.environ},
        }
        super().__init__(
            "grpo_spmd.rewards.pool.worker",
            setup,
            rewards,
            log_file=log_file,
            check=check,
            secrets={*secrets, *names},
        )
        self._pool = pool
        self._columns = tuple(columns)
        self._watched = watched
        # The facts are known when the nursery has imported the rewards.
        self._rewards: list[RewardFacts] = []
        self._is_ready = False
        self._state = TrainerState()
        self._slow = SlowRewards([waits_for_others(reward) for reward in rewards])
        self._limits = CallLimits(rewards, pool.timeout_s, *ranks)
        # The completions of the step over all ranks, while `score` waits for a step.
        self._num_step_completions: int | None = None
        self._early_error: Exception | None = None
        self._start_over()

    def begin_step(self, state: TrainerState) -> None:
        """Sets the state of the run that reward functions get from now on."""
        self._state = state

    @property
    def has_slow_rewards(self) -> bool:
        """True if some reward is worth calling while the engine still samples."""
        return bool(self._slow.early)

    def start_early(self, group: RolloutGroup, tokenizer: Any) -> None:
        """Calls the slow rewards for a group while other groups are still sampled. Never waits.

        This very object must be among the next groups that `score` gets. Errors until then are kept
        and raised by `score`. If the rewards are not imported yet, all calls are left to `score`.
        """
        if self._early_error is not None:
            return
        try:
            if self._is_ready or self._selector.select(0.0):
                self._begin()
                self._current.queue(group, tokenizer, self._slow.early)
        except Exception as error:
            self._early_error = error

    def poll(self) -> None:
        """Reads the workers' answers and starts the next calls, between two steps of the engine.

        The answers come first: a worker that has just become free would otherwise be idle for a
        whole step.
        """
        if self._early_error is not None or not self._is_busy():
            return
        try:
            self._listen(0.0)
            self._dispatch()
        except Exception as error:
            self._early_error = error

    def score(
        self,
        groups: Sequence[RolloutGroup],
        tokenizer: Any,
        *,
        num_step_completions: int | None = None,
    ) -> ScoredRollouts:
        """Scores every completion of `groups`, which are this rank's groups of the step (perhaps
        none).

        Calls that `start_early` began are not made again. Raises RewardError if the rewards cannot
        be imported in the nursery, if the nursery was killed, or if the user left the debugger. A
        function may hang in every call. Therefore RewardError is raised too as soon as the timeouts
        on this rank alone are `max_error_frac` of `num_step_completions`, the completions over all
        ranks.
        """
        try:
            if self._early_error is not None:
                raise self._early_error
            scoring = self._current
            if not groups and not scoring.samples:
                return ScoredRollouts()
            self._begin()
            self._limits.wait_for_all()
            rewards = range(len(self._rewards))
            samples = [
                sample for group in groups for sample in scoring.queue(group, tokenizer, rewards)
            ]
            self._num_step_completions = num_step_completions
            # Calls that were begun early may have timed out already.
            self._stop_if_hopeless()
            while self._is_busy():
                self._check()
                self._dispatch()
                self._listen(self._limits.wait_s())
        finally:
            for worker in list(self._workers.values()):
                # Calls are still running only after an exception.
                if worker.call is not None:
                    self._discard(worker)
            self._start_over()
        assert len(samples) == len(scoring.samples), "what was begun early is not in the step"
        scoring.samples = samples
        self._slow.end_scoring()
        scoring.warn()
        return scoring.scores()

    def _start_over(self) -> None:
        """Forgets the scoring that has ended, for the next one."""
        self._current = _Scoring(self._rewards, self._columns)
        self._num_step_completions = None
        self._early_error = None
        self._limits.begin_scoring()

    def _begin(self) -> None:
        """Waits until the nursery has imported the rewards, which gives their facts."""
        # The list may stay empty, as an environment may give all rewards: a flag says if it is
        # known.
        if not self._is_ready:
            self._is_ready = True
            self._rewards += [RewardFacts(**facts) for facts in self._wait_until_ready()]
        self._open_log()

    def _is_busy(self) -> bool:
        """Returns True while calls are queued or running."""
        running = [worker for worker in self._workers.values() if worker.call is not None]
        return bool(self._current.calls or running)

    def _dispatch(self) -> None:
        """Starts the calls that may start now, in free workers and in new ones."""
        scoring = self._current
        limits = self._limits
        for call in limits.take_given_up(scoring.calls):
            for sample in call.samples:
                scoring.fail(Call(call.reward, [sample]), "error", call.error)
        free = [
            worker
            for worker in self._workers.values()
            if worker.call is None and not worker.has_hung_up
        ]
        while scoring.calls and (free or len(self._workers) < self._pool.num_workers):
            started = limits.take_next(scoring.calls)
            if started is None:
                return
            worker = free.pop() if free else self._spawn()
            message = {"reward": started.reward, "keywords": scoring.keywords(started)}
            if self._rewards[started.reward].takes:
                message["state"] = asdict(self._state)
            frame = encode_frame(message)
            try:
                self._give(worker, started, frame, limits.remaining_s(started))
            except OSError:
                # The worker died, or was stopped, between two calls: not this call's fault.
                scoring.calls.appendleft(limits.put_back(started))
                self._discard(worker)

    def _answered(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Records the reply of a call. Raises RewardError for errors that end the run."""
        call: Call = worker.call
        name = self._rewards[call.reward].name
        try:
            reply = msgspec.convert(message, _Reply)
            lists = [reply.values or [], *reply.extra.values()]
            if reply.values is not None and any(len(c) != len(call.samples) for c in lists):
                raise ValueError("not one value a completion")
        except ValueError as error:
            # Errors of msgspec are ValueErrors too.
            self._fail(worker, "error", f"answered with what is no reply: {error!s:.300}")
            return
        # The pool does not listen while the engine makes a step: this time is not the call's.
        seconds = min(time.monotonic() - call.start, reply.seconds)
        # The time counts for failed calls too: a slow failure also keeps a worker busy.
        self._slow.add_call(call.reward, seconds, len(call.samples))
        if reply.quit:
            raise RewardError(f"the debugger was left in reward {name!r}")
        if reply.broken is not None:
            raise RewardError(f"reward {name!r} {reply.broken}")
        self._release(worker)
        if reply.values is not None:
            self._current.record(call, reply)
            self._limits.end(call, "ok")
        elif reply.failure is None:
            self._failed(worker, call, "error", str(reply.failed))
            return
        else:
            call = self._limits.retry(call, reply.failure, seconds)
            if not call.error:
                self._current.calls.append(call)
                return
            self._current.fail(call, "error", call.error, by_function=False)
        self._current.measure(call, self._limits.measure(call, seconds))

    def _failed(
        self, worker: WorkerProcess, call: Call | None, kind: HowItFailed, reason: str
    ) -> None:
        """Records that a call ended without a reply; a worker without a call needs nothing."""
        if call is None:
            return
        self._limits.end(call, "failed", reason)
        seconds = time.monotonic() - call.start
        self._current.measure(call, self._limits.measure(call, seconds))
        self._current.fail(call, kind, reason)
        if kind == "timeout":
            self._slow.add_call(call.reward, self._pool.timeout_s, len(call.samples))
            self._stop_if_hopeless()

    def _too_long(self, worker: WorkerProcess) -> str:
        return f"took longer than timeout_s={self._limits.timeout_s(worker.call):g}"

    def _ended(self, reason: str) -> RewardError:
        return RewardError(reason)

    def _stop_if_hopeless(self) -> None:
        """Raises RewardError if the timeouts so far are already too many for the step."""
        scoring = self._current
        number = self._num_step_completions
        if number is None:
            return
        for index, reward in enumerate(self._rewards):
            num_failed = scoring.count(index)["timeout"]
            statuses = {"timeout": num_failed, "ok": number - num_failed}
            check_error_rate(
                [{reward.name: statuses}],
                [scoring.first_error()],
                self._pool.max_error_frac,
                watched=self._watched,
            )


@dataclass
class _Queued:
    """A group whose calls are queued, for some rewards or for all."""

    # It is kept alive, so that no other object gets its id().
    group: RolloutGroup
    samples: list[_Sample]
    rewards: set[int] = field(default_factory=set)


class _Scoring:
    """The completions that are scored together, and their results."""

    def __init__(self, rewards: Sequence[RewardFacts], columns: Collection[str]) -> None:
        self._rewards = rewards
        # By id(): slots cannot identify groups, as they start at 0 in each round of a step.
        self._groups: dict[int, _Queued] = {}
        self._columns = columns
        # Reasons why something could not be logged, by reward (a dict keeps their order).
        self._left_out: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self.samples: list[_Sample] = []
        # The calls that are still to be made.
        self.calls: deque[Call] = deque()

    def queue(self, group: RolloutGroup, tokenizer: Any, rewards: Collection[int]) -> list[_Sample]:
        """Queues the calls of `rewards` for this very group, except those that were queued before.

        Returns the group's samples.
        """
        if id(group) not in self._groups:
            samples = self._make_samples(group, tokenizer)
            self._groups[id(group)] = _Queued(group, samples)
            self.samples += samples
        queued = self._groups[id(group)]
        for index in sorted({*rewards} - queued.rewards):
            is_alone = self._rewards[index].one_at_a_time
            batches = [[sample] for sample in queued.samples] if is_alone else [[*queued.samples]]
            self.calls.extend(Call(index, batch) for batch in batches)
        queued.rewards.update(rewards)
        return queued.samples

    def _make_samples(self, group: RolloutGroup, tokenizer: Any) -> list[_Sample]:
        token_ids = [completion.token_ids for completion in group.completions]
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        needed = [name for reward in self._rewards for name in reward.needs]
        absent = dict.fromkeys([*self._columns, *needed])
        samples: list[_Sample] = []
        for completion, text in zip(group.completions, texts, strict=True):
            is_text = isinstance(group.prompt.text, str)
            answer = text if is_text else [{"role": "assistant", "content": text}]
            if completion.episode is not None:
                answer = completion.episode.messages
            call_columns = {
                "prompts": group.prompt.text_before(completion),
                "completions": answer,
                "completion_ids": completion.token_ids,
            }
            inputs = absent | group.prompt.columns | call_columns
            samples.append(_Sample(text, inputs))
        return samples

    def keywords(self, call: Call) -> dict[str, list[Any]]:
        """Returns the keyword arguments of a call: all columns of the data set, the functions and
        the row."""
        rows = [sample.inputs for sample in call.samples]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def record(self, call: Call, reply: _Reply) -> None:
        """Keeps the rewards of a call and the values that its function logged."""
        assert reply.values is not None
        for sample, value in zip(call.samples, reply.values, strict=True):
            if isinstance(value, str):
                self.fail(Call(call.reward, [sample]), "error", value)
            else:
                status = "not_applicable" if value is None else "ok"
                sample.results[call.reward] = _Result(value, status)
        self._left_out[call.reward] |= dict.fromkeys(reply.left_out)
        name = self._rewards[call.reward].name
        if reply.metrics:
            logged = call.samples[0].notes["logged"].setdefault(name, {})
            logged |= {metric: [*pair] for metric, pair in reply.metrics.items()}
        if reply.extra:
            for i, sample in enumerate(call.samples):
                extra = {column: values[i] for column, values in reply.extra.items()}
                sample.notes["extra"][name] = extra

    def measure(self, call: Call, metrics: Mapping[str, list[float]]) -> None:
        """Keeps the metrics of a call next to the values that its function logged.

        The requests for a group count at its first completion, together with the first completion's
        own requests. The seconds are those of the last request.
        """
        if not metrics:
            return
        name = self._rewards[call.reward].name
        logged = call.samples[0].notes["logged"].setdefault(name, {})
        for metric, (value, number) in metrics.items():
            known_value, known_number = logged.get(metric, (0, 0)) if metric != ".s" else (0, 0)
            logged[metric] = [known_value + value, known_number + number]

    def fail(
        self, call: Call, status: HowItFailed, reason: str, *, by_function: bool = True
    ) -> None:
        """Notes a failure, or queues one call for each completion to learn which one is to blame.

        With `by_function` False a server could not be reached. It may be back by then, and its
        absence says nothing about the reward.
        """
        reason = f"reward {self._rewards[call.reward].name!r} {reason}"
        sample = call.samples[0]
        if len(call.samples) > 1:
            sample.group_errors[call.reward] = reason
            if by_function:
                sample.notes["retried"][self._rewards[call.reward].name] = status
            self.calls.extend(Call(call.reward, [sample]) for sample in call.samples)
            return
        sample.results[call.reward] = _Result(math.nan, status, reason)

    def results(self, reward: int) -> list[_Result]:
        """Returns the results of a reward so far, in the order of completions."""
        return [sample.results[reward] for sample in self.samples if reward in sample.results]

    def count(self, reward: int) -> Counter[str]:
        """Returns how often a reward gave each status so far."""
        return Counter(result.status for result in self.results(reward))

    def errors(self, reward: int) -> list[str]:
        """Returns the errors of a reward, in the order of completions."""
        return [result.error for result in self.results(reward) if result.error]

    def group_errors(self, reward: int) -> list[str]:
        """Returns why calls for whole groups failed, in the order of groups."""
        return [s.group_errors[reward] for s in self.samples if reward in s.group_errors]

    def first_error(self) -> str | None:
        """Returns the first error of the reward that failed most, None if none did."""
        rewards = range(len(self._rewards))
        errors = max(map(self.errors, rewards), key=len, default=[])
        group_errors = [error for reward in rewards for error in self.group_errors(reward)]
        return next(iter([*errors, *group_errors]), None)

    def scores(self) -> ScoredRollouts:
        """Returns the scores of all samples."""
        results = {reward.name: self.results(i) for i, reward in enumerate(self._rewards)}
        by_name = {name: [result.value for result in row] for name, row in results.items()}
        weights = {reward.name: reward.weight for reward in self._rewards}
        return ScoredRollouts(
            rewards=sum_rewards(by_name, weights, len(self.samples)),
            by_name=by_name,
            statuses={name: [result.status for result in row] for name, row in results.items()},
            first_error=self.first_error(),
            texts=[sample.text for sample in self.samples],
            reward_inputs=[sample.inputs for sample in self.samples],
            # Sorted, so that the result does not depend on which worker was first.
            notes={
                number: {
                    kind: dict(sorted(by_reward.items()))
                    for kind, by_reward in sorted(sample.notes.items())
                }
                for number, sample in enumerate(self.samples)
                if sample.notes
            },
        )

    def warn(self) -> None:
        """Logs what failed and what could not be logged, one line for each reward."""
        for index, reward in enumerate(self._rewards):
            left_out = list(self._left_out[index])[:_MAX_SHOWN]
            if left_out:
                _log.warning("reward %r: not logged: %s", reward.name, "; ".join(left_out))
            counts = self.count(index)
            errors = self.errors(index)
            group_errors = self.group_errors(index)
            failures = (
                f"{len(errors)} of {len(self.samples)} completions failed "
                f"({counts['timeout']} timeout, {counts['error']} error)"
            )
            if not errors:
                failures = (
                    f"it failed for {len(group_errors)} groups and was called again "
                    "for each of their completions"
                )
            for error in [*errors, *group_errors][:1]:
                summary = error.partition("\n")[0]
                _log.warning("reward %r: %s; first: %s", reward.name, failures, summary)


class SlowRewards:
    """Decides which rewards are called while the engine still samples: those where it saves time.

    A reward that mostly waits for others (servers, functions under limits of calls) is always
    called early. Any other function is called early only if it kept a worker busy for long when it
    was last called: the engine needs the CPU too, and a cheap function is quickly done after it. So
    in a run's first step such functions are called after the engine, unless an evaluation has
    measured them. The value of a reward does not depend on when it is called.
    """

    def __init__(self, always: Sequence[bool]) -> None:
        """`always` has True, by the number of a reward, if the reward is slow before any call of
        it."""
        self._always = frozenset(reward for reward, is_slow in enumerate(always) if is_slow)
        self.early = self._always
        # Of the calls since the last scoring, by reward.
        self._seconds = defaultdict[int, float](float)
        self._num_completions = Counter[int]()

    def add_call(self, reward: int, seconds: float, num_completions: int) -> None:
        """Adds the seconds of a call for `num_completions` completions."""
        self._seconds[reward] += seconds
        self._num_completions[reward] += num_completions

    def end_scoring(self) -> None:
        """Chooses the rewards that are called early from now on: those that were slow in this
        scoring.

        A reward that was not called stays as it was.
        """
        called = self._num_completions
        slow = {reward for reward in called if self._seconds[reward] > _SLOW_S * called[reward]}
        self.early = self._always | slow | (self.early - called.keys())
        self._seconds.clear()
        called.clear()


def waits_for_others(reward: RewardConfig) -> bool:
    """Returns True for a reward that mostly waits: for its server, or for its limits of calls."""
    limits = (reward.url, reward.max_concurrent, reward.max_per_minute)
    return any(limit is not None for limit in limits)

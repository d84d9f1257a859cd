"""What a teacher, a critic and a reward model add to a step: memory, forward passes and time,
beside the plain step of the same rollouts.

A step here is what the trainer does while the engine sleeps, from completions to the models that
wait in host memory again; sampling and sync are the same whatever teaches. One policy and optimizer
make all of them, in turn, on 64 rollouts of the `update` benchmark's lengths; teacher, critic and
reward model are of the policy's size, alone on one rank, so that each is held whole. `to_plain` is
the ratio to the plain step of the same round (median, min, max).

Counted: `forward` and `trained` are passes of the step's tokens through the first decoder layers of
all models, without and with a gradient, by hooks behind FSDP's; `calls` how often such a layer was
called. `held_mib` are parameters and moments on the device while the step is made, `waiting_mib`
those of them that are in host memory while the engine is awake, `peak_mib` all other tensors at
their peak (gradients, gathered parameters, activations). Rewards are the same in all steps: the
reward model's scores are taken, and not trained on.

    benchmarks/run.sh signals [--size 0.5b|1.5b|tiny] [--json FILE]
With --size a model of Qwen2.5's shape in bfloat16, as `update` has it; for a GPU.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.speed import gpu
from benchmarks.speed.update import MODELS, base_config, made_rollouts, peak_tensor_bytes, sized
from benchmarks.support.models import make_large_model, make_model
from benchmarks.support.ranks import time_in_turn
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from grpo_spmd.config.schema import Config, CriticConfig, RewardConfig, TeacherConfig
from grpo_spmd.demo.countdown import make_tokenizer
from grpo_spmd.demo.making import model_config
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.learn.update import PolicyUpdater, attach_logprobs
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.model.offload import HostOffload, optimizer_state, storage_of
from grpo_spmd.model.policy import Policy, build_policy
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.model.values import RewardModel, build_reward_model
from grpo_spmd.records import Completion, Prompt, Rollout, RolloutGroup, ScoredRollouts
from grpo_spmd.rollout.reward_models import ModelReward, RewardTexts
from grpo_spmd.signals.opening import Signals, open_signals

_ROUNDS, _GROUP_SIZE, _NUM_ROLLOUTS, _MIB = 5, 8, 64, 2**20


@dataclass
class Passes:
    """Through first decoder layers: tokens without and with a gradient, calls, and the most bytes
    held at one."""

    held_bytes: Callable[[], int]
    tokens: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    calls: int = 0
    most_held: int = 0

    def count(self, _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        hidden = inputs[0] if inputs else named["hidden_states"]
        self.tokens[torch.is_grad_enabled()] += hidden.shape[0] * hidden.shape[1]
        self.calls, self.most_held = self.calls + 1, max(self.most_held, self.held_bytes())


@dataclass
class Step:
    """One kind of step, over the same rollouts as all others."""

    config: Config
    session: Session
    policy: Policy
    updater: PolicyUpdater
    signals: Signals
    reward_model: tuple[RewardModel, ModelReward] | None
    rollouts: list[Rollout]

    def __post_init__(self) -> None:
        extra = self.signals.offloadable_models
        self.offload = HostOffload(
            self.config.model.offload, self.policy, None, self.updater.optimizer, extra
        )
        scored = [self.reward_model[0]] if self.reward_model else []
        self.models = [self.policy, *(model for model, _ in extra), *scored]
        self.optimizers = [self.updater.optimizer, *(local for _, local in extra if local)]
        # of the shards: within a forward pass a parameter is what was gathered of it
        self.shards = [
            storage_of(parameter) for model in self.models for parameter in model.parameters()
        ]
        self.groups = _groups(self.rollouts)
        self.num_tokens = sum(
            len(g.prompt.token_ids) + len(c.token_ids) for g in self.groups for c in g.completions
        )

    def run(self) -> Reductions:
        """As loop.py has it."""
        self.score()
        self.offload.to_device()
        result = self.train()
        self.rest()
        return result

    def score(self) -> None:
        if self.reward_model is not None:
            result = self.reward_model[1].score(self.groups, [""] * len(self.rollouts), None)
            assert {*result.statuses["model"]} == {"ok"}

    def rest(self) -> None:
        self.offload.before_sync()
        self.offload.after_sync()

    def train(self) -> Reductions:
        config, sampled = self.config, self._sampled()
        batch, decision = assemble_batch(sampled, self.session)
        attach_logprobs(self.policy, None, batch, config.loss, config.training.num_optimizer_steps)
        self.signals.attach(batch, decision, lambda _: None, sampled)
        return self.updater.update(batch) | self.signals.update(batch)

    def _sampled(self) -> SampledStep:
        config, rewards = self.config, [float(len(r.completion_ids) % 7) for r in self.rollouts]
        sections = config.rollout, config.advantage, config.loss, config.training
        sampled = SampledStep(
            StepRules(*sections, config.reward_pool.max_error_frac, self.session.world_size)
        )
        statuses = {"length": ["ok"] * len(rewards)}
        sampled.add(
            self.groups,
            ScoredRollouts([*rewards], {"length": [*rewards]}, statuses, texts=[""] * len(rewards)),
        )
        return sampled

    def held_bytes(self) -> int:
        """Of parameters and moments, on the device now."""
        moments = (
            storage_of(item) for optimizer in self.optimizers for item in optimizer_state(optimizer)
        )
        return sum(
            {storage._cdata: storage.nbytes() for storage in (*self.shards, *moments)}.values()
        )

    @contextmanager
    def counted(self) -> Iterator[Passes]:
        passes, hooks = Passes(self.held_bytes), []
        for model in self.models:
            layers = next(
                (piece for piece in model.modules() if isinstance(piece, nn.ModuleList)), None
            )
            if layers is None:  # a head alone
                continue
            hooks.append(layers[0].register_forward_pre_hook(passes.count, with_kwargs=True))
        yield passes
        for hook in hooks:
            hook.remove()


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--size", choices=gpu.SIZES, help="a model of this size, in bfloat16")
    parser.add_argument(
        "--folder", type=Path, help="where the models stay; default: a temporary one"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # that the reward model's head is new
    session = start_session()
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        name, config, rollouts = _made(Path(folder), args.size)
        rows = measure(name, steps_of(config, rollouts, Path(folder), session))
    end_session()
    report("signals", rows, args.json)


def _made(folder: Path, size: str | None) -> tuple[str, Config, list[Rollout]]:
    """Writes `folder`/policy, /teacher and /reward_model. Their size in words, what trains the
    policy, and on what."""
    policy, name = folder / "policy", size or MODELS[0][0]
    for number, path in enumerate((policy, folder / "teacher")):
        if size is not None:
            make_large_model(
                path, transformers.Qwen2Config(**gpu.model_config(gpu.SIZES[size])), seed=number
            )
        else:
            sizes = MODELS[0][1] | {
                "num_key_value_heads": 2,
                "head_dim": 64,
                "max_position_embeddings": 512,
            }
            make_model(path, model_config(**sizes), seed=number)
    kind, options = (
        transformers.AutoModelForSequenceClassification,
        {"num_labels": 1, "pad_token_id": None},
    )
    kind.from_pretrained(folder / "teacher", trust_remote_code=False, **options).save_pretrained(
        folder / "reward_model"
    )
    make_tokenizer(folder / "reward_model")
    if size is not None:
        config, rollouts = sized(size, str(policy), _NUM_ROLLOUTS)
    else:
        config, rollouts = (
            base_config(str(policy)),
            made_rollouts(_NUM_ROLLOUTS, MODELS[0][1]["vocab_size"]),
        )
    sampling = replace(
        config.rollout, num_prompts_per_step=_NUM_ROLLOUTS // _GROUP_SIZE, group_size=_GROUP_SIZE
    )
    return name, replace(config, rollout=sampling), rollouts


def _groups(rollouts: list[Rollout]) -> list[RolloutGroup]:
    groups = []
    for slot, start in enumerate(range(0, len(rollouts), _GROUP_SIZE)):
        group = rollouts[start : start + _GROUP_SIZE]
        completions = [
            Completion([*r.completion_ids], [*r.rollout_logprobs], "stop") for r in group
        ]
        groups.append(
            RolloutGroup(slot, Prompt(slot, slot, [*group[0].prompt_ids], "", {}), completions)
        )
    return groups


def steps_of(
    config: Config, rollouts: list[Rollout], folder: Path, session: Session
) -> dict[str, Step]:
    """By what teaches, the plain step first."""
    temperature, max_length = config.rollout.temperature, config.max_rollout_tokens
    policy = build_policy(config.model, temperature, session, max_rollout_tokens=max_length)
    update_values = config.optimizer, config.loss, config.training, max_length
    updater = PolicyUpdater(policy, *update_values)
    gae = replace(config.advantage, estimator="gae", normalize_std="batch")
    teaches: dict[str, dict[str, Any]] = {
        "plain": {},
        "teacher, sampled": {"teacher": TeacherConfig(path=f"{folder}/teacher")},
        "teacher, topk": {"teacher": TeacherConfig(path=f"{folder}/teacher", loss="topk")},
        "teacher, full": {"teacher": TeacherConfig(path=f"{folder}/teacher", loss="full")},
        "critic": {"critic": CriticConfig(path=f"{folder}/teacher"), "advantage": gae},
        "critic on the policy": {"critic": CriticConfig(path="policy"), "advantage": gae},
        "reward model": {},
    }
    steps = {}
    for name, sections in teaches.items():
        local = replace(config, **sections)
        signals = open_signals(local, policy, session)
        scores = _reward_model(local, folder, session) if name == "reward model" else None
        its_updater = (
            updater
            if signals.value_head is None
            else PolicyUpdater(policy, *update_values, signals.value_head)
        )
        steps[name] = Step(local, session, policy, its_updater, signals, scores, rollouts)
    return steps


def _reward_model(
    config: Config, folder: Path, session: Session
) -> tuple[RewardModel, ModelReward]:
    reward, budget = RewardConfig(model=str(folder / "reward_model"), name="model"), config.training
    files = read_reward_model(0, reward, folder / "reward_model", budget.micro_batch_tokens)
    model = build_reward_model(files, config.model, session)
    texts = RewardTexts(files, load_tokenizer(config.model.path))
    return model, ModelReward("model", model, texts, budget.micro_batch_tokens)


def measure(model: str, steps: dict[str, Step]) -> list[Row]:
    """A row for each step, after one of each that is not timed."""
    seconds, initial = time_in_turn({name: step.run for name, step in steps.items()}, _ROUNDS)
    for name, sums in initial.items():  # each teacher was heard, and the critic learnt
        for word, metric in {"teacher": "teacher/kl", "critic": "critic/loss"}.items():
            assert not name.startswith(word) or sums[metric].value, name
        assert sums["loss_tokens"].value == initial["plain"]["loss_tokens"].value, name
    return [
        _row(model, name, step, seconds[name], seconds["plain"]) for name, step in steps.items()
    ]


def _row(model: str, name: str, step: Step, seconds: list[float], plain: list[float]) -> Row:
    with step.counted() as passes:
        step.run()
    waiting = passes.most_held - step.held_bytes()  # as while the engine is awake
    # its parameters, which come and go, are held
    scores_values = (
        peak_tensor_bytes(step.score) - waiting if step.reward_model is not None else 0.0
    )
    step.offload.to_device()
    peak = max(peak_tensor_bytes(step.train), scores_values)
    step.rest()
    return {
        "model": model,
        "signal": name,
        "rollouts": len(step.rollouts),
        "tokens": step.num_tokens,
        "forward": passes.tokens[False] / step.num_tokens,
        "trained": passes.tokens[True] / step.num_tokens,
        "calls": passes.calls,
        "held_mib": passes.most_held / _MIB,
        "waiting_mib": waiting / _MIB,
        "peak_mib": peak / _MIB,
        "seconds": statistics.median(seconds),
        **spread("to_plain", ratios(seconds, plain)),
    }


if __name__ == "__main__":
    main()

"""One tree of frozen dataclasses. Every value of a run lives here once: its type, default, bounds and meaning."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.config.critic import CriticConfig
from grpo_spmd.config.environment import EnvironmentConfig
from grpo_spmd.config.key import key, required
from grpo_spmd.config.logging_keys import LoggingConfig
from grpo_spmd.config.recipes import Algorithm
from grpo_spmd.config.reward_keys import RewardConfig, RewardPoolConfig
from grpo_spmd.config.teacher import TeacherConfig

# The phases of a step, in their order: timers, metrics and limits bear these names.
PHASES = ("weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint")
SYNC_BUCKET_MIB = {"cpu": 16, "cuda": 256}  # what weight_sync_bucket_mib is where it is null
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM makes room for


# The sections are a table: a key's type and default on one line, and its sentence below where that line is full.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    rank: int = key(0, "rank of the adapters; 0: full fine-tuning", at_least=0)
    alpha: float = key(32.0, "the adapters' product counts alpha / rank", above=0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = key("all-linear",
        "names of the layers that get one, or all but the lm_head")
    sync: Literal["merged", "adapter"] = key("merged",
        "what the engine gets: base plus adapters, or, after the start, the adapters alone")

    @property
    def base_stays_in_engine(self) -> bool:
        """The weight sync brings adapters alone, so that the engine must not lose the weights that they go with."""
        return self.rank > 0 and self.sync == "adapter"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = required("folder with config.json, safetensors and a tokenizer, or a hub id")
    dtype: Literal["float32", "bfloat16"] = key("bfloat16",
        "compute dtype of policy and engine; master weights are float32")
    attention: Literal["auto", "flash", "sdpa"] = key("auto",
        "auto: flash-attn on a GPU where it is installed, else torch's own varlen attention; on the CPU sdpa")
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    activation_checkpointing: bool | Literal["selective"] = key(False,
        "recompute activations in the backward pass: true: of whole layers; selective: of all but their products")
    offload: bool | Literal["optimizer"] = key(False,
        "keep in host memory while the engine is awake: optimizer: its state; true: the policy's parameters too")
    compile: bool = key(False, "torch.compile the layers")
    num_replicas: int = key(1,
        "copies of the policy (HSDP): each is sharded over ranks / this many consecutive ranks", at_least=1)
    logprob_chunk_tokens: int = key(1024, "tokens whose [tokens, vocabulary] logits exist at one time", at_least=1)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: str = required("a .jsonl or .parquet file, or hub:REPO:SUBSET:SPLIT (SUBSET may be empty)")
    eval: dict[str, Any] | str = key({}, "held-out sets, {name: source as in data.train}; or one source")
    prompt_key: str = key("prompt", "column that holds the prompt: a string, or a list of chat messages")
    prompt_template: str | None = key(None, "in place of prompt_key, columns in braces: 'Use {nums} to make {target}'")
    as_chat: bool = key(False, "send a string prompt through the tokenizer's chat template as one user message")
    system_prompt: str | None = key(None, "system message put before a chat prompt that has none")
    max_prompt_tokens: int = key(512, "longest prompt, in tokens", at_least=1)
    on_long_prompt: Literal["error", "drop"] = key("error", "a longer prompt: refuse to start, or drop it and count")
    shuffle: bool = key(True, "a new order each epoch, a function of seed and epoch alone")

    @property
    def eval_sets(self) -> dict[str, str]:
        """The held-out sets by name; a single source is named after its file or hub repository."""
        if isinstance(self.eval, str):
            name = self.eval.split(":")[1] if self.eval.startswith("hub:") else self.eval
            return {Path(name).stem: self.eval} if self.eval else {}
        return self.eval


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    num_prompts_per_step: int = key(64, "prompts a step over all ranks (P)", at_least=1)
    group_size: int = key(8, "completions per prompt (G)", at_least=2)
    max_completion_tokens: int = key(1024, "longest completion, in tokens", at_least=1)
    # vLLM would silently sample at 0.01 what is asked for at less.
    temperature: float = key(1.0, "sampling temperature, also of the policy's logprobs", at_least=0.01)
    tensor_parallel_size: int = key(1, "ranks that share one engine", at_least=1)
    dynamic_sampling: bool = key(False, "drop groups whose rewards are all alike, and refill from further prompts")
    dynamic_sampling_max_rounds: int = key(10,
        "rounds of generation after which such a step trains on the groups that it has", at_least=1)
    tail_batching: float = key(1.0,
        "launch this many times num_prompts_per_step, train on the first to finish, let the others wait; 1: off",
        at_least=1)
    gpu_memory_utilization: float = key(0.6,
        "share of its memory that the engine may take (GPU only)", above=0, below=1)
    schedule: Literal["shared_queue", "static"] = key("shared_queue",
        "shared_queue: engines claim groups as they get free, the longest expected first; static: each has its share")
    sleep_level: Literal[1, 2] | None = key(None,
        "asleep on a GPU, 1 keeps the engine's weights in host memory, 2 drops them; null: what the sync needs")
    weight_sync_bucket_mib: int | None = key(None,
        "MiB of one gather of the weight sync, over all its ranks; null: 256 on GPUs, 16 on a CPU", at_least=1)
    engine: dict[str, Any] = key({}, "passed through to vllm.LLM")

    @property
    def num_launched_prompts(self) -> int:
        """Of a short round of tail batching; without it those of a step."""
        return math.ceil(round(self.num_prompts_per_step * self.tail_batching, 6))  # 100 * 1.1 is above 110

    def sync_bucket_bytes(self, device: str) -> int:
        return (self.weight_sync_bucket_mib or SYNC_BUCKET_MIB[device]) << 20

    def sleep_level_with(self, lora: LoraConfig) -> int:
        """`sleep_level`, or what the weight sync needs: 2 where it brings every weight, 1 where the base stays."""
        return self.sleep_level or (1 if lora.base_stays_in_engine else 2)


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "max_rl", "gae"] = key("grpo",
        "grpo: minus the group's mean, scaled by normalize_std; dr_grpo: never scaled; rloo: minus the mean of the "
        "others; reinforce_pp: minus the mean of the step's rewards, over their standard deviation; max_rl: minus the "
        "group's mean, over that mean; gae: PPO's, of each token, from the critic's values")
    normalize_std: Literal["group", "batch", "none"] = key("group",
        "which standard deviation grpo divides by; of gae batch whitens over the step's tokens, or none")
    overlong_buffer_tokens: int = key(0,
        "completions that end within this many tokens of the longest are punished, linearly; 0: none", at_least=0)
    overlong_penalty: float = key(1.0, "what a completion of the full length loses of its reward", at_least=0)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    policy: Literal["clip", "gspo", "cispo"] = key("clip",
        "clip: PPO's, a ratio for each token; gspo: one for each sequence; cispo: a clipped, detached ratio as weight")
    clip_ratio_low: float = key(0.2, "the ratio is clipped below at 1 - this; 1: never", above=0, at_most=1)
    clip_ratio_high: float = key(0.28, "the ratio is clipped above at 1 + this", above=0)
    dual_clip: float | None = key(3.0,
        "where the advantage is negative the ratio counts as this at most (clip, gspo); null: no bound", above=1)
    aggregation: Literal["token", "sequence", "constant"] = key("token",
        "mean over tokens; over sequences of their token means; or token sum over sequences * "
        "rollout.max_completion_tokens")
    mask_truncated: bool = key(False,
        "leave completions that were cut off out of the loss (their rewards count in their group)")
    old_logprobs: Literal["policy", "engine"] = key("policy",
        "what the ratio is taken to: the policy before the update, or the engine")
    rollout_correction: Literal["none", "token_tis", "sequence_tis", "icepop"] = key("token_tis",
        "weight for the difference of engine and policy, r = policy / engine: min(r, cap) of a token; of a sequence; "
        "or r of a token, 0 outside [1/cap, cap]")
    rollout_correction_cap: float = key(2.0, "that cap", above=1)
    kl_coef: float = key(0.0, "weight of the KL term to the reference model; 0 builds no reference model", at_least=0)
    kl_estimator: Literal["k1", "k2", "k3"] = key("k3", "per-token estimator of that KL (Schulman's names)")
    kl_in: Literal["loss", "reward"] = key("loss",
        "a term of the loss, or taken from a completion's reward, summed over its tokens")
    entropy_coef: float = key(0.0, "weight of an entropy bonus", at_least=0)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = key(1e-6, "learning rate after the warm-up", at_least=0)
    schedule: Literal["constant", "linear", "cosine"] = key("constant",
        "what follows the warm-up: lr to the end, or a line or half a cosine down to min_lr at the run's end")
    min_lr: float = key(0.0, "learning rate at which schedule linear or cosine ends", at_least=0)
    weight_decay: float = key(0.01, "decoupled weight decay, on matrices only", at_least=0)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's two", at_least=0, below=1)
    max_grad_norm: float = key(1.0, "global gradient norm above which gradients are scaled down", above=0)
    warmup_steps: int = key(0, "optimizer steps over which lr rises linearly", at_least=0)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    num_steps: int = key(100, "rollout-and-update steps of the run", at_least=1)
    num_mini_batches: int = key(1, "optimizer steps a rollout, in each epoch over it", at_least=1)
    num_epochs: int = key(1, "passes over each step's rollouts", at_least=1)
    max_tokens_per_micro_batch: int = key(16384,
        "prompt and completion tokens of one forward-backward on one rank; on a CPU by default 2048, or 2 rollouts")
    max_nonfinite_in_a_row: int = key(3,
        "updates in a row, skipped since loss or gradient was not finite, at which the run stops", at_least=1)
    max_time_s: float | None = key(None,
        "seconds after which the run saves and ends as preempted; null: when Slurm's time ends", above=0)

    @property
    def num_optimizer_steps(self) -> int:
        return self.num_mini_batches * self.num_epochs

    @property
    def num_run_optimizer_steps(self) -> int:
        return self.num_steps * self.num_optimizer_steps


@dataclass(frozen=True, kw_only=True)
class ProofConfig:
    every_steps: int = key(50,
        "steps between proofs of the engine's weights and checks of the update; 0: only at the start", at_least=0)
    max_mismatch: float | None = key(None,
        "mean |policy - engine| in nats a token that stops the run; null: from what the first step measures", above=0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every_steps: int = key(0, "evaluate before training, after each N-th step and after the last; 0: never", at_least=0)
    num_samples: int = key(4, "completions per prompt", at_least=1)
    temperature: float = key(1.0, "sampling temperature of the evaluation; 0: greedy", at_least=0)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = key(100,
        "save all that a run needs to go on each N steps; 0: only at the end and when preempted", at_least=0)
    keep: int = key(2, "how many of the newest checkpoints stay on disk", at_least=1)
    best_metric: str | None = key(None, "metric, e.g. eval/gsm8k/mean: the checkpoint with its highest value stays too")
    export_every_steps: int = key(0,
        "put the model in HF's format (adapters in peft's) into each N-th step's checkpoint; 0: the last", at_least=0)
    resume: str = key("never",
        "auto: from run_dir's newest good checkpoint, if any; never: refuse a run_dir in use; or a checkpoint's folder")
    rollout_buffer: bool = key(True,
        "keep finished completions on disk until their step is saved, so that none is sampled again on resume")


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    timeout_s: float = key(1800.0,
        "seconds in a phase after which the run is stopped with a report of where each rank is", above=0)
    phase_timeouts_s: dict[str, float] = key({},
        "limits by phase: {rollout: 3600}; that of start grows by 10 s for each rank after the 8th", above=0)


@dataclass(frozen=True, kw_only=True)
class Config:
    run_dir: str = required("folder of this run: config, metrics, rollouts, logs, checkpoints")
    seed: int = key(0, "the run is a function of config and seed", at_least=0)
    algorithm: Algorithm | None = key(None,
        "sets what makes this algorithm (configs/README.md has the values) where nothing else does; null: defaults")
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    rewards: tuple[RewardConfig, ...] = required(
        "one or more rewards; the reward of a completion is their weighted sum; [] where a teacher teaches alone")
    reward_pool: RewardPoolConfig = dataclasses.field(default_factory=RewardPoolConfig)
    environment: EnvironmentConfig = dataclasses.field(default_factory=EnvironmentConfig)
    teacher: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)
    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    proofs: ProofConfig = dataclasses.field(default_factory=ProofConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    watchdog: WatchdogConfig = dataclasses.field(default_factory=WatchdogConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    @property
    def called_rewards(self) -> tuple[RewardConfig, ...]:
        """Those that are functions, and no models."""
        return tuple(reward for reward in self.rewards if reward.is_called)

    @property
    def max_rollout_tokens(self) -> int:
        """Longest prompt plus longest completion, in tokens: what engine and micro-batch must have room for."""
        of_turn, episode = self.rollout.max_completion_tokens, self.environment
        return self.data.max_prompt_tokens + (episode.max_tokens if episode.is_on and episode.max_tokens else of_turn)

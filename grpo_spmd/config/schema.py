"""What a line of the table of config keys is made of."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.recipes import Algorithm

_SIGNS = {"above": ">", "at_least": ">=", "below": "<", "at_most": "<="}


def key(default: Any, doc: str, **bounds: float) -> Any:
    """A config key: its default, its sentence for `--help`, bounds of every number in it by the names of _SIGNS."""
    metadata = {
        "doc": doc,
        "required": False,
        "bounds": {_SIGNS[name]: bound for name, bound in bounds.items()},
    }
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(doc: str) -> Any:
    """A key without a default; where it is text, the text must not be empty."""
    return dataclasses.field(metadata={"doc": doc, "required": True, "bounds": {}})


# The section `critic`: a model that learns what each token's rest of the completion is worth (PPO).


# Where a checkpoint may have a value head: of transformers' classifiers (one label), of TRL's, of others'.
VALUE_HEADS = ("score", "value_head", "v_head", "v_head.summary")


# fmt: off
@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    path: str | None = key(None,
        "folder or hub id of a causal LM or a classifier of one label, whose decoder gets the value head; policy: the "
        "policy's own layers do; needs advantage.estimator: gae. null: no critic")
    lr: float = key(1e-5, "its learning rate; schedule, betas, decay and clipping are those of `optimizer`", above=0)
    coef: float = key(0.1, "of path: policy: what the value loss counts beside the policy's (TRL's vf_coef)", above=0)
    gamma: float = key(1.0, "discount of a token", at_least=0, at_most=1)
    lam: float = key(1.0, "GAE's lambda of the returns that the values are taught", at_least=0, at_most=1)
    lam_policy: float | Literal["length"] = key(0.95,
        "GAE's lambda of the policy's advantages; length: 1 - 1 / (length_alpha * tokens) of a completion, VAPO's",
        at_least=0, at_most=1)
    length_alpha: float = key(0.05, "that factor", above=0)
    warmup_steps: int = key(0, "first steps of the run, in which the critic alone is trained", at_least=0)
    clip_value: float | None = key(0.2,
        "an update moves a value by this at most, beyond which the loss has no gradient; null: no bound", above=0)

    @property
    def is_on_policy(self) -> bool:
        """Whether it has no layers of its own."""
        return self.path == "policy"


# fmt: on
def check_critic(
    critic: CriticConfig,
    estimator: str,
    normalize_std: str,
    discount: float | None,
    num_steps: int,
    has_rewards: bool,
) -> None:
    """Raises ConfigError for what does not go together."""
    if critic.path is not None and not critic.path.strip():
        raise ConfigError("critic.path is empty; name a model's folder or hub id, or leave it out")
    if (estimator == "gae") != (critic.path is not None):
        if critic.path is None:
            raise ConfigError(
                "advantage.estimator: gae needs a critic; set critic.path, e.g. to policy or model.path's model"
            )
        rule = f"is not used by advantage.estimator: {estimator}; set estimator: gae, or leave critic.path out"
        raise ConfigError(f"critic.path ({critic.path}) {rule}")
    if critic.path is None:
        return
    if not has_rewards:
        why = "learns what rewards come to, and there is none that counts"
        raise ConfigError(
            f"critic.path: a critic {why}; give a reward a weight, or leave the critic out"
        )
    if normalize_std == "group":
        why = "a deviation within groups, of which gae knows none"
        raise ConfigError(
            f"advantage.normalize_std: group is {why}; set it to batch (over the step's tokens) or none"
        )
    if critic.warmup_steps >= num_steps:
        rule = f"must be < training.num_steps ({num_steps}), or the policy is never trained"
        raise ConfigError(f"critic.warmup_steps ({critic.warmup_steps}) {rule}")
    if discount is not None and discount != 1:
        why = "with gae it is critic.gamma that discounts, token by token"
        remedy = "set 1 for rewards at the ends of their turns, or leave it out"
        raise ConfigError(f"environment.discount ({discount:g}): {why}; {remedy}")


# The section `environment`: what the policy talks to between its turns.


# fmt: off
@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    tools: tuple[str, ...] = key((),
        'functions that the policy may call, as TRL has them: "file.py:function", or a shipped one (python)')
    factory: dict[str, str] | str = key({},
        'TRL\'s environment_factory: "file.py:Class" or a shipped one (countdown, search:CORPUS); or {name: ...}, of '
        "which the row's column `environment` names one")
    gym: str | None = key(None, '"file.py:Class" with reset(**row) and step(action), over messages')
    agent: str | None = key(None,
        '"file.py:function": async def rollout(task, base_url, api_key, model), which talks to an OpenAI-like server')
    max_turns: int = key(8, "turns of the policy in an episode, at most", at_least=1)
    max_tokens: int | None = key(None,
        "tokens of an episode behind its prompt, sampled and given; null: rollout.max_completion_tokens, which is the "
        "most of one turn", at_least=1)
    call_timeout_s: float = key(30.0, "seconds that one call of an environment may take before it is killed", above=0)
    timeout_s: float = key(600.0,
        "seconds that all calls of one episode may take together; time in the engine does not count", above=0)
    history: Literal["append", "fork"] = key("append",
        "where the chat template rewrites earlier turns: append to them as they were, or begin another segment, which "
        "shares rollout and reward")
    num_workers: int = key(16,
        "processes of environments on each rank, of one episode at a time each", at_least=1, at_most=4096)
    discount: float | None = key(None,
        "null: an episode's reward is the sum of its turns'; a number: each turn is credited with the rewards from it "
        "on, those of k turns later times this to the power k", at_least=0, at_most=1)

    @property
    def is_on(self) -> bool:
        return bool(self.tools or self.factory or self.gym or self.agent)

    @property
    def can_reward(self) -> bool:
        """Whether rewards of its own are to be expected; bare tools give none."""
        return bool(self.factory or self.gym or self.agent)


# fmt: on
def check_environment(
    environment: EnvironmentConfig, tail_batching: float, overlong_buffer_tokens: int, kl_in: str
) -> None:
    """Raises ConfigError for what does not go together."""
    named = [name for name in ("gym", "agent") if getattr(environment, name)]
    if environment.tools or environment.factory:
        named.insert(0, "tools" if environment.tools else "factory")
    if len(named) > 1:
        rule = "are two ways to run an episode; leave one out (tools and factory go together)"
        raise ConfigError(f"environment.{named[0]} and environment.{named[1]} {rule}")
    if environment.is_on and tail_batching > 1:
        why = "an episode that waits for its environment would be dropped as a slow one; set tail_batching: 1"
        raise ConfigError(
            f"rollout.tail_batching and environment.{named[0]} do not go together: {why}"
        )
    if environment.is_on and overlong_buffer_tokens:
        why = "which measures one completion, not the turns of an episode; set it to 0"
        raise ConfigError(
            f"advantage.overlong_buffer_tokens ({overlong_buffer_tokens}) with environment.{named[0]}: {why}"
        )
    if environment.discount is not None and kl_in == "reward":
        why = "the KL is taken from an episode's reward as a whole; set kl_in: loss, or leave discount out"
        raise ConfigError(
            f"loss.kl_in: reward and environment.discount ({environment.discount:g}): {why}"
        )
    if environment.discount is not None and environment.is_on and not environment.gym:
        rule = "credits turns with rewards of their own, which only a step of environment.gym gives; leave it out"
        raise ConfigError(f"environment.discount ({environment.discount:g}) {rule}")


# The keys of what a run writes for people: dumps, trackers, the report; and what they demand of each other.


TRACKERS = ("wandb", "tensorboard", "trackio")  # their packages, too


# The section is a table: a key's type and default on one line, and its sentence below where that line is full.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    trackers: tuple[str, ...] = key((), "send the metrics to these too: wandb, tensorboard, trackio")
    trackers_rollouts_every_steps: int = key(0,
        "show up to 64 rollouts of each N-th step there, of those that are dumped; 0: never", at_least=0)
    wandb: bool | Literal["online", "offline"] = key(False, "wandb among the trackers, and how it is reached")
    wandb_project: str = key("grpo_spmd", "the project there, and in trackio")
    report_every_steps: int = key(0,
        "write run_dir/report.html after each N-th step and at the end, in a process of its own; 0: never", at_least=0)
    rollouts_every_steps: int = key(1, "dump each N-th step's rollouts as jsonl; 0: never", at_least=0)
    rollouts_compression: Literal["none", "gzip"] = key("none", "gzip: step_N.jsonl.gz, less than half the size")
    rollouts_keep: int | None = key(None,
        "how many of the newest steps' dumps stay on disk; null: all (evaluations' always stay)", at_least=1)

    @property
    def tracker_names(self) -> list[str]:
        """Each once."""
        return [name for name in TRACKERS if name in self.trackers or (name == "wandb" and self.wandb)]
# fmt: on


def check_logging(options: LoggingConfig) -> None:
    """Raises ConfigError for keys that do not go together, and for a tracker that is not there."""
    for name in options.trackers:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=1)
            meant = f"did you mean {near[0]}? There are" if near else "there are"
            raise ConfigError(
                f"logging.trackers: no tracker {name!r}; {meant} {', '.join(TRACKERS)}"
            )
    every, dumped = options.trackers_rollouts_every_steps, options.rollouts_every_steps
    if every and not options.tracker_names:
        remedy = "needs a tracker: set logging.trackers, e.g. to [tensorboard], or leave it out"
        raise ConfigError(f"logging.trackers_rollouts_every_steps ({every}) {remedy}")
    if every and (not dumped or every % dumped):
        rule = (
            f"must be a multiple of logging.rollouts_every_steps ({dumped}), whose files it reads"
        )
        raise ConfigError(
            f"logging.trackers_rollouts_every_steps ({every}) {rule}; set it to another"
        )


# The entries of `rewards` and the section `reward_pool`: what scores completions, and in which processes.


# fmt: off
@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    name: str | None = key(None, "a shipped reward (math, gsm8k, countdown, code, format, exact), or another's name")
    function: str | None = key(None, '"file.py:function": fn(prompts, completions, completion_ids, **columns)')
    url: str | None = key(None,
        "in place of function: http(s) address of a server, called by POST of JSON; engine: the policy is the judge")
    model: str | None = key(None,
        "folder or hub id of a reward model: a decoder (qwen3, llama, ...) with a head for sequence classification")
    weight: float = key(1.0, "factor of this reward in the sum")
    args: dict[str, Any] = key({}, "further keyword arguments for the function, or fields of what a url is sent")
    timeout_s: float | None = key(None, "as reward_pool.timeout_s, which null means, of this function or url: requests "
        "for one completion and the pauses between them", above=0)
    max_concurrent: int | None = key(None, "calls of this function or url under way at once, over all ranks; a "
        "function with a limit is called with one completion at a time", at_least=1)
    max_per_minute: int | None = key(None, "calls begun in a minute, over all ranks, at even distances", at_least=1)
    retries: int = key(3, "requests to a url made again for a completion, with growing pauses, or those the server "
        "asks for, after 408, 429, 5xx, a dropped line or a malformed answer", at_least=0, at_most=20)
    headers_env: dict[str, str] = key({}, "headers that a url is sent, by the environment variables that hold them: "
        "{Authorization: MY_TOKEN}")
    form: Literal["slime", "openrlhf"] = key("slime", "what a url is sent: slime, {prompt, response, label, metadata} "
        "of one completion; openrlhf, {query, prompts, labels} of a group")
    judge: str | None = key(None, "file with a rubric over {prompt}, {completion} and columns: url is then an "
        "OpenAI-compatible .../v1/chat/completions, whose reply ends with a score")
    judge_model: str | None = key(None, "the model that judges, by the name its server has for it")
    judge_scale: tuple[float, float] = key((0.0, 10.0), "lowest and highest score of the rubric, made 0 and 1")
    judge_tokens: int = key(256, "longest reply of a judge with url: engine, in tokens; a longer one is no score",
        at_least=1)
    label: str | None = key(None, "whose score counts where `model` has several labels: its name or number")
    max_tokens: int | None = key(None,
        "longest text for `model`, in tokens; null: its positions, training.max_tokens_per_micro_batch at most; for a "
        "judge with url: engine its prompt; null: as its rubric and the limits of prompt and completion come to",
        at_least=1)
    on_long: Literal["not_applicable", "drop_start"] = key("not_applicable",
        "a longer one gets no score from `model`, or only its last max_tokens are read")
    template: str | None = key(None, "file with a chat template (jinja) for `model`, in place of its own")
    revision: str | None = key(None, "branch, tag or commit of a `model` at the hub")

    @property
    def is_shipped(self) -> bool:
        """Whether `name` says what it is, and not only what it is called."""
        return self.function is None and self.url is None and self.model is None

    @property
    def is_engine_judge(self) -> bool:
        """Whether the run's own engine judges."""
        return self.url == "engine"

    @property
    def uses_pool(self) -> bool:
        """Whether the reward pool calls it."""
        return self.model is None and not self.is_engine_judge

    @property
    def metric_name(self) -> str:
        """Its metric's."""
        of_url = "judge" if self.judge is not None else "server"
        of_file = (self.function or "").rpartition(":")[2] or PurePath(self.model or "").name
        return self.name or (of_url if self.url is not None else of_file)

    @property
    def is_measured(self) -> bool:
        """Whether calls of it are measured and held to limits of their own."""
        limits = self.timeout_s, self.max_concurrent, self.max_per_minute
        return (self.url is not None and not self.is_engine_judge) or any(limit is not None for limit in limits)


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    num_workers: int = key(4, "processes on each rank that score rewards", at_least=1, at_most=4096)
    timeout_s: float = key(10.0, "seconds that scoring one completion may take before its process is killed", above=0)
    max_error_frac: float = key(0.3,
        "share of a step's completions without a usable reward at which the run stops", above=0, at_most=1)


# The section `teacher`: a model whose distribution the policy learns on its own rollouts (on-policy distillation),
# here or behind a server.


# fmt: off
@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    path: dict[str, str] | str = key({},
        "model that teaches on the policy's own rollouts, a folder or a hub id, perhaps model.path itself; or {name: "
        "path}, of which the row's column `teacher` names one")
    url: dict[str, str] | str = key({},
        "in place of path: address of a vLLM server, http(s)://host:port/v1/completions, which is asked for the "
        "logprobs of prompt and completion, as token ids; or {name: address}")
    coef: float = key(1.0, "weight of what it says", above=0)
    loss: Literal["sampled", "topk", "full"] = key("sampled",
        "sampled: coef * log(policy / teacher) of each sampled token is taken off its advantage; full: the divergence "
        "of both distributions is a term of the loss; topk: that over the teacher's likeliest tokens and one for all "
        "others")
    beta: float = key(1.0,
        "divergence of full and topk: 0: KL(teacher || policy), 1: KL(policy || teacher), between: the generalized "
        "Jensen-Shannon divergence", at_least=0, at_most=1)
    top_k: int = key(32, "tokens of topk", at_least=1)
    prompt_key: str | None = key(None,
        "column with the prompt that the teacher sees in place of the policy's, e.g. one that has the solution")
    model: str | None = key(None, "the model at url, by its server's name; null: the only one that it has")
    timeout_s: float = key(120.0, "seconds for what a url says of one context of a rollout: requests and the pauses "
        "between them", above=0)
    max_concurrent: int = key(64, "requests to a url under way at once, over all ranks", at_least=1)
    retries: int = key(3, "requests to a url made again for a context, as rewards.N.retries", at_least=0, at_most=20)
    headers_env: dict[str, str] = key({}, "headers that a url is sent, as rewards.N.headers_env")

    @property
    def is_on(self) -> bool:
        return bool(self.path or self.url)

    @property
    def paths(self) -> dict[str, str]:
        """By name; a single one has none."""
        return _by_name(self.path)

    @property
    def urls(self) -> dict[str, str]:
        """As paths."""
        return _by_name(self.url)

    @property
    def names(self) -> list[str]:
        return [*self.paths, *self.urls]


# fmt: on
def check_teacher(
    teacher: TeacherConfig, *, has_episodes: bool, is_dynamic: bool, has_rewards: bool, kl_in: str
) -> None:
    """Raises ConfigError for what does not go together. `has_rewards`: some that count."""
    if teacher.is_on and teacher.prompt_key is not None and has_episodes:
        why = "an episode's prompt comes again in its later turns, where the teacher's would not"
        raise ConfigError(f"teacher.prompt_key with an environment: {why}; leave one of them out")
    if teacher.is_on and is_dynamic and not has_rewards:
        why = "without a reward that counts all groups are alike, and would all be dropped"
        raise ConfigError(
            f"rollout.dynamic_sampling with a teacher alone: {why}; set dynamic_sampling: false"
        )
    if teacher.is_on and kl_in == "reward" and not has_rewards:
        why = "without a reward that counts there is nothing that the KL could be taken off"
        raise ConfigError(f"loss.kl_in: reward with a teacher alone: {why}; set kl_in: loss")
    for name, path in teacher.paths.items():
        if not path.strip() or "/" in name:
            rule = (
                "needs a path, and a name without a slash, since metrics bear it (teacher/NAME/kl)"
            )
            raise ConfigError(f"teacher.path.{name} {rule}; got {path!r}")


def _by_name(given: dict[str, str] | str) -> dict[str, str]:
    if isinstance(given, str):
        return {"": given} if given else {}
    return given


# One tree of frozen dataclasses. Every value of a run lives here once: its type, default, bounds and meaning.


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
    def pool_rewards(self) -> tuple[RewardConfig, ...]:
        """Those that are functions, and no models."""
        return tuple(reward for reward in self.rewards if reward.uses_pool)

    @property
    def max_rollout_tokens(self) -> int:
        """Longest prompt plus longest completion, in tokens: what engine and micro-batch must have room for."""
        of_turn, episode = self.rollout.max_completion_tokens, self.environment
        return self.data.max_prompt_tokens + (episode.max_tokens if episode.is_on and episode.max_tokens else of_turn)

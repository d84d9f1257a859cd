"""The schema of the config: one frozen dataclass for each section, in which each key is declared.

Each key's type, default, bounds and help text are here and nowhere else. The string below a field
is its help text, which `describe.help_texts` reads for `--help`. Rules between keys are in
rules.py. `python -m grpo_spmd.config.describe` prints the table of all keys that is in
configs/README.md.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from msgspec import Meta

# The phases of a step in their order. Timers, metrics and time limits have these names.
PHASES = ("weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint")
# The value of rollout.weight_sync_bucket_mib where it is null.
SYNC_BUCKET_MIB = {"cpu": 16, "cuda": 256}
# The value of training.max_tokens_per_micro_batch: auto, if it fits.
_AUTO_MICRO_BATCH_TOKENS = 16384
# Keys whose value `auto` is replaced by the planner. A resumed run keeps the planner's values.
RECOMPUTE_KEY = "model.activation_checkpointing"
MICRO_BATCH_KEY = "training.max_tokens_per_micro_batch"
ENGINE_RANKS_KEY = "rollout.tensor_parallel_size"
DECIDED_KEYS = (RECOMPUTE_KEY, MICRO_BATCH_KEY, ENGINE_RANKS_KEY)
# Values of vLLM's max_lora_rank. An engine gets the smallest one that is not below the rank.
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The number of consecutive columns of a row that share a scale in `optimizer.name: adamw_8bit`.
MOMENT_BLOCK = 128
# One rollout in this many is used to compare the policy's own routes with the engine's. A forward
# pass without gradients takes a third of an update's time, so the comparison takes 2 % of it.
ROUTES_SAMPLED_EVERY = 16
# The trackers, by the names of their packages.
TRACKERS = ("wandb", "tensorboard", "trackio")
# As the value of teacher.path or critic.path it means the policy itself, not a folder. A folder of
# that name can be given as ./policy.
POLICY = "policy"
# Possible names of the value head in checkpoints: in transformers' classifiers, TRL and elsewhere.
VALUE_HEADS = ("score", "value_head", "v_head", "v_head.summary")

# Types of numbers with bounds.
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
# At most about 115 days: longer timeouts overflow in system calls.
Seconds = Annotated[float, Meta(gt=0, le=1e7)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Beta = Annotated[float, Meta(ge=0, lt=1)]

StopString = Annotated[str, Meta(min_length=1)]

# The name of a file or folder.
FilePath = Annotated[str, Meta(title="path")]

# The algorithms that have a recipe in recipes.yaml.
Algorithm = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "max_rl", "opd", "ppo"
]


def _no_entries() -> Any:
    """Returns a dataclass field whose default is a new empty mapping for each config."""
    return dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Section `model.lora`: LoRA adapters, and how the engine gets them."""

    rank: NonNegativeInt = 0
    """rank of the LoRA adapters; 0: full fine-tuning"""
    alpha: PositiveFloat = 32.0
    """the adapters' product is scaled by alpha / rank"""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """names of the layers that get an adapter; all-linear: every linear layer but lm_head"""
    sync: Literal["merged", "adapter"] = "merged"
    """what the weight sync sends to the engine. merged: the base weights with the adapters added;
    adapter: after the start, the adapters alone"""

    @property
    def base_stays_in_engine(self) -> bool:
        """True if the weight sync sends only adapters, so that the engine must keep the base
        weights."""
        return self.rank > 0 and self.sync == "adapter"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Section `model`: the policy, its precision and memory."""

    path: FilePath
    """model folder with config.json, safetensors files and a tokenizer, or a hub id"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """compute dtype of policy and engine; the master weights are float32"""
    attention: Literal["auto", "flash", "sdpa"] = "auto"
    """auto: on a GPU flash-attn if it is installed, else torch's own varlen attention; on a CPU
    sdpa"""
    lora: LoraConfig = LoraConfig()
    activation_checkpointing: bool | Literal["selective", "auto"] = "auto"
    """recompute activations in the backward pass. true: of whole layers; selective: all activations
    but the outputs of matrix products; false: none; auto: the fastest of these with which the
    planner finds that the run fits, on a CPU false"""
    offload: bool | Literal["optimizer"] = False
    """keep in host memory while the engine is awake. optimizer: the optimizer state; true: the
    policy's parameters too"""
    compile: bool = False
    """run torch.compile on the layers"""
    num_replicas: PositiveInt = 1
    """copies of the policy (HSDP); each is sharded over ranks / num_replicas consecutive ranks"""
    sequence_parallel_size: PositiveInt = 1
    """consecutive ranks of a node that share each micro-batch: every rank computes an equal slice
    of its tokens, and attention for its share of the heads (Ulysses)"""
    logprob_chunk_tokens: PositiveInt = 1024
    """most tokens whose logits [tokens, vocabulary] are in memory at one time"""
    logprob_kernel: Literal["auto", "fused", "plain"] = "auto"
    """what computes logprobs from logits. fused: Triton kernels, which need a GPU of compute
    capability 8.0; plain: torch's operations; auto: fused where it runs, else plain"""

    router_replay: bool = True
    """for a mixture of experts: record the engine's routes, where it can, and replay them in the
    policy and the reference"""

    @property
    def recompute(self) -> bool | Literal["selective"]:
        """The value of `activation_checkpointing`, or False if that is still auto."""
        return self.activation_checkpointing != "auto" and self.activation_checkpointing


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Section `data`: prompts for training and evaluation."""

    train: FilePath
    """a .jsonl or .parquet file, or hub:REPO:SUBSET:SPLIT (SUBSET may be empty)"""
    eval: dict[str, Any] | FilePath = _no_entries()
    """held-out sets {name: source as in data.train}, or one source"""
    prompt_key: str = "prompt"
    """column with the prompt: a string or a list of chat messages"""
    prompt_template: str | None = None
    """builds the prompt from columns in braces, in place of prompt_key: 'Use {nums} to make
    {target}'"""
    as_chat: bool = False
    """render a string prompt with the tokenizer's chat template, as one user message"""
    system_prompt: str | None = None
    """system message for chat prompts that have none"""
    chat_template_kwargs: dict[str, Any] = _no_entries()
    """variables for the policy's chat template, wherever it is used: {enable_thinking: false}"""
    max_prompt_tokens: PositiveInt = 512
    """most tokens of a prompt"""
    on_long_prompt: Literal["error", "drop"] = "error"
    """what happens to a longer prompt. error: the run does not start; drop: it is left out and
    counted"""
    shuffle: bool = True
    """use a new order in each epoch, which depends on seed and epoch only"""

    @property
    def eval_sets(self) -> dict[str, str]:
        """The sources of the held-out sets by name. A single source is named after its file or hub
        repository."""
        # Path().stem gives the last part of a file's path, and of "organisation/name" too.
        if isinstance(self.eval, str):
            name = self.eval.split(":")[1] if self.eval.startswith("hub:") else self.eval
            return {Path(name).stem: self.eval} if self.eval else {}
        return self.eval


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Section `rollout`: how completions are sampled, and the engine."""

    num_prompts_per_step: PositiveInt = 64
    """prompts in a step, over all ranks (P)"""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """completions for each prompt (G)"""
    max_completion_tokens: PositiveInt = 1024
    """most tokens of a completion"""
    # vLLM silently raises lower temperatures to 0.01.
    temperature: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """sampling temperature; the policy's logprobs are computed at the same one"""
    stop: tuple[StopString, ...] = ()
    """texts that end a completion, or a turn of an episode, as soon as they are sampled; they stay
    part of it, also in evaluations: ["</answer>"]"""
    tensor_parallel_size: PositiveInt | Literal["auto"] = "auto"
    """ranks that share one engine. auto: the fewest of 1, 2, 4 and 8 with which the planner finds
    that the engine fits, on a CPU 1"""
    dynamic_sampling: bool = False
    """drop groups whose rewards are all equal, and sample further prompts in their place"""
    dynamic_sampling_max_rounds: PositiveInt = 10
    """rounds of generation in a step; after the last one the step trains on the groups it has"""
    tail_batching: Annotated[float, Meta(ge=1)] = 1.0
    """start this many times num_prompts_per_step, train on the groups that finish first, and defer
    the others to a later step; 1: off"""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.6
    """fraction of the GPU's memory that the engine may use (GPU only)"""
    speculation: Literal["auto"] | None = None
    """auto: the engine checks drafts from texts of the same prompt where that pays, several places
    in a step, each with the noise of a run without; tokens are the same too where kernels do not
    round by the number of rows, else but for near ties (CPU only)"""
    schedule: Literal["shared_queue", "static"] = "shared_queue"
    """shared_queue: an engine that has room takes the next group, those expected to be longest
    first; static: each engine gets a fixed share"""
    sleep_level: Literal[1, 2] | None = None
    """what a sleeping engine on a GPU does with its weights. 1: keep them in host memory; 2: drop
    them; null: what the weight sync needs"""
    weight_sync_bucket_mib: PositiveInt | None = None
    """MiB gathered at a time in the weight sync, over all ranks of a gather; null: 256 on GPUs, 16
    on a CPU"""
    engine: dict[str, Any] = _no_entries()
    """further arguments for vllm.LLM; on GPUs the default of max_num_seqs is the number of
    sequences that an engine can get in a step, at least 256 and at most vLLM's own default"""

    @property
    def engine_ranks(self) -> int:
        """The value of `tensor_parallel_size`, or 1 if that is still auto."""
        return 1 if self.tensor_parallel_size == "auto" else self.tensor_parallel_size

    @property
    def num_launched_prompts(self) -> int:
        """The number of prompts that are started in a short round of tail batching, which defers
        the slow ones; without tail batching num_prompts_per_step."""
        # It is rounded before ceil, because 100 * 1.1 is above 110 in floating point.
        return math.ceil(round(self.num_prompts_per_step * self.tail_batching, 6))

    def sync_bucket_bytes(self, device: str) -> int:
        """Returns the bytes of a weight sync's bucket on a device of type "cpu" or "cuda"."""
        return (self.weight_sync_bucket_mib or SYNC_BUCKET_MIB[device]) << 20

    def sleep_level_with(self, lora: LoraConfig) -> int:
        """Returns `sleep_level`. If it is null, returns 2 if the weight sync sends all weights, and
        1 if it sends only adapters."""
        # Level 2 drops the weights, which is right if the next sync sends all of them. If the base
        # weights must stay, level 1 is needed. It copies them to host memory at each sleep, since
        # vLLM (0.26 to 0.33) drops its copy when it wakes. Level 2 and a copy of our own would not
        # be enough: level 2 also drops vLLM's tables of which token uses which adapter, and vLLM
        # rewrites only the entries that have changed (LoRAModelManager._last_mapping).
        return self.sleep_level or (1 if lora.base_stays_in_engine else 2)


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """One entry of `rewards`: a function, a server, a reward model or a judge."""

    name: str | None = None
    """a shipped reward (math, gsm8k, countdown, code, format, exact), or a name for another reward
    """
    function: FilePath | None = None
    """"file.py:function" with the signature fn(prompts, completions, completion_ids, **columns)"""
    url: str | None = None
    """http(s) address of a reward server, which gets JSON by POST; engine: the policy is the judge
    """
    model: FilePath | None = None
    """folder or hub id of a reward model: a decoder (qwen3, llama, ...) with a sequence
    classification head"""
    weight: Annotated[float, Meta(ge=-1e6, le=1e6)] = 1.0
    """factor of this reward in the sum"""
    args: dict[str, Any] = _no_entries()
    """further keyword arguments of the function, or further fields of the JSON sent to a url"""
    timeout_s: Seconds | None = None
    """seconds for one completion, with all requests and the pauses between them; for a function or
    a url; null: reward_pool.timeout_s"""
    max_concurrent: PositiveInt | None = None
    """most calls of this function or url at one time, over all ranks; a function with a limit is
    called with one completion at a time"""
    max_per_minute: PositiveInt | None = None
    """most calls started in a minute, over all ranks, evenly spaced"""
    retries: Annotated[int, Meta(ge=0, le=20)] = 3
    """repeated requests to a url for one completion after 408, 429, 5xx, a lost connection or a
    malformed answer; the pauses grow, or are what the server asks for"""
    headers_env: dict[str, str] = _no_entries()
    """headers sent to a url, each with the environment variable that holds its value:
    {Authorization: MY_TOKEN}"""
    form: Literal["slime", "openrlhf"] = "slime"
    """JSON sent to a url. slime: {prompt, response, label, metadata} for one completion; openrlhf:
    {query, prompts, labels} for a group"""
    judge: FilePath | None = None
    """file with a rubric over {prompt}, {completion} and columns; url is then an OpenAI-compatible
    .../v1/chat/completions whose reply ends with a score"""
    judge_model: str | None = None
    """name of the judge's model at its server"""
    judge_scale: tuple[float, float] = (0.0, 10.0)
    """lowest and highest score of the rubric; they become rewards 0 and 1"""
    judge_tokens: PositiveInt = 256
    """most tokens in a reply of a judge with url: engine; a longer reply gives no score"""
    label: str | None = None
    """label whose score is the reward, if `model` has several: its name or number"""
    max_tokens: PositiveInt | None = None
    """most tokens of a text for `model`; null: its positions, and at most
    training.max_tokens_per_micro_batch. For a judge with url: engine the most tokens of its prompt;
    null: computed from its rubric and the limits of prompt and completion"""
    on_long: Literal["not_applicable", "drop_start"] = "not_applicable"
    """what `model` does with a longer text. not_applicable: no score; drop_start: it reads the last
    max_tokens only"""
    template: FilePath | None = None
    """file with a chat template (jinja) for `model`, in place of its own"""
    revision: str | None = None
    """branch, tag or commit of a `model` on the hub"""

    @property
    def is_shipped(self) -> bool:
        """True if this is a shipped reward, which `name` chooses; else `name` is only a label."""
        return self.function is None and self.url is None and self.model is None

    @property
    def is_engine_judge(self) -> bool:
        """True if this is a judge that the run's own engine serves."""
        return self.url == "engine"

    @property
    def uses_pool(self) -> bool:
        """True if the reward pool calls this reward: it is a function or a server."""
        return self.model is None and not self.is_engine_judge

    @property
    def metric_name(self) -> str:
        """The reward's name in metrics."""
        if self.name or self.url is not None:
            return self.name or ("judge" if self.judge is not None else "server")
        # The default name of a function is its own, and that of a model its folder or repository.
        return (self.function or "").rpartition(":")[2] or PurePath(self.model or "").name

    @property
    def is_measured(self) -> bool:
        """True if the calls of this reward are measured and limited one by one: it is a server, or
        a function with a limit of its own."""
        limits = (self.timeout_s, self.max_concurrent, self.max_per_minute)
        # A judge that the run's own engine serves makes no calls.
        has_server = self.url is not None and not self.is_engine_judge
        return has_server or any(limit is not None for limit in limits)


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    """Section `reward_pool`: the processes that compute rewards."""

    num_workers: Annotated[int, Meta(ge=1, le=4096)] = 4
    """processes on each rank that compute rewards"""
    timeout_s: Seconds = 10.0
    """seconds for scoring one completion; after that its process is killed"""
    max_error_frac: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """fraction of a step's completions without a usable reward at which the run stops"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Section `environment`: what the policy talks to between its turns."""

    tools: tuple[str, ...] = ()
    """functions that the policy may call, as in TRL: "file.py:function", or a shipped one (python)
    """
    factory: dict[str, str] | str = _no_entries()
    """TRL's environment_factory: "file.py:Class" or a shipped one (countdown, search:CORPUS); or
    {name: ...}, and the row's column `environment` chooses by name"""
    gym: str | None = None
    """"file.py:Class" with reset(**row) and step(action); observations and actions are messages"""
    agent: str | None = None
    """"file.py:function": async def rollout(task, base_url, api_key, model), which talks to an
    OpenAI-compatible server"""
    max_turns: PositiveInt = 8
    """most turns of the policy in an episode"""
    max_tokens: PositiveInt | None = None
    """most tokens of an episode after its prompt, sampled and environment tokens together; null:
    rollout.max_completion_tokens, which also bounds each turn"""
    call_timeout_s: Seconds = 30.0
    """seconds for one call of an environment; after that it is killed"""
    timeout_s: Seconds = 600.0
    """seconds for all calls of one episode together, without the time in the engine"""
    history: Literal["append", "fork"] = "append"
    """what happens if the chat template rewrites earlier turns. append: the context keeps them as
    they were; fork: a new segment begins, with the same rollout and reward"""
    num_workers: Annotated[int, Meta(ge=1, le=4096)] = 16
    """environment processes on each rank; each runs one episode at a time"""
    discount: Fraction | None = None
    """null: the reward of an episode is the sum over its turns. A number: each turn is credited
    with its own and later rewards, and one k turns later is multiplied by discount^k"""

    @property
    def is_on(self) -> bool:
        """True if the run has episodes with an environment or an agent."""
        return bool(self.tools or self.factory or self.gym or self.agent)

    @property
    def can_reward(self) -> bool:
        """True if the environment may give rewards of its own; tools alone give none."""
        # Tools are functions that return text to the policy.
        return bool(self.factory or self.gym or self.agent)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Section `teacher`: on-policy distillation from a model in this run or behind a server."""

    path: dict[str, str] | FilePath = _no_entries()
    """teacher model for distillation on the policy's own rollouts: a folder or hub id, which may be
    model.path itself; policy: the policy as it is before the step's updates, which needs another
    prompt; or {name: path}, and the row's column `teacher` chooses by name"""
    url: dict[str, str] | str = _no_entries()
    """address of a vLLM server, http(s)://host:port/v1/completions, in place of path; it is asked
    for the logprobs of prompt and completion as token ids; or {name: address}"""
    coef: PositiveFloat = 1.0
    """weight of the teacher's term"""
    loss: Literal["sampled", "topk", "full"] = "sampled"
    """sampled: coef * log(policy / teacher) of each sampled token is subtracted from its advantage;
    full: the divergence of both distributions is a term of the loss; topk: the same over the
    teacher's most likely tokens and one more outcome for all other tokens together"""
    beta: Fraction = 1.0
    """divergence of full and topk. 0: KL(teacher || policy); 1: KL(policy || teacher); between: the
    generalized Jensen-Shannon divergence"""
    top_k: PositiveInt = 32
    """number of tokens for loss: topk"""
    prompt_key: str | None = None
    """column with another prompt for the teacher, e.g. one that includes the solution"""
    prompt_template: str | None = None
    """builds the teacher's prompt from columns in braces, in place of prompt_key: columns of the
    data, and those that a reward function writes with log_extra; {prompt} is the policy's own. A
    completion for which a column is null, or whose prompt would be too long, is scored after the
    policy's own prompt"""
    model: str | None = None
    """name of the model at the server; null: the only one it has"""
    timeout_s: Seconds = 120.0
    """seconds for one context at a url, with all requests and the pauses between them"""
    max_concurrent: PositiveInt = 64
    """most requests to a url at one time, over all ranks"""
    retries: Annotated[int, Meta(ge=0, le=20)] = 3
    """repeated requests for one context, as rewards.N.retries"""
    headers_env: dict[str, str] = _no_entries()
    """headers sent to a url, as rewards.N.headers_env"""

    @property
    def is_on(self) -> bool:
        """True if the run has a teacher."""
        return bool(self.path or self.url)

    @property
    def paths(self) -> dict[str, str]:
        """The teachers' paths by name; the name of a single teacher is ""."""
        return _by_name(self.path)

    @property
    def sees_other_prompt(self) -> bool:
        """True if the teachers may see other prompts than the policy."""
        return self.prompt_key is not None or self.prompt_template is not None

    @property
    def urls(self) -> dict[str, str]:
        """The teachers' addresses by name; the name of a single teacher is ""."""
        return _by_name(self.url)

    @property
    def names(self) -> list[str]:
        """The names of all teachers; the name of a single teacher is ""."""
        return [*self.paths, *self.urls]


def _by_name(value: dict[str, str] | str) -> dict[str, str]:
    """Returns paths or addresses by the teachers' names, from a mapping or from a single one."""
    # A single teacher has an empty name, so that its metrics are named teacher/kl.
    if isinstance(value, str):
        return {"": value} if value else {}
    return value


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Section `advantage`: how rewards become advantages."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "max_rl", "gae"] = "grpo"
    """grpo: reward minus the group's mean, scaled by normalize_std; dr_grpo: the same, never
    scaled; rloo: reward minus the mean of the others in the group; reinforce_pp: reward minus the
    step's mean, divided by the step's standard deviation; max_rl: reward minus the group's mean,
    divided by that mean; gae: PPO's, for each token, from the critic's values"""
    normalize_std: Literal["group", "batch", "none"] = "group"
    """which standard deviation grpo divides by; for gae, batch whitens over the step's tokens"""
    overlong_buffer_tokens: NonNegativeInt = 0
    """a completion that ends within this many tokens of the maximum loses reward, linearly; 0: off
    """
    overlong_penalty: NonNegativeFloat = 1.0
    """reward that a completion of the maximum length loses"""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Section `critic`: the model that estimates each token's value (PPO)."""

    path: FilePath | None = None
    """folder or hub id of a causal LM, or of a classifier with one label; a value head is put on
    its decoder. policy: the value head is on the policy itself. Needs advantage.estimator: gae.
    null: no critic"""
    lr: PositiveFloat = 1e-5
    """learning rate of the critic; schedule, betas, weight decay and clipping are those of
    `optimizer`"""
    coef: PositiveFloat = 0.1
    """weight of the value loss beside the policy loss, with path: policy (TRL's vf_coef)"""
    gamma: Fraction = 1.0
    """discount factor for each token"""
    lam: Fraction = 1.0
    """GAE's lambda for the returns that the values are trained on"""
    lam_policy: Fraction | Literal["length"] = 0.95
    """GAE's lambda for the policy's advantages; length: 1 - 1 / (length_alpha * tokens) of a
    completion, as in VAPO"""
    length_alpha: PositiveFloat = 0.05
    """the factor in lam_policy: length"""
    warmup_steps: NonNegativeInt = 0
    """first steps of the run, in which only the critic is trained"""
    clip_value: PositiveFloat | None = 0.2
    """most that an update may move a value; beyond it the loss has no gradient; null: no bound"""

    @property
    def is_on_policy(self) -> bool:
        """True if the critic is a value head on the policy's own model and has no other layers."""
        return self.path == POLICY


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Section `loss`: the policy loss, its corrections and the KL term."""

    policy: Literal["clip", "gspo", "cispo"] = "clip"
    """clip: PPO's loss with a ratio for each token; gspo: with a ratio for each sequence; cispo: a
    clipped, detached ratio is the weight of each token"""
    clip_ratio_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """the ratio is clipped below at 1 - clip_ratio_low; 1: it is not clipped below"""
    clip_ratio_high: PositiveFloat = 0.28
    """the ratio is clipped above at 1 + clip_ratio_high"""
    dual_clip: Annotated[float, Meta(gt=1)] | None = 3.0
    """upper bound of the ratio where the advantage is negative (clip, gspo); null: no bound"""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all tokens; sequence: mean over sequences of their token means; constant:
    sum over tokens, divided by sequences * rollout.max_completion_tokens"""
    mask_truncated: bool = False
    """leave completions that were cut off out of the loss; their rewards still count in their group
    """
    old_logprobs: Literal["policy", "engine"] = "policy"
    """denominator of the ratio: the policy before the update, or the engine"""
    rollout_correction: Literal["none", "token_tis", "sequence_tis", "icepop"] = "token_tis"
    """weight that corrects for the difference between engine and policy, with r = policy / engine.
    token_tis: min(r, cap) for each token; sequence_tis: for each sequence; icepop: r for each
    token, 0 outside [1/cap, cap]"""
    rollout_correction_cap: Annotated[float, Meta(gt=1)] = 2.0
    """the cap in rollout_correction"""
    kl_coef: NonNegativeFloat = 0.0
    """weight of the KL to the reference model; 0: there is no reference model"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator of that KL for each token (Schulman's names)"""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: the KL is a term of the loss; reward: its sum over a completion's tokens is subtracted
    from the completion's reward"""
    entropy_coef: NonNegativeFloat = 0.0
    """weight of an entropy bonus"""
    router_aux_coef: NonNegativeFloat = 0.0
    """weight of the load-balance loss of a mixture of experts, from the engine's routes of the
    whole mini-batch; it needs model.router_replay"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Section `optimizer`: AdamW and its learning rate."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw: float32 moments, 8 bytes a parameter; adamw_8bit: 8-bit codes with a scale for each
    block of a row, 2.06 bytes a parameter"""
    lr: NonNegativeFloat = 1e-6
    """learning rate after the warm-up"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rate after the warm-up: constant, or falling to min_lr at the end of the run along a
    line or half a cosine"""
    min_lr: NonNegativeFloat = 0.0
    """last learning rate of schedule linear or cosine"""
    weight_decay: NonNegativeFloat = 0.01
    """decoupled weight decay, on matrices only"""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's two betas"""
    max_grad_norm: PositiveFloat = 1.0
    """global gradient norm above which gradients are scaled down"""
    warmup_steps: NonNegativeInt = 0
    """optimizer steps over which lr rises linearly"""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Section `training`: the length of the run and the size of its updates."""

    num_steps: PositiveInt = 100
    """steps of the run; a step is one rollout and its updates"""
    num_mini_batches: PositiveInt = 1
    """optimizer steps in each epoch over a rollout"""
    num_epochs: PositiveInt = 1
    """passes over the rollouts of a step"""
    max_tokens_per_micro_batch: int | Literal["auto"] = "auto"
    """most prompt and completion tokens in one forward-backward pass on one rank. auto: 16384, or
    fewer if the planner finds that these do not fit; on a CPU 2048, or 2 rollouts if that is more
    """
    share_prefixes: bool | Literal["auto"] = "auto"
    """read a prompt once for several of its completions in one micro-batch, and what an episode's
    contexts have in common. auto: in the steps in which this is counted cheaper; true: in all
    steps. Not for recurrent layers, replayed routes of experts, prompts of the teacher's own, nor
    with model.sequence_parallel_size
    """
    max_nonfinite_in_a_row: PositiveInt = 3
    """the run stops after this many updates in a row were skipped because loss or gradient was not
    finite"""
    max_time_s: Seconds | None = None
    """seconds after which the run saves and ends as preempted; null: when the Slurm job's time ends
    """

    @property
    def micro_batch_tokens(self) -> int:
        """The value of `max_tokens_per_micro_batch`, or the planner's first choice if that is still
        auto."""
        tokens = self.max_tokens_per_micro_batch
        return _AUTO_MICRO_BATCH_TOKENS if tokens == "auto" else tokens

    @property
    def num_optimizer_steps(self) -> int:
        """The number of optimizer steps in one step of the run."""
        return self.num_mini_batches * self.num_epochs

    @property
    def num_run_optimizer_steps(self) -> int:
        """The number of optimizer steps in the whole run."""
        return self.num_steps * self.num_optimizer_steps


@dataclass(frozen=True, kw_only=True)
class ProofConfig:
    """Section `proofs`: checks of engine and update during the run."""

    every_steps: NonNegativeInt = 50
    """steps between two checks of the engine's weights and of the update, besides those in the
    first and the third step; 0: only these"""
    max_mismatch: PositiveFloat | None = None
    """mean |policy - engine| of a token's logprob, in nats, above which the run stops; null:
    derived from the first step"""
    weights: bool = True
    """prove tensor by tensor that the engine holds the policy's weights; false: all weights go
    through vLLM's loader, which is slower, since direct copies follow a map that is proved first"""
    logprobs: bool = True
    """stop where the engine's logprobs and the policy's differ by more than rounding; false: they
    are only measured"""
    update: bool = True
    """check the update against a plain recomputation; false: nothing looks at loss, gradient,
    AdamW, advantages, prompts, rewards' inputs, the reference, teachers and critic while the run
    goes on"""
    signals: bool = True
    """check what teachers, critic and reward models gave against plain forward passes"""
    bound_factor: Annotated[float, Meta(ge=1, le=3)] = 1.0
    """multiplies the bounds of scores and gradients in the checks of update and signals, for a
    model that rounds more than others"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Section `checkpoint`: what is saved, when, and where a run starts."""

    every_steps: NonNegativeInt = 100
    """steps between two checkpoints, from which a run can go on; 0: only at the end and when
    preempted"""
    keep: PositiveInt = 2
    """number of the newest checkpoints that stay on disk"""
    best_metric: str | None = None
    """metric, e.g. eval/gsm8k/mean; the checkpoint with its highest value stays on disk too"""
    export_every_steps: NonNegativeInt = 0
    """also write the model in Hugging Face format (adapters: PEFT) into the checkpoint of each N-th
    step; 0: the last one only"""
    resume: FilePath = "never"
    """auto: go on from the newest good checkpoint in run_dir, if there is one; never: refuse a
    run_dir in use; or the folder of a checkpoint to start from"""
    rollout_buffer: bool = True
    """keep finished completions on disk until their step is saved, so that a resumed run does not
    sample them again"""


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Section `watchdog`: time limits of the phases."""

    timeout_s: Seconds = 1800.0
    """seconds in one phase after which the run stops with a report of where each rank is"""
    phase_timeouts_s: dict[str, Seconds] = _no_entries()
    """limits for single phases: {rollout: 3600}; the limit for start grows by 10 s for each rank
    after the 8th"""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Section `eval`: evaluation on held-out sets."""

    every_steps: NonNegativeInt = 0
    """evaluate before training, after each N-th step and after the last; 0: never"""
    num_samples: PositiveInt = 4
    """completions for each prompt"""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """sampling temperature of the evaluation; 0: greedy"""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """sample from the likeliest tokens that have this probability together; 1: from all tokens"""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Section `logging`: trackers, rollout dumps and the report."""

    trackers: tuple[str, ...] = ()
    """also send the metrics to these: wandb, tensorboard, trackio"""
    trackers_rollouts_every_steps: NonNegativeInt = 0
    """show up to 64 rollouts of each N-th step in the trackers, from the dumped ones; 0: never"""
    wandb: bool | Literal["online", "offline"] = False
    """use wandb as a tracker; online and offline set its mode"""
    wandb_project: str = "grpo_spmd"
    """name of the project in wandb and trackio"""
    report_every_steps: NonNegativeInt = 0
    """write run_dir/report.html after each N-th step and at the end, in a separate process; 0:
    never"""
    rollouts_every_steps: NonNegativeInt = 1
    """write each N-th step's rollouts as jsonl; 0: never"""
    rollouts_compression: Literal["none", "gzip"] = "none"
    """gzip: write step_N.jsonl.gz, which is less than half the size"""
    rollouts_keep: PositiveInt | None = None
    """number of the newest steps whose rollouts stay on disk; null: all (those of evaluations
    always stay)"""

    @property
    def tracker_names(self) -> list[str]:
        """The names of the trackers in use, each once."""
        # wandb can be chosen in `trackers` or by its own key, which also sets its mode.
        names = {*self.trackers, *(["wandb"] if self.wandb else [])}
        return [name for name in TRACKERS if name in names]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole config. Printed configs have the sections in this order."""

    run_dir: FilePath
    """folder of this run: config, metrics, rollouts, logs, checkpoints"""
    seed: NonNegativeInt = 0
    """seed of everything random: order of prompts, sampling, new adapters; config and seed
    determine the run"""
    algorithm: Algorithm | None = None
    """sets the keys that define this algorithm where nothing else sets them (configs/README.md has
    the values); null: the defaults"""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    rewards: tuple[RewardConfig, ...]
    """one or more rewards; a completion's reward is their weighted sum; [] if a teacher alone
    teaches, or an environment alone rewards"""
    reward_pool: RewardPoolConfig = RewardPoolConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    teacher: TeacherConfig = TeacherConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    proofs: ProofConfig = ProofConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    eval: EvalConfig = EvalConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def policy_training(self) -> TrainingConfig:
        """`training` without the steps in which only the critic is trained.

        The policy's learning rate schedule has this length. With the length of the whole run it
        would not reach its end.
        """
        num_held_steps = self.critic.warmup_steps if self.critic.path is not None else 0
        return replace(self.training, num_steps=self.training.num_steps - num_held_steps)

    @property
    def pool_rewards(self) -> tuple[RewardConfig, ...]:
        """The rewards that the reward pool calls, which are functions and servers."""
        return tuple(reward for reward in self.rewards if reward.uses_pool)

    @property
    def micro_batch_tokens(self) -> int:
        """The most tokens of a micro-batch. If that is still auto, the most that the planner may
        choose."""
        is_auto = self.training.max_tokens_per_micro_batch == "auto"
        return max(self.training.micro_batch_tokens, is_auto * self.max_rollout_tokens)

    @property
    def secret_variables(self) -> set[str]:
        """The names of the environment variables that hold the values of headers, which may be
        secrets."""
        mappings = [self.teacher.headers_env, *(reward.headers_env for reward in self.rewards)]
        return {variable for headers_env in mappings for variable in headers_env.values()}

    @property
    def max_rollout_tokens(self) -> int:
        """The most tokens of prompt and completion together. A sequence in the engine and a
        micro-batch can have this length."""
        # Without environment.max_tokens an episode has the limit of one completion.
        episode_tokens = self.environment.max_tokens if self.environment.is_on else None
        return self.data.max_prompt_tokens + (episode_tokens or self.rollout.max_completion_tokens)

"""The contract: every name, signature, option and behaviour of vLLM that `grpo_spmd/engine/` relies
on, and why; and those of torch that differ between its versions. A test keeps it complete: what
engine/ imports, passes and reads of vLLM has its row here.

A row is kept where the name is there, takes the call, and its source says what it must. `absent`
tells what engine/ does without it. vLLM's text is quoted as ast writes it, so that its line breaks
and comments do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

_LINEAR = "vllm.model_executor.layers.linear"
_VOCABULARY = "vllm.model_executor.layers.vocab_parallel_embedding"
_CORE = "vllm.v1.engine.core.EngineCore"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_V1, _V2 = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
)
_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_EXECUTOR = "vllm.v1.executor.uniproc_executor.ExecutorWithExternalLauncher"
_STATE = "vllm.distributed.parallel_state"
_LORA_LAYER = "vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA"


@dataclass(frozen=True)
class Row:
    name: str  # module, class, member
    why: str
    call: str = ""  # how it is called: "(names, level=2)"
    forwards_to: str = ""  # the class whose fields it takes as further keywords
    says: tuple[str, ...] = ()  # each of these is in its source
    absent: str = ""  # it may be missing: what engine/ then does
    since: tuple[int, int] = (0, 0)  # for versions from this one on, up to the next
    before: tuple[int, int] = (9999, 0)

    @property
    def label(self) -> str:
        return self.name + self.call + (f" says {' ... '.join(self.says)}" if self.says else "")


def _option(name: str, reason: str, absent: str = "") -> Row:
    return Row("vllm.LLM", reason, f"(model=0, {name}=0)", "vllm.EngineArgs", absent=absent)


def _parameter(name: str, reason: str) -> Row:
    return Row("vllm.SamplingParams", reason, f"({name}=0)")


OPTIONS = (
    Row("vllm.LLM", "start.py makes it by keywords alone", "(model=0)"),
    _option("dtype", "the policy's compute dtype, which the sync casts to"),
    _option(
        "max_model_len",
        "room for the longest prompt and completion; longrope takes its factors by it",
    ),
    _option("load_format", "dummy: the first sync brings the weights, and none are read from disk"),
    _option("skip_tokenizer_init", "prompts come as token ids, completions leave as such"),
    _option("tokenizer_mode", "hf, for stop strings"),
    _option("disable_log_stats", "no statistics, which cost host time at each step"),
    _option(
        "distributed_executor_backend", "external_launcher: one worker, in this process, a rank"
    ),
    _option("seed", "a fixed one: every request brings its own"),
    _option("tensor_parallel_size", "ranks that share an engine"),
    _option("enable_prefix_caching", "a group's prompt is computed once"),
    _option("logprobs_mode", "logprobs at the sampling temperature, as the policy's are"),
    _option("enable_sleep_mode", "the memory that the update needs comes back"),
    _option(
        "language_model_only",
        "of a model of text and images the text part alone",
    ),
    _option("moe_backend", "on a GPU triton: experts whose rows can be compared and copied"),
    _option(
        "enable_return_routed_experts",
        "model.router_replay on a GPU",
        absent="start.py leaves it out, and nothing is replayed",
    ),
    _option("gpu_memory_utilization", "rollout.gpu_memory_utilization"),
    _option("trust_remote_code", "False: no code from the model's folder"),
    _option("enforce_eager", "on a CPU: no compilation of the model"),
    _option("block_size", "on a CPU: 32, so that prompts under 128 tokens are cached too"),
    _option("kv_cache_memory_bytes", "on a CPU vLLM would ask for nearly all memory on each rank"),
    _option("enable_chunked_prefill", "on a CPU: False, since a CPU generator cannot be set back"),
    _option("max_num_batched_tokens", "on a CPU: room for the longest sequence in one step"),
    _option("max_num_seqs", "on a GPU: what an engine can get in a step (checks/memory.py)"),
    Row(
        "vllm.engine.arg_utils.EngineArgs.get_batch_defaults",
        "observe/cards.py knows on which GPUs the default is 1,024 sequences and on which 256",
        says=(
            "device_memory >= 70 * GiB_bytes and 'a100' not in device_name",
            "UsageContext.LLM_CLASS: 1024",
            "UsageContext.LLM_CLASS: 256",
        ),
    ),
    _option(
        "disable_custom_all_reduce",
        "what a user sets who wants expandable segments with tensor parallelism",
    ),
    _option("enable_lora", "model.lora.sync: adapter"),
    _option("max_loras", "one adapter", absent="start.py leaves it out"),
    _option("max_lora_rank", "room for the adapter's rank"),
    _option(
        "lora_target_modules",
        "only layers that get an adapter",
        absent="start.py leaves it out: all layers",
    ),
    Row(
        "vllm.config.model.LogprobsMode",
        "the value that start.py passes",
        says=("'processed_logprobs'",),
    ),
    Row(
        "vllm.model_executor.model_loader._LOAD_FORMAT_TO_MODEL_LOADER",
        "the same",
        says=("'dummy':",),
    ),
    Row(
        "vllm.config.lora.MaxLoRARanks",
        "start.py's list",
        says=("8, 16, 32, 64, 128, 256, 320, 512]",),
    ),
    Row(
        "vllm.engine.arg_utils.EngineArgs",
        "checks/machine.py looks a misspelt rollout.engine key up in this file",
    ),
    Row("vllm.entrypoints.llm.LLM", "and in this one"),
    Row(
        "vllm.v1.executor.abstract.Executor.get_class",
        "the backend is known by this name",
        says=(
            "distributed_executor_backend == 'external_launcher'",
            "executor_class = ExecutorWithExternalLauncher",
        ),
    ),
    Row(
        f"{_EXECUTOR}._init_executor",
        "VLLM_ENABLE_V1_MULTIPROCESSING=0 is what it needs",
        says=("not envs.VLLM_ENABLE_V1_MULTIPROCESSING",),
    ),
    Row(
        f"{_EXECUTOR}._distributed_args",
        "start.py puts a function in its place that changes the first of three: the name of "
        "shared memory",
        "()",
        says=("return (distributed_init_method, rank, local_rank)",),
    ),
    Row(
        f"{_STATE}.destroy_model_parallel",
        "start.py ends what a failed run has left of the groups",
        "()",
    ),
    Row(
        f"{_STATE}.destroy_distributed_environment",
        "start.py: the next engine would take the old world for its own",
        "()",
        says=("_WORLD = None",),
    ),
    *(
        Row("vllm.envs.environment_variables", "start.py sets it", says=(f"'{name}':",))
        for name in (
            "VLLM_ENABLE_V1_MULTIPROCESSING",
            "VLLM_LOGGING_LEVEL",
            "VLLM_NO_USAGE_STATS",
            "VLLM_CACHE_ROOT",
        )
    ),
)

STATES = (
    Row("vllm.LLM.llm_engine", "requests are given to it, not to LLM.generate"),
    Row("vllm.LLM.model_config", "the folder of the model, for the text of an error"),
    Row("vllm.config.ModelConfig.model", "the same"),
    Row("vllm.LLM.apply_model", "gives the model itself, for the reload and the proof", "(func)"),
    Row("vllm.LLM.collective_rpc", "reload_weights of the worker", "(method, kwargs=0)"),
    Row(
        "vllm.LLM.sleep",
        "frees weights and KV cache; requests of an ended generation go too",
        "(level=2)",
    ),
    Row("vllm.LLM.wake_up", "the weights before the sync, the KV cache after it", "(tags=0)"),
    Row("vllm.LLM.reset_prefix_cache", "keys and values of the old weights", "()"),
    Row(
        "vllm.v1.core.block_pool.BlockPool.reset_prefix_cache",
        "says False, and raises nothing, while requests hold blocks",
        says=("return False", "return True"),
    ),
    Row(
        f"{_WORKER}.sleep",
        "level 2 drops the weights; buffers, which no sync brings, it keeps",
        "(level=2)",
        says=("level == 2", "model.named_buffers()"),
    ),
    Row(
        f"{_WORKER}.sleep",
        "its error where another process took memory (start.py): the run ends then",
        says=("Memory usage increased after sleeping",),
    ),
    Row(
        f"{_WORKER}.wake_up",
        "and puts them back",
        "(tags=0)",
        says=("_sleep_saved_buffers", ".copy_("),
    ),
    Row(
        _WORKER, "the pools that the tags of wake_up name", says=("tag='weights'", "tag='kv_cache'")
    ),
    Row("vllm.device_allocator.cumem.CuMemAllocator.get_instance", "the sleep pool's bytes", "()"),
    Row("vllm.device_allocator.cumem.CuMemAllocator.get_current_usage", "the same", "()"),
    Row(
        "vllm.device_allocator.cumem.CuMemAllocator.use_memory_pool",
        "switches expandable segments off and on again: gpu.py keeps the user's other options",
        says=("expandable",),
    ),
    Row(
        "vllm.v1.engine.llm_engine.LLMEngine.vllm_config",
        "dtype of the weights, size of a batch, model runner",
    ),
    Row("vllm.config.VllmConfig.model_config", "the dtype"),
    Row("vllm.config.ModelConfig.dtype", "the dtype that the sync casts to"),
    Row("vllm.config.VllmConfig.scheduler_config", "what an engine runs at once"),
    Row(
        "vllm.config.SchedulerConfig.max_num_seqs",
        "how many jobs an engine takes from the shared queue",
    ),
    Row("vllm.config.VllmConfig.cache_config", "what an engine's cache holds"),
    Row(
        "vllm.config.CacheConfig.num_gpu_blocks",
        "how many requests the shared queue expects to run at once; known once the cache is there",
    ),
    Row("vllm.config.CacheConfig.block_size", "the same, in tokens"),
    Row(
        "vllm.config.VllmConfig.use_v2_model_runner",
        "V1's sampler loops over seeds in Python: a warning where it runs on a GPU",
    ),
    Row(
        "vllm.v1.worker.gpu.sample.states.SamplingStates.seeds",
        "the V2 model runner takes seeds from a tensor, one kernel for all requests",
    ),
    Row(
        "vllm.v1.worker.gpu.sample.sampler.Sampler.__call__",
        "V2 too gives logprobs of what was sampled from, not of the raw logits",
        says=("self.logprobs_mode in", "logits = processed_logits"),
    ),
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",
        "so does V1",
        says=("== 'processed_logprobs'",),
    ),
    Row(
        "vllm.envs.environment_variables",
        "the worker sets the precision of float32 products for the whole process, to what torch "
        "has by default",
        says=("env_with_choices('VLLM_FLOAT32_MATMUL_PRECISION', 'highest',",),
    ),
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler.random_sample",
        "V1's loop",
        says=("in generators.items()",),
    ),
    Row("vllm.v1.engine.llm_engine.LLMEngine.engine_core", "the scheduler and the end of vLLM"),
    Row(
        "vllm.v1.engine.core_client.EngineCoreClient.make_client",
        "in this process",
        says=("return InprocClient(",),
    ),
    Row(
        "vllm.v1.engine.core_client.InprocClient.engine_core",
        "the EngineCore, whose scheduler is asked",
    ),
    Row(
        "vllm.v1.engine.core_client.InprocClient.shutdown", "ends vLLM, on all ranks together", "()"
    ),
    Row(f"{_CORE}.scheduler", "asked how many requests wait for room"),
    Row(
        f"{_CORE}.batch_queue",
        "asynchronous scheduling: a batch may be under way",
        absent="taken for none",
    ),
    Row(f"{_SCHEDULER}.requests", "those that are not finished, by name"),
    Row("vllm.v1.request.Request.num_output_tokens", "how many a dropped request had"),
    Row(f"{_SCHEDULER}.has_requests", "an abort is over when it says no", "()"),
    Row(
        f"{_SCHEDULER}.get_request_counts",
        "(running, waiting): while some wait, claim no more",
        "()",
        says=("return (len(self.running), len(self.waiting)",),
    ),
)

REQUESTS = (
    Row(
        "vllm.v1.engine.llm_engine.LLMEngine.add_request",
        "a request by name, its prompt as {prompt_token_ids}",
        "(request_id, prompt, params, lora_request=None)",
    ),
    Row("vllm.inputs.TokensPrompt", "the key of that prompt", "(prompt_token_ids=0)"),
    Row(
        "vllm.v1.engine.llm_engine.LLMEngine.abort_request",
        "drops requests by the names that we gave",
        "(names)",
    ),
    Row(
        "vllm.v1.engine.llm_engine.LLMEngine.step",
        "one step; what it returns may not be finished",
        "()",
    ),
    _parameter("max_tokens", "rollout.max_completion_tokens"),
    _parameter("temperature", "rollout.temperature, or that of the evaluation"),
    _parameter(
        "seed", "a function of step, prompt and sample: a completion does not depend on its batch"
    ),
    _parameter(
        "stop_token_ids", "of tokenizer and generation_config.json: vLLM has no tokenizer here"
    ),
    _parameter("top_p", "eval.top_p; 1 in rollouts"),
    _parameter("stop", "rollout.stop"),
    _parameter("include_stop_str_in_output", "True: what was sampled is what is trained"),
    _parameter("skip_special_tokens", "False: a stop string may be one"),
    _parameter("logprobs", "0: of the sampled token alone"),
    _parameter("flat_logprobs", "a list of numbers, not an object a token"),
    _parameter("detokenize", "False: no text is made"),
    _parameter("output_kind", "FINAL_ONLY: one output a request"),
    Row("vllm.sampling_params.RequestOutputKind.FINAL_ONLY", "that value"),
    Row("vllm.outputs.RequestOutput.request_id", "the name that we gave, not vLLM's own"),
    Row("vllm.outputs.RequestOutput.finished", "whether it is over"),
    Row("vllm.outputs.RequestOutput.outputs", "one completion"),
    Row("vllm.outputs.CompletionOutput.token_ids", "with the stop token at its end"),
    Row("vllm.outputs.CompletionOutput.logprobs", "flat"),
    Row("vllm.outputs.CompletionOutput.finish_reason", '"stop" or "length"'),
    Row(
        "vllm.outputs.CompletionOutput.routed_experts",
        "[tokens that were read, layers, k], cached prompts included",
        since=(0, 32),
    ),
    Row("vllm.outputs.RequestOutput.prompt_token_ids", "the tokens before those"),
    Row("vllm.config.vllm.VllmConfig.aux_output_config", "whether it returns them", since=(0, 32)),
    Row("vllm.config.aux_output.AuxOutputConfig.enable_return_routed_experts", "", since=(0, 32)),
    Row(
        "vllm.config.vllm.VllmConfig._verify_aux_output_compatibility",
        "start.py knows a refusal by these words, and starts without routes",
        says=("AuxOutput Connector requires Model Runner V2", "--enable-return-routed-experts is"),
        since=(0, 32),
    ),
    Row("vllm.logprobs.FlatLogprobs.logprobs", "one number a token, since logprobs=0"),
)

RELOAD = (
    Row(f"{_WORKER}.reload_weights", "by name, through collective_rpc", "(weights_iterator=0)"),
    Row(f"{_V1}.reload_weights", "V1's", "(weights_iterator=0)"),
    Row(f"{_V2}.reload_weights", "V2's", "(weights_iterator=0)"),
    Row(
        "vllm.model_executor.model_loader.reload.layerwise",
        "reload.py keeps this warning from the log: it comes for modules without weights of "
        "their own",
        says=("Failed to load weights",),
    ),
    Row(
        f"{_VOCABULARY}.ParallelLMHead",
        "on a CPU a tied one keeps its packed copy: it is packed anew. The proof reads it by its "
        "packed weights",
    ),
    Row(
        f"{_VOCABULARY}.UnquantizedEmbeddingMethod.process_weights_after_loading",
        "that packing",
        "(layer)",
    ),
    Row(
        f"{_LINEAR}.UnquantizedLinearMethod.process_weights_after_loading",
        "a linear layer's, after a copy",
        "(layer)",
    ),
    Row(
        "vllm.model_executor.layers.attention.attention.Attention.process_weights_after_loading",
        "after all copies, as vLLM does after its reload: the one layer that may have such a "
        "method",
        "(act_dtype)",
    ),
    Row(
        "vllm.model_executor.layers.utils",
        "on a CPU a layer keeps its packed weights",
        says=("layer.cpu_linear",),
    ),
)

LAYOUT = (
    Row(f"{_LINEAR}.LinearBase", "weights whose rows the proof knows"),
    *(
        Row(f"{_LINEAR}.LinearBase.{name}", "which rows this rank holds")
        for name in ("output_size", "tp_rank", "tp_size", "quant_method")
    ),
    Row(f"{_LINEAR}.UnquantizedLinearMethod.weight", "a plain layout: by bytes"),
    Row(
        f"{_LINEAR}.UnquantizedLinearMethod.apply",
        "a packed one: its product with a vector",
        "(layer, x, bias)",
    ),
    Row(f"{_LINEAR}.ColumnParallelLinear.bias", "HF's bias, or None"),
    Row(f"{_LINEAR}.RowParallelLinear.bias", "the same"),
    Row(f"{_LINEAR}.ColumnParallelLinear", "split by rows"),
    Row(f"{_LINEAR}.RowParallelLinear", "split by columns"),
    Row(f"{_LINEAR}.MergedColumnParallelLinear.output_sizes", "rows of each of HF's layers in it"),
    *(
        Row(f"{_LINEAR}.QKVParallelLinear.{name}", "rows of q, k and v on this rank")
        for name in (
            "num_heads",
            "num_kv_heads",
            "total_num_heads",
            "total_num_kv_heads",
            "head_size",
        )
    ),
    Row(f"{_LINEAR}.QKVParallelLinear.num_kv_head_replicas", "ranks that share a KV head"),
    Row(
        f"{_LINEAR}.QKVParallelLinear.v_head_size",
        "where values are smaller than keys",
        absent="taken for head_size",
    ),
    Row(f"{_VOCABULARY}.VocabParallelEmbedding", "split by vocabulary"),
    Row(f"{_VOCABULARY}.VocabParallelEmbedding.shard_indices", "which rows this rank holds"),
    Row(f"{_VOCABULARY}.VocabParallelEmbedding.org_vocab_size", "rows without padding"),
    Row(f"{_VOCABULARY}.VocabParallelEmbedding.quant_method", "whether they are packed"),
    Row(
        f"{_VOCABULARY}.VocabParallelEmbeddingShardIndices.org_vocab_start_index",
        "the first of them",
    ),
    Row(f"{_VOCABULARY}.VocabParallelEmbeddingShardIndices.org_vocab_end_index", "the last"),
    Row(
        "vllm.model_executor.models.qwen2.Qwen2ForCausalLM.packed_modules_mapping",
        "HF's names in a fused layer",
    ),
    Row(
        "vllm.model_executor.models.qwen2.Qwen2ForCausalLM.lm_head",
        "read by its packed weights where it has such",
    ),
    Row(
        "vllm.model_executor.models.llama.LlamaForCausalLM.hf_to_vllm_mapper",
        "a class's renaming",
        absent="none",
    ),
    Row(
        "vllm.model_executor.models.utils.WeightsMapper.apply_list",
        "names that a class of vLLM's changes",
        "(names)",
    ),
    Row(
        "vllm.model_executor.models.utils.WeightsMapper.get_rename_mapper",
        "from 0.30 on a mapper stacks too: the names alone",
        "()",
        absent="get_unstacked_mapper (0.28), or the mapper as it is",
    ),
    Row(
        "vllm.model_executor.models.utils.WeightsMapper.get_unstacked_mapper",
        "the same, in 0.28",
        "()",
        absent="get_rename_mapper (from 0.30 on), or the mapper as it is",
    ),
)

ADAPTERS = (
    Row(
        "vllm.lora.request.LoRARequest",
        "an adapter by name, number and a folder that nobody opens",
        "(a, b, c)",
    ),
    Row(
        "vllm.lora.lora_model.LoRAModel", "tensors handed over in memory", "(number, rank, weights)"
    ),
    Row("vllm.lora.lora_weights.LoRALayerWeights", "those of a layer", "(name, rank, alpha, a, b)"),
    Row(
        "vllm.lora.lora_weights.LoRALayerWeights.optimize",
        "multiplies B in place, but not where alpha is the rank",
        "()",
        says=("if self.scaling == 1:",),
    ),
    Row("vllm.lora.model_manager.LoRAModelManager.lora_manager", "the model holds its manager"),
    Row(
        "vllm.lora.model_manager.LRUCacheLoRAModelManager.add_adapter",
        "as it would be read from a folder",
        "(model)",
    ),
    Row(
        "vllm.lora.model_manager.LRUCacheLoRAModelManager.activate_adapter",
        "into the layers",
        "(number)",
    ),
    Row(
        "vllm.lora.model_manager.LRUCacheLoRAModelManager.remove_adapter",
        "out of them; one that is not there too",
        "(i)",
    ),
    Row(
        "vllm.lora.model_manager.LoRAModelManager.modules",
        "the layers that take one, for the proof, and for reloads of the base",
    ),
    Row(f"{_LORA_LAYER}.base_layer", "the layer below"),
    Row(f"{_LORA_LAYER}.n_slices", "adapters of a fused layer"),
    Row(f"{_LORA_LAYER}.lora_a_stacked", "[adapter, 1, rank, columns]"),
    Row(f"{_LORA_LAYER}.lora_b_stacked", "[adapter, 1, rows, rank]"),
)

_EXPERTS = "vllm.model_executor.layers.fused_moe"
EXPERTS = (
    Row(f"{_EXPERTS}.routed_experts.RoutedExperts.moe_config", "which part of the experts it has"),
    Row(f"{_EXPERTS}.config.FusedMoEConfig.num_experts", "of a layer"),
    Row(f"{_EXPERTS}.config.FusedMoEConfig.moe_parallel_config", "ranks that share an expert"),
    Row(f"{_EXPERTS}.config.FusedMoEParallelConfig.tp_rank", "this rank among them"),
    Row(f"{_EXPERTS}.config.FusedMoEParallelConfig.tp_size", "their number"),
    Row(
        f"{_EXPERTS}.config.FusedMoEConfig.intermediate_size_per_partition_unpadded",
        "the width of an expert on this rank",
        absent="the matrix's own width: nothing is padded then",
    ),
    Row(
        f"{_EXPERTS}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.unquantized_backend",
        "whether the matrices are as HF has them",
    ),
    Row(f"{_EXPERTS}.oracle.unquantized.UnquantizedMoeBackend.TRITON", "they are"),
    Row(f"{_EXPERTS}.oracle.unquantized.UnquantizedMoeBackend.CPU", "packed"),
    Row(
        f"{_EXPERTS}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.forward_native",
        "the names of the matrices",
        says=("w1=layer.w13_weight", "w2=layer.w2_weight"),
    ),
    Row(
        "vllm.model_executor.models.glm4_moe.Glm4MoE.__init__",
        "a constant under the checkpoint's name, and not rounded",
        says=(
            "self.gate.e_score_correction_bias = nn.Parameter("
            "torch.empty(config.n_routed_experts, dtype=torch.float32))",
        ),
    ),
)

_GATED_DELTA_NET = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
# Where vllm runs on a CPU: its wheels alone need them.
# For rollout.speculation, which asks for 0.32 (checks/machine.py).
_SINCE = (0, 32)
_SPECULATION = (
    Row(
        "vllm.v1.spec_decode.custom_class_proposer.create_custom_proposer",
        "makes a Speculation, by its name",
        "(vllm_config=0)",
        since=_SINCE,
    ),
    *(
        Row(f"vllm.config.speculative.SpeculativeConfig.{name}", reason, since=_SINCE)
        for name, reason in (
            ("method", "custom_class"),
            ("model", "the name of the class"),
            ("num_speculative_tokens", "the most drafts of a request"),
            ("num_speculative_tokens_per_batch_size", "with it no request is padded with drafts"),
        )
    ),
    Row(
        f"{_SCHEDULER}.schedule",
        "a schedule of drafts keeps it from padding a request with drafts of -1",
        says=("self.dynamic_sd_lookup is None",),
        since=_SINCE,
    ),
    Row(
        f"{_V1}.__init__",
        "what speculation.py replaces and reads",
        says=(
            "self.drafter = create_custom_proposer(",
            "self.rejection_sampler = RejectionSampler(",
            "self.effective_drafter_max_model_len =",
        ),
        since=_SINCE,
    ),
    Row(
        f"{_V1}._sample",
        "how the sampler in its place is called",
        says=(
            "self.rejection_sampler(spec_decode_metadata, draft_probs, logits, sampling_metadata)",
        ),
        since=_SINCE,
    ),
    Row(
        f"{_V1}.propose_draft_token_ids",
        "how drafts are asked for",
        says=("self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu",),
        since=_SINCE,
    ),
    Row(
        f"{_V1}._calc_spec_decode_metadata",
        "the places of a request are consecutive rows of the logits",
        says=("np.repeat(cu_num_scheduled_tokens - num_sampled_tokens, num_sampled_tokens)",),
        since=_SINCE,
    ),
    Row(
        "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu",
        "a generator is taken and drawn from before the next is taken",
        says=("for i, gen in generators.items():",),
        since=_SINCE,
    ),
    Row(
        "vllm.v1.sample.rejection_sampler.RejectionSampler.parse_output",
        "drops tokens of -1 and their logprobs",
        says=("output_token_ids_np != PLACEHOLDER_TOKEN_ID", "valid_mask.flatten()"),
        since=_SINCE,
    ),
    Row("vllm.v1.outputs.SamplerOutput.sampled_token_ids", "of each place", since=_SINCE),
    Row("vllm.v1.outputs.SamplerOutput.logprobs_tensors", "the same", since=_SINCE),
    Row(
        "vllm.v1.engine.output_processor.OutputProcessor._trim_surplus_tokens",
        "drops what a step brought after a stop string",
        since=_SINCE,
    ),
)

CPU = (
    *_SPECULATION,
    Row(
        "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm",
        "a convolution is packed beside its rows as they were",
        says=("layer._cpu_unpacked_conv_weight = unpacked", "ops.causal_conv1d_weight_pack"),
    ),
    Row(
        "vllm._custom_ops.causal_conv1d_fwd_cpu",
        "what a packed convolution computes",
        "(x=0, weight=0, bias=0, conv_states=0, query_start_loc=0, cache_indices=0, "
        "has_initial_state=0, silu_activation=0, is_weight_packed=0)",
    ),
    Row(
        f"{_GATED_DELTA_NET}.QwenGatedDeltaNetAttention.key_dim",
        "which channels of a convolution a rank has",
    ),
    Row(f"{_GATED_DELTA_NET}.QwenGatedDeltaNetAttention.value_dim", "the same"),
    Row(
        "vllm.model_executor.models.registry._ModelRegistry.register_model",
        "a class that is looked at in this process",
        "(model_arch, model_cls)",
    ),
    Row("vllm.model_executor.models.registry._ModelRegistry.models", "by architecture"),
    Row(
        "vllm.model_executor.models.registry._LazyRegisteredModel.load_model_cls",
        "the class of an architecture",
        "()",
    ),
    Row("vllm.model_executor.models.ModelRegistry", "the one registry"),
    Row(
        f"{_EXPERTS}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply",
        "what each expert alone computes",
        "(layer=0, x=0, topk_weights=0, topk_ids=0, shared_experts=0, shared_experts_input=0)",
    ),
    Row(
        f"{_EXPERTS}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod._setup_kernel",
        "packs the experts while there is no kernel",
        says=("is_weight_update = self.moe_kernel is not None", "if not is_weight_update"),
    ),
    Row(
        f"{_EXPERTS}.router.base_router.BaseRouter.set_capture_fn",
        "routes.py gets a layer's experts [tokens, k], by their numbers in the model",
        "(capture_fn=0)",
        absent="nothing is replayed",
    ),
    Row(
        f"{_EXPERTS}.router.base_router.BaseRouter._select_experts",
        "called before the numbers become those of physical experts",
        says=("self.capture_fn(topk_ids)",),
        since=(0, 32),
    ),
    Row(f"{_EXPERTS}.runner.moe_runner.MoERunner.router", "of a layer"),
    Row(f"{_EXPERTS}.runner.moe_runner.MoERunner.layer_id", "its number"),
    Row("vllm.v1.kv_cache_interface.KVCacheConfig.kv_cache_groups", "one for each kind of cache"),
    Row(f"{_SCHEDULER}.kv_cache_config", "routes.py records full attention alone"),
    Row(f"{_SCHEDULER}.kv_cache_manager", "asked for the blocks of a finished request"),
    Row("vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids", "", "(request_id)"),
    Row(f"{_SCHEDULER}._free_request", "called while the request has its blocks", "(request=0)"),
    Row(f"{_V1}.execute_model", "one forward pass, whose slots of the KV cache are read after it"),
    Row("vllm.v1.worker.block_table.BlockTable.slot_mapping", "the slots of its tokens"),
    Row(
        "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend.get_supported_head_sizes",
        "a model with other heads would fail when it first samples",
        "()",
    ),
    Row(
        "vllm.platforms.cpu",
        "isolation.py puts LOCAL_WORLD_SIZE back",
        says=("os.environ['LOCAL_WORLD_SIZE'] =",),
    ),
)

TORCH = (
    Row(
        "torch.compiler.set_stance",
        "vLLM compiles a helper of its logprobs on first use",
        '("force_eager")',
    ),
    Row(
        "torch._C._accelerator_setAllocatorSettings",
        "the user's allocator options again, after vLLM has reset them",
        "(settings)",
    ),
    Row("torch.cuda.get_rng_state", "isolation.py", "()"),
    Row("torch.cuda.set_rng_state", "isolation.py", "(state)"),
    Row(
        "torch.nn.attention.varlen.varlen_attn",
        "attention over packed rows on a GPU (model/attention.py)",
        "(q, k, v, a, b, c, d, scale=0, window_size=0)",
    ),
    Row(
        "torch.distributed.fsdp.fully_shard",
        "the policy's shards (model/policy.py)",
        "(module, mesh=0)",
    ),
    Row(
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "limits of vLLM's groups (session.py)",
        "(a, b)",
    ),
    Row(
        "torch.distributed.distributed_c10d._World.pg_map", "the groups that there are (session.py)"
    ),
)

VLLM = (*OPTIONS, *STATES, *REQUESTS, *RELOAD, *LAYOUT, *ADAPTERS, *EXPERTS)

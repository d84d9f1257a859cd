"""Worker: plain vLLM over a folder, eight greedy tokens after each prompt.

python -m tests.support.workers.vllm_greedy FOLDER PROMPTS     PROMPTS: token ids, JSON
"""

from __future__ import annotations

import json
import sys

import vllm

if __name__ == "__main__":
    llm = vllm.LLM(sys.argv[1], enforce_eager=True, max_model_len=64)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], sampling, use_tqdm=False
    )
    print("tokens", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))

"""What a vLLM server answers, as 0.32 does, of a plain transformers model: its models, and the
logprobs of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

NAME = "tiny"


def answers(folder: Path, max_tokens: int = 256) -> Callable[[Any], Any]:
    """To a body of StubServer's."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", trust_remote_code=False
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.no_grad()
    def answer(body: Any) -> Any:
        if body is None:
            return {
                "object": "list",
                "data": [{"id": NAME, "object": "model", "max_model_len": max_tokens}],
            }
        ids, number = body["prompt"], body["prompt_logprobs"]
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        positions: list[Any] = [None]
        for place_values, local in zip(logprobs, ids[1:], strict=False):
            rank = int((place_values >= place_values[local]).sum())
            ranks = {local: rank} | {
                int(i): position for position, i in enumerate(place_values.topk(number).indices, 1)
            }
            positions.append(
                {
                    str(i): {
                        "logprob": float(place_values[i]),
                        "rank": rank,
                        "decoded_token": tokenizer.decode([i]),
                    }
                    for i, rank in ranks.items()
                }
            )
        return {
            "id": "cmpl-0",
            "model": NAME,
            "choices": [{"prompt_logprobs": positions, "prompt_token_ids": ids}],
        }

    return answer

"""What TRL's DistillationTrainer says of a small batch: its loss, and a sketch of the gradient of
each parameter.

    .venv-trl/bin/python -m tests.support.trl_distillation > tests/support/trl_distillation.json

Made once with trl 1.16.0; the tests read the file. Models are filled by a formula, so that they are
the same anywhere. The command runs where TRL is (benchmarks/support/trl_environment.py makes that)
and imports nothing of grpo_spmd.
"""

from __future__ import annotations

import json
import sys
import types
import zlib
from typing import Any

import torch
import transformers
from torch import Tensor

TEMPERATURE = 0.8
BETAS = (0.0, 0.3, 0.5, 1.0)
ROWS = [([5, 9, 2], [7, 1, 30, 4]), ([11, 3], [8, 19, 22, 6, 1, 17]), ([2, 40, 41, 13], [3])]
_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}
_CAPS = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 32,
}
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen3": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"tie_word_embeddings": False},
    ),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"tie_word_embeddings": True, **_CAPS},
    ),
}


def made_models(family: str) -> tuple[Any, Any]:
    """Student and teacher, which is wider and has a layer more."""
    config, cls, changes = FAMILIES[family]
    student = config(**{**_SIZES, "hidden_size": 16, "intermediate_size": 24, **changes})
    teacher = config(
        **{**_SIZES, "hidden_size": 24, "intermediate_size": 32, **changes, "num_hidden_layers": 2}
    )
    return _filled(cls, student, 1), _filled(cls, teacher, 2)


@torch.no_grad()
def _filled(cls: Any, config: Any, number: int) -> Any:
    """With values of about 0.3 that follow from the names alone, to the bit."""
    config._attn_implementation = "eager"
    model = cls(config)
    for name, parameter in model.named_parameters():
        positions = torch.arange(parameter.numel(), dtype=torch.int64)
        mixed = (positions * 2654435761 + zlib.crc32(f"{number}/{name}".encode())) % 4093
        parameter.copy_((mixed.double() / 4093 - 0.5).float().view(parameter.shape))
    return model


def sketch(gradient: Tensor) -> list[float]:
    """Its norm, and two products with fixed waves."""
    flat = gradient.detach().double().flatten()
    positions = torch.arange(len(flat), dtype=torch.float64)
    return [
        float(flat.norm()),
        float(flat @ torch.cos(positions * 0.7)),
        float(flat @ torch.sin(positions * 1.3)),
    ]


def by_trl(family: str, beta: float) -> dict[str, Any]:
    """Loss and sketches, by TRL's own code from padded token ids on."""
    from trl import DistillationTrainer  # type: ignore[import-not-found, attr-defined, unused-ignore]

    student, teacher = made_models(family)
    trainer: Any = DistillationTrainer.__new__(DistillationTrainer)
    trainer.beta, trainer.temperature, trainer.teacher_model, trainer._is_vlm = (
        beta,
        TEMPERATURE,
        teacher,
        False,
    )
    trainer.model_kwarg_keys = {"input_ids", "attention_mask"}
    trainer.accelerator = types.SimpleNamespace(
        unwrap_model=lambda model: model, is_main_process=False
    )
    trainer.args, trainer.state = (
        types.SimpleNamespace(report_to=[]),
        types.SimpleNamespace(global_step=0),
    )
    trainer._forward_redirection = lambda wrapper, model, method, *args, **kwargs: method(
        *args, **kwargs
    )
    loss, _, _ = trainer._compute_loss(student, _padded(), num_items_in_batch=None)
    loss.backward()
    gradients = {name: sketch(parameter.grad) for name, parameter in student.named_parameters()}
    return {"loss": float(loss.detach()), "gradients": gradients}


def _padded() -> dict[str, Tensor]:
    prompts, completions = zip(*ROWS, strict=True)
    maximum = [max(map(len, prompts)), max(map(len, completions))]
    remaining = [
        ([0] * (maximum[0] - len(ids)) + ids, [0] * (maximum[0] - len(ids)) + [1] * len(ids))
        for ids in prompts
    ]
    correct = [
        (ids + [0] * (maximum[1] - len(ids)), [1] * len(ids) + [0] * (maximum[1] - len(ids)))
        for ids in completions
    ]
    (prompt_ids, prompt_mask), (ids, mask) = (
        zip(*side, strict=True) for side in (remaining, correct)
    )
    named = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": ids,
        "completion_mask": mask,
    }
    return {name: torch.tensor(rows) for name, rows in named.items()}


if __name__ == "__main__":
    found = {family: {str(beta): by_trl(family, beta) for beta in BETAS} for family in FAMILIES}
    json.dump(found, sys.stdout, indent=None)

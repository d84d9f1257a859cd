"""Which models are refused, by what: config.json alone, transformers' code for them, the tensors of
the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.config_json import refuse_by_config
from grpo_spmd.model.families.build import (
    as_config_error,
    build_hf_model,
    constants,
    decoder_layers,
    keep_hf_classes,
    saved_layout,
    stored_layout,
)
from grpo_spmd.model.families.refusals import (
    refuse_unmatched_names,
    refuse_untrainable,
)
from tests.support.models import EXPERTS, FAMILIES, make_model


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "quantised .*fp8",
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised .*gptq",
        ),
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 64}},
            "several models in it .text_config",
        ),
        ({"model_type": "bart", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
    ],
)
def test_what_config_json_tells_is_refused_in_one_line(
    config: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path: some/model .*{expected}") as refused:
        refuse_by_config(config, "some/model")
    assert "\n" not in str(refused.value)


def test_dense_models_are_not_taken_for_others() -> None:
    dense = {
        "num_experts": None,
        "num_local_experts": 0,
        "moe_intermediate_size": 96,
        "quantization_config": None,
    }
    refuse_by_config(
        {**dense, "text_config": None, "alibi": False, "attn_config": {"alibi": False}},
        "some/model",
    )


SIZES = {
    "vocab_size": 97, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,  # noqa: E501
    "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=97), "transposed"),
        (
            transformers.GPTJConfig(n_embd=128, n_layer=2, n_head=4, rotary_dim=16, vocab_size=97),
            "code of its own",
        ),
        (transformers.StableLmConfig(**SIZES), "StableLmAttention is not told where"),
        (transformers.DiffLlamaConfig(**SIZES), "4 times in its 2 layers"),
        (
            transformers.XGLMConfig(d_model=128, num_layers=2, attention_heads=4, ffn_dim=96),
            "0 times in its 2 layers",
        ),
        (transformers.BertConfig(**SIZES), "only a causal decoder"),
        (
            transformers.RwkvConfig(vocab_size=97, hidden_size=128, num_hidden_layers=2),
            "takes no position_ids",
        ),
        (
            transformers.ApertusConfig(**SIZES),
            r"act_fn\.beta in its checkpoint, which is no parameter",
        ),
        (transformers.PhiConfig(**SIZES), "bias in its lm_head"),
        (
            transformers.GptOssConfig(**SIZES, num_local_experts=2),
            r"experts\) has experts with down_proj, down_proj_bias, .* in a layout of their own",
        ),
        (transformers.Gemma3Config(), "several models in it"),
        (
            transformers.HeliumConfig(**SIZES, head_dim=16),
            "HeliumForCausalLM. cannot be run over packed rows: Runtime",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, transformers.PreTrainedConfig) else "",
)
def test_what_transformers_code_does_is_refused(tmp_path: Path, config: Any, expected: str) -> None:
    """Before any tensor is looked at but for those whose maths are asked: they alone need a
    checkpoint."""
    config.save_pretrained(tmp_path)
    if "times" in expected or "told" in expected or "rows" in expected:
        transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=False
        ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model\.path: .*{expected}") as refused:
        refuse_untrainable(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "starcoder2"])
def test_a_model_that_trains_is_not_refused(tmp_path: Path, family: str) -> None:
    refuse_untrainable(str(make_model(tmp_path, family, tied=True)))


def test_files_beside_model_safetensors_are_let_be(tmp_path: Path) -> None:
    """As transformers does: Mistral's own format, say, or an adapter that was saved into the
    model's folder."""
    folder = make_model(tmp_path, "llama", tied=True)
    save_file(
        {"layers.0.attention.wq.weight": torch.zeros(2, 2)}, folder / "consolidated.safetensors"
    )
    refuse_untrainable(str(folder))


def _rewrite(folder: Path, **tensors: Tensor) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)


def test_a_tensor_that_the_policy_has_no_place_for_is_refused(tmp_path: Path) -> None:
    folder, attention = make_model(tmp_path, "llama", tied=True), "model.layers.0.self_attn."
    # A tied head stored twice and the buffers of old checkpoints are none of the model's and harm
    # nothing.
    expected_names = {
        "lm_head.weight": torch.zeros(97, 64),
        f"{attention}rotary_emb.inv_freq": torch.zeros(16),
    }
    masks = {
        f"{attention}bias": torch.ones(1, 1, 8, 8),
        f"{attention}masked_bias": torch.tensor(-1e4),
    }
    _rewrite(folder, **expected_names, **masks)
    refuse_untrainable(str(folder))
    _rewrite(
        folder,
        **{f"{attention}q_proj.bias": torch.ones(128), f"{attention}k_proj.bias": torch.ones(64)},
    )
    expected = (
        r"has model\.layers\.0\.self_attn\.k_proj\.bias and 1 more, which "
        r"LlamaForCausalLM has no place for"
    )
    with pytest.raises(ConfigError, match=expected):
        refuse_untrainable(str(folder))


def test_raw_codes_of_a_quantised_checkpoint_are_refused(tmp_path: Path) -> None:
    """FP8 weights whose config.json says nothing of it."""
    folder, name = make_model(tmp_path, "llama", tied=True), "model.layers.0.mlp.up_proj.weight"
    full = load_file(folder / "model.safetensors")[name]
    _rewrite(folder, **{name: full.to(torch.float8_e4m3fn)})
    with pytest.raises(ConfigError, match=r"up_proj\.weight is stored as F8_E4M3 .*raw codes"):
        refuse_untrainable(str(folder))
    _rewrite(folder, **{name: full, f"{name}_scale_inv": torch.ones(1, 1)})
    with pytest.raises(
        ConfigError, match=r"has model\.layers\.0\.mlp\.up_proj\.weight_scale_inv, which"
    ):
        refuse_untrainable(str(folder))


def test_tensors_that_transformers_renames_are_found() -> None:
    with torch.device("meta"):
        model = build_hf_model(transformers.GPTNeoXConfig(**SIZES), "x")
    assert stored_layout(model, [name for name, _ in model.named_parameters()], {}) == {}
    stored = [
        name.replace("lm_head", "embed_out").removeprefix("gpt_neox.")
        for name, _ in model.named_parameters()
    ]
    result = stored_layout(model, stored, {})
    assert [part.name for part in result["lm_head.weight"]] == ["embed_out.weight"]
    assert set(result) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_found_in_a_checkpoint(tmp_path: Path, family: str) -> None:
    """The rows that each tensor on disk has are those of transformers' own loader."""
    folder = make_model(tmp_path / "model", family, tied=False)
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    parts = stored_layout(model, stored, saved_layout(model))
    assert parts == saved_layout(model)
    covered = set()
    for name, parameter in model.named_parameters():
        matrix = parameter.detach().reshape(-1, parameter.shape[-1])
        pieces = parts.get(name)
        if pieces is None:
            assert torch.equal(parameter, stored[name])
            covered.add(name)
            continue
        for part in pieces:
            rows = matrix[part.start : part.start + part.num_rows]
            assert torch.equal(rows.view(part.shape), stored[part.name]), part
            covered.add(part.name)
        assert sum(part.num_rows for part in pieces) == len(matrix)
    assert covered | constants(model).keys() == stored.keys()
    assert any(len(pieces) > 1 for pieces in parts.values()) == (family != "granitemoe")


def test_experts_that_were_stored_fused_or_as_a_decoder_alone_are_found() -> None:
    config = transformers.Qwen3MoeConfig(**SIZES, num_experts=2, moe_intermediate_size=32)
    with torch.device("meta"):
        model = build_hf_model(config, "x")
    assert stored_layout(model, [name for name, _ in model.named_parameters()], {}) == {}
    saved = saved_layout(model)
    alone = [part.name.removeprefix("model.") for parts in saved.values() for part in parts]
    result = stored_layout(model, alone, saved)
    assert [part.name for parts in result.values() for part in parts] == alone
    assert result.keys() == saved.keys()


def test_a_tensor_that_one_side_lacks_is_refused_and_a_strange_layout_is_not() -> None:
    refuse_unmatched_names("Policy", {}, {})
    refuse_unmatched_names(
        "Policy", {"a": 3, "b": 4}, {"ab": 8}
    )  # fused, and padded: not known, not absent
    with pytest.raises(
        ConfigError, match=r"Policy has a\.bias and 1 more, which vLLM's model does not have"
    ):
        refuse_unmatched_names("Policy", {"b.bias": 3, "a.bias": 4}, {})
    with pytest.raises(
        ConfigError, match=r"vLLM's model has a\.bias, which Policy does not have: no sync"
    ):
        refuse_unmatched_names("Policy", {}, {"a.bias": 4})


def test_classes_of_transformers_are_put_back_as_they_were(tmp_path: Path) -> None:
    """As vLLM changes them: another __init__ and __call__, and another base; the engine's own
    module keeps these."""
    config = transformers.Qwen2Config(**SIZES)
    config.save_pretrained(tmp_path)
    put_back = keep_hf_classes(str(tmp_path))
    decoder_class = transformers.Qwen2Model
    old, bases = dict(vars(decoder_class)), decoder_class.__bases__

    class Compiled:
        pass

    def init(self: Any, *args: Any) -> None:
        old["__init__"](self, *args)
        self.made_for_engine = True

    decoder_class.__init__, decoder_class.__call__ = init, lambda self, ids: "compiled"
    decoder_class.__bases__ = (*bases, Compiled)
    engine_values = decoder_class(config)
    put_back(engine_values)
    policy_values, ids = transformers.Qwen2Model(config), torch.zeros(1, 3, dtype=torch.long)
    assert policy_values(ids, use_cache=False).last_hidden_state.shape == (1, 3, 128)
    assert (dict(vars(decoder_class)), decoder_class.__bases__) == (old, bases)
    assert not hasattr(policy_values, "made_for_engine")
    assert engine_values.made_for_engine
    assert engine_values(ids) == "compiled"
    assert isinstance(engine_values, Compiled)
    assert isinstance(engine_values, transformers.Qwen2Model)


def test_what_a_library_raises_is_one_line_but_not_what_the_machine_does() -> None:
    with (
        pytest.raises(ConfigError, match=r"^model\.path: m cannot be built: KeyError: 'head_dim'$"),
        _built(),
    ):
        raise KeyError("head_dim")
    with pytest.raises(ConfigError, match=r"cannot be built: ValueError: first$"), _built():
        raise ValueError("\n first\n second")
    for error in (
        torch.OutOfMemoryError("x"),
        RuntimeError("CUDA error: no"),
        OSError("disk"),
        KeyboardInterrupt(),
    ):
        with pytest.raises(type(error)), _built():
            raise error


def _built() -> Any:
    return as_config_error("m", "cannot be built")


def test_the_list_of_layers_is_found_by_whatever_name() -> None:
    with torch.device("meta"):
        model = build_hf_model(
            transformers.GPTBigCodeConfig(n_embd=64, n_layer=3, n_head=2, vocab_size=97), "x"
        )
    assert len(decoder_layers(model)) == 3
    assert isinstance(decoder_layers(model), nn.ModuleList)


def test_a_config_that_transformers_cannot_use_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "num_attention_heads": "many"})
    )
    with pytest.raises(ConfigError, match=r"^model\.path: ") as refused:
        refuse_untrainable(str(tmp_path))
    assert "\n" not in str(refused.value)

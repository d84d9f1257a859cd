"""Whether every dense text family that transformers and the installed vLLM both know trains at
rounding, or is refused in one line.

python -m benchmarks.agreement.families [FAMILY...] [--dtype float32|bfloat16] [--ranks N] [--set
KEY=VALUE]

A tiny random model of each is made (its sizes set by the keys that its config has) and trained for
three steps, by the command itself, on a rank of the tests' server, or on N that share one engine;
one that is refused is not tried in the other format. `mismatch` is the mean |policy - engine| over
the sampled tokens, of the worst step. Above the bound of its format it is held against `rounds`:
how far transformers' own passes in that format and in float32 are apart on the tokens of the first
step, over the same weights. Twice that is rounding. `proved` is how many tensors the proof of the
weight sync covered (a tied head by itself), of those in the checkpoint. `direct` is how many are
copied into the engine without vLLM's loader: after 20 updates, which the training and 17 changes at
random make, all that the engine holds is compared to the bit with what the loader brings. Exit code
1 where a run ends in a traceback or a breach, where one trains beyond rounding, where a tensor is
not proved, or differs between the two ways.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.support.models import make_model
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.config_json import refuse_by_config
from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.ranks import RanksJob

STEPS = 3
ROUNDING = {"float32": 3e-6, "bfloat16": 3e-2}  # mean |policy - engine|, nats a token
_NOISE_FACTOR = 2  # as in proofs/gradient_check.py
# By the names that configs have for them. Heads of 32 are the smallest that vLLM has on a CPU.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 128),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **{
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rotary_dim": 16,
        "sliding_window": 8,
        "initializer_range": 0.1,
    },
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    **{"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
# What the config.json of a released model has, and the default of its config class lacks.
_RELEASED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32},
    "dots1": {"n_shared_experts": 1},
}
_TABLES = (
    "_TEXT_GENERATION_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
)  # of vLLM's registry: its classes, and HF's
# Of which vLLM's backend for transformers' classes makes an engine without listing them.
_UNLISTED = (
    "bitnet",
    "biogpt",
    "diffllama",
    "helium",
    "ministral",
    "nanochat",
    "persimmon",
    "xglm",
)


def families() -> list[str]:
    """Model types with a causal LM in transformers that vLLM serves, but for those whose config
    tells at once that they
    are no text models."""
    architectures = _known_to_vllm()
    both = [of for of, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in architectures]
    return sorted(of for of in {*both, *_UNLISTED} if _is_text(of))


def _known_to_vllm() -> set[str]:
    """Read from its source: importing vLLM takes ten seconds."""
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "model_executor" / "models" / "registry.py"
    expected_names = set[str]()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        target = (
            node.target if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [None])[0]
        )
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in _TABLES and isinstance(value, ast.Dict):
            expected_names |= {ast.literal_eval(key) for key in value.keys if key is not None}
    return expected_names


def _is_text(family: str) -> bool:
    try:
        refuse_by_config(CONFIG_MAPPING[family]().to_dict(), family)
    except ConfigError as error:
        return "several models" not in str(error)
    except Exception:  # a config that its own library cannot make by default
        return False
    return True


def tiny_config(family: str) -> Any:
    default = CONFIG_MAPPING[family]()
    expected_names = set(default.to_dict()) | set(default.attribute_map)
    aliases = {alias for alias, name in default.attribute_map.items() if name in SIZES}
    sizes = {
        name: size for name, size in SIZES.items() if name in expected_names and name not in aliases
    }
    if "linear_num_key_heads" in sizes:  # every fourth layer is one of attention
        sizes["num_hidden_layers"] = 4
    if "multi_query" in expected_names:  # which says how many there are
        sizes.pop("num_key_value_heads", None)
    if sizes.get("sliding_window") and not getattr(default, "sliding_window", None):
        sizes.pop("sliding_window")
    return type(default)(**sizes, **_RELEASED.get(family, {}))


def _move_vectors(model: Any) -> None:
    """Norms at 1 and biases at 0 would hide one that was not loaded."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.ndim == 1:
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            )


def rows(
    names: list[str], dtypes: list[str], folder: Path, num_ranks: int, overrides: list[str]
) -> Iterator[Row]:
    for family in names:
        model = folder / family / "model"
        try:
            make_model(model, tiny_config(family), change=_move_vectors)
        except Exception as error:  # whatever transformers' code for this family does
            reason = (
                f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
            yield _row(
                family, "-", "not made", reason=f"transformers cannot make a tiny one: {reason}"
            )
            continue
        for dtype in dtypes:
            (folder / family / dtype).mkdir()
            row = trained(family, model, dtype, folder / family / dtype, num_ranks, overrides)
            yield row
            # But for a format, a model is refused whatever it is.
            if row["outcome"] == "refused" and not str(row["why"]).startswith("model.dtype"):
                break


def _parameters(stored: Iterable[str]) -> set[str]:
    """Names of a checkpoint's parameters, of which the experts of a layer are two."""

    def of_all(match: re.Match[str]) -> str:
        return f".experts.{'down' if match[1] in ('down_proj', 'w2') else 'gate_up'}"

    return {re.sub(r"\.experts\.\d+\.(\w+)", of_all, name) for name in stored}


def trained(
    family: str, model: Path, dtype: str, folder: Path, num_ranks: int, overrides: list[str]
) -> Row:
    settings: dict[str, Any] = {
        "model": {"path": str(model), "dtype": dtype},
        "training": {"num_steps": STEPS},
    }
    settings["rollout"] = {"tensor_parallel_size": num_ranks}
    config = str(write_config(folder, model, **settings))
    job = RanksJob(
        num_ranks, "benchmarks.agreement.families_worker", "--config", config, *overrides
    )
    code, output = job.wait(200)
    metrics = folder / "run" / "metrics.jsonl"
    steps = (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    )
    mismatch = max((step["weight_sync/mismatch_abs_mean"] for step in steps), default=None)
    counts = re.search(r"proof: .* s, (\d+) tensors by bytes, (\d+) by probe", output)
    proved = sum(map(int, counts.groups())) if counts else 0
    with safe_open(model / "model.safetensors", framework="pt") as file:
        everything = f"{proved} of {len(_parameters(file.keys()))}" if counts else ""
    copies = re.search(
        r"direct: (\d+ of \d+) tensors; of \d+ of the engine's differ: \[(.*)\]", output
    )
    result: dict[str, Any] = {"proved": everything, "direct": copies[1] if copies else ""}
    if "Traceback" in output or code not in (0, 2):
        raised = [
            line for line in output.splitlines() if re.search(r"[\w.]*(Error|Exception)\b: ", line)
        ]
        kind = "TRACEBACK" if "Traceback" in output or not raised else "BREACH"
        return _row(
            family,
            dtype,
            kind,
            mismatch,
            **result,
            reason=(raised or output.splitlines() or [""])[-1],
        )
    if code == 2:
        refusal = next((line for line in output.splitlines() if line.startswith("error: ")), "")
        reason = (
            refusal.removeprefix("error: ").removeprefix("model.path: ").replace(str(model), family)
        )
        return _row(family, dtype, "refused", **result, reason=reason)
    assert mismatch is not None
    assert copies is not None, output
    if copies[2]:
        return _row(family, dtype, "NOT THE SAME", mismatch, **result, reason=copies[2])
    if "not proved" in output:
        reason = output.partition("not proved, ")[2].splitlines()[0]
        return _row(family, dtype, "NOT PROVED", mismatch, **result, reason=reason)
    bound = ROUNDING[dtype]
    if mismatch >= bound:
        result["rounds"] = rounding(model, folder / "run", dtype)
        bound = max(bound, _NOISE_FACTOR * result["rounds"])
    outcome = "trains" if mismatch < bound else "BEYOND ROUNDING"
    return _row(family, dtype, outcome, mismatch, **result)


@torch.no_grad()
def rounding(model: Path, run_dir: Path, dtype: str) -> float:
    """Returns how far transformers' passes in `dtype` and in float32 are apart on the samples of
    the first step, at temperature 1: the mean |difference| of logprobs, over weights in `dtype`."""
    logprobs = []
    for arithmetic in (dtype, "float32"):
        plain = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, trust_remote_code=False
        )
        plain = plain.to(getattr(torch, arithmetic))
        for sample in dumped(run_dir, 1):
            prompt, completion = sample["prompt_ids"], sample["completion_ids"]
            ids = torch.tensor([[*prompt, *completion]])
            logits = plain(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            targets = ids[0, len(prompt) :, None]
            logprobs.append(logits.log_softmax(-1).gather(-1, targets)[:, 0])
    half = len(logprobs) // 2
    return float((torch.cat(logprobs[:half]) - torch.cat(logprobs[half:])).abs().mean())


def _row(
    family: str,
    dtype: str,
    outcome: str,
    mismatch: float | None = None,
    proved: str = "",
    direct: str = "",
    reason: str = "",
    rounds: float | None = None,
) -> Row:
    displayed = "" if mismatch is None else mismatch
    result = {"family": family, "dtype": dtype, "outcome": outcome, "mismatch": displayed}
    result |= {"proved": proved, "direct": direct, "why": reason[:200]}
    return result if rounds is None else result | {"rounds": rounds}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; default: all")
    parser.add_argument("--dtype", choices=list(ROUNDING), help="default: both")
    parser.add_argument(
        "--ranks", type=int, default=1, help="that share one engine (tensor parallel); default: 1"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of the training's config"
    )
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    result = list[Row]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            names, dtypes = (
                args.families or families(),
                [args.dtype] if args.dtype else list(ROUNDING),
            )
            for row in rows(names, dtypes, Path(folder), args.ranks, args.set):
                print(*(value for value in row.values() if value != ""), flush=True)
                result.append({"ranks": args.ranks, **row})
    finally:  # also what there is when somebody has seen enough
        report("families", result, args.json)
    outcomes = [row["outcome"] for row in result]
    print(
        "  "
        + ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    )
    sys.exit(any(outcome.isupper() for outcome in outcomes))


if __name__ == "__main__":
    main()

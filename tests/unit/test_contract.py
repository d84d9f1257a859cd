"""What the engine relies on of vLLM: the table holds for the installed one, leaves nothing out that
engine/ uses, and a
breach of each kind is found. The GPU builds are asked by `benchmarks/run.sh contract`. Nothing here
imports vllm."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.agreement.contract_check import check, installed_version
from benchmarks.agreement.contract_rows import CPU, OPTIONS, TORCH, VLLM, Row
from benchmarks.agreement.contract_source import Source
from tests.support.processes import ROOT

_TORCH = importlib.util.find_spec("torch")
assert _TORCH is not None
assert _TORCH.origin is not None
SITE = Path(_TORCH.origin).parents[1]
# Where objects of vLLM's are touched, and what they are called there.
# None: what is called rows in the one are tensors, and the other's self._engine is ours.
_OWN = {"weight_proof.py", "weight_sync.py"}
FILES = [path for path in sorted((ROOT / "grpo_spmd/engine").glob("*.py")) if path.name not in _OWN]
_OBJECTS = re.compile(
    r"^(self\._llm|self\._engine|self\._model|"
    r"llm|core|scheduler|layer|wrapper|model|module|method|mapper|output|sampled"
    r"|of|rows|vllm_config|CuMemAllocator|"
    r"CPUAttentionBackend|ExecutorWithExternalLauncher|RequestOutputKind)[.(]"
)
# What these have by nn.Module or as a dict, and what is ours: other things are called so too, and
# reload.py patches.
_NOT_VLLMS = {"modules", "named_modules", "named_parameters", "parameters", "items", "load_weights"}
_NOT_VLLMS |= {
    "path",
    "dtype",
    "lora",
    "router_replay",
    "rank",
    "base_stays_in_engine",
    "set_submodule",
    "get_submodule",
    "device",
    "name",
    "moe_kernel",
    "__name__",
    "_kernel_before_reload",
}
_NOT_VLLMS |= {
    "parts",
    "layer",
    "shape",
    "stride",
    "view",
    "numel",
}  # of a tensor, or of our account of one
ROWS = (*VLLM, *CPU)


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(SITE)


def broken(rows: tuple[Row, ...], source: Source, version: tuple[int, int] = (0, 32)) -> list[str]:
    result = check(rows, source, version)
    return [
        f"{finding.row.label}: {finding.how}" for finding in result if finding.verdict == "broken"
    ]


def test_the_installed_vllm_keeps_the_contract(source: Source) -> None:
    assert broken(ROWS, source, installed_version("vllm", SITE)) == []
    assert broken(TORCH, source, installed_version("torch", SITE)) == []
    assert len(ROWS) > 100


# The table is complete


def without_a_row(text: str) -> Iterator[str]:
    """What this code uses of vLLM and no row speaks of."""
    names, members = {row.name for row in ROWS}, {row.name.rpartition(".")[2] for row in ROWS}
    keywords = {word for row in ROWS for word in re.findall(r"(\w+)=", row.call)}
    quoted = " ".join(text for row in ROWS for text in row.says)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                if not any(f"{name}.".startswith(f"{node.module}.{alias.name}.") for name in names):
                    yield f"import of {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and _OBJECTS.match(ast.unparse(node)):
            if node.attr not in members | _NOT_VLLMS and f"layer.{node.attr}" not in quoted:
                yield f"attribute {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("hasattr", "getattr") and isinstance(node.args[1], ast.Constant):
                requests = str(node.args[1].value)
                if (
                    _OBJECTS.match(f"{ast.unparse(node.args[0])}.")
                    and requests not in members | _NOT_VLLMS
                ):
                    yield from () if requests in quoted else (f"attribute {requests}",)
            elif called in ("SamplingParams", "vllm.LLM"):
                yield from (
                    f"{called}({word.arg}=)"
                    for word in node.keywords
                    if word.arg and word.arg not in keywords
                )
        elif isinstance(node, ast.Dict) and "options" in _assigned_to(text, node):
            yield from (
                f"option {key.value!s}"
                for key in node.keys
                if isinstance(key, ast.Constant) and key.value not in keywords
            )


def _assigned_to(text: str, found: ast.Dict) -> str:
    return text.splitlines()[found.lineno - 1].partition("=")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_the_engine_uses_of_vllm_has_its_row(path: Path) -> None:
    assert list(without_a_row(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (
            "from vllm.v1.engine.core import EngineShutdown",
            "import of vllm.v1.engine.core.EngineShutdown",
        ),
        ("self._engine.engine_core.preempt()", "attribute self._engine.engine_core.preempt"),
        ("getattr(layer, 'scales', None)", "attribute scales"),
        ("SamplingParams(seed=1, top_k=3)", "SamplingParams(top_k=)"),
        ("options |= {'seed': 0, 'swap_space': 4}", "option swap_space"),
    ],
)
def test_a_use_without_a_row_is_found(added: str, message: str) -> None:
    assert list(without_a_row(added)) == [message]


# A breach of each kind


def test_an_option_that_this_vllm_lacks_is_found(source: Source) -> None:
    made_up = Row("vllm.LLM", "sleeps deeper", "(model=0, sleep_depth=0)", "vllm.EngineArgs")
    assert broken((made_up,), source) == [
        "vllm.LLM(model=0, sleep_depth=0): it takes no sleep_depth"
    ]


@pytest.mark.parametrize(
    ("file", "old", "new", "row", "method"),
    [
        (
            "entrypoints/llm.py",
            "def sleep(self, level:",
            "def doze(self, level:",
            "LLM.sleep(level=2)",
            "no such name",
        ),
        (
            "entrypoints/llm.py",
            "def wake_up(self, tags:",
            "def wake_up(self, of:",
            "LLM.wake_up(",
            "it takes no tags",
        ),
        (
            "engine/arg_utils.py",
            "    load_format:",
            "    format:",
            "load_format=0)",
            "it takes no load_format",
        ),
        (
            "sampling_params.py",
            "    flat_logprobs:",
            "    flat:",
            "(flat_logprobs=0)",
            "it takes no flat_logprobs",
        ),
        (
            "sampling_params.py",
            "    FINAL_ONLY =",
            "    LAST =",
            "RequestOutputKind.FINAL_ONLY",
            "no such name",
        ),
        (
            "v1/worker/gpu_worker.py",
            "model.named_buffers()",
            "0",
            "Worker.sleep(",
            "not say model.named_buffers()",
        ),
        (
            "v1/engine/core.py",
            "self.scheduler",
            "self.planner",
            "EngineCore.scheduler",
            "no such name",
        ),
        (
            "v1/engine/llm_engine.py",
            "        prompt:",
            "        *, prompt:",
            ".add_request(",
            "takes 1 by place",
        ),
        (
            "lora/lora_weights.py",
            "float | None = None",
            "float",
            "LoRALayerWeights(",
            "it needs scaling too",
        ),
        (
            "config/model.py",
            '"processed_logprobs"\n]',
            '"logprobs"\n]',
            "LogprobsMode says",
            "not say 'processed_log",
        ),
    ],
)
def test_a_planted_breach_is_found(
    file: str, old: str, new: str, row: str, method: str, tmp_path: Path
) -> None:
    text = (SITE / "vllm" / file).read_text(encoding="utf-8")
    assert old in text, "vllm has changed here: plant the breach anew"
    planted = tmp_path / "vllm" / file
    planted.parent.mkdir(parents=True)
    planted.write_text(text.replace(old, new), encoding="utf-8")
    about = tuple(item for item in ROWS if row in item.label)
    assert broken(about, Source(SITE)) == []
    result = broken(about, Source(tmp_path, SITE))
    assert [line for line in result if row in line and method in line], (about, result)


def test_what_may_be_absent_is_no_breach(source: Source) -> None:
    row = Row("vllm.LLM.doze", "naps", "()", absent="it stays awake")
    assert [(finding.verdict, finding.how) for finding in check((row,), source, (0, 32))] == [
        ("absent, as allowed", "it stays awake")
    ]
    later = Row("vllm.LLM.doze", "naps", "()", since=(0, 40))
    assert [finding.verdict for finding in check((later,), source, (0, 32))] == [
        "of another version"
    ]


def test_what_is_there_must_be_as_it_is_called(tmp_path: Path) -> None:
    """Also what may be absent: engine/ asks for the name, and calls it."""
    text = (SITE / "vllm/model_executor/models/utils.py").read_text(encoding="utf-8")
    (tmp_path / "vllm/model_executor/models").mkdir(parents=True)
    changed = text.replace("def get_rename_mapper(self)", "def get_rename_mapper(self, model)")
    assert changed != text, "vllm has changed here: plant the breach anew"
    (tmp_path / "vllm/model_executor/models/utils.py").write_text(changed, encoding="utf-8")
    about = tuple(row for row in ROWS if "get_rename_mapper" in row.label)
    assert [line.rpartition(": ")[2] for line in broken(about, Source(tmp_path, SITE))] == [
        "it needs model too"
    ]


def test_each_option_that_start_passes_stands_in_the_table_once() -> None:
    names = [row.label for row in OPTIONS]
    assert len(set(names)) == len(names)

"""Teachers behind servers on real ranks: what they teach is what the same models teach here,
however the work is split;
the running check sees each planted fault; and the same with the real vLLM server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from tests.ranks.test_partition import SECTIONS, relative_difference
from tests.support.models import make_model, write_config
from tests.support.nightly import selected_values
from tests.support.processes import ROOT, environment
from tests.support.ranks import run_worker
from tests.support.stub_server import stub_server
from tests.support.stub_vllm import NAME, answers
from tests.support.workers.served_teacher import KINDS, LIMITS, SOME, UNANSWERED, tokens_of
from tests.support.workers.update import SPLITS

# With 9 of the prompt 256 tokens, as many as the server takes, and it samples one more.
LONG = ["rollout.max_completion_tokens=247", "training.max_tokens_per_micro_batch=400"]
Results = dict[tuple[str, str], dict[str, Any]]
ONE_ROW, FEW_ROWS, _ = SPLITS
SILENT = [tokens_of(rollout_id) for rollout_id in UNANSWERED]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher is wider than the policy, and untied."""
    folder = tmp_path_factory.mktemp("served")
    wide: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    make_model(folder / "teacher", "qwen3", tied=False, seed=1, **wide)
    make_model(folder / "model", "qwen3", tied=True)
    sections = {**SECTIONS, "rollout": {**SECTIONS["rollout"], "temperature": 1.0}}
    write_config(folder, folder / "model", **{**sections, "loss": {"rollout_correction": "none"}})
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path, request: pytest.FixtureRequest) -> dict[int, str]:
    """By number of ranks, what the worker prints."""
    ranks, result = selected_values(request, "num_ranks") or [2], dict[int, str]()
    with ExitStack() as stack:
        servers = [
            stack.enter_context(stub_server(answers(folder / name)))
            for name in ("teacher", "model")
        ]
        silent = stack.enter_context(
            stub_server(
                answers(folder / "teacher"),
                lambda body: "404" if body["prompt"] in SILENT else "ok",
            )
        )
        for num_ranks in ranks:
            urls = [
                server.url.replace("/score", "/v1/completions") for server in (*servers, silent)
            ]
            out = folder / f"ranks_{num_ranks}.pt"
            files = str(folder / "config.yaml"), str(folder / "teacher")
            result[num_ranks] = run_worker(num_ranks, "served_teacher", *files, *urls, str(out))
        assert all(server.most_at_once <= LIMITS["max_concurrent"] for server in servers)
        assert all(
            requests.body["prompt"] in map(tokens_of, range(24))
            for requests in silent.asked
            if requests.how == "404"
        )
    return result


@pytest.fixture(scope="module")
def by_ranks(folder: Path, outputs: dict[int, str]) -> dict[int, Results]:
    return {
        num_ranks: torch.load(folder / f"ranks_{num_ranks}.pt", weights_only=True)
        for num_ranks in outputs
    }


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_planted_faults_are_seen(outputs: dict[int, str], num_ranks: int) -> None:
    assert outputs[num_ranks].count("12 faults seen") == num_ranks, outputs[num_ranks]


def same(result: dict[str, Any], reference: dict[str, Any], location: Any) -> None:
    for name in reference.keys() - {"gradients", "parameters", "rows"}:
        assert result[name] == pytest.approx(reference[name], rel=1e-6, abs=1e-7), (location, name)
    for name, expected in reference["parameters"].items():
        assert relative_difference(result["parameters"][name], expected) < 1e-6, (location, name)
    for name, expected in reference["gradients"][0].items():
        assert relative_difference(result["gradients"][0][name], expected) < 1e-5, (location, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_teaches_what_its_model_teaches_here(
    by_ranks: dict[int, Results], kind: str
) -> None:
    """On any number of ranks, in rows of any length, packed or not."""
    reference = by_ranks[min(by_ranks)]["path", kind]
    assert reference["teacher/kl"] > 0.05
    for num_ranks, results in by_ranks.items():
        for split in SPLITS:
            same(results[kind, split], reference, (num_ranks, split))


@pytest.mark.parametrize("kind", ["sampled", "topk"])
def test_rollouts_without_an_answer_are_taught_nothing(
    by_ranks: dict[int, Results], kind: str
) -> None:
    one = min(by_ranks)
    reference = by_ranks[one][f"{kind}, {SOME}", FEW_ROWS]
    for num_ranks, results in by_ranks.items():
        same(results[f"{kind}, {SOME}", FEW_ROWS], reference, num_ranks)
    assert reference["teacher/kl"] != pytest.approx(
        by_ranks[one][kind, ONE_ROW]["teacher/kl"], rel=1e-4
    )


@pytest.fixture(scope="module")
def vllm_url(folder: Path) -> Iterator[str]:
    """The real server, of the teacher."""
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder / "teacher"),
    ]
    command += [
        "--served-model-name",
        NAME,
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--max-model-len", "256", "--enforce-eager", "--max-num-seqs", "8"]
    env = environment() | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env
        )
    try:
        for _ in range(600):
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer,
            ):
                assert json.load(answer)["data"][0]["id"] == NAME
                break
            assert process.poll() is None, (folder / "serve.log").read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1/completions"
    finally:
        process.terminate()
        process.wait(60)


def test_the_real_server_teaches_what_its_model_teaches_here(folder: Path, vllm_url: str) -> None:
    out, files = folder / "real.pt", (str(folder / "config.yaml"), str(folder / "teacher"))
    run_worker(1, "served_teacher", *files, vllm_url, vllm_url, vllm_url, str(out), "plain")
    result = torch.load(out, weights_only=True)
    for kind in ("sampled", "topk"):
        same(result[kind, ONE_ROW], result["path", kind], kind)


def test_the_real_server_is_asked_before_a_model_is_built(folder: Path, vllm_url: str) -> None:
    on = [f"teacher.url={vllm_url}", "teacher.loss=topk"]
    check_inputs(load_config(folder / "config.yaml", [*on, "teacher.top_k=20"]), num_ranks=1)
    # vllm serve's own limit is 20, and 32 the default.
    with pytest.raises(
        ConfigError,
        match=r"does not take 32 prompt_logprobs .* --max-logprobs of at least teacher.top_k",
    ):
        check_inputs(load_config(folder / "config.yaml", on), num_ranks=1)
    with pytest.raises(ConfigError, match=r"start it with --max-model-len 257"):
        check_inputs(load_config(folder / "config.yaml", [*on, *LONG]), num_ranks=1)

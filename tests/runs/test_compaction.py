"""An agent that compacts its own history, with the real engine: what it sampled is trained in the
contexts that it was sampled in, the summaries too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_spmd.demo import tools
from grpo_spmd.demo.making import make_folder
from grpo_spmd.distributed import startup
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.contexts import row_contexts
from grpo_spmd.records import Completion
from grpo_spmd.tools.replay.read import make_completion, read_step
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on one rank, with a model that has learned little more than how calls are
    written."""
    folder = tmp_path_factory.mktemp("compaction")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "_CORRECT_STEPS", 120)
        patch.setattr(tools, "_CARELESS_STEPS", 0)

        def fill(model: Path) -> list[dict[str, Any]]:
            return tools.fill_compacting_demo(model, 0)

        make_folder(folder / "demo", {}, fill)
    startup.end()
    run_ranks(
        1,
        "grpo_spmd.train",
        "--config",
        str(ROOT / "configs/demo-compacting.yaml"),
        f"model.path={folder}/demo/model",
        f"data.train={folder}/demo/train.jsonl",
        f"run_dir={folder}/run",
        "training.num_steps=2",
        "environment.num_workers=4",
    )
    return folder


def episodes_of(run: Path, step: int) -> list[tuple[Completion, float]]:
    recorded = read_step(run / "run", step)
    return [
        (make_completion(record), float(record.advantage or 0.0))
        for group in recorded.rollouts
        for record in group
    ]


def test_each_sampled_token_is_trained_where_it_was_sampled(run: Path) -> None:
    """Plain transformers in float32, with the model that sampled step 1, gives each sampled token
    of each segment the logprob that the engine gave it; and what is packed for the update has the
    same tokens after the same contexts, each with the advantage of its episode."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "demo/model")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        run / "demo/model", dtype=torch.float32, attn_implementation="eager"
    )
    request = tokenizer.encode(f"<|user|>{tools.SUMMARISE}<|end|><|assistant|>")
    num_summaries = num_compacted = 0
    for number, (completion, advantage) in enumerate(episodes_of(run, 1)):
        assert completion.episode is not None
        segments = completion.episode.segments
        num_compacted += len(segments) > 1
        logprobs = iter(completion.logprobs)
        for segment in segments:
            ids = segment.token_ids.tolist()
            with torch.no_grad():
                log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            for position in np.flatnonzero(segment.sampled).tolist():
                plain = float(log_p[position - 1, ids[position]])
                assert next(logprobs) == pytest.approx(plain, abs=2e-4)
                # The first token after the request for a summary is a summary's.
                num_summaries += ids[position - len(request) : position] == request
        assert next(logprobs, None) is None
        row = pack_rollouts(
            [episode_rollout(number, advantage, True, segments, completion.logprobs)],
            torch.device("cpu"),
        )
        assert row.advantages.tolist() == pytest.approx([advantage] * len(completion.token_ids))
        assert bool(row.loss_mask.all())
        for segment, context in zip(segments, row_contexts(row), strict=True):
            assert context.token_ids.tolist() == segment.token_ids.tolist()
            assert context.sampled_at.tolist() == np.flatnonzero(segment.sampled).tolist()
    assert num_compacted > 10
    assert num_summaries >= num_compacted


def test_after_a_compaction_the_history_is_gone(run: Path) -> None:
    """A later segment begins with the question and the summary that another one ends with."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "demo/model")
    num_seen = 0
    for completion, _ in episodes_of(run, 1):
        assert completion.episode is not None
        contexts = [tokenizer.decode(s.token_ids) for s in completion.episode.segments]
        ends = [text.rpartition("<|assistant|>")[2].removesuffix("<|end|>") for text in contexts]
        questions = [text.split("<|user|>")[1].split("<|end|>")[0] for text in contexts]
        assert len({question.partition("|")[0] for question in questions}) == 1
        for question in questions:
            summary = question.partition("|")[2]
            # A call in the place of a summary has no text.
            if summary:
                num_seen += 1
                assert summary in ends
    assert num_seen > 10

"""Host time of an engine step, with the model left out: vLLM's Python and our own loop, apart.

Each row runs `RolloutEngine.generate_shared` with that many sequences at a time. Figures are
medians over engine steps in which all of them sample, in milliseconds of CPU time of the process:
`vllm_ms` within vLLM's step, `loop_ms` in our loop around it, `add_us` for one request. A rollout
has logprobs; `short` has one stop token, `long_stops` as many as a careless generation config.
`evaluation` is as `short`, without logprobs. On a GPU the step's model runner comes on top, and
asynchronous scheduling hides what is shorter than the GPU's own step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import transformers

from benchmarks.support.models import make_model
from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report

NUM_SEQUENCES = (64, 256, 512, 1024)


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(
            Path(folder),
            transformers.Qwen3Config(
                vocab_size=512,
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=64,
                max_position_embeddings=4096,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=0,
            ),
        )
        rows: list[Row] = []
        for num_sequences in NUM_SEQUENCES:
            rows += measure(1, "benchmarks.speed.engine_host_worker", folder, str(num_sequences))[0]
    report("engine_host", rows, args.json)


if __name__ == "__main__":
    main()

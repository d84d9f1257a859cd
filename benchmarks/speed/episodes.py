"""Episodes beside TRL's: 64 of 5 turns with tools of 100 ms, the same model, real generation by
vLLM on both sides, one thread each.

    benchmarks/run.sh episodes [--rounds N] [--json FILE]

A random Qwen3 (float32, 4 layers of width 256) whose chat template opens a call at the start of
each turn, so that every completion that ends is one; a turn has 24 tokens in the mean, and each
call waits 100 ms. An episode is 5 turns with 4 calls between them, on both sides by their own limit
of turns.

Ours is `python -m grpo_spmd.train`, with 64 environments alive (`num_workers: 64`) and with the
default of 16. TRL's is its GRPOTrainer with colocated vLLM and `environment_factory`, as in
`step_vs_trl`: it calls one tool after the other and samples the next turn when the last one has
answered.

What is timed is a step's generation: sampling, tools, and what lies between. The floor is the same
of ours with tools that answer at once, and an episode's own 4 x 100 ms on top: nothing that waits
for its tools can be quicker. Rounds are in turn, as in `step_vs_trl`; a ratio is between the turns
of one round.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import transformers

from benchmarks.speed.episodes_environment import TOOL_S
from benchmarks.speed.step_vs_trl import Ours, Shape, Task, Trl, make
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from benchmarks.support.trl_environment import TRL_VERSION, trl_python
from grpo_spmd.demo.tools import make_tokenizer

_ROUNDS, _TURNS, _STEPS_A_TURN = 3, 5, 2
_MICRO_BATCH = 16
_DEFAULT, _AT_ONCE = "ours, 16 workers", "ours, tools of 0 ms"
_SHAPE = Shape(Task(8, 8, 1000, 1e-8, 1024, 48), 8, 4096, 24)
# The tools demo's, but that the generation prompt opens the call.
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message.role + '|>' -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<tool_call>' + call.function.name -}}"
    "{%- for name, value in call.function.arguments.items() -%}{{- ' ' + name + ':' + value "
    "-}}{%- endfor -%}"
    "{%- endfor -%}"
    "{{- (message.content or '') + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|><tool_call>work text:' -}}{%- endif -%}"
)
_RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>work text:",
            "close": "<|end|>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "work", "arguments": {"text": "{content}"}},
            },
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        make_chat(Path(name))
        report("episodes", race(Path(name), trl_python(), args.rounds), args.json)


def make_chat(folder: Path) -> None:
    """The model of `step_vs_trl` with a tokenizer whose chat template opens a call, and chats as
    prompts."""
    make(folder, _SHAPE)
    tokens = make_tokenizer(
        folder / "model"
    )  # bytes and the roles of the tools demo, and a word for each id above
    tokens.add_tokens([f" w{number}" for number in range(len(tokens), _SHAPE.vocabulary)])
    tokens.chat_template, tokens.response_template = _CHAT_TEMPLATE, _RESPONSE_TEMPLATE
    tokens.save_pretrained(folder / "model")
    rng = random.Random(0)
    max_length = _SHAPE.task.max_prompt_tokens - 18  # that the template writes around it
    with (folder / "train.jsonl").open("w") as file:
        for _ in range(512):
            length = rng.randint(_SHAPE.fewest_prompt_tokens, max_length)
            text = "".join(
                f" w{rng.randrange(_SHAPE.vocabulary // 2, _SHAPE.vocabulary)}"
                for _ in range(length)
            )
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n")


def race(folder: Path, python: str, rounds: int) -> list[Row]:
    sides: dict[str, Ours | Trl] = {}
    try:
        for label, kind, num_workers in (
            ("ours", "Slow", 64),
            (_DEFAULT, "Slow", 16),
            (_AT_ONCE, "Quick", 64),
        ):
            ours = sides[label] = Ours(
                folder,
                label.replace(", ", "_").replace(" ", "_"),
                _SHAPE.task,
                **_section(kind, num_workers),
            )
            ours.turn(1)
        sides["trl"] = Trl(
            folder,
            "trl",
            _SHAPE.task,
            python,
            _MICRO_BATCH,
            environment="Slow",
            max_tool_calling_iterations=_TURNS - 1,
        )
        sides["trl"].turn(1)
        seen: dict[str, list[list[Row]]] = {label: [] for label in sides}
        for number in range(rounds):
            for label, side in sides.items():
                seen[label].append(side.turn(1 if label == "trl" else _STEPS_A_TURN))
            print(f"round {number + 1} of {rounds}", flush=True)
    finally:
        for side in sides.values():
            if side.process.returncode is None:
                side.end()
    seconds = {
        label: [statistics.mean(step["generation_s"] for step in turn) for turn in turns]
        for label, turns in seen.items()
    }
    seconds["floor"] = [item + (_TURNS - 1) * TOOL_S for item in seconds.pop(_AT_ONCE)]
    facts = {
        "episodes": _SHAPE.task.num_rollouts,
        "turns": _TURNS,
        "tool_s": TOOL_S,
        "TRL version": TRL_VERSION,
    }
    return [
        {
            "side": side,
            "beside": extra,
            "side_s": statistics.median(seconds[side]),
            "beside_s": statistics.median(seconds[extra]),
            **spread("ratio", ratios(seconds[slower], seconds[quicker])),
            "side_tokens_mean": statistics.median(
                step["tokens_mean"] for turn in seen[side] for step in turn
            ),
            "rounds": rounds,
            **facts,
        }
        for side, extra, slower, quicker in (
            ("ours", "trl", "trl", "ours"),
            (_DEFAULT, "trl", "trl", _DEFAULT),
            ("ours", "floor", "ours", "floor"),
            (_DEFAULT, "floor", _DEFAULT, "floor"),
            ("trl", "floor", "trl", "floor"),
        )
    ]


def _section(kind: str, num_workers: int) -> dict[str, dict[str, Any]]:
    """Deadlines are of the wall clock, and a side is stopped while another one has its turn."""
    factory = f"{Path(__file__).with_name('episodes_environment.py')}:{kind}"
    section = {"factory": factory, "max_turns": _TURNS, "num_workers": num_workers}
    return {"environment": section | {"call_timeout_s": 3600.0, "timeout_s": 36000.0}}


if __name__ == "__main__":
    main()

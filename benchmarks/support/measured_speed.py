"""What the README's table says of the rows of `speed/`: one function a benchmark, from its newest run to lines of the
table. A column that a function reads is one that the benchmark writes now; what older rows call otherwise is said where
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
        of_command = record.run(
            "start", "command", "ranks", "side", where=_is(command=command, ranks=ranks)
        )
        now = one(of_command, {"side": "now"})
        others = ("min", "max", "before_x", "before_x_min", "before_x_max", "ranks")
        phases = [
            f"{name} {figure(seconds)}"
            for name, seconds in now.items()
            if isinstance(seconds, int | float) and name not in others and not name.endswith("_s")
        ]
        figures = (
            f"{spread(now, 'total_s')} s, {figure(now.number('cpu_s'))} s of CPU time of all its processes; rank 0: "
            f"{', '.join(phases)}"
        )
        for row in of_command:
            if row["side"] != "now":
                figures += f"; {row['side']} takes {spread(row, 'before_x', 'before_x_min', 'before_x_max')} times as long"
        yield Line(
            f"from `{command}` to the end of the first step, {_plural(ranks, 'rank')}",
            figures,
            of_command,
        )


def init(record: Record) -> Iterator[Line]:
    rows = record.run("init", "built by", "ranks")
    if rows:
        parts = [
            f"{row['built by']} on {_ranks(row)}: {spread(row, 'peak_beyond_shard_mib')} MiB beyond "
            f"{figure(row.number('shard_mib'))}"
            for row in rows
        ]
        yield Line(
            "building the policy: a rank's memory at its peak beyond its shard",
            "; ".join(parts),
            rows,
        )


def weight_sync(record: Record) -> Iterator[Line]:
    rows = record.run("weight_sync into vLLM", "model", "ranks", "dtype", "what")
    for (model, ranks, dtype), of_case in _by(rows, "model", "ranks", "dtype"):
        parts = [
            f"{row['what']} {spread(row, 'x_memcpy')}" for row in of_case if row["what"] != "memcpy"
        ]
        moved = figure(of_case[0].number("needed_mib"))
        what = f"a weight sync into vLLM, {model} parameters in {dtype} on {_plural(ranks, 'rank')}"
        yield Line(
            f"{what}, in multiples of a memcpy of its {moved} MiB", "; ".join(parts), of_case
        )
    rows = record.run("weight_sync gather", "model", "ranks", "dtype", "what")
    for (ranks,), of_ranks in _by(rows, "ranks"):
        parts = []
        for (model,), of_model in _by(of_ranks, "model"):
            in_buckets = [row for row in of_model if row["what"].startswith("gather, ")]
            others = [row for row in of_model if row["what"] != "memcpy" and row not in in_buckets]
            sizes = [
                row["what"].removeprefix("gather, ").removesuffix(" MiB") for row in in_buckets
            ]
            named = (
                [(f"buckets of {sizes[0]} to {sizes[-1]} MiB", in_buckets)] if in_buckets else []
            )
            named += [(what, of_what) for (what,), of_what in _by(others, "what")]
            said = [
                f"{what} {span(row.number('x_memcpy') for row in of_what)}"
                for what, of_what in named
            ]
            parts.append(f"{model}: {', '.join(said)}")
        dtypes = listed(dict.fromkeys(row["dtype"] for row in of_ranks))
        what = f"gathering whole tensors on {_plural(ranks, 'rank')}, in multiples of a memcpy (medians; {dtypes})"
        yield Line(what, "; ".join(parts), of_ranks)


def loss_memory(record: Record) -> Iterator[Line]:
    rows = record.run("loss_memory", "logits", "chunk", "dtype")
    for (dtype,), of_dtype in _by(rows, "dtype"):
        parts = [
            f"{'row by row' if row['chunk'] == '-' else row['chunk']}: {figure(row.number('less_than_full'))} times "
            f"less in {figure(row.number('time_to_full'))} of the time"
            for row in of_dtype
            if row["logits"] != "full"
        ]
        off = max(row.number("gradients_off_by") for row in of_dtype if row["logits"] == "chunked")
        what = f"memory of logprobs forward and backward, by tokens a chunk, beside full logits in {dtype}"
        yield Line(what, f"{'; '.join(parts)}; gradients of chunks within {figure(off)}", of_dtype)


def update(record: Record) -> Iterator[Line]:
    """A block of rows begins with "packed", the first of all ratios."""
    blocks = record.runs("update", "model", "update")
    for kind, is_kind in (
        ("packed rows beside padded batches", lambda row: row["update"].startswith("padded")),
        ("recomputation and compilation", lambda row: row["update"].startswith("packed, ")),
    ):
        done: set[Hashable] = set()
        for rows in blocks:
            of_kind = [row for row in rows if is_kind(row)]
            for (model,), of_model in _by(of_kind, "model"):
                if model not in done:
                    done.add(model)
                    parts = [f"{row['update']} {spread(row, 'to_first')}" for row in of_model]
                    what = f"an update, {kind}, {model}: time in multiples of packed rows"
                    yield Line(what, "; ".join(parts), of_model)


def balance(record: Record) -> Iterator[Line]:
    rows = record.run("balance", "max_tokens", "rollouts", "ranks")
    for (max_tokens,), of_budget in _by(rows, "max_tokens"):
        worst = max(of_budget, key=lambda row: row.number("gap_to_bound"))
        figures = (
            f"at most {_percent(worst.number('gap_to_bound'))} above what any plan could reach ({worst['rollouts']:,} "
            f"rollouts on {worst['ranks']} ranks"
        )
        if worst["plain"] is not None:
            figures += (
                f"; dealt plainly {_percent(worst.number('best') / worst.number('plain') - 1)}"
            )
        figures += f"); {span(row.number('us_a_rollout') for row in of_budget)} microseconds a rollout at best"
        what = f"plans of a long-tailed trace, rows of {max_tokens:,} tokens, {_sizes(of_budget)}"
        yield Line(f"{what}: time of the slowest rank", figures, of_budget)


def rank0(record: Record) -> Iterator[Line]:
    rows = record.run("rank0", "rollouts", "ranks")
    if rows:
        worst = max(rows, key=lambda row: row.number("share"))
        most = [row for row in rows if row["rollouts"] == max(row["rollouts"] for row in rows)]
        parts = [
            f"on {row['ranks']:,} ranks {_percent(row.number('share'))}, {figure(row.number('bytes_in'))} bytes in, "
            f"{figure(row.number('bytes_out'))} out, {figure(row.number('held'))} held and "
            f"{figure(row.number('peak'))} at its peak"
            for row in most
        ]
        figures = (
            f"at most {_percent(worst.number('share'))} ({worst['rollouts']:,} rollouts on {worst['ranks']:,} ranks); "
            f"of {most[0]['rollouts']:,} rollouts, with bytes a rollout: {'; '.join(parts)}"
        )
        what = f"rank 0 alone, of a step of 100 s, simulated, CPU time of its quickest round, {_sizes(rows)}"
        yield Line(what, figures, rows)


def host_overhead(record: Record) -> Iterator[Line]:
    rows = record.run("host_overhead", "ranks", "rollouts")
    for (ranks,), of_ranks in _by(rows, "ranks"):
        total, dump = (
            span(row.number(f"{part}_us") for row in of_ranks) for part in ("total", "dump")
        )
        figures = (
            f"{total} microseconds a rollout, of {figure(of_ranks[0].number('budget_us'))} allowed; the dump of the "
            f"step besides {dump}"
        )
        what = f"host work from completions to packed micro-batches on {_plural(ranks, 'rank')}"
        yield Line(
            f"{what}, {_span_of_counts(row['rollouts'] for row in of_ranks)} rollouts",
            figures,
            of_ranks,
        )


def prompts(record: Record) -> Iterator[Line]:
    """Where nothing is kept, a benchmark may take fewer rows, which are a case of their own."""
    for (num_rows, how), _ in _by(record.all("prompts"), "rows", "prompts"):
        of_case = record.run(
            "prompts", "rows", "prompts", "start", where=_is(rows=num_rows, prompts=how)
        )
        parts = [
            f"{row['start']} {figure(row.number('node_cpu_s'))} s ({figure(row.number('node_cpu_s') / num_rows * 1e6)} "
            f"microseconds a row), {figure(row.number('anon_mib'))} MiB"
            for row in of_case
        ]
        parts.append(
            f"the tokenizers library alone {figure(min(row.number('encode_s') for row in of_case))} s"
        )
        kept = max(row.number("kept_mb") for row in of_case)
        parts += [f"{figure(kept)} MB are kept"] if kept else []
        what = f"{num_rows:,} prompts, {how}, of a node of {_ranks(of_case[0])}, one of each start"
        yield Line(
            f"{what}: CPU time of all ranks, memory of the largest beyond its base",
            "; ".join(parts),
            of_case,
        )


def rollout_dump(record: Record) -> Iterator[Line]:
    rows = record.run("rollout_dump", "ranks", "rollouts", "tokens")
    for (tokens, num), of_shape in _by(rows, "tokens", "rollouts"):
        parts = [
            f"{_ranks(row)}: {figure(row.number('now_us'))} microseconds, "
            f"{spread(row, 'ratio', 'ratio_min', 'ratio_max')} times less than through rank 0, which needs "
            f"{figure(row.number('now_rank0_peak_kib'))} KiB a rollout of the step and had needed "
            f"{figure(row.number('before_rank0_peak_kib'))}"
            for row in of_shape
        ]
        saved = f"{span(row.number('bytes_frac') for row in of_shape)} of the bytes"
        what = f"a rollout's line in the dump, {tokens:,} tokens, {num:,} rollouts a step"
        yield Line(what, f"{'; '.join(parts)}; {saved}", of_shape)


def report(record: Record) -> Iterator[Line]:
    rows = record.run("report", "steps", "rollouts")
    for row in rows:
        there = (
            "all of them"
            if row["steps_there"] == row["steps"]
            else f"{row['steps_there']:,} of them"
        )
        figures = (
            f"{figure(row.number('seconds'))} s, {figure(row.number('cpu_s'))} s of CPU time, "
            f"{figure(row.number('peak_mib'))} MiB, a file of {figure(row.number('mb'))} MB with {there}"
        )
        yield Line(
            f"a page of {row['steps']:,} steps of {row['rollouts']:,} rollouts", figures, [row]
        )


def signals(record: Record) -> Iterator[Line]:
    rows = record.run("signals", "model", "signal")
    for (model,), of_model in _by(rows, "model"):
        plain = one(of_model, {"signal": "plain"})
        parts = [f"plain {figure(plain.number('seconds'))} s, {_of_signal(plain)}"]
        parts += [
            f"{row['signal']} {spread(row, 'to_plain')} times its time, {_of_signal(row)}"
            for row in of_model
            if row is not plain
        ]
        what = f"what teaches, beside the plain step behind the engine, {model}, {plain['rollouts']:,} rollouts"
        where = f" of {figure(plain.number('tokens') / plain.number('rollouts'))} tokens"
        yield Line(f"{what}{where}", "; ".join(parts), of_model)


def _of_signal(row: RecordedRow) -> str:
    waiting = f" ({figure(row.number('waiting_mib'))} of them in host memory meanwhile)" * bool(
        row["waiting_mib"]
    )
    return (
        f"{figure(row.number('forward'))} + {figure(row.number('trained'))} passes, "
        f"{figure(row.number('held_mib'))} MiB held{waiting}, {figure(row.number('peak_mib'))} at the peak"
    )


def episodes(record: Record) -> Iterator[Line]:
    rows = record.run("episodes", "side", "beside")
    for (beside,), of_beside in _by(rows, "beside"):
        first = of_beside[0]
        parts = [f"{row['side']} {spread(row, 'ratio')}" for row in of_beside]
        times = f"{figure(first.number('beside_s'))} s"
        sides = {"trl": f"times sooner than TRL's ({times})", "floor": f"times the floor ({times})"}
        what = f"{_plural(first['episodes'], 'episode')} of {first['turns']} turns"
        tools = f"tools of {figure(1000 * first.number('tool_s'))} ms"
        yield Line(f"{what}, {tools}: {sides[beside]}", "; ".join(parts), of_beside)


def rollout_tail(record: Record) -> Iterator[Line]:
    """A replay, real vLLM and its lengths replayed come from one run, tail batching from a table of its own; a replay
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
    own = [row for row in run if row["source"] != "recorded" or row["what"] in played]
    for title, column, least, most in (
        ("the shared queue beside the static split", "ratio", "min", "max"),
        (
            "the queue's longest expected groups first, beside its own order",
            "first",
            "first min",
            "first max",
        ),
    ):
        rows = [row for row in own if row["source"] in _SOURCES and column in row]
        parts = [
            f"{_SOURCES[source]} {_spans(of_source, column, least, most)}"
            for (source,), of_source in _by(rows, "source")
        ]
        if parts:
            figures = f"{'; '.join(parts)}{_decode_steps(rows, *_COMPARED[column])}"
            yield Line(f"{title}: times sooner that the last engine is done", figures, rows)
    rows = record.run("rollout_tail", *columns, where=lambda row: row["source"] in _TAIL_SOURCES)
    for (factor, source), of_factor in sorted(_by(rows, "factor", "source")):
        figures = (
            f"{_spans(of_factor, 'ratio')}{_decode_steps(of_factor, 'without', 'tail')}; "
            f"{span(100 * row.number('dropped') for row in of_factor)} % of {_THROWN_AWAY[source]} are thrown away"
        )
        what = (
            f"an epoch's rollouts with `rollout.tail_batching: {factor:g}`, {_TAIL_SOURCES[source]}"
        )
        yield Line(f"{what}: times less time than without", figures, of_factor)


_THROWN_AWAY = {"tail": "the sampled tokens", "tail real": "a round's tokens, on average,"}
_TAIL_SOURCES = {"tail": "replayed, by how lengths are spread", "tail real": "on two real ranks"}
_COMPARED = {"ratio": ("static", "shared_queue"), "first": ("shared_queue", "longest_first")}
_SOURCES = {
    "model": "in a replay",
    "real": "on two real ranks",
    "recorded": "their lengths replayed",
}


def _spans(rows: Rows, column: str, least: str = "min", most: str = "max") -> str:
    """Of several rows: their medians, and the ends of all rounds."""
    ends = min(row.number(least) for row in rows), max(row.number(most) for row in rows)
    return f"{span(row.number(column) for row in rows)} (rounds {figure(ends[0])} to {figure(ends[1])})"


def _values(rows: Rows, column: str) -> set[Any]:
    return {row[column] for row in rows}


def _decode_steps(rows: Rows, before: str, after: str) -> str:
    """How many more decode steps the engine that made most made, on real ranks; no load of the machine changes it."""
    counted = [row for row in rows if f"{before} steps" in row]
    parts = [
        f"{100 * (row.number(f'{after} steps') / row.number(f'{before} steps') - 1):+.0f} %"
        for row in counted
    ]
    return f"; decode steps there {listed(parts)}" if parts else ""


def step_vs_trl(record: Record) -> Iterator[Line]:
    equal = record.run("step_vs_trl_equal", "what")
    if equal:
        parts = [
            f"{row['what']} {figure(row.number('difference'))} (at most {figure(row.number('at most'))})"
            for row in equal
        ]
        what = f"beside TRL {equal[0]['TRL version']}, before the times: how far the two sides' numbers are apart"
        yield Line(what, "; ".join(parts), equal)
    shapes = dict.fromkeys(_shape(row) for row in record.all("step_vs_trl"))
    for shape in shapes:
        columns = "shape", "TRL's micro-batch", "phase"
        rows = record.run("step_vs_trl", *columns, where=_of_shape(shape))
        yield Line(*_beside_trl(shape, rows), rows)


def _shape(row: RecordedRow) -> str:
    """The rows of before there were shapes are of the first."""
    return str(row.get("shape", "short"))


def _of_shape(shape: str) -> Callable[[RecordedRow], bool]:
    return lambda row: _shape(row) == shape


def _beside_trl(shape: str, rows: Rows) -> tuple[str, str]:
    """TRL's time over ours by phase at its best micro-batch; in short, what else it was tried with."""
    by_label = {str(label): of_label for (label,), of_label in _by(rows, "TRL's micro-batch")}
    best = next((label for label in by_label if label.endswith("its best")), "")
    step = one(by_label.pop(best, rows), {"TRL's micro-batch": best, "phase": "step"})
    what = (
        f"a whole step beside TRL {step['TRL version']} with colocated vLLM, shape `{shape}`, {step['rollouts']:,} "
        f"rollouts of {figure(step.number('ours_tokens_mean'))} tokens ({figure(step.number('trl_tokens_mean'))} "
        "there): TRL's time over ours"
    )
    own = [row for row in rows if row["TRL's micro-batch"] == best]
    tried = f" of {step['tried']}" if "tried" in step else ""
    parts = [f"at TRL's micro-batch {best}{tried}: {_phases(own)}"]
    for label, of_label in by_label.items():
        parts.append(
            f"at {label}: {_phases([row for row in of_label if row['phase'] in _IN_SHORT])}"
        )
    return what, "; ".join(parts)


_IN_SHORT = ("step", "step a token", "generation a token")


def _phases(rows: Rows) -> str:
    return ", ".join(f"{row['phase']} {spread(row, 'ratio')}" for row in rows)


def gpu(record: Record) -> Iterator[Line]:
    rows = record.run("gpu", "variant", "phase", where=_on_gpu)
    for (model, device, variant), of_variant in _by(rows, "model", "device", "variant"):
        parts = [
            f"{row['phase']} {spread(row, 'measured_s')} s"
            + ("" if row["share"] == "-" else f", its floor {_percent(row.number('share'))} of it")
            for row in of_variant
        ]
        yield Line(
            f"phases of a step beside their floors, {model} on {device}, {variant}",
            "; ".join(parts),
            of_variant,
        )


def kernels(record: Record) -> Iterator[Line]:
    rows = record.run("kernels", "kind", where=_on_gpu)
    if rows:
        parts = [
            f"{row['kind']} {_percent(row.number('share'))}" for row in rows if row["kind"] != "all"
        ]
        busy = f"the device is busy {_percent(rows[0].number('busy'))} of the update"
        what = f"what an update's time is made of, {rows[0]['model']} on {rows[0]['device']}"
        yield Line(what, f"{', '.join(parts)}; {busy}", rows)


def _on_gpu(row: RecordedRow) -> bool:
    """A smoke test on a CPU measures nothing."""
    return not str(row["device"]).startswith("CPU")


def _percent(share: float) -> str:
    return f"{figure(100 * share)} %"


def _is(**wanted: Any) -> Callable[[RecordedRow], bool]:
    return lambda row: all(row[column] == value for column, value in wanted.items())


def _by(rows: Rows, *columns: str) -> list[tuple[tuple[Any, ...], Rows]]:
    """Rows by what they have in these columns, in the order in which that comes first."""
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return list(groups.items())


def _span_of_counts(values: Iterable[int]) -> str:
    known = list(values)
    return " to ".join(dict.fromkeys(f"{value:,}" for value in (min(known), max(known))))


def _sizes(rows: Rows) -> str:
    rollouts, ranks = (
        _span_of_counts(row[column] for row in rows) for column in ("rollouts", "ranks")
    )
    return f"{rollouts} rollouts, {ranks} ranks"


def _ranks(row: RecordedRow) -> str:
    return _plural(row["ranks"], "rank")


def _plural(number: Any, what: str) -> str:
    return f"{number} {what}" + "s" * bool(number != 1)

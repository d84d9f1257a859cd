"""The teachers of a recorded step once more."""

from __future__ import annotations

from grpo_spmd.distributed.session import Session
from grpo_spmd.model.hf_files import load_tokenizer
from grpo_spmd.model.policy import Policy
from grpo_spmd.records import Decision, Prompt, RolloutBatch
from grpo_spmd.replay.read import RecordedStep, is_there
from grpo_spmd.signal_parts import open_teacher


def teach(
    recorded: RecordedStep, policy: Policy, reference: object, batch: RolloutBatch, decision: Decision, session: Session
) -> Decision:
    """Collective. What the run's teachers say, where they and the rows that name them are here; else a note."""
    config, columns = recorded.config, recorded.columns
    if config.teacher.url and not recorded.asks_servers:
        why = "it is a server, which was not asked (--ask-servers)"
        recorded.notes.append(f"the teacher is left out: {why}; loss and gradient are those without it")
        return decision
    missing = [path for path in config.teacher.paths.values() if not is_there(path)]
    asks = "" not in config.teacher.names or config.teacher.prompt_key is not None
    if missing or (asks and columns is None):
        why = f"there is no folder {missing[0]}" if missing else "the rows that name it cannot be had as they were"
        recorded.notes.append(f"the teacher is left out: {why}; loss and gradient are those without it")
        return decision
    first = {group[0].position: (group[0], columns[n] if columns else {}) for n, group in enumerate(recorded.rollouts)}

    def prompt_at(position: int) -> Prompt:
        record, own = first[position]
        return Prompt(position, record.row, record.prompt_ids, record.prompt, own)

    tokenizer = load_tokenizer(config.model.path) if config.teacher.prompt_key is not None else None
    teacher = open_teacher(config, policy, session, reference, prompt_at, tokenizer)
    assert teacher is not None, config.teacher
    return teacher.attach(batch, decision, lambda _: None)

"""The diagnosis of a run: its findings, causes before symptoms, and the margins of its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_spmd.diagnosis.causes import CAUSES
from grpo_spmd.diagnosis.dumps import DUMP_RULES, Dumps
from grpo_spmd.diagnosis.ranks import judge_timeline
from grpo_spmd.diagnosis.results import LEVELS, Check, Finding
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.diagnosis.symptoms import SYMPTOMS


def list_findings(run: RecordedRun) -> list[Finding]:
    """Returns the findings, the worst first; one that all is well if nothing is wrong."""
    symptoms = [result for result in _judge(run) if isinstance(result, Finding)]
    findings = _explain([*_list_causes(run, symptoms), *symptoms])
    # Checks near their bound, so that a verdict of praise does not stand beside them.
    if all(finding.level == "ok" for finding in findings):
        for check in list_checks(run):
            if check.level != "ok":
                findings.append(
                    Finding(
                        check.level,
                        f"the check of {check.name} is not far from its bound",
                        f"{check.value}; its bound is {check.bound}: {check.text}.",
                    )
                )
    if run.steps and all(finding.level == "ok" for finding in findings):
        findings.append(
            Finding(
                "ok",
                "nothing stands out",
                f"{len(run.steps)} steps: {_list_sources(run)} show no trouble.",
            )
        )
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    # Praise has no place beside trouble.
    worst = findings[0].level if findings else "ok"
    return [finding for finding in findings if worst == "ok" or finding.level != "ok"]


def summary_lines(run: RecordedRun, max_findings: int = 3) -> list[str]:
    """Returns a line for each of the worst findings, for the end of a run's console."""
    lines: list[str] = []
    for finding in list_findings(run)[:max_findings]:
        if finding.level != "ok" or not lines:
            lines.append(f"{finding.title}{finding.suffix}: {finding.text}")
    return lines


def list_checks(run: RecordedRun) -> list[Check]:
    """Returns the checks that the run has made, with their margins."""
    return [result for result in _judge(run) if isinstance(result, Check)]


def _judge(run: RecordedRun) -> list[Finding | Check]:
    # The figures in other people's folders may be beyond all bounds.
    with np.errstate(all="ignore"):
        return [result for rule in SYMPTOMS for result in rule(run)]


def _list_causes(run: RecordedRun, symptoms: Sequence[Finding]) -> list[Finding]:
    dumps = Dumps(run)
    with np.errstate(all="ignore"):
        # A slow rank explains what waits for it.
        causes = [*judge_timeline(run)]
        causes += [finding for rule in CAUSES for finding in rule(run, symptoms)]
        causes += [finding for rule in DUMP_RULES for finding in rule(run, dumps)]
        return causes


def _explain(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings; one that an earlier one explains is told in the text of that one, with
    all that it explains itself."""
    explanations: dict[Finding, Finding] = {}
    explained: set[Finding] = set()
    for cause in findings:
        if cause in explained:
            continue
        effects: list[Finding] = []
        remaining = [cause]
        while remaining:
            current = remaining.pop()
            direct = [
                effect
                for effect in findings
                # A cause does not explain what began before it.
                if effect is not cause
                and effect not in effects
                and effect.metric in current.explains
                and (effect.step is None or effect.step >= (current.step or 0))
            ]
            effects += direct
            remaining += direct
        explained.update(effects)
        titles = ", ".join(effect.title + effect.suffix for effect in effects)
        text = f"{cause.text} This also explains: {titles}." if effects else cause.text
        # A cause is as grave as its gravest effect.
        level = min((cause.level, *(effect.level for effect in effects)), key=LEVELS.index)
        explanations[cause] = replace(cause, text=text, level=level)
    return [explanations[finding] for finding in findings if finding not in explained]


def _list_sources(run: RecordedRun) -> str:
    """Returns what the diagnosis could look at in this folder."""
    sources = "rewards, lengths, entropy, gradients, memory and the checks"
    if run.dumped_steps:
        sources = f"{sources.replace(' and', ',')}, rollouts and prompts"
    return sources

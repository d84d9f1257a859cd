"""The diagnosis of a run: its findings, causes before symptoms, and the margins of its checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_spmd.diagnosis.causes import CAUSES
from grpo_spmd.diagnosis.curves import LEVELS, Check, Finding
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.diagnosis.symptoms import SYMPTOMS, Rule


def list_findings(run: RecordedRun) -> list[Finding]:
    """Returns the findings about a run, the worst first.

    If there is trouble, only trouble is returned. If nothing is wrong, there is a finding that says
    so.
    """
    results = _judge(run, CAUSES + SYMPTOMS)
    findings = _explain([result for result in results if isinstance(result, Finding)])
    # Praise has no place beside trouble.
    troubles = [finding for finding in findings if finding.level != "ok"]
    if not troubles:
        # Checks near their bound are trouble, too, if there is no other.
        troubles = [
            Finding(
                check.level,
                f"the check of {check.name} is not far from its bound",
                f"{check.value}; its bound is {check.bound}: {check.text}.",
            )
            for check in results
            if isinstance(check, Check) and check.level != "ok"
        ]
    if run.steps and not troubles:
        text = f"{len(run.steps)} steps: {_list_sources(run)} show no trouble."
        findings.append(Finding("ok", "nothing stands out", text))
    return sorted(troubles or findings, key=lambda finding: LEVELS.index(finding.level))


def summary_lines(run: RecordedRun) -> list[str]:
    """Returns a line for each of the worst findings, for the end of a run's console."""
    findings = list_findings(run)
    # One line of praise is enough.
    num_lines = 1 if findings and findings[0].level == "ok" else 3
    return [f"{f.title}{f.suffix}: {f.text}" for f in findings[:num_lines]]


def list_checks(run: RecordedRun) -> list[Check]:
    """Returns the run's own checks, with their values and bounds."""
    return [result for result in _judge(run, SYMPTOMS) if isinstance(result, Check)]


def _judge(run: RecordedRun, rules: Sequence[Rule]) -> list[Finding | Check]:
    """Returns what all `rules` yield about a run, in their order."""
    # The figures in other people's folders may be beyond all bounds.
    with np.errstate(all="ignore"):
        return [result for rule in rules for result in rule(run)]


def _explain(findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings without those that another finding explains.

    A finding explains those about the metrics in its `explains` that began no earlier, and all that
    these explain in turn. Its text then names them, and it gets the worst level among them. Causes
    come first in `findings`: of two findings that explain each other, the earlier one stays.
    """
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
    """Returns a text of what the diagnosis could look at in this folder."""
    sources = "rewards, lengths, entropy, gradients, memory and the checks"
    if run.dumped_steps:
        sources = f"{sources.replace(' and', ',')}, rollouts and prompts"
    return sources

"""The page of a report in a real browser without a network: no error, no request, the chunks'
figures, and a way from a
curve to a token by mouse and keys. Also of texts that want to be more than text."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.browser import Browser, Page
from tests.support.made_chunks import HOSTILE, PHASES, MadeRun, hostile_run, made_page
from tests.support.processes import run_command

VIEWS = ("verdict", "curves", "timeline", "rollouts", "prompts", "config")
RUNS = {
    "finished": lambda: [MadeRun()],
    "killed": lambda: [MadeRun(1, state="killed")],
    "crashed": lambda: [MadeRun(2, state="failed")],
    "two": lambda: [MadeRun(), MadeRun(1, name="other", num_steps=60)],
    "episode": lambda: [MadeRun(3, is_episode=True, num_steps=10)],
    "thousand": lambda: [
        MadeRun(4, num_steps=1000, groups=2, group_size=4, keep=4, num_tokens=20, ranks=8)
    ],
    "hostile": lambda: [hostile_run()],
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser") / "profile")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: made_page(folder / f"{name}.html", *make()) for name, make in RUNS.items()}


def _rounded(value: float | None) -> float | None:
    """As the page says a number: four digits, of very small and large ones three."""
    if value is None or (float(value).is_integer() and abs(value) < 1e7):
        return value
    return float(f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}")


def _number(text: str) -> float | None:
    return None if text in ("\u2013", "") else float(text)


def _assert_quiet(page: Page) -> None:
    assert page.errors == []
    assert len(page.requests) == 1, page.requests  # the file itself
    assert page.value("window.owned === undefined")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", RUNS)
def test_every_view_is_shown_without_an_error_or_a_request(
    name: str, width: int, browser: Browser, pages: dict[str, Path]
) -> None:
    [run, *_] = RUNS[name]()
    step = run.made_steps[-1]
    with browser.open(pages[name], width=width, dark=width == 390) as page:
        for view in VIEWS:
            page.go(
                f"#run=0&view={view}&step={step}"
                + f"&rollout={step * run.groups}/3" * (view == "rollouts")
            )
            assert page.value("document.querySelector('main').textContent.length") > 100
            assert page.value("document.querySelector('.note.bad')") is None
            assert page.value("document.documentElement.scrollWidth") == width, (
                view
            )  # nothing stands out of the page
            assert (
                page.value(
                    "document.querySelectorAll('main script, main img, main iframe, main "
                    "style').length"
                )
                == 0
            )
        _assert_quiet(page)


def test_curves_say_what_the_metrics_are(browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun()
    metrics = run.main()["metrics"]
    with browser.open(pages["finished"], "#view=curves&step=17") as page:
        row_values = "[row.querySelector('th').textContent, row.querySelector('td').textContent]"
        rows = f"[...e.querySelectorAll('.u-series')].map((row) => {row_values})"
        legends = page.each(".chart", f"[e.querySelector('h2').textContent, {rows}]")
        message = {f"{title}: {label}": value for title, rows in legends for label, value in rows}
        at = run.made_steps.index(17)
        displayed = 0
        for key, values in metrics.items():
            if key in ("time/wall_s", "reward/unscored_frac"):
                continue
            [result] = [value for position, value in message.items() if _is_of(position, key)]
            assert _number(result) == _rounded(values[at]), key
            displayed += 1
        assert displayed == len(metrics) - 2
        assert page.text("#zeros summary") == "metrics that are 0 at every step: 1"
        assert "reward/unscored_frac" in page.text("#zeros")
        assert message["evaluation: step"] == "--"  # there was none after step 17
        page.go("#view=curves&step=20")
        [said_20] = [text for text in page.each(".chart", "e.textContent") if "pass_at_4" in text]
        evaluations = run.main()["evaluations"]
        assert (
            str(
                _rounded(
                    evaluations["metrics"]["eval/heldout/pass_at_4"][evaluations["steps"].index(20)]
                )
            )
            in said_20
        )
        assert (
            page.value(
                "charts.find((c) => c.keys.includes('loss/kl')).plot.data[1].filter((v) => v === "
                "null).length"
            )
            == 1
        )


def test_a_metric_of_zeros_has_a_chart_where_a_link_asks_for_it(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with browser.open(pages["finished"], "#view=curves&metric=reward/unscored_frac") as page:
        assert "unscored_frac" in page.text(".chart.wanted")
        assert page.value("document.querySelector('#zeros')") is None
        _assert_quiet(page)


def test_a_colour_is_a_run_or_a_phase_in_every_chart(
    browser: Browser, pages: dict[str, Path]
) -> None:
    colours = "charts.map(({ plot }) => plot.series.slice(1).map((line) => line.stroke()))"
    keys = "charts.map((chart) => chart.keys)"
    with browser.open(pages["two"], "#view=curves&step=30") as page:
        drawn = page.value(colours)
        assert {len(names) for names in page.value(keys)} == {1}
        assert {tuple(chart) for chart in drawn} == {tuple(drawn[0])}  # all charts have both runs
        marks = page.each("#runs .key", "getComputedStyle(e).color")
        assert marks == drawn[0]
        assert len(set(marks)) == 2
        page.go("#view=timeline")  # whose colours are phases
        assert page.each("#runs .key", "getComputedStyle(e).color") == []
    with browser.open(pages["finished"], "#view=curves&step=30") as page:
        by_key = {
            key: colour
            for names, lines in zip(page.value(keys), page.value(colours), strict=True)
            for key, colour in zip(names, lines, strict=True)
        }
        page.go("#view=timeline&step=30")
        boxes = page.each(".legend > span", "e.textContent")[: len(PHASES)]
        shown = page.each(".legend .box", "getComputedStyle(e).backgroundColor")
        for phase, colour in zip(boxes, shown, strict=False):
            assert by_key[f"time/{phase}_s"] == colour, phase
            assert by_key[f"memory/{phase}/peak_gib"] == colour, phase
        bars = page.each(".bins.low .bin i", "getComputedStyle(e).backgroundColor")
        assert not set(bars) & set(shown[: len(PHASES)])


def test_a_run_is_named_with_its_subject_and_its_findings(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with browser.open(pages["finished"]) as page:
        assert "demo done, 1 finding tiny on sums.jsonl" in page.text("#verdict h2")
        assert page.value("document.querySelector('#runs .mark').className") == "mark warning"


def test_phases_are_stacked_and_all_charts_zoom_together(
    browser: Browser, pages: dict[str, Path]
) -> None:
    metrics = MadeRun().main()["metrics"]
    times = [
        metrics[f"time/{phase}_s"] for phase in PHASES
    ]  # in the order of a step: the first lies on top
    with browser.open(pages["finished"], "#view=curves") as page:
        drawn = page.value(
            "charts.find((chart) => chart.keys.includes('time/update_s')).plot.data.slice(1)"
        )
        sums = [[sum(at) for at in zip(*times[i:], strict=True)] for i in range(len(times))]
        assert drawn == [pytest.approx(line) for line in sums]
        ranges = (
            "[...new Set(charts.map(({ plot }) => `${plot.scales.x.min} ${plot.scales.x.max}`))]"
        )
        assert page.value(ranges) == ["0 40"]  # from the evaluation before the first step
        remaining, top, correct, bottom = page.box(".chart .u-over")
        y = (top + bottom) / 2
        page.drag(
            (remaining + (correct - remaining) * 0.25, y),
            (remaining + (correct - remaining) * 0.5, y),
        )
        page.wait(f"{ranges}.join() !== '0 40'")
        [[low, high]] = [map(float, text.split()) for text in page.value(ranges)]  # one for all
        assert [low, high] == pytest.approx([10, 20], abs=0.3)
        assert "view=curves" in page.value("location.hash")  # a drag is no click
        page.click("#all-steps")
        page.wait(f"{ranges}.join() === '0 40'")
        _assert_quiet(page)


def _is_of(position: str, key: str) -> bool:
    """Whether a line of a legend is of a metric: the labels leave out what a chart's metrics have
    in common."""
    title, _, label = position.partition(": ")
    charts_values = {
        "rewards by name": r"reward/(.+)/mean", "completion length": r"completion/(.+)",
        "logprob mismatch of engine and policy": r"weight_sync/(.+)",
        "time by phase": r"time/(?!step_s)(.+)",
        "memory by phase, peak GiB": r"memory/(.+)/peak_gib",
    }  # fmt: skip
    if match := re.fullmatch(charts_values.get(title, r"(.+)"), key):
        return match[1] == label
    return False


def _table(page: Page) -> list[list[str]]:
    return page.each("#table tbody tr", "[...e.cells].map((cell) => cell.textContent)")


def test_the_table_is_the_steps_rollouts_sorted_by_any_column(
    browser: Browser, pages: dict[str, Path]
) -> None:
    run = MadeRun()
    chunk = run.step(7)
    columns = chunk["table"]
    with browser.open(pages["finished"], "#view=rollouts&step=7") as page:
        expected = [
            [
                columns["row"][i],
                columns["position"][i],
                columns["sample"][i],
                _rounded(columns["reward"][i]),
                columns["tokens"][i],
            ]
            for i in range(len(columns["row"]))
        ]
        assert [[_number(row[i]) for i in (0, 1, 2, 3, 5)] for row in _table(page)] == expected
        assert [row[6] for row in _table(page)] == [
            ("stop", "cut off")[end] for end in columns["finish"]
        ]
        assert [row[7] for row in _table(page)] == [
            chunk["status_names"][status] for status in columns["status"]
        ]
        for row, at in zip(_table(page), columns["shown"], strict=True):
            rollout = chunk["rollouts"][at] if at >= 0 else {"completion": "", "why": ""}
            start, _, end = row[9].removesuffix(rollout["why"]).partition(" \u2026 ")
            text = " ".join(rollout["completion"].split())
            assert text.startswith(start.strip()), row
            assert end.strip() in text, row
            assert bool(start) == (at >= 0)
            assert row[9].endswith(rollout["why"]) == (rollout["why"] not in ("group", "sampled"))
        for number, name in enumerate(
            ("row", "position", "sample", "reward", "advantage", "tokens")
        ):
            page.click("#table thead button", number)
            initial = page.value(
                "document.querySelector('#table [aria-sort]').getAttribute('aria-sort')"
            )
            page.click("#table thead button", number)
            second = page.value(
                "document.querySelector('#table [aria-sort]').getAttribute('aria-sort')"
            )
            assert {initial, second} == {"ascending", "descending"}
            expected_names = [value for value in columns[name] if value is not None]
            wanted = sorted(expected_names, reverse=second == "descending") + [None] * (
                len(columns[name]) - len(expected_names)
            )
            digits = 3 if name == "advantage" else 4
            short = [
                None
                if v is None
                else float(f"{v:.{digits}g}")
                if name == "advantage"
                else _rounded(v)
                for v in wanted
            ]
            assert [_number(row[number]) for row in _table(page)] == pytest.approx(short, rel=1e-2)


def test_bins_and_filters_leave_what_they_say(browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun()
    chunk = run.step(9)
    columns, total = chunk["table"], len(chunk["table"]["row"])

    def kept(page: Page) -> int:
        result = re.match(rf"(\d+) of {total} rollouts", page.text("#kept"))
        assert result
        assert int(result[1]) == len(_table(page))
        return int(result[1])

    with browser.open(pages["finished"], "#view=rollouts&step=9") as page:
        bins = page.each("#histogram .bin", "e.getAttribute('aria-label')")
        values = sorted({value for value in columns["reward"] if value is not None})
        expected = [
            f"reward {value:g}: {columns['reward'].count(value)} rollouts" for value in values
        ]
        expected += [f"reward unknown: {columns['reward'].count(None)} rollouts"] * (
            None in columns["reward"]
        )
        assert bins == expected
        page.click("#histogram .bin", 2)
        assert kept(page) == columns["reward"].count(values[2])
        page.click("#histogram .bin", 2)
        assert kept(page) == total
        for name, value, test in (
            (
                "rewardLow",
                "0.5",
                lambda i: columns["reward"][i] is not None and columns["reward"][i] >= 0.5,
            ),
            (
                "rewardHigh",
                "0.5",
                lambda i: columns["reward"][i] is not None and columns["reward"][i] <= 0.5,
            ),
            ("tokensLow", "45", lambda i: columns["tokens"][i] >= 45),
            ("tokensHigh", "45", lambda i: columns["tokens"][i] <= 45),
            ("mismatchLow", "0.02", lambda i: columns["mismatch"][i] >= 0.02),
            ("text", "SUM of", lambda i: "sum of" in _text(chunk, i).lower()),
        ):
            page.click(f"[data-filter={name}]")
            page.type(value)
            assert kept(page) == sum(map(test, range(total))), name
            page.click("#clear")
            assert kept(page) == total
        for name, value, column in (("status", "error", "status"), ("finish", "1", "finish")):
            page.value(
                f"(() => {{ const f = document.querySelector('[data-filter={name}]'); f.value = "
                f"'{value}';"
                " f.dispatchEvent(new Event('change')); })()"
            )
            assert kept(page) == columns[column].count(1), name
            page.click("#clear")
        page.click(".filters [type=checkbox]")
        assert kept(page) == len(chunk["rollouts"])
        _assert_quiet(page)


def _text(chunk: dict[str, Any], i: int) -> str:
    at = chunk["table"]["shown"][i]
    return str(
        chunk["prompts"][chunk["table"]["prompt"][i]]
        + "\n"
        + (chunk["rollouts"][at]["completion"] if at >= 0 else "")
    )


def test_from_a_curve_to_a_token_by_mouse(browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun()
    with browser.open(pages["finished"]) as page:
        page.click("#views a", 1)
        page.wait("location.hash.includes('view=curves')")
        page.settle()
        page.click(
            ".chart .u-over", 0, x=0.31
        )  # the x axis begins at the evaluation before the first step
        page.wait("location.hash.includes('view=rollouts')")
        page.settle()
        [step] = map(int, re.findall(r"step=(\d+)", page.value("location.hash")))
        assert abs(step - 0.31 * 40) <= 1
        assert page.text("main h2") == f"Step {step}"
        assert page.text("main code") == f"rollouts/step_{step:06}.jsonl"
        chunk = run.step(step)
        page.click(".square", 0)
        page.wait("location.hash.includes('rollout=')")
        page.settle()
        assert page.value("document.querySelectorAll('.card').length") == 8
        page.click(".card", 5)
        page.wait("/rollout=\\d+\\/5/.test(location.hash)")
        page.settle()
        single = next(
            r for r in chunk["rollouts"] if (r["position"], r["sample"]) == (step * run.groups, 5)
        )
        assert page.text("#tokens") == single["completion"]
        page.click("#tokens .t", 11)
        figures = dict(page.each("#said [data-figure]", "[e.dataset.figure, e.textContent]"))
        tokens = single["tokens"]
        for name in ("logprob", "difference", "entropy"):
            assert float(figures[name]) == tokens[name][11], name
        assert (int(figures["id"]), float(figures["advantage"])) == (
            tokens["ids"][11],
            single["advantage"],
        )
        _assert_quiet(page)


def test_the_first_token_that_differs_is_marked(browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun()
    group = [single for single in run.step(5)["rollouts"] if single["position"] == 5 * run.groups]
    reference = group[2]
    with browser.open(
        pages["finished"], f"#view=rollouts&step=5&rollout={reference['position']}/2"
    ) as page:
        marked = page.each(".card", "e.querySelector('.parting')?.textContent")
        old = page.each(".card", "e.querySelector('.parting')?.previousElementSibling.textContent")
    for single, token, text in zip(group, marked, old, strict=True):
        if single is reference:
            continue
        pairs = zip(single["tokens"]["ids"], reference["tokens"]["ids"], strict=False)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        assert token == single["tokens"]["pieces"][at]
        assert "".join(single["tokens"]["pieces"][:at]).endswith(text.removeprefix("\u2026 "))


@pytest.mark.parametrize("name", ["difference", "advantage", "logprob", "entropy", "mask"])
def test_a_tokens_colour_is_its_figure(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun(3, is_episode=True, num_steps=10)
    chunk = run.step(4)
    single = chunk["rollouts"][3]
    with browser.open(
        pages["episode"], f"#view=rollouts&step=4&rollout={single['position']}/{single['sample']}"
    ) as page:
        page.click(f"#colourings [data-name={name}]")
        shades = page.each("#tokens .t", "e.className.split(' ')[1]")
    tokens = single["tokens"]
    values = {"advantage": [single["advantage"]] * len(tokens["ids"])}.get(name, tokens.get(name))
    assert len(shades) == len(values)
    if name == "mask":
        assert shades == ["" if value else "masked" for value in values]
        return
    limit = {
        "difference": max(v for v in chunk["table"]["mismatch"] if v is not None),
        "advantage": max(abs(v) for v in chunk["table"]["advantage"]),
        "logprob": 5.0,
        "entropy": max(1.0, *tokens["entropy"]),
    }[name]
    for shade, value in zip(shades, values, strict=True):
        size = min(5.0, 5 * abs(value) / limit)  # five shades of a direction, each of a fifth
        if shade == "":
            assert size <= 0.5
            continue
        assert abs(int(shade[-1]) - size) <= 0.5
        assert shade[:-1] == ("minus" if value < 0 and name != "logprob" else "plus")


def test_an_episode_is_a_conversation_of_its_turns(
    browser: Browser, pages: dict[str, Path]
) -> None:
    single = MadeRun(3, is_episode=True, num_steps=10).step(4)["rollouts"][1]
    with browser.open(
        pages["episode"], f"#view=rollouts&step=4&rollout={single['position']}/{single['sample']}"
    ) as page:
        turns = page.each(
            "#tokens .turn",
            "[e.classList.contains('sampled'), e.querySelector('.text').textContent]",
        )
        assert turns == [[turn["sampled"], "".join(turn["pieces"])] for turn in single["turns"]]
        assert page.value("document.querySelectorAll('#tokens .cut').length") == 1  # a new segment
        # figures of the second turn's tokens are those behind the first's
        position = single["turns"][0]["num_tokens"] + 2
        page.click("#tokens .t", position)
        assert (
            float(page.text("#said [data-figure=logprob]")) == single["tokens"]["logprob"][position]
        )


def test_a_timeline_is_to_scale(browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun()
    timeline = run.main()["timeline"]
    spans = timeline["spans"][timeline["steps"].index(13)]["spans"]
    length = max(span[2] for rank in spans for span in rank)
    with browser.open(pages["finished"], "#view=timeline&step=13") as page:
        blocks = page.value(
            "[...document.querySelectorAll('.track')].map((track) => "
            "[...track.children].map((block) => {"
            " const [t, b] = [track.getBoundingClientRect(), block.getBoundingClientRect()];"
            " const wait = block.querySelector('i')?.getBoundingClientRect().width ?? 0;"
            " return [(b.left - t.left) / t.width, (b.right - t.left) / t.width, wait / "
            "t.width]; }))"
        )
        for rank, row in zip(spans, blocks, strict=True):
            for (_, start, end, _, busy), (remaining, correct, wait) in zip(rank, row, strict=True):
                assert [remaining, correct] == pytest.approx(
                    [start / length, end / length], abs=2e-3
                )
                assert wait == pytest.approx(
                    0 if busy is None else (end - start - busy) / length, abs=2e-3
                )


def test_two_runs_are_overlaid_and_their_configs_differ(
    browser: Browser, pages: dict[str, Path]
) -> None:
    initial, second = RUNS["two"]()
    with browser.open(pages["two"], "#view=curves&step=30") as page:
        [text] = [
            t for t in page.each(".chart", "e.textContent") if t.startswith("reward reward/mean")
        ]
        for run in (initial, second):
            assert run.name in text
            assert str(_rounded(run.main()["metrics"]["reward/mean"][29])) in text
        rows = page.each("main > .panel tbody tr", "[...e.cells].map((cell) => cell.textContent)")
        assert rows == [
            ["optimizer.lr", "0.000001", "0.001"],
            ["run_dir", "runs/demo", "runs/other"],
        ]
        page.go("#run=1&view=rollouts&step=60")
        assert _number(_table(page)[0][3]) == _rounded(second.step(60)["table"]["reward"][0])


def test_findings_lead_to_their_curve_and_reports_are_open(
    browser: Browser, pages: dict[str, Path]
) -> None:
    run = MadeRun(2, state="failed")
    finding = run.main()["findings"][0]
    with browser.open(pages["crashed"]) as page:
        assert page.value("document.querySelector('.report').open")
        assert page.text(".report .log") == run.main()["reports"]["failure.txt"]
        assert run.main()["why"] in page.text(".why")
        page.click(".finding a", 0)
        page.wait("location.hash.includes('view=curves')")
        page.settle()
        assert f"step={finding['step']}" in page.value("location.hash")
        assert "memory by phase" in page.text(".chart.wanted h2")
        _, top, _, bottom = page.box(".chart.wanted")
        assert 0 <= top < bottom <= 900


def test_prompts_lead_to_their_completions(browser: Browser, pages: dict[str, Path]) -> None:
    with browser.open(pages["finished"], "#view=prompts") as page:
        page.click("[data-kind=never]")
        assert page.value("document.querySelectorAll('.prompt').length") == 4
        page.click(".prompt .leads a", 0)
        page.wait("location.hash.includes('view=rollouts')")
        page.settle()
        assert {row[0] for row in _table(page)} == {"0"}


def test_search_finds_what_the_completions_have(browser: Browser, pages: dict[str, Path]) -> None:
    run = MadeRun(3, is_episode=True, num_steps=10)
    wanted = "number total"
    expected = sum(
        wanted in single["completion"]
        for step in run.made_steps
        for single in run.step(step)["rollouts"]
    )
    assert expected > 0
    with browser.open(pages["episode"]) as page:
        page.key("/")
        page.type(wanted)
        page.key("Enter")
        page.wait("location.hash.includes('view=search')")
        page.settle()
        assert page.text("main .note").startswith(f"{expected} of them, in 10 of 10 steps")
        assert page.value("document.querySelectorAll('main mark').length") == expected
        page.click(".finding a", 0)
        page.wait("location.hash.includes('view=rollouts')")
        page.settle()
        assert wanted in "".join(page.each("#tokens .t", "e.textContent"))


def test_keys_lead_everywhere(browser: Browser, pages: dict[str, Path]) -> None:
    with browser.open(pages["finished"], "#view=verdict&step=10") as page:

        def after(key: str) -> str:
            old = page.value("location.hash")
            page.key(key)
            page.wait(f"location.hash !== {json.dumps(old)}")
            page.settle()
            return str(page.value("location.hash"))

        for number, view in enumerate(VIEWS, 1):
            if view != "verdict":
                assert f"view={view}" in after(str(number))
        assert "view=curves" in after("2")
        assert "step=11" in after("j")
        assert "step=12" in after("ArrowRight")
        assert "step=11" in after("k")
        assert "view=rollouts" in after("Enter")
        assert "rollout=88/0" in after("n")
        assert "rollout=88/1" in after("n")
        assert "rollout=88/0" in after("p")
        page.value("document.querySelector('#tokens .tokens').focus()")
        page.key(
            "ArrowRight"
        )  # the first is chosen when the keys arrive there; a step does not change
        page.key("ArrowRight")
        assert "token 3 of" in page.text("#said")
        assert "step=11" in page.value("location.hash")
        page.key("c")
        assert page.text("#colourings [aria-pressed=true]") == "advantage"
        assert "rollout=" not in after("Escape")
        page.key("?")
        assert page.value("document.querySelector('#help').open")
        page.key("Escape")
        page.wait("!document.querySelector('#help').open")
        # Tab goes through links, buttons and fields, each of which shows that it has the focus
        outlines = list[str]()
        for _ in range(12):
            page.key("Tab")
            active = (
                "document.activeElement"  # the body: nothing has it, as after the last of a page
            )
            outlines += page.value(
                f"{active} === document.body ? [] : [getComputedStyle({active}).outlineStyle]"
            )
        assert len(outlines) >= 3
        assert set(outlines) == {"solid"}
        _assert_quiet(page)


def test_themes_differ_and_the_button_changes_them(
    browser: Browser, pages: dict[str, Path]
) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    with browser.open(pages["finished"], dark=False) as page:
        light = page.value(back)
        page.theme(True)
        dark = page.value(back)
        assert light != dark
        page.click("#theme")
        assert page.value(back) == light
        page.key("t")
        assert page.value(back) == dark
        page.value("localStorage.clear()")  # the next page begins as the system says
        _assert_quiet(page)


_PICTURES = {
    "\x1b": "ESC",
    "\x07": "BEL",
    "\x08": "BS",
    "\x7f": "DEL",
    "\0": "NUL",
} | dict.fromkeys("\ud800\udc00", "\ufffd")
_NUMBERED = "\x9b\u202e\u2066\u2069\u200f\u200b\ufeff\U000e0041\u2028"


def _as_shown(piece: str) -> str:
    text = "".join(_PICTURES.get(c) or (f"U+{ord(c):04X}" if c in _NUMBERED else c) for c in piece)
    return re.sub("[\u0300-\u0302]{7,}", lambda m: f"U+{ord(m[0][0]):04X} \u00d7 {len(m[0])}", text)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_shown_as_text(name: str, browser: Browser, pages: dict[str, Path]) -> None:
    run = hostile_run()
    single = next(r for r in run.step(1)["rollouts"] if r["completion"] == HOSTILE[name])
    expected = "".join(map(_as_shown, single["tokens"]["pieces"]))
    with browser.open(
        pages["hostile"],
        f"#view=rollouts&step=1&rollout={single['position']}/{single['sample']}",
        width=390,
    ) as page:
        assert page.text("#tokens") == expected
        assert page.value("document.documentElement.scrollWidth") == 390
        remaining, top, correct, bottom = page.box("#tokens .tokens")
        assert 0 <= remaining < correct <= 390
        assert bottom - top < 1200
        titles = page.each("#tokens .odd", "e.title")
        if name == "halves":
            assert titles == ["U+D800, half a surrogate pair", "U+DC00, half a surrogate pair"]
        _assert_quiet(page)


def test_what_is_put_into_the_file_does_not_run(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    """The file's policy: were a text ever to become HTML, it would do nothing."""
    text = pages["finished"].read_text(encoding="utf-8")
    spoilt = tmp_path / "spoilt.html"
    spoilt.write_text(
        text.replace(
            '<main id="content"',
            '<script>window.owned = 1</script><img src=x onerror="window.owned = 2"><main '
            'id="content"',
        )
    )
    with browser.open(spoilt) as page:
        assert page.value("window.owned === undefined")
        assert len(page.errors) == 3  # the script, the image, its handler
        with pytest.raises(AssertionError, match="TrustedHTML"):
            page.value("document.body.innerHTML = '<b>x</b>'")


def test_a_cut_file_an_old_browser_and_another_format_are_one_line(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    text = pages["finished"].read_text(encoding="utf-8")
    cut = tmp_path / "cut.html"
    cut.write_text(text[: len(text) * 2 // 3])
    with browser.open(cut) as page:
        assert "not whole" in page.text("#refused")
        assert page.errors == []
    old = tmp_path / "old.html"
    old.write_text(text)
    with browser.open(old) as page:
        page.call(
            "Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream"
        )
        page.call("Page.reload")
        page.wait("document.querySelector('#refused')?.textContent.includes('too old')")
        assert page.errors == []


def test_a_link_to_what_is_not_there_shows_what_is(
    browser: Browser, pages: dict[str, Path]
) -> None:
    with browser.open(
        pages["finished"], "#run=9&view=nothing&step=999999&rollout=<b>/3&metric=%ud800&row=-1"
    ) as page:
        assert page.value("document.querySelector('#verdict') !== null")
        page.go("#view=rollouts&step=999999")
        assert "of the nearest step that has them" in page.text("main .note")
        assert page.text("main h2") == "Step 40"
        page.go("#view=rollouts&step=40&rollout=1/77")
        assert "has no rollout 1/77" in page.text("#detail")
        page.go("#view=curves&metric=constructor")
        _assert_quiet(page)


@pytest.mark.parametrize("selection", ["plain_run", "elaborate_run"])
def test_a_real_runs_page_is_its_metrics_and_its_dump(
    selection: str, browser: Browser, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """By the command, from what a run left; beside it the lines of the run's files, read here by
    themselves."""
    run_dir = request.getfixturevalue(selection) / "run"
    old = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    out = tmp_path / "report.html"
    command = [sys.executable, "-m", "grpo_spmd.report", str(run_dir), "--out", str(out)]
    assert run_command(command).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == old
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = {
        line["step"]: line for line in lines if not any(key.startswith("eval/") for key in line)
    }
    step = max(metrics)
    dump = [
        json.loads(line)
        for line in (run_dir / f"rollouts/step_{step:06}.jsonl").read_text().splitlines()
    ]
    dump.sort(key=lambda line: (line["position"], line["sample"]))
    with browser.open(out, f"#view=curves&step={step}") as page:
        drawn = page.value(
            "Object.fromEntries(charts.flatMap((chart) => chart.keys.map((key) => [key, true])))"
        )
        zeros = page.each("#zeros code", "e.textContent")
        assert not any(line.get(key) for key in zeros for line in metrics.values())
        assert metrics[step].keys() - drawn.keys() - set(zeros) <= {
            "step",
            "time/unix_s",
            "time/wall_s",
        }  # each has its curve
        legends = dict(page.each(".u-series", "[...e.cells].map((cell) => cell.textContent)"))
        for key in (
            "reward/mean",
            "loss/entropy",
            "optim/grad_norm",
            "time/step_s",
        ):  # each alone in its chart
            assert _number(legends[key]) == pytest.approx(metrics[step][key], rel=1e-2), key
            assert _number(legends[key]) == _rounded(metrics[step][key]), key
        page.go(f"#view=rollouts&step={step}")
        expected = [
            (line["row"], line["position"], line["sample"], len(line["completion_ids"]))
            for line in dump
        ]
        assert [
            (int(row[0]), int(row[1]), int(row[2]), int(row[5])) for row in _table(page)
        ] == expected
        assert [_number(row[3]) for row in _table(page)] == [
            _rounded(line["reward"]) for line in dump
        ]
        single = next(line for line in dump if line["completion"] and line["advantage"])
        page.go(f"#view=rollouts&step={step}&rollout={single['position']}/{single['sample']}")
        pieces = page.each("#tokens .t", "e.textContent")
        assert len(pieces) == len(single["completion_ids"])
        assert "".join(pieces).startswith(
            single["completion"]
        )  # what follows is the end-of-sequence token
        page.click("#tokens .t", 0)
        figures = dict(page.each("#said [data-figure]", "[e.dataset.figure, e.textContent]"))
        logprobs = np.frombuffer(base64.b64decode(single["rollout_logprobs"]), "<f4")
        assert int(figures["id"]) == single["completion_ids"][0]
        assert float(figures["logprob"]) == pytest.approx(float(logprobs[0]), abs=6e-4)
        assert float(figures["advantage"]) == pytest.approx(single["advantage"], rel=1e-4)
        assert abs(float(figures["difference"])) < 1e-4  # float32 on a CPU: rounding
        for view in VIEWS:
            page.go(f"#view={view}")
            assert page.value("document.querySelector('.note.bad')") is None
        _assert_quiet(page)

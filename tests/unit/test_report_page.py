"""The file of a report, without a browser: whole or not at all, one chunk at a time, nothing in it
that could run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_spmd.tools.report.page import write_page
from tests.support.made_chunks import HOSTILE, MadeRun, chunks_of, hostile_run, made_page
from tests.support.processes import ROOT

PAGE = ROOT / "grpo_spmd/tools/report/page"


def _chunks(text: str) -> dict[str, object]:
    result = re.findall(
        r'<script type="application/octet-stream" data-chunk="([^"]+)">([^<]*)</script>', text
    )
    return {
        name: json.loads(zlib.decompress(base64.b64decode(packed), wbits=-15))
        for name, packed in result
    }


@pytest.mark.parametrize("run", [MadeRun(num_steps=3), hostile_run()], ids=["plain", "hostile"])
def test_what_goes_in_comes_out(run: MadeRun, tmp_path: Path) -> None:
    text = made_page(tmp_path / "r.html", run).read_text(encoding="utf-8")
    assert _chunks(text) == {name: json.loads(content) for name, content in chunks_of(run)}
    assert text.rstrip().endswith("</html>")


def test_the_policy_names_the_hash_of_each_script_and_nothing_else(tmp_path: Path) -> None:
    text = made_page(tmp_path / "r.html", MadeRun(num_steps=1)).read_text(encoding="utf-8")
    [policy] = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    for kind in ("script", "style"):
        bodies = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        hashes = [
            base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies
        ]
        [named] = re.findall(rf"{kind}-src ([^;]*)", policy)
        assert named.split() == [f"'sha256-{single}'" for single in hashes]
        assert hashes
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert text.index("<meta http-equiv") < text.index(
        "<style>"
    )  # what stands before a policy is not under it


def test_the_page_is_its_files_and_needs_no_other(tmp_path: Path) -> None:
    text = made_page(tmp_path / "r.html", MadeRun(num_steps=1)).read_text(encoding="utf-8")
    for path in PAGE.iterdir():
        content = path.read_text(encoding="utf-8").strip()
        if path.suffix in (".js", ".css"):
            assert content in text, path.name
        elif path.suffix == ".LICENSE":  # its terms: every copy has it
            assert html.escape(content) in text
    assert not re.findall(
        r'(?:src|href)="(?!data:)[^"]*"', re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    )


@pytest.mark.parametrize(
    "path", sorted(set(PAGE.glob("*.*")) - set(PAGE.glob("uplot.*"))), ids=lambda path: path.name
)
def test_the_pages_own_files_keep_the_houses_sizes_and_make_no_html_of_text(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 450
    assert [line for line in lines if len(line) > 120] == []
    created = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new "
        r"Function|createContextualFragment|srcdoc"
    )
    assert not re.search(created, "\n".join(lines))


def test_a_title_is_text(tmp_path: Path) -> None:
    title = HOSTILE["script"] + HOSTILE["halves"] + '"&'
    write_page(tmp_path / "r.html", title, iter([("main", b"{}")]))
    [result] = re.findall(r"<title>(.*)</title>", (tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "<" not in result
    assert html.unescape(result) == title.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")]
)
def test_an_error_leaves_the_earlier_page_and_nothing_else(
    error: BaseException, tmp_path: Path
) -> None:
    out = made_page(tmp_path / "r.html", MadeRun(num_steps=1))
    old = out.read_bytes()

    def chunks() -> Iterator[tuple[str, bytes]]:
        yield "main", b"{}"
        assert len(list(tmp_path.iterdir())) == 2  # it is being written
        raise error

    with pytest.raises(type(error)):
        write_page(out, "t", chunks())
    assert out.read_bytes() == old
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    old, young, rest = (
        tmp_path / name for name in (".r.html.1.tmp", ".r.html.2.tmp", ".x.html.1.tmp")
    )
    for path in (old, young, rest):
        path.write_bytes(b"half")
    for path in (old, rest):
        os.utime(path, (1e9, 1e9))
    made_page(tmp_path / "r.html", MadeRun(num_steps=1))
    assert {path.name for path in tmp_path.iterdir()} == {
        "r.html",
        ".r.html.2.tmp",
        ".x.html.1.tmp",
    }


def test_one_chunk_is_held_at_a_time(tmp_path: Path) -> None:
    size = 1 << 18

    def chunks() -> Iterator[tuple[str, bytes]]:
        for number in range(40):
            yield (
                f"0/{number}",
                os.urandom(size),
            )  # does not shrink: 256 KiB, and a third more as base64

    write_page(tmp_path / "warm.html", "t", iter([("main", b"{}")]))
    tracemalloc.start()
    write_page(tmp_path / "r.html", "t", chunks())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 * size  # of 53: content, deflate's pieces and their sum, base64, its line

"""Writes one HTML file: the HTML, styles and scripts of page/, and the data in chunks of JSON.

A browser opens the file without network and without a server. Each chunk is compressed separately,
and unpacked when it is first shown. The file's content security policy (CSP) allows only the
scripts and styles whose hashes it lists, so that nothing that a run recorded can run or load
anything.
"""

from __future__ import annotations

import base64
import binascii
import functools
import glob
import hashlib
import html
import json
import os
import re
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from grpo_spmd.files import sync_path

FORMAT = 1  # of the data in the chunks; the scripts refuse data of another format (page/base.js)
_FOLDER = Path(__file__).with_suffix("")  # page/
_CHUNKS_MARK = "<!-- chunks -->"
_POLICY_MARK = "<!-- policy -->"
_LICENCE_MARK = "<!-- uplot.LICENSE -->"
_INLINE = re.compile(
    r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>'
)
_STALE_S = 600.0  # an unfinished file of this age was left by a writer that was killed
_NON_ASCII = re.compile(r"[^\x00-\x7f]+")


# The first bytes of every page, by which a later command recognises a page.
PAGE_START = b"<!doctype html>"


def write_page(out: Path, title: str, chunks: Iterable[tuple[str, bytes]]) -> None:
    """Writes the page to `out`, completely or not at all. A chunk is (name, JSON in ASCII).

    An earlier file is replaced at the end. Only one chunk is in memory at a time. Raises OSError if
    the file cannot be written, and whatever `chunks` raises.
    """
    head, foot = _shell()
    for path in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE_S:
                path.unlink()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        # Mode x creates the file; it would not write through a link of that name.
        with temporary.open("xb") as file:
            # In ASCII: half a surrogate pair becomes a number, which a browser shows as U+FFFD.
            shown_title = html.escape(title).encode("ascii", "xmlcharrefreplace")
            file.write(head.replace(b"{{title}}", shown_title))
            for name, content in chunks:
                file.write(_pack_chunk(name, content))
            file.write(foot)
        # Written to the disk before the rename: a crash of the machine must not leave half a page.
        sync_path(temporary)
        temporary.replace(out)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _pack_chunk(name: str, content: bytes) -> bytes:
    """Returns a chunk, compressed and in base64, as a <script> element.

    Its type is one that browsers neither run nor show."""
    deflate = zlib.compressobj(level=6, wbits=-15)  # raw: DecompressionStream("deflate-raw")
    packed = deflate.compress(content) + deflate.flush()
    text = binascii.b2a_base64(packed, newline=False).decode()
    return f'<script type="application/octet-stream" data-chunk="{name}">{text}</script>\n'.encode()


@functools.cache
def _shell() -> tuple[bytes, bytes]:
    """Returns (head, foot): page.html before and after the place of the chunks.

    Its styles, its scripts and the content security policy are put into it."""
    # The hashes of the styles and scripts, which the policy allows.
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(match: re.Match[str]) -> str:
        """Returns the element with the file's text that replaces a reference to the file."""
        kind = "style" if match["style"] else "script"
        text = f"\n{_read_asset(match[kind]).strip()}\n"
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    page = _INLINE.sub(inline, _read_asset("page.html"))
    page = page.replace(_LICENCE_MARK, html.escape(_read_asset("uplot.LICENSE")))
    # With trusted types, a browser that supports them refuses to parse any text as HTML.
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head, mark, foot = page.replace(_POLICY_MARK, meta).partition(_CHUNKS_MARK)
    assert mark, page[:200]
    return head.encode(), foot.encode()


def _read_asset(name: str) -> str:
    """Returns the text of a file in the folder page/."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def json_bytes(value: Any) -> bytes:
    """Returns `value` as JSON in ASCII, with null for NaN and infinity.

    Half a surrogate pair, which a policy may write, becomes its escape. Never raises for a value
    that was read from JSON.
    """
    try:
        text = msgspec.json.encode(value).decode()
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError):
        # msgspec refuses half a surrogate pair and very large numbers. json has no null for NaN.
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        text = json.dumps(finite, separators=(",", ":"))
    return _NON_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text).encode()

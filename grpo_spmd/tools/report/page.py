"""One HTML file from chunks of JSON: shell, style and scripts of page/, then the chunks, each compressed on its own.

A browser opens it without network and without a server; a chunk is unpacked when somebody looks at it. The file's own
policy (CSP) names the hash of each script and style, so that nothing that a run recorded can run or load anything.
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

FORMAT = 1  # of `main` and of the steps' chunks; page/base.js shows no other
_FOLDER = Path(__file__).with_suffix("")  # page/
_CHUNKS = "<!-- chunks -->"
_POLICY = "<!-- policy -->"
_STALE_S = 600.0  # an unfinished file this old is of a writer that was killed


def write_page(out: Path, title: str, chunks: Iterable[tuple[str, bytes]]) -> None:
    """Write `out` from (name, JSON in UTF-8), whole or not at all: it takes the place of an earlier one at the end.

    Holds one chunk at a time. Raises OSError where the folder or the disk refuses, whatever `chunks` raises, and
    ValueError for a name that is none.
    """
    before, after = _shell()
    _remove_stale(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        # 0o666: as readable as any file of this user; O_EXCL with O_NOFOLLOW: never through somebody's link
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "wb") as file:
            file.write(before.replace(b"{{title}}", _escaped(title)))
            for name, content in chunks:
                file.write(_packed(name, content))
            file.write(after)
        sync_path(temporary)
        temporary.replace(out)
    except BaseException:  # Ctrl-C too
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _packed(name: str, content: bytes) -> bytes:
    """A chunk as the page's scripts look for it: a block of data, which no browser runs or shows."""
    if not re.fullmatch(r"[a-z0-9_/]+", name):
        raise ValueError(f"a chunk's name has a-z, 0-9, _ and / only; got {name!r:.80}")
    deflate = zlib.compressobj(level=6, wbits=-15)  # raw: DecompressionStream("deflate-raw")
    packed = deflate.compress(content) + deflate.flush()
    text = binascii.b2a_base64(packed, newline=False)
    return b'<script type="application/octet-stream" data-chunk="%s">%s</script>\n' % (
        name.encode(),
        text,
    )


def _escaped(title: str) -> bytes:
    """Text for <title>, in ASCII: half a surrogate pair too has a number, which a browser shows as U+FFFD."""
    return html.escape(title).encode("ascii", "xmlcharrefreplace")


@functools.cache
def _shell() -> tuple[bytes, bytes]:
    """page.html before and behind the chunks, with the files that it names inside it."""
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def inline(match: re.Match[str]) -> str:
        text = (
            "\n"
            + (_FOLDER / (match["style"] or match["script"])).read_text(encoding="utf-8").strip()
            + "\n"
        )
        kind = "style" if match["style"] else "script"
        if f"</{kind}" in text:
            raise ValueError(f"{match[0]} holds its own end tag, </{kind}")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    page = re.sub(
        r'<link rel="stylesheet" href="(?P<style>[\w.]+)">|<script src="(?P<script>[\w.]+)"></script>',
        inline,
        page,
    )
    licence = html.escape(
        (_FOLDER / "uplot.LICENSE").read_text(encoding="utf-8")
    )  # every copy has it
    page = page.replace("<!-- uplot.LICENSE -->", licence)
    # Trusted types: a browser that knows them refuses to make HTML from text at all.
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = page.replace(_POLICY, f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    before, mark, after = page.partition(_CHUNKS)
    assert mark, page[:200]
    return before.encode(), after.encode()


def _remove_stale(out: Path) -> None:
    for path in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE_S:
                path.unlink()


# JSON for the page: in ASCII, with null for what is not finite.


_ENCODER = msgspec.json.Encoder()


def json_bytes(value: Any) -> bytes:
    """Half a surrogate pair, which a policy may write, is its escape. Raises nothing for what JSON was read as."""
    try:
        if (text := _ENCODER.encode(value)).isascii():
            return text
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        pass  # what it does not know: half a surrogate pair, or a large number
    # By their parts: only texts need the slower way, and beside them are thousands of numbers.
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return b"{%s}" % b",".join(
            b"%s:%s" % (_dumped(name), json_bytes(inner)) for name, inner in value.items()
        )
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return b"[%s]" % b",".join(map(json_bytes, value))
    try:
        return _dumped(value)
    except ValueError:
        return _dumped(json.loads(json.dumps(value), parse_constant=lambda _: None))


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")

"""Whether the Hugging Face hub can be asked for a name: one short request, not libraries' retries."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError

WAIT_S = 2.5
_REMEDY = (
    "run `python -m grpo_spmd.prefetch --config ...` on a node with network, or give a local {what}"
)


def is_offline() -> bool:
    """As huggingface_hub and transformers read it."""
    asked = (
        os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    return any(value in ("1", "ON", "YES", "TRUE") for value in asked)


def check_reachable(kind: Literal["models", "datasets"], name: str, key: str) -> None:
    """Refuse a name that is not on the hub, or not for this user, or a hub that cannot be asked. Raises ConfigError.
    On the first rank of each node: the others see the same, and a thousand ranks are not to ask."""
    remedy = _REMEDY.format(what="folder" if kind == "models" else "file")
    if is_offline():
        raise ConfigError(
            f"{key}: {name} is not in the local Hugging Face cache, and HF_HUB_OFFLINE is set; {remedy}"
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(f"{key}: HF_ENDPOINT must begin with https://; got {endpoint!r}")
    _token()  # before the thread that asks
    path = (
        f"{name}/resolve/main/config.json"
        if kind == "models"
        else f"datasets/{name}/resolve/main/README.md"
    )
    status, said = ask(f"{endpoint}/{path}")
    page = f"{endpoint}/{path.split('/resolve')[0]}"
    if status is None:
        raise ConfigError(
            f"{key}: {name} is not in the local cache, and {endpoint} gives no answer ({said}); {remedy}"
        )
    if said == "GatedRepo" or status == 403:
        raise ConfigError(
            f"{key}: {name} is gated: accept its terms on {page}, and set HF_TOKEN (or `hf auth login`)"
        )
    if status == 404 and said == "EntryNotFound":
        if kind == "models":
            raise ConfigError(
                f"{key}: {name} has no config.json on the hub; a model in transformers' format has one"
            )
    elif status in (401, 404):
        who = "the token in use does not see it" if _token() else "set HF_TOKEN if it is private"
        raise ConfigError(
            f"{key}: there is no {page}, or it is private; check the name ({who}), or {remedy}"
        )


def ask(url: str) -> tuple[int | None, str]:
    """Status and the hub's own error code; None and the reason where there is no answer. Names are resolved without a
    limit of time, so that a thread asks."""
    found: list[tuple[int | None, str]] = []

    def ask() -> None:
        headers = {"Authorization": f"Bearer {token}"} if (token := _token()) else {}
        opener = urllib.request.build_opener(_NoRedirect())
        try:
            with opener.open(
                urllib.request.Request(url, headers=headers, method="HEAD"), timeout=WAIT_S
            ) as answer:
                found.append((answer.status, ""))
        except urllib.error.HTTPError as error:  # redirects too, which say that there is something
            found.append((error.code, error.headers.get("X-Error-Code", "")))
        except (OSError, ValueError) as error:  # ValueError: what is no URL in HF_ENDPOINT
            found.append((None, str(getattr(error, "reason", error))))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(WAIT_S)
    return found[0] if found else (None, f"within {WAIT_S:g} s")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _token() -> str:
    """As huggingface_hub finds it, without importing it."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    file = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return _sound(os.environ[name], name)
    try:
        return _sound(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError):
        return ""


def _sound(token: str, where: str) -> str:
    """The token, line breaks taken out as huggingface_hub does. An HTTP client's own error would quote it."""
    token = re.sub(r"[\r\n]", "", token).strip()
    if not re.fullmatch(r"[!#-&(-~]*", token):
        what = "holds a character that no token has (a blank, a quote, a letter beyond ASCII)"
        raise ConfigError(
            f"{where} {what}; copy it again from https://huggingface.co/settings/tokens"
        )
    return token


def need_datasets(source: str, key: str) -> None:
    """Raises ConfigError where the package that reads the hub's data sets is not installed."""
    if importlib.util.find_spec("datasets") is None:
        remedy = "pip install 'grpo_spmd[datasets]', or give a .jsonl or .parquet file"
        raise ConfigError(
            f"{key}: {source} needs the package datasets, which is not installed; {remedy}"
        )

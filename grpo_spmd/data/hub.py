"""This module checks with one short request, without retries, whether a model or data set exists on
the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_spmd.config.errors import ConfigError, within

# Seconds to wait for the hub's answer.
WAIT_S = 2.5


class HubAnswer(NamedTuple):
    """The hub's answer to one request."""

    status: int | None
    """The HTTP status; None if there was no answer."""
    reason: str
    """The hub's own error code, or the reason why there was no answer."""


def is_offline() -> bool:
    """Returns True if environment variables of huggingface_hub forbid requests to the hub."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)


def check_reachable(kind: Literal["models", "datasets"], name: str, key: str) -> None:
    """Raises ConfigError if a model or data set is not on the hub, if this user may not read it, or
    if the hub does not answer.

    Only the first rank of each node sends the request, so that a thousand ranks do not. `key` is
    the config key that has the name.
    """
    command = "run `python -m grpo_spmd.prefetch --config ...` on a node with network"
    remedy = f"{command}, or give a local file or local folder"
    if is_offline():
        rule = "is not in the local Hugging Face cache, and HF_HUB_OFFLINE is set"
        raise ConfigError(f"{key}: {name} {rule}; {remedy}")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    if not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(f"{key}: HF_ENDPOINT must begin with https://; got {endpoint!r}")
    is_model = kind == "models"
    page = f"{endpoint}/{name}" if is_model else f"{endpoint}/datasets/{name}"
    answer = ask(f"{page}/resolve/main/{'config.json' if is_model else 'README.md'}")
    if answer.status is None:
        rule = f"is not in the local cache, and {endpoint} gives no answer ({answer.reason})"
        raise ConfigError(f"{key}: {name} {rule}; {remedy}")
    if answer.reason == "GatedRepo" or answer.status == 403:
        raise ConfigError(
            f"{key}: {name} is gated: accept its terms on {page}, and set HF_TOKEN (or `hf auth "
            "login`)"
        )
    if answer.status == 404 and answer.reason == "EntryNotFound":
        # For a data set, "no README.md" means that it exists.
        if is_model:
            rule = "has no config.json on the hub; a model in transformers' format has one"
            raise ConfigError(f"{key}: {name} {rule}")
    # The hub's answer is the same for a private name and for one that does not exist.
    elif answer.status in (401, 404):
        access = "the token in use cannot see it" if _token() else "set HF_TOKEN if it is private"
        rule = f"there is no {page}, or it is private"
        raise ConfigError(f"{key}: {rule}; check the name ({access}), or {remedy}")


def ask(url: str) -> HubAnswer:
    """Returns the hub's answer to a HEAD request, after at most WAIT_S seconds."""
    # Called here, since a malformed token raises ConfigError, which must not happen in the thread.
    token = _token()

    def request() -> HubAnswer:
        """Sends the request and returns the hub's answer. Runs in a thread."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        head = urllib.request.Request(url, headers=headers, method="HEAD")
        try:
            with urllib.request.build_opener(_NoRedirect()).open(head, timeout=WAIT_S) as response:
                return HubAnswer(response.status, "")
        # A redirect comes here, too; it means that the name exists.
        except urllib.error.HTTPError as error:
            return HubAnswer(error.code, error.headers.get("X-Error-Code", ""))
        # ValueError: HF_ENDPOINT is no URL.
        except (OSError, ValueError) as error:
            return HubAnswer(None, str(getattr(error, "reason", error)))

    try:
        # The request runs in a thread, because a DNS lookup has no timeout.
        return within(WAIT_S, request)
    except TimeoutError:
        return HubAnswer(None, f"within {WAIT_S:g} s")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes urllib raise HTTPError for a redirect and not follow it."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        # None makes urllib raise HTTPError, with the redirect's status.
        return None


def _token() -> str:
    """Returns the user's token from where huggingface_hub looks for it, or "" if there is none.

    huggingface_hub itself is not imported here.
    """
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return _checked_token(os.environ[name], name)
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    file = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        return _checked_token(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError):
        return ""


def _checked_token(token: str, origin: str) -> str:
    """Returns the token without line breaks, as huggingface_hub does.

    Raises ConfigError for a malformed token: an HTTP client's own error would show it.
    """
    token = re.sub(r"[\r\n]", "", token).strip()
    if not re.fullmatch(r"[!#-&(-~]*", token):
        raise ConfigError(
            f"{origin} holds a character that no token has (a blank, a quote, a letter beyond "
            "ASCII); copy it again from https://huggingface.co/settings/tokens"
        )
    return token


def need_datasets(source: str, key: str) -> None:
    """Raises ConfigError if the package that reads the hub's data sets is not installed."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{key}: {source} needs the package datasets, which is not installed; pip install "
            "datasets, or give a .jsonl or .parquet file"
        )

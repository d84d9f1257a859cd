"""The resolved config as plain values, with secrets replaced."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from grpo_spmd.config.schema import Config


def flat_config(config: Config) -> dict[str, Any]:
    """`config_to_dict` as {dotted key: value}, list items by their number: "optimizer.betas.0", "rewards.0.name"."""
    return flat(config_to_dict(config))


def config_to_dict(section: Any) -> dict[str, Any]:
    """A config or section as plain YAML types; strings under names like api_key or password become "<redacted>"."""
    return dict(_plain(section))


def _plain(value: Any, name: str = "", free_form: bool = False) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name), field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        is_free = name not in (
            "headers_env",
            "path",
            "url",
        )  # names of variables, which say nothing; models of teachers
        return {inner: _plain(item, f"{name}.{inner}", free_form=is_free) for inner, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, name, free_form) for item in value]
    # Only keys of free-form mappings are judged by name; declared ones (max_prompt_tokens, prompt_key) merely sound so.
    if isinstance(value, str) and ((free_form and SECRET_NAME.search(name)) or SECRET.search(value)):
        return "<redacted>"
    return value


SECRET_NAME = re.compile(
    r"(?i)key(?!word)|token(?!iz)|secret|passw|passphrase|credential|auth(?!or(?!i[sz]))|bearer|cookie"
    r"|(?<![a-z])(pwd?|pat|jwt|dsn)(?![a-z])"
)
# By their form, whatever the key: a header, a URL with a password, and what services give out.
SECRET = re.compile(
    r"(?i:\bbearer\s+[\w.~+/-]{8}|authorization\s*[:=]\s*\S|://[^/\s:@]*:[^/\s@]+@|\b(password|passwd|pwd)\s*=\s*\S"
    r"|://\S{1,300}[?&][\w-]*(key|token|secret|signature|sig)=\S)"
    r"|\b(hf_[A-Za-z0-9]{16}|sk-[\w-]{16}|gh[pousr]_\w{20}|github_pat_\w{20}|glpat-[\w-]{16}|xox[abprs]-[\w-]{10}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30}|eyJ[\w-]{8,}\.[\w-]{8,}\.)|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """{dotted key: value} of what a tree of mappings and lists holds; an empty one is a value itself."""
    if not isinstance(value, dict | list) or not value:
        return {where: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {full: leaf for name, inner in items for full, leaf in flat(inner, join_key(where, str(name))).items()}


def join_key(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name

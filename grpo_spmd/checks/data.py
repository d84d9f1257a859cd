"""Early checks of prompts: chat template, lengths and tokens, without torch or transformers.

Later `build_prompts` checks every row with the model's tokenizer class. Here the tokenizers library
and jinja2 read the same files; what they cannot tell is left to `build_prompts`.
"""

from __future__ import annotations

import functools
import heapq
import json
import re
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import digest_of, versions_of
from grpo_spmd.data.rows import PromptRow, overview_of
from grpo_spmd.data.tokens import no_template, panics_named, refused_by_template, too_long
from grpo_spmd.files import open_regular, read_json, read_stop_tokens
from grpo_spmd.records import Fields

Messages = list[Fields]
Render = Callable[[Messages], str]
_CHARACTER_BUDGET = 600_000  # characters that a check tokenizes: half a second
_NUM_VIEWED = 20  # view_prompts tokenizes this many of the longest rows, and of the shortest
_NUM_TOKENIZED = 100  # this many first rows of a sample are tokenized even if they are short


def check_prompts_early(
    rows: Sequence[PromptRow], config: DataConfig, folder: Path, num_embeddings: int | None = None
) -> None:
    """Raises ConfigError, which names file:line, for a prompt that the run cannot use.

    `folder` is that of the policy's model. Such a prompt is a chat without a chat template, is too
    long, or contains a token without an embedding. `num_embeddings` is the number of rows of the
    model's embedding. If there are many rows, only those with the most characters and every n-th of
    the others are checked.
    """
    render = None
    files = read_tokenizer_files(folder)
    first_chat = overview_of(rows).first_chat
    if first_chat is not None:
        if files.has_template is False:
            raise ConfigError(no_template(rows[first_chat].where))
        if files.template is not None:
            render = renderer(files.template, files.settings, config.chat_template_kwargs)
        if render is None:
            return
    tokenizer = files.load_tokenizer() if rows else None
    if tokenizer is not None:
        _check_sample(sample(rows), config, tokenizer, render, num_embeddings)


@dataclass
class PromptView:
    """The first prompt as the model sees it, and the lengths of prompts.

    Numbers are 0 if the tokenizer cannot be read here."""

    text: str
    num_tokens: int = 0
    shortest: int = 0
    """The fewest tokens among the prompts that have the fewest characters."""
    longest: int = 0
    """The most tokens among the prompts that have the most characters."""
    has_template: bool | None = None
    """Whether the model has a chat template; None if it is not known here."""
    problem: str = ""
    """Why the chat template fails for the first prompt."""
    open_end: tuple[str, int] | None = None
    """Text and id of the special token that ends a turn in the template, if completions do not stop
    at it."""


def view_prompts(rows: Sequence[PromptRow], folder: Path | None, variables: Fields) -> PromptView:
    """Returns what the model in `folder` sees of the prompts, to be shown before the run.

    `check_prompts_early` has passed `rows`. If `folder` is None, the model is not here, and only
    the first prompt's text is known. `variables` are passed to the chat template; raises
    ConfigError for one that the template never reads.
    """
    prompt = rows[0].prompt
    plain_text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    view = PromptView(plain_text)
    if folder is None:
        return view
    files = read_tokenizer_files(folder)
    template = files.template
    view.has_template = files.has_template
    render = None if template is None else renderer(template, files.settings, variables)
    for name in () if view.has_template is None else variables:
        # Otherwise a misspelt name would have no effect, and nobody would notice.
        if not re.search(rf"\b{re.escape(name)}\b", template or ""):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template of {folder} reads no such "
                "variable; take it out"
            )

    def text_of(prompt: str | Messages) -> str:
        """Returns a prompt as the model reads it: a chat is rendered by the chat template."""
        if isinstance(prompt, str):
            return prompt
        return plain_text if render is None else render(prompt)

    try:
        view.text = text_of(prompt)
    except Exception as error:  # a template may fail in any way
        view.problem = f"{type(error).__name__}: {error}"
        return view
    tokenizer = files.load_tokenizer()
    if tokenizer is None or (render is None and not isinstance(prompt, str)):
        return view

    def count(indices: Iterable[int]) -> list[int]:
        """Returns the number of tokens of each of these prompts."""
        counts = []
        for index in indices:
            prompt = rows[index].prompt
            # A prompt that the template refuses is skipped here. The run reports it, with its row.
            with suppress(Exception):
                encoding = tokenizer.encode(
                    text_of(prompt), add_special_tokens=isinstance(prompt, str)
                )
                counts.append(len(encoding.ids))
        return counts

    size_of = overview_of(rows).sizes.__getitem__
    view.num_tokens = max(count([0]), default=0)
    fewest = count(heapq.nsmallest(_NUM_VIEWED, range(len(rows)), size_of))
    most = count(heapq.nlargest(_NUM_VIEWED, range(len(rows)), size_of))
    view.shortest = min(fewest, default=view.num_tokens)
    view.longest = max(most, default=view.num_tokens)
    if template is not None:
        eos_id = tokenizer.token_to_id(files.special_tokens.get("eos_token", ""))
        stop_ids = {eos_id} | (read_stop_tokens(folder) or set())
        turn = renderer(template, files.settings, variables, opens_turn=False)
        view.open_end = _open_end(turn, tokenizer, stop_ids)
    return view


def _open_end(
    render: Render | None, tokenizer: Any, stop_ids: Set[int | None]
) -> tuple[str, int] | None:
    """Returns text and id of the special token that the template puts after an assistant's answer.

    If completions do not stop at this token, they may all run to the length limit. Returns None if
    a stop token is there too, if there is no special token, or if the template fails."""
    answer = "a completion"
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": answer}]
    with suppress(Exception):  # a template may fail in any way
        _, is_there, tail = render(turns).rpartition(answer) if render else ("", "", "")
        ids = tokenizer.encode(tail if is_there else "", add_special_tokens=False).ids
        added = tokenizer.get_added_tokens_decoder()
        ends = [(added[i].content, i) for i in ids if i in added and added[i].special]
        return ends[0] if ends and not stop_ids & {*ids} else None
    return None


def _check_sample(
    rows: Sequence[PromptRow],
    config: DataConfig,
    tokenizer: Any,
    render: Render | None,
    num_embeddings: int | None,
) -> None:
    """Raises ConfigError for a prompt among `rows`, a sample, as `check_prompts_early` describes.

    `tokenizer` is of the tokenizers library; `render` is None if prompts are plain text."""
    contents: set[str] = set()
    prompts: set[str] = set()
    for number, row in enumerate(rows):
        is_text = isinstance(row.prompt, str)
        text = row.prompt
        if not isinstance(text, str):
            assert render is not None
            messages = text
            try:
                text = render(messages)
            except TemplateRefusal as error:
                refusal = refused_by_template(row.where, f"TemplateError: {error}")
                raise ConfigError(refusal) from None
            except Exception:  # a template may fail in any way: transformers reports it
                return
            if number < _NUM_TOKENIZED:
                contents.add(str([message.get("content") for message in messages]))
                prompts.add(text)
        # A token has at least one byte, so a short text cannot be too long. A few special tokens
        # may be added.
        if number >= _NUM_TOKENIZED and len(text.encode()) + 8 <= config.max_prompt_tokens:
            continue
        with panics_named(row.where):
            # A rendered chat already has its special tokens.
            ids = tokenizer.encode(text, add_special_tokens=is_text).ids
        if len(ids) > config.max_prompt_tokens and config.on_long_prompt == "error":
            raise ConfigError(too_long(row, len(ids), config))
        largest = max(ids, default=0)
        if num_embeddings is not None and largest >= num_embeddings:
            raise ConfigError(
                f"{row.where}: the prompt has the token {tokenizer.id_to_token(largest)!r} "
                f"({largest}), and the model embeds {num_embeddings}: its tokenizer is another "
                "model's"
            )
    # With such a template the run would train on one prompt only, with plausible rewards.
    if len(contents) > len(prompts) == 1:
        raise ConfigError(
            "model.path: its chat template makes one and the same prompt of different "
            f"messages ({min(prompts)[:40]!r}): it lacks {{{{ message['content'] }}}}, or is "
            "another model's"
        )


def check_columns(
    rows: Sequence[PromptRow], needs: Iterable[str], reader: str, source: str
) -> None:
    """Raises ConfigError if the rows of `source` lack one of the columns `needs`.

    `reader` names the reward function that needs them, for the message."""
    columns = {*overview_of(rows).columns}
    for name in needs:
        if name not in columns:
            available = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"{reader} needs the column {name!r}, which {source} does not have; besides the "
                f"prompt it has {available}; a reward function is fn(prompts, completions, "
                "completion_ids, **columns), lists in, a list of numbers out"
            )


def prompt_check_inputs(folder: Path, config: DataConfig) -> list[Any]:
    """Returns what the result of `check_prompts_early` depends on, as the key of a cache.

    These are digests of the tokenizer's files, versions of libraries, and config values. The rows
    and the number of embeddings are left out."""
    patterns = ("tokenizer.json", "tokenizer_config.json", "*chat_template*")
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    digests = {path.name: digest_of(path) for path in paths}
    versions = versions_of("tokenizers", "jinja2")
    limits = [config.max_prompt_tokens, config.on_long_prompt]
    return [digests, versions, limits, config.chat_template_kwargs]


def load_tokenizer_file(file: Path) -> Any:
    """Returns the tokenizer of a tokenizer.json. Raises ConfigError if it cannot be read."""
    return _load_cached(file, file.resolve(), file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _load_cached(file: Path, *_: Any) -> Any:
    """Returns the tokenizer of `file`, without truncation and padding.

    The other arguments (path and time of change) only serve as the key of the cache."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"model.path: cannot read {file}: {error}") from None
    # The run uses neither. With padding to 512 tokens, say, every prompt would seem too long.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def sample(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Returns the rows to tokenize, in the order of the file.

    These are all rows if they are few. Otherwise they are the rows with the most characters, which
    take up half of the budget of characters, and every n-th row, which take up about the other
    half."""
    sizes, half = overview_of(rows).sizes, _CHARACTER_BUDGET // 2
    total = sum(sizes)
    if total <= _CHARACTER_BUDGET:
        return list(rows)
    # No more of the longest rows can fit into half, since they are longer than the average.
    num_fitting = half * len(rows) // total + 2
    chosen, budget = {0}, half
    for index in heapq.nlargest(num_fitting, range(len(rows)), key=sizes.__getitem__):
        budget -= sizes[index]
        if budget < 0:
            break
        chosen.add(index)
    chosen.update(range(0, len(rows), -(-total // half)))
    return [rows[index] for index in sorted(chosen)]


class TemplateRefusal(Exception):
    """Raised when a chat template refuses the messages by calling raise_exception."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What can be read of the tokenizer in a model's folder without transformers."""

    folder: Path
    settings: Fields
    """tokenizer_config.json; {} if there is none, or none that can be read."""
    is_readable: bool
    """False if tokenizer_config.json cannot be read."""
    template: str | None
    """The chat template, the one named "default" of several, or None."""

    @property
    def has_template(self) -> bool | None:
        """Whether there is a chat template. None: there may be one that only transformers reads."""
        if self.template is not None:
            return True
        may_be = not self.is_readable or any(self.folder.glob("*chat_template*"))
        return None if may_be else False

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their names in a template, such as bos_token."""
        return _special_tokens(self.settings)

    def load_tokenizer(self) -> Any | None:
        """Returns the tokenizer, or None if it has no tokenizer.json: only that can be read here,
        and other tokenizers are left to transformers. Raises ConfigError."""
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            return None
        tokenizer = load_tokenizer_file(file)
        # transformers adds these tokens too.
        tokenizer.add_special_tokens(list(self.special_tokens.values()))
        return tokenizer


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Returns what can be read of the tokenizer's files in a model's folder."""
    settings: Fields = {}
    is_readable = True
    try:
        settings = read_json(folder / "tokenizer_config.json", follow=True)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        is_readable = False
    template: Any = settings.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file() and is_readable:
        # The file may be somebody else's: a fifo is refused, and the size is limited.
        with open_regular(file, follow=True) as opened:
            template = opened.read(1 << 20).decode("utf-8", errors="replace")
    elif isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        default = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = next(iter(default[-1:]), None)
    template = template if isinstance(template, str) else None
    return TokenizerFiles(folder, settings, is_readable, template)


def renderer(
    template: str,
    settings: Fields,
    variables: Fields | None = None,
    *,
    opens_turn: bool = True,
) -> Render | None:
    """Returns a function that renders messages by the template, in the way of transformers.

    Returns None if only transformers can compile the template. `opens_turn` adds the generation
    prompt. `variables` are passed to the template. Raises ConfigError, which names model.path."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        return None

    def refuse(message: str) -> None:
        """Called by a template that does not take the messages."""
        raise TemplateRefusal(message)

    def to_json(value: Any, **options: Any) -> str:
        """Returns a value as JSON, for the filter `tojson` of templates."""
        return json.dumps(value, **{"ensure_ascii": False, **options})

    # The options are those of transformers' own compiler. A template is untrusted: the sandbox
    # denies it the attributes by which it could reach Python's internals.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    # Unlike jinja2's own filter, that of transformers does not escape characters for HTML.
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        # {% generation %} is a tag that only transformers knows.
        if "generation" in template:
            return None
        raise ConfigError(f"model.path: its chat template does not compile: {error}") from None

    def render(messages: Messages) -> str:
        """Returns the text that the template makes of `messages`."""
        return compiled.render(
            **_special_tokens(settings) | {**(variables or {})},
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=opens_turn,
        )

    return render


def _special_tokens(settings: Fields) -> dict[str, str]:
    """Returns the special tokens by their names in a template, such as bos_token."""
    tokens: dict[str, str] = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens

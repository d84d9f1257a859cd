"""This module turns conversations into tokens with the tokenizer's chat template.

Words used here: a *turn* is one message that the policy (the assistant) has sampled. *Data* is text
that tools, users and policies wrote; the template's own text is *trusted*. A *span* is a
(begin, end) pair of character indices. The *mark* is a random word that is inserted into data
before rendering: its places in the rendered text show where the template has put the data.

`ChatFormat` makes the prompt of an episode and the context of each later turn. Sampled tokens stay
as they were sampled; only new messages are rendered, encoded and appended to them. `PlainText`
encodes a text in which some spans are data: where data spells a special token, it becomes ordinary
tokens for the letters, and everything else is encoded as the tokenizer always does.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from os.path import commonprefix
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.reply_parser import ReplyParser, decode
from grpo_spmd.records import Fields, Message

Span = tuple[int, int]
Tools = Sequence[Fields]
Kind = Literal["tool", "user"]

# Drawn when the process starts, so no text can contain this word, not even on purpose.
_MARK = secrets.token_hex(16)
# Added tokens of blanks alone are allowed in data: runs of newlines are such tokens in Gemma's
# vocabulary.
_BLANK = re.compile("[\\s\u2581]*")
# Words for trial conversations (see ChatFormat). No template and no tool contains them.
_SAID_WORD = "said7c1f0b"
_ANSWER_WORD = "given7c1f0b"
_THINKING_WORD = "thought7c1f0b"
_TRIAL_PROMPT: list[Message] = [{"role": "user", "content": "asked7c1f0b"}]
# Removed before rendered trial conversations are compared: a template that only strips thinking
# from earlier turns counts as rewriting nothing, and `history: append` then keeps the thinking.
_THINKING = re.compile(r"<think>.*?(?:</think>|$)\s*", re.DOTALL)
_THINKING_TAGS = ("<think>", "</think>")
# Canonical composition (NFC), which a tokenizer may apply, joins at most four code points into one.
_MAX_COMPOSED = 4
# A trial conversation has as many turns as an episode may have, within these bounds. Each turn
# costs a rendering, and no known template begins to rewrite earlier turns after more than 32 turns.
_TRIAL_TURNS = (2, 32)
# How errors about the template begin.
_KEY = "environment: the chat template of model.path"
# By kind of environment: the kind of message that is certain to follow a turn of the policy.
_SURE_KINDS: dict[str, Kind] = {"tools": "tool", "gym": "user"}
# How the log and errors call each kind of message.
_WORDS: dict[Kind, str] = {
    "tool": "results of tools",
    "user": "a user's messages after the first turn",
}
# Names of a message's fields, which are not data. Other names are data, such as those of arguments.
_FIELDS = {
    "role", "type", "content", "text", "name", "tool_call_id", "tool_calls", "id", "function",
    "arguments", "reasoning_content", "thinking",
}  # fmt: skip


class TemplateError(ConfigError):
    """The chat template refuses a conversation, or data in it cannot be encoded without special
    tokens."""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools = (),
    *,
    generate: bool = True,
    template: str | None = None,
) -> str:
    """Returns the text of a conversation, with the generation prompt if `generate`.

    `template` replaces the tokenizer's chat template. Raises TemplateError if the chat template
    refuses the messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            [*messages],
            tools=[*tools] or None,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=generate,
        )
    except Exception as error:
        # A template is a program and may raise any exception.
        raise TemplateError(
            f"the chat template refuses the messages: {type(error).__name__}: {error}"
        ) from None
    return str(text)


class PlainText:
    """Encodes text that contains data so that no data becomes a special or added token.

    transformers encodes the rendered text as a whole, so a `<|im_end|>` in a tool's result would
    become the special token. The tokenizer's `split_special_tokens` does not help: it splits only
    tokens with special=True (not Qwen's `<tool_call>`), and the template's own tokens too.

    Here the text is first encoded as always. Where data has become a special or added token, the
    text between the nearest special tokens of the template is encoded again, by a copy of the
    tokenizer without special and added tokens. If such a token still results (a vocabulary may hold
    `<s>` as a word), its text is cut in two and each part is encoded alone. A single character
    cannot be cut, so such text is refused (TemplateError).
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ConfigError for a slow tokenizer, which is one written in Python."""
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "the tokenizer is not a fast one, and only fast ones tell the positions of "
                "tokens in a text; save it as tokenizer.json"
            )
        self._tokenizer = tokenizer
        # Data may become the unknown token, which stands for letters outside the vocabulary, unless
        # that token also begins, ends or pads a text.
        allowed = {tokenizer.unk_token_id}
        allowed -= {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        # By token id: the text of each special or added token that data must not become.
        self._texts = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token_id not in allowed and not _BLANK.fullmatch(token.content)
        }
        # The tokenizer's normalizer may change the case of a text.
        self._pattern = re.compile(
            "|".join(map(re.escape, self._texts.values())) or "(?!)", re.IGNORECASE
        )

    def is_special(self, token_id: int) -> bool:
        """Returns whether a token is a special or added token that data must not become."""
        return token_id in self._texts

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Returns (begin, end, id) for each special or added token in the encoding of a text.

        Raises TemplateError if the tokenizer fails.
        """
        encoded = self._encode_with_offsets(text)
        return [
            (*self._text_span(text, token_id, offset), token_id)
            for token_id, offset in zip(
                encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
            if token_id in self._texts
        ]

    def mark(self, text: str, ignored: Collection[str] = ()) -> str:
        """Returns a text with the mark inserted after the first letter of each special or added
        token that the text spells, except for tokens whose text is in `ignored`.

        Raises TemplateError if the tokenizer fails.
        """
        # Most texts spell no special token and need no encoding. Other letters than ASCII may
        # become a special token's letters by the tokenizer's normalizer.
        if text.isascii() and not self._pattern.search(text):
            return text
        cuts = [
            begin + 1
            for begin, _, token_id in self.special_spans(text)
            if self._texts[token_id] not in ignored
        ]
        return _MARK.join(_cut(text, cuts))

    def encode(self, text: str, data: Collection[Span] = ()) -> list[int]:
        """Returns the tokens of a text, in which no data becomes a special token.

        `data` has the spans of the text that are data; they do not overlap. Raises TemplateError if
        data cannot be encoded without special tokens.
        """
        encoded = self._encode_with_offsets(text)
        ids: list[int] = list(encoded["input_ids"])
        # The additional pair has the bounds of the text, for the loop below: at index -1 the end of
        # what is before the first token (0), at index len(ids) the begin of what is after the last.
        offsets = [*encoded["offset_mapping"], (len(text), 0)]
        # The indices of special and added tokens. Those that the template wrote are trusted and
        # stay; those that data spells become ordinary tokens below.
        special = [i for i, token_id in enumerate(ids) if token_id in self._texts] if data else []
        spans = sorted(data)
        ends = [end for _, end in spans]
        trusted = []
        for i in special:
            begin, end = self._text_span(text, ids[i], offsets[i])
            # Trusted if the token overlaps no span. A conversation may have thousands of spans, so
            # only the first one that ends after `begin` is compared.
            following_span = bisect_right(ends, begin)
            if following_span == len(spans) or end <= spans[following_span][0]:
                trusted.append(i)
        if len(trusted) == len(special):
            return ids
        result = []
        # What is between two trusted tokens is encoded again if it has special tokens.
        for previous, following in pairwise([-1, *trusted, len(ids)]):
            between = ids[previous + 1 : following]
            if any(map(self.is_special, between)):
                stretch = text[offsets[previous][1] : offsets[following][0]]
                between = self._encode_without_special(stretch)
            result += between
            result += ids[following : following + 1]
        return result

    def _encode_with_offsets(self, text: str) -> Any:
        """Returns the tokenizer's encoding of a text, with the span of each token.

        Raises TemplateError if the tokenizer panics.
        """
        try:
            return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # The Rust library panics if a regular expression backtracks too often; a panic is a
        # BaseException.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise TemplateError(f"the tokenizer fails on the text: {error}") from None

    def _text_span(self, text: str, token_id: int, offset: Span) -> Span:
        """Returns the span of a special token's own text within `offset`, the token's whole span.

        The whole span may include blanks around the text, which belong to the token. It is returned
        if the text is spelled otherwise there.
        """
        content = self._texts[token_id]
        begin = text.find(content, *offset)
        return offset if begin < 0 else (begin, begin + len(content))

    def _encode_without_special(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows a special token, none of which is special.

        Raises TemplateError if that is impossible.
        """
        copy, mark_id = self._copy
        encoding = copy.encode(_MARK + text, add_special_tokens=False)
        ids: list[int] = encoding.ids[1:]
        if encoding.ids[:1] != [mark_id] or mark_id in ids:
            raise TemplateError(
                f"the tokenizer does not split {text[:40]!r} from the special token before it"
            )
        cuts = []
        for token_id, offset in zip(ids, encoding.offsets[1:], strict=True):
            if token_id in self._texts:
                begin, end = (place - len(_MARK) for place in offset)
                if end - begin < 2:
                    raise TemplateError(
                        "the tokenizer cannot write it without special tokens: "
                        f"{text[begin:end]!r} becomes {self._texts[token_id]!r}"
                    )
                cuts.append(begin + 1)
        if cuts:
            ids = [i for piece in _cut(text, cuts) for i in self._encode_without_special(piece)]
        return ids

    @cached_property
    def _copy(self) -> tuple[Any, int]:
        """Returns (copy, mark id): a copy of the tokenizer that reads the texts of special tokens
        as plain text, and the id of the mark, the only added token that it still recognizes.

        The text to encode is put after the mark, and the mark's token is then removed. So the text
        is split into tokens as it is after any special token. The copy is made when it is first
        needed, because a large vocabulary takes a second.
        """
        # Imported late: without special tokens in data no copy is needed.
        from tokenizers import AddedToken, Tokenizer

        tree = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in tree["added_tokens"]:
            token["special"] = True
        copy: Any = Tokenizer.from_str(json.dumps({**tree, "truncation": None, "padding": None}))
        # With this option no special token is found in a text. All added tokens were made special
        # above; the mark is not special, so it is found.
        copy.encode_special_tokens = True
        copy.add_tokens([AddedToken(_MARK, special=False, normalized=False)])
        return copy, copy.token_to_id(_MARK)


def render_with_data(
    plain: PlainText,
    render_text: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    num_trusted: int,
    *,
    marks_thinking: bool = True,
) -> tuple[str, list[Span]]:
    """Returns (text, spans): the rendered conversation, and the spans of data that spells special
    tokens. There is one span for each such token: its first letter.

    The first `num_trusted` messages are not data. The conversation is rendered without marks and
    with marks in the data. The places of the marks show where the template has put the data, even
    if it trims data or writes it as JSON. Without `marks_thinking` the `<think>` tags in the
    assistant's messages stay special tokens. Raises TemplateError if the template refuses the
    messages, or if the marks change more of the text than themselves.
    """
    trusted = messages[:num_trusted]
    rest = [_map_texts(message, without_surrogates) for message in messages[num_trusted:]]
    text = render_text([*trusted, *rest])
    # The first try marks the thinking tags too. A template that cuts thinking out of a turn's text
    # does not find marked tags and renders something else; then the second try leaves them out.
    for thinking in ((), _THINKING_TAGS) if marks_thinking else (_THINKING_TAGS,):
        marked = []
        for message in rest:
            ignored = thinking if message["role"] == "assistant" else ()
            marked.append(_map_texts(message, partial(plain.mark, ignored=ignored)))
        if marked == rest:
            return text, []
        pieces = render_text([*trusted, *marked]).split(_MARK)
        # Apart from the marks both renderings must be equal, or else the spans would be wrong.
        if "".join(pieces) == text:
            return text, [(end - 1, end) for end in accumulate(map(len, pieces[:-1]))]
    raise TemplateError(
        "a message spells special tokens, and the chat template rewrites it or depends on its text"
    )


def without_surrogates(text: str) -> str:
    """Returns valid Unicode, as tokenizers need it: surrogate pairs are joined, and single
    surrogates are replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True)
class _HistoryRule:
    """How the chat template treats earlier turns when messages of one kind (results of tools, or a
    user's messages) follow them."""

    end_text: str
    """The text after a turn's own words, up to and including the token that ends the turn."""
    end_token: str
    """The text of the token that ends the turn."""
    end_id: int
    """The id of the token that ends the turn."""
    replaced_end: str | None
    """The text of the token that ends a turn as long as no messages follow; None if `end_token`
    ends the turn then, too."""
    may_append: bool
    """True if new messages can be appended to the sampled tokens, because the template changes
    nothing in the text before them, except that it may strip thinking."""
    strips_thinking: bool
    """True if the template drops the thinking of a turn as soon as messages follow."""

    @property
    def note(self) -> str:
        """Returns the rule in words, for the log."""
        if not self.may_append:
            return "rewrites earlier turns"
        return "strips thinking" if self.strips_thinking else "keeps earlier turns"


class ChatFormat:
    """Encodes prompts and the contexts of later turns, and parses the policy's turns.

    The context of a later turn is the context before, the tokens sampled after it, and the new
    messages as the template writes them after a made-up turn of the assistant. At the start, trial
    conversations are rendered to find out whether the template would render the whole conversation
    in the same way. Texts of tools, users and policies are data: see PlainText. The prompt of an
    episode is encoded as in data/tokens.py.
    """

    def __init__(
        self,
        tokenizer: Any,
        history: Literal["append", "fork"],
        tools: Tools,
        environment: Literal["tools", "gym", "agent"],
        max_turns: int = _TRIAL_TURNS[0],
    ) -> None:
        """`tools` are JSON schemas. The kind of `environment` determines which messages are certain
        to follow the policy's turns. `max_turns` is the most turns of an episode.

        Raises ConfigError if the template cannot render these messages, or if it rewrites the
        history although the config wants to append to it.
        """
        self._tokenizer = tokenizer
        self._history = history
        self._num_trial_turns = min(max(max_turns, _TRIAL_TURNS[0]), _TRIAL_TURNS[1])
        self._plain = PlainText(tokenizer)
        self.max_token_chars = _MAX_COMPOSED * max(map(len, tokenizer.get_vocab()))
        """The most characters that one token can stand for. A text with more characters than the
        free tokens of the context can stand for is refused before it is tokenized."""
        self._render = partial(render, tokenizer)
        prompt = self._render(_TRIAL_PROMPT, tools)
        # Tools that the template does not show are no error: the policy may know them from its
        # training.
        self._hidden_tools = [name for name in map(_tool_name, tools) if name not in prompt]
        self._trial_tool = _tool_name(tools[0]) if tools else "function"
        # Rules by kind and tools, for each list of tools that was tried.
        self._rules_by_tools: dict[str, _HistoryRule | TemplateError] = {}
        # By kind of message: the rule with the tools that are known at the start.
        self._rules: dict[Kind, _HistoryRule] = {}
        for kind in _WORDS:
            self._try_kind(kind, tools, is_sure=kind == _SURE_KINDS.get(environment))
        ends = {tokenizer.eos_token}
        for rule in self._rules.values():
            ends |= {rule.end_token, rule.replaced_end}
        parser = ReplyParser(
            tokenizer,
            self._anchors(prompt, tools),
            sorted(filter(None, ends), key=len, reverse=True),
            reads_calls=environment != "gym",
        )
        self.parse = parser.parse
        """Returns the parsed message of a turn. Never raises; counts calls that do not parse."""
        if tools:
            self._check_calls(prompt, tools)

    @property
    def note(self) -> str:
        """Returns a description for the log of how the template treats earlier turns."""
        notes = [f"{rule.note} before {_WORDS[kind]}" for kind, rule in self._rules.items()]
        notes = notes or ["is rendered anew for each turn"]
        if self._hidden_tools:
            tools = ", ".join(self._hidden_tools)
            notes.append(f"does not tell the policy of its tools ({tools})")
        return f"the chat template {', '.join(notes)} (environment.history: {self._history})"

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Returns the tokens of an episode's prompt, including the generation prompt.

        Raises TemplateError.
        """
        # An environment's reset() may have added single surrogates, which are not valid Unicode.
        return self._plain.encode(without_surrogates(self._render(messages, tools)))

    def whole_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Returns the tokens of an agent's whole conversation, including the generation prompt.

        All messages are data. Raises TemplateError.
        """
        text, data = self._render_with_data(complete(messages), tools, 0)
        return self._plain.encode(text, data)

    def next_ids(
        self,
        context_ids: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools,
    ) -> tuple[list[int], bool]:
        """Returns (ids, is_appended): the context of the next turn, and whether it begins with
        `context_ids`.

        `context_ids` are the last context and the tokens sampled after it. `messages_so_far` are
        all messages in it; the last one is the policy's turn. If that turn ended with another stop
        token than the template's, the template's token is appended. Raises TemplateError.
        """
        kind: Kind = "tool" if new_messages[0]["role"] == "tool" else "user"
        rule = self._rule(kind, tools)
        # New messages are appended if the template changes nothing in earlier turns. If it only
        # strips their thinking, `history: append` keeps the thinking.
        if (
            isinstance(rule, _HistoryRule)
            and rule.may_append
            and (self._history == "append" or not rule.strips_thinking)
        ):
            turn, *new_messages = complete([messages_so_far[-1], *new_messages])
            # gpt-oss's template takes the name of a result's tool from the call before it, so the
            # made-up turn must call that tool.
            calls = turn.get("tool_calls") or [{}]
            called = calls[0].get("function", {}).get("name")
            name = str(new_messages[0].get("name") or called or self._trial_tool)
            trial = [*_TRIAL_PROMPT, self._trial_pair(kind, name)[0], *new_messages]
            text, data = self._render_with_data(trial, tools, len(_TRIAL_PROMPT))
            begin = text.find(_SAID_WORD) + len(_SAID_WORD)
            end = begin + len(rule.end_text)
            # The tokens from the end of the made-up turn on.
            ids = self._encode_from(end - len(rule.end_token), text, data)
            if text[begin:end] != rule.end_text or ids[:1] != [rule.end_id]:
                raise TemplateError(
                    "the chat template ends the assistant's turn differently before these messages"
                )
            # The context has the turn's end token already, unless another stop token ended it.
            ids = ids[1:] if context_ids[-1] == rule.end_id else ids
            return [*context_ids, *ids], True
        # Otherwise the whole conversation is rendered. Its first messages, the prompt, are trusted.
        roles = [message["role"] for message in messages_so_far]
        num_prompt = roles.index("assistant") if "assistant" in roles else len(roles)
        messages = complete([*messages_so_far, *new_messages])
        text, data = self._render_with_data(messages, tools, num_prompt)
        context = decode(self._tokenizer, context_ids)
        if self._plain.is_special(context_ids[-1]) and text.startswith(context):
            # The template rewrote nothing in this conversation, so the sampled tokens are kept.
            begin = len(context) - len(self._tokenizer.decode(context_ids[-1:]))
            return [*context_ids, *self._encode_from(begin, text, data)[1:]], True
        return self._plain.encode(text, data), False

    def _render_with_data(
        self, messages: Sequence[Message], tools: Tools, num_trusted: int
    ) -> tuple[str, list[Span]]:
        """Calls `render_with_data` with this tokenizer and its chat template."""
        return render_with_data(
            self._plain, partial(self._render, tools=tools), messages, num_trusted
        )

    def _encode_from(self, begin: int, text: str, data: Sequence[Span]) -> list[int]:
        """Returns the tokens of `text[begin:]`, which must start with a special token, since blanks
        after such a token may belong to it. `data` has spans of the whole text."""
        shifted = [(first - begin, last - begin) for first, last in data]
        return self._plain.encode(text[begin:], shifted)

    # Trial conversations: what does the template do with earlier turns?

    def _trial_pair(self, kind: Kind, tool_name: str | None = None) -> list[Message]:
        """Returns a made-up turn, whose last word is _SAID_WORD, and a message of this kind that
        answers it."""
        turn: Message = {"role": "assistant", "content": _SAID_WORD}
        answer: Message = {"role": kind, "content": _ANSWER_WORD}
        if kind == "tool":
            call = {"name": tool_name or self._trial_tool, "arguments": {"text": _SAID_WORD}}
            calls = [{"type": "function", "id": _call_id(0), "function": call}]
            turn |= {"content": "", "tool_calls": calls}
            answer |= {"name": self._trial_tool, "tool_call_id": _call_id(0)}
        return [turn, answer]

    def _try_kind(self, kind: Kind, tools: Tools, *, is_sure: bool) -> None:
        """Finds the rule for messages of a kind and stores it in `_rules`.

        Raises ConfigError if such messages are certain to come, and the template refuses them or
        rewrites text that the config wants to keep.
        """
        rule = self._rule(kind, tools)
        if isinstance(rule, _HistoryRule):
            self._rules[kind] = rule
        if not is_sure:
            return
        subject = _WORDS[kind]
        if isinstance(rule, TemplateError):
            raise ConfigError(
                f"{_KEY} has no place for {subject}: {rule}; give the model's folder another "
                "(chat_template.jinja)"
            )
        if self._history == "append" and not rule.may_append:
            raise ConfigError(
                f"{_KEY} rewrites what came before {subject}, so that earlier turns cannot stay as "
                "they were sampled (environment.history: append); set environment.history: fork"
            )

    def _rule(self, kind: Kind, tools: Tools) -> _HistoryRule | TemplateError:
        """Returns the rule for messages of a kind in conversations with these tools, or the error
        if the template refuses such messages.

        The rule depends on the tools, since a template may write them into the last message. An
        agent brings its own tools.
        """
        # A trial takes several renderings, so its result is cached for each list of tools.
        key = json.dumps([kind, [*tools]])
        if key not in self._rules_by_tools:
            try:
                self._rules_by_tools[key] = self._try_history(kind, tools)
            except TemplateError as error:
                self._rules_by_tools[key] = error
        return self._rules_by_tools[key]

    def _try_history(self, kind: Kind, tools: Tools) -> _HistoryRule:
        """Finds the rule for messages of a kind, by rendering conversations of 0, 1, 2, ... turns.

        If the template rewrites nothing, each text begins with the text of the conversation that is
        one turn shorter. Raises TemplateError if the template leaves out a message, or if the end
        of a turn is not clear.
        """
        # All turns are equal, so differences between the texts depend on the turns' places alone.
        pair = self._trial_pair(kind)
        texts = [
            self._render([*_TRIAL_PROMPT, *pair * num], tools)
            for num in range(self._num_trial_turns + 1)
        ]
        for num, text in enumerate(texts):
            if text.count(_SAID_WORD) != num or text.count(_ANSWER_WORD) != num:
                raise TemplateError("it leaves out a message, or a part of one")
        # What the template writes after a turn's own words: `alone` if no messages follow the turn,
        # `followed` if messages do.
        turn, answer = pair
        alone = self._render([*_TRIAL_PROMPT, turn], tools, generate=False)
        alone = alone.partition(_SAID_WORD)[2]
        followed = texts[1].partition(_SAID_WORD)[2]
        plain = [_THINKING.sub("", text) for text in texts]
        rewrites = any(not longer.startswith(shorter) for shorter, longer in pairwise(plain))
        if not rewrites and not all(text.endswith(followed) for text in texts[1:]):
            raise TemplateError("it writes equal messages in two ways")
        # A turn may have its thinking in a field, or as tags in its text.
        fields = {"reasoning_content": _THINKING_WORD, "thinking": _THINKING_WORD}
        thinking_turns = [{**turn, **fields}]
        if kind == "user":
            thinking_turns.append(
                {**turn, "content": f"<think>\n{_THINKING_WORD}\n</think>\n\n{turn['content']}"}
            )
        alone_spans = self._ending_spans(alone)
        # The tokens after the turn that stay when messages follow. (Phi-3 writes one more token at
        # the end of the conversation.)
        kept_spans = [span for span in alone_spans if followed.startswith(alone[: span[1]])]
        # GLM's template ends a turn by the first token of the next message.
        spans = kept_spans[-1:] or self._ending_spans(followed)[:1]
        if not spans:
            raise TemplateError("no special token ends the assistant's turn before them")
        begin, end, end_id = spans[0]
        replaced_end = None
        if alone_spans and not kept_spans:
            replaced_end = alone[slice(*alone_spans[-1][:2])]
        return _HistoryRule(
            end_text=followed[:end],
            end_token=followed[begin:end],
            end_id=end_id,
            replaced_end=replaced_end,
            may_append=replaced_end is None and not rewrites,
            strips_thinking=any(self._strips(turn, answer, tools) for turn in thinking_turns),
        )

    def _ending_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Returns (begin, end, id) of the tokens in a text that may end a turn.

        They are the tokens with special=True, or all added tokens if the text has no such token.
        """
        spans = self._plain.special_spans(text)
        tokens = self._tokenizer.added_tokens_decoder
        return [span for span in spans if tokens[span[2]].special] or spans

    def _strips(self, turn: Message, answer: Message, tools: Tools) -> bool:
        """Returns whether the template drops the thinking in `turn` as soon as `answer` follows."""
        try:
            alone = self._render([*_TRIAL_PROMPT, turn], tools, generate=False)
            # The template never writes the thinking in this form.
            if _THINKING_WORD not in f"{alone}{turn['content']}":
                return False
            return _THINKING_WORD not in self._render([*_TRIAL_PROMPT, turn, answer], tools)
        except TemplateError:
            # gpt-oss's template refuses tags in a turn's text.
            return False

    # Set-up of the parser for turns.

    def _anchors(self, prompt: str, tools: Tools) -> list[str]:
        """Returns the texts after which a turn begins: the generation prompt, or, if the template
        has none, the different ends of the messages before a turn.

        They end before a `<think>` tag, since the parser reads the tag as part of the turn.
        """
        bare = self._render(_TRIAL_PROMPT, tools, generate=False)
        if prompt.startswith(bare) and prompt != bare:
            generation_prompt = prompt[len(bare) :]
            return [generation_prompt.partition("<think>")[0] or generation_prompt]
        pairs = [[], *map(self._trial_pair, self._rules)]
        texts = [self._render([*_TRIAL_PROMPT, *pair], tools) for pair in pairs]
        anchors = dict.fromkeys(
            text[begin:].partition("<think>")[0]
            for text in texts
            for begin, _, _ in self._ending_spans(text)[-1:]
        )
        return [*anchors] or [prompt]

    def _check_calls(self, prompt: str, tools: Tools) -> None:
        """Raises ConfigError if the parser does not read back a call that the template writes.

        That happens if the template's format of calls is unknown.
        """
        turn = self._trial_pair("tool")[0]
        text = self._render([*_TRIAL_PROMPT, turn], tools, generate=False)
        # commonprefix compares characters and not path components, as is wanted here.
        written = text.removeprefix(commonprefix([prompt, text]))  # noqa: RUF071
        parsed = self.parse(self._plain.encode(written), self._plain.encode(prompt), ())
        functions = [call["function"] for call in parsed.message.get("tool_calls", [])]
        if functions != [turn["tool_calls"][0]["function"]] or parsed.num_invalid:
            raise ConfigError(
                f"{_KEY} writes a call as {written!r}, which no known format of calls reads back, "
                "nor its own response_template; put a response_template for transformers' "
                "parse_response into its tokenizer_config.json"
            )


def complete(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with an id in each tool call, and with that id in the call's result.

    Ids that are there already stay. The content of a tool result that is neither text nor a list of
    blocks becomes text.
    """
    completed = []
    ids = []
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": _call_id(number), **call}
                for number, call in enumerate(message["tool_calls"])
            ]
            ids = [str(call["id"]) for call in message["tool_calls"]]
        if message["role"] == "tool":
            message.setdefault("tool_call_id", ids.pop(0) if ids else _call_id(0))
            if not isinstance(message.get("content"), str | list):
                message["content"] = str(message.get("content"))
        completed.append(message)
    return completed


def _tool_name(tool: Fields) -> str:
    """Returns the name in a tool's JSON schema."""
    return str(tool.get("function", tool).get("name", ""))


def _call_id(number: int) -> str:
    """Returns an id for the tool call with this number in its message."""
    # Mistral's templates insist on ids of exactly nine letters and digits.
    return f"call{number:05d}"


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a message in which `change` was applied to each text, in the order of the template.

    Texts are all strings but roles, types and the keys that are in _FIELDS. A template is tried
    with marks in the place of the texts, to see where it writes each of them.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            (name if name in _FIELDS else change(name)): field
            if name in ("role", "type")
            else _map_texts(field, change)
            for name, field in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_texts(field, change) for field in value]
    return value


def _cut(text: str, cuts: Sequence[int]) -> list[str]:
    """Returns the pieces of a text that is cut before each of these character indices."""
    return [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]

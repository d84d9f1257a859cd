"""This module turns conversations into tokens with the tokenizer's chat template.

Words used here: a *turn* is one message that the policy (the assistant) has sampled. *Data* are
texts that tools, users and policies wrote; the template's own text is *trusted*. A *span* is a
(begin, end) pair of character indices. A *mark* is a secret word inside of data that shows where
the template has put the data.

`ChatFormat` makes prompts and the contexts of next turns. Sampled tokens stay as they were
sampled; only new messages are rendered and encoded, after them. `PlainText` encodes a text in
which some spans are data: special-token text in data becomes the tokens of its letters, and all
else is encoded as the tokenizer always does.
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

# Nobody's text contains this word, as nobody knows it before the process starts.
_MARK = secrets.token_hex(16)
# Runs of newlines are added tokens in Gemma's vocabulary, and data may contain them.
_BLANK = re.compile("[\\s\u2581]*")
# These words fill trial conversations. No template, no tool and nobody's text contains them.
_SAID_WORD = "said7c1f0b"
_ANSWER_WORD = "given7c1f0b"
_THINKING_WORD = "thought7c1f0b"
_TRIAL_PROMPT: list[Message] = [{"role": "user", "content": "asked7c1f0b"}]
# Thinking may differ where a template rewrites nothing else; `history: append` keeps all of it.
_THINKING = re.compile(r"<think>.*?(?:</think>|$)\s*", re.DOTALL)
_THINKING_TAGS = ("<think>", "</think>")
# Canonical composition (NFC) makes one letter out of at most four code points.
_MAX_COMPOSED = 4
# Trial conversations have as many turns as an episode may have, within these bounds. Each turn
# costs a rendering; no known template rewrites earlier turns in still longer conversations alone.
_TRIAL_TURNS = (2, 32)
_KEY = "environment: the chat template of model.path"
# The messages that follow the policy's turns for certain, by the kind of environment.
_SURE_KINDS: dict[str, Kind] = {"tools": "tool", "gym": "user"}
_WORDS: dict[Kind, str] = {
    "tool": "results of tools",
    "user": "a user's messages behind the first turn",
}
_FIELDS = {
    "role", "type", "content", "text", "name", "tool_call_id", "tool_calls", "id", "function",
    "arguments", "reasoning_content", "thinking",
}  # fmt: skip


class TemplateError(ConfigError):
    """The chat template refuses a conversation, or data cannot be encoded as text."""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Tools = (),
    *,
    generate: bool = True,
    template: str | None = None,
) -> str:
    """Returns the text of a conversation, with the generation prompt if `generate`.

    `template` is a chat template in place of the tokenizer's. Raises TemplateError where the chat
    template refuses the messages.
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
        # A template may refuse with any error.
        raise TemplateError(
            f"the chat template refuses the messages: {type(error).__name__}: {error}"
        ) from None
    return str(text)


class PlainText:
    """Encodes text that has data in it, with one tokenizer.

    transformers encodes the rendered text as a whole, so a `<|im_end|>` in a tool's result would
    become the special token. The tokenizer's `split_special_tokens` splits only tokens with
    special=True (not Qwen's `<tool_call>`), and would split the template's own tokens too.

    Here the text is first encoded as always. Where a special or added token came out of data, the
    stretch between the template's own tokens around it is encoded again, by a copy of the tokenizer
    without special and added tokens. A token that still comes out (a vocabulary may hold `<s>` as a
    word) is cut in two; a token that cannot be cut is refused.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Raises ConfigError for a tokenizer in Python."""
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "the tokenizer is not a fast one, which alone says where in a "
                "text a token stands; save it as tokenizer.json"
            )
        self._tokenizer = tokenizer
        # Data with letters outside the vocabulary may become the unknown token.
        allowed = {tokenizer.unk_token_id}
        allowed -= {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        self._texts = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token_id not in allowed and not _BLANK.fullmatch(token.content)
        }
        # A normalizer may change the case.
        self._pattern = re.compile(
            "|".join(map(re.escape, self._texts.values())) or "(?!)", re.IGNORECASE
        )

    def is_special(self, token_id: int) -> bool:
        """Returns whether a token is a special or added token."""
        return token_id in self._texts

    def special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Returns (begin, end, id) of the special and added tokens that a text is encoded to.

        Raises TemplateError.
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
        """Returns a text with the mark behind the first letter of each special or added token,
        except for those with an `ignored` text. Raises TemplateError."""
        # Most texts need no encoding. Letters beyond ASCII may become others by a normalizer.
        if text.isascii() and not self._pattern.search(text):
            return text
        cuts = [
            begin + 1
            for begin, _, token_id in self.special_spans(text)
            if self._texts[token_id] not in ignored
        ]
        return _MARK.join(_cut(text, cuts))

    def encode(self, text: str, data: Collection[Span] = ()) -> list[int]:
        """Returns the tokens of a text; `data` are the spans of the text that are data, none of
        which overlaps another.

        Raises TemplateError where data would become a special token.
        """
        encoded = self._encode_with_offsets(text)
        ids: list[int] = list(encoded["input_ids"])
        # The last pair is the bounds of the text: the end before the first token, at index -1, and
        # the begin after the last one.
        offsets = [*encoded["offset_mapping"], (len(text), 0)]
        special = [i for i, token_id in enumerate(ids) if token_id in self._texts] if data else []
        spans = sorted(data)
        ends = [end for _, end in spans]
        trusted = []
        for i in special:
            begin, end = self._text_span(text, ids[i], offsets[i])
            # Only the first span that ends behind `begin`, since a conversation may hold thousands.
            following_span = bisect_right(ends, begin)
            if following_span == len(spans) or end <= spans[following_span][0]:
                trusted.append(i)
        if len(trusted) == len(special):
            return ids
        result: list[int] = []
        for previous, following in pairwise([-1, *trusted, len(ids)]):
            between = ids[previous + 1 : following]
            if any(map(self.is_special, between)):
                stretch = text[offsets[previous][1] : offsets[following][0]]
                between = self._encode_without_special(stretch)
            result += between
            result += ids[following : following + 1]
        return result

    def _encode_with_offsets(self, text: str) -> Any:
        """Returns the tokenizer's encoding with the span of each token."""
        try:
            return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # The Rust library panics where a regular expression backtracks without end.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise TemplateError(f"the tokenizer fails on it: {error}") from None

    def _text_span(self, text: str, token_id: int, offset: Span) -> Span:
        """Returns the span of a token's own text, without blanks around it that belong to the
        token."""
        content = self._texts[token_id]
        begin = text.find(content, *offset)
        return offset if begin < 0 else (begin, begin + len(content))

    def _encode_without_special(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows a special token. Raises TemplateError."""
        copy, mark_id = self._copy
        encoding = copy.encode(_MARK + text, add_special_tokens=False)
        ids: list[int] = encoding.ids[1:]
        if encoding.ids[:1] != [mark_id] or mark_id in ids:
            raise TemplateError(
                f"the tokenizer does not keep {text[:40]!r} apart from what is before it"
            )
        cuts: list[int] = []
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
        """Returns a tokenizer that reads the names of special tokens as plain text, and the id of
        the one special token that it has, the mark.

        Text is encoded behind the mark, which is then cut off: so it is split as after any special
        token. The copy is made when it is first needed, because a large vocabulary takes a second.
        """
        # Imported late: data that is plain needs no copy.
        from tokenizers import AddedToken, Tokenizer

        tree = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in tree["added_tokens"]:
            token["special"] = True
        copy: Any = Tokenizer.from_str(json.dumps({**tree, "truncation": None, "padding": None}))
        # The copy then finds no special token in a text, and all added ones are special.
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
    """Returns (text, spans): the rendered conversation, and spans in it that are data.

    Each special token that data would become has its first letter in a span. The first
    `num_trusted` messages are no data. The conversation is rendered with marks in the data and
    without them: where the mark is in one text, the other has data in the form in which the
    template writes it (trimmed, as JSON). Without `marks_thinking` the assistant's tags of thinking
    stay special tokens. Raises TemplateError.
    """
    trusted = messages[:num_trusted]
    rest = [_map_texts(message, without_surrogates) for message in messages[num_trusted:]]
    text = render_text([*trusted, *rest])
    # Templates cut thinking out of a turn's text; a mark inside of its tags would hide it.
    for thinking in ((), _THINKING_TAGS) if marks_thinking else (_THINKING_TAGS,):
        marked = []
        for message in rest:
            ignored = thinking if message["role"] == "assistant" else ()
            marked.append(_map_texts(message, partial(plain.mark, ignored=ignored)))
        if marked == rest:
            return text, []
        pieces = render_text([*trusted, *marked]).split(_MARK)
        # Without its marks this must be the real rendering, or else the spans would be wrong.
        if "".join(pieces) == text:
            return text, [(end - 1, end) for end in accumulate(map(len, pieces[:-1]))]
    raise TemplateError(
        "the chat template looks into, or rewrites, a message that has the text of special "
        "tokens in it"
    )


def without_surrogates(text: str) -> str:
    """Returns the text with lone surrogates replaced and surrogate pairs joined, as tokenizers need
    it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True)
class _HistoryRule:
    """How the template treats earlier turns if messages of one kind follow."""

    end_text: str
    """All text after a turn's own words, including the token that ends the turn."""
    end_token: str
    end_id: int
    replaced_end: str | None
    """The token that ends the last turn of a conversation, if it is a different token."""
    may_append: bool
    """True if new messages can be appended to the sampled tokens: the template changes nothing in
    earlier text but thinking."""
    strips_thinking: bool

    @property
    def note(self) -> str:
        """Returns for the log how earlier turns are treated."""
        if not self.may_append:
            return "rewrites earlier turns"
        return "strips thinking" if self.strips_thinking else "keeps earlier turns"


class ChatFormat:
    """Makes prompts and the contexts of next turns in tokens, and parses the policy's turns.

    The next context is the last context, the tokens sampled after it, and the new messages as the
    template writes them after a made-up turn of the assistant. Trials at the start find out whether
    the template renders the whole conversation in the same way. Texts of tools, users and policies
    are data: see PlainText. A prompt is encoded as in data/tokens.py.
    """

    def __init__(
        self,
        tokenizer: Any,
        history: Literal["append", "fork"],
        tools: Tools,
        environment: Literal["tools", "gym", "agent"],
        max_turns: int = _TRIAL_TURNS[0],
    ) -> None:
        """`tools` are JSON schemas. The kind of environment says which messages are sure to follow
        the policy's turns. `max_turns` is the most turns of an episode.

        Raises ConfigError if the template cannot render these messages, or if it rewrites the
        history although the config wants to append to it.
        """
        self._tokenizer = tokenizer
        self._history = history
        self._num_trial_turns = min(max(max_turns, _TRIAL_TURNS[0]), _TRIAL_TURNS[1])
        self._plain = PlainText(tokenizer)
        self.max_token_chars = _MAX_COMPOSED * max(map(len, tokenizer.get_vocab()))
        """A text with more than this many characters for each free token of the context cannot fit.
        It is refused before it is tokenized."""
        self._render = partial(render, tokenizer)
        prompt = self._render(_TRIAL_PROMPT, tools)
        # No error: a policy may know its tools from its training.
        self._hidden_tools = [name for name in map(_tool_name, tools) if name not in prompt]
        self._trial_tool = _tool_name(tools[0]) if tools else "function"
        self._rules_by_tools: dict[str, _HistoryRule | TemplateError] = {}
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
        """Returns the message of a turn. Calls that do not parse are counted; nothing raises."""
        if tools:
            self._check_calls(prompt, tools)

    @property
    def note(self) -> str:
        """Returns for the log how the template treats earlier turns."""
        notes = [f"{rule.note} before {_WORDS[kind]}" for kind, rule in self._rules.items()]
        notes = notes or ["is rendered anew for each turn"]
        if self._hidden_tools:
            tools = ", ".join(self._hidden_tools)
            notes.append(f"does not tell the policy of its tools ({tools})")
        return f"the chat template {', '.join(notes)} (environment.history: {self._history})"

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Returns the tokens of a first prompt, with the generation prompt. Raises
        TemplateError."""
        # reset() may have added halves of surrogate pairs.
        return self._plain.encode(without_surrogates(self._render(messages, tools)))

    def whole_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Returns the tokens of an agent's conversation, with the generation prompt.

        All texts of the conversation are data. Raises TemplateError.
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
        all its messages; the last of them is the policy's turn. If the turn ended with another stop
        token than the template's, the template's is appended. Raises TemplateError.
        """
        kind: Kind = "tool" if new_messages[0]["role"] == "tool" else "user"
        rule = self._rule(kind, tools)
        if (
            isinstance(rule, _HistoryRule)
            and rule.may_append
            and (self._history == "append" or not rule.strips_thinking)
        ):
            turn, *new_messages = complete([messages_so_far[-1], *new_messages])
            # gpt-oss has the name of an answering tool only in the turn.
            calls = turn.get("tool_calls") or [{}]
            called = calls[0].get("function", {}).get("name")
            name = str(new_messages[0].get("name") or called or self._trial_tool)
            trial = [*_TRIAL_PROMPT, self._trial_pair(kind, name)[0], *new_messages]
            text, data = self._render_with_data(trial, tools, len(_TRIAL_PROMPT))
            begin = text.find(_SAID_WORD) + len(_SAID_WORD)
            end = begin + len(rule.end_text)
            ids = self._encode_from(end - len(rule.end_token), text, data)
            if text[begin:end] != rule.end_text or ids[:1] != [rule.end_id]:
                raise TemplateError(
                    "the chat template ends the assistant's turn otherwise before these messages"
                )
            # The end of the turn is there, unless another stop token ended it.
            ids = ids[1:] if context_ids[-1] == rule.end_id else ids
            return [*context_ids, *ids], True
        # The template renders the whole conversation, of which the prompt is trusted.
        roles = [message["role"] for message in messages_so_far]
        num_prompt = roles.index("assistant") if "assistant" in roles else len(roles)
        messages = complete([*messages_so_far, *new_messages])
        text, data = self._render_with_data(messages, tools, num_prompt)
        context = decode(self._tokenizer, context_ids)
        if self._plain.is_special(context_ids[-1]) and text.startswith(context):
            # The template rewrote nothing this time.
            begin = len(context) - len(self._tokenizer.decode(context_ids[-1:]))
            return [*context_ids, *self._encode_from(begin, text, data)[1:]], True
        return self._plain.encode(text, data), False

    def _render_with_data(
        self, messages: Sequence[Message], tools: Tools, num_trusted: int
    ) -> tuple[str, list[Span]]:
        """Returns what `render_with_data` returns for this chat template. Raises TemplateError."""
        return render_with_data(
            self._plain, partial(self._render, tools=tools), messages, num_trusted
        )

    def _encode_from(self, begin: int, text: str, data: Sequence[Span]) -> list[int]:
        """Returns the tokens of a text from a special token on; blanks behind that token may belong
        to it."""
        shifted = [(first - begin, last - begin) for first, last in data]
        return self._plain.encode(text[begin:], shifted)

    # Trials at the start: what does the template do with earlier turns?

    def _trial_pair(self, kind: Kind, tool_name: str | None = None) -> list[Message]:
        """Returns a made-up turn, whose last word is _SAID_WORD, and the message that answers
        it."""
        turn: Message = {"role": "assistant", "content": _SAID_WORD}
        answer: Message = {"role": kind, "content": _ANSWER_WORD}
        if kind == "tool":
            call = {"name": tool_name or self._trial_tool, "arguments": {"text": _SAID_WORD}}
            calls = [{"type": "function", "id": _call_id(0), "function": call}]
            turn |= {"content": "", "tool_calls": calls}
            answer |= {"name": self._trial_tool, "tool_call_id": _call_id(0)}
        return [turn, answer]

    def _try_kind(self, kind: Kind, tools: Tools, *, is_sure: bool) -> None:
        """Finds the rule for messages of a kind.

        Raises ConfigError if such messages are sure to come, and the template refuses them or
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
        """Returns the rule with these tools, or the error where the template refuses such messages.

        An agent brings its own tools, and a template may move them to the last message.
        """
        # Trials take several renderings, so that their result is kept for each list of tools.
        key = json.dumps([kind, [*tools]])
        if key not in self._rules_by_tools:
            try:
                self._rules_by_tools[key] = self._try_history(kind, tools)
            except TemplateError as error:
                self._rules_by_tools[key] = error
        return self._rules_by_tools[key]

    def _try_history(self, kind: Kind, tools: Tools) -> _HistoryRule:
        """Returns the rule for messages of a kind, from conversations of 0, 1, 2 and more turns.

        Each rendered text should begin with the text of the shorter conversation. Raises
        TemplateError where the template leaves a message out.
        """
        # Equal turns: what differs between the texts is what the template makes of their places.
        pair = self._trial_pair(kind)
        texts = [
            self._render([*_TRIAL_PROMPT, *pair * num], tools)
            for num in range(self._num_trial_turns + 1)
        ]
        for num, text in enumerate(texts):
            if text.count(_SAID_WORD) != num or text.count(_ANSWER_WORD) != num:
                raise TemplateError("it leaves out a message, or a part of one")
        # The texts after the turn's own words, if nothing follows the turn and if messages do.
        turn, answer = pair
        alone = self._render([*_TRIAL_PROMPT, turn], tools, generate=False)
        alone = alone.partition(_SAID_WORD)[2]
        followed = texts[1].partition(_SAID_WORD)[2]
        plain = [_THINKING.sub("", text) for text in texts]
        rewrites = any(not longer.startswith(shorter) for shorter, longer in pairwise(plain))
        if not rewrites and not all(text.endswith(followed) for text in texts[1:]):
            raise TemplateError("it writes the same messages in two ways")
        fields = {"reasoning_content": _THINKING_WORD, "thinking": _THINKING_WORD}
        thinking_turns = [{**turn, **fields}]
        if kind == "user":
            thinking_turns.append(
                {**turn, "content": f"<think>\n{_THINKING_WORD}\n</think>\n\n{turn['content']}"}
            )
        alone_spans = self._ending_spans(alone)
        # Phi-3 writes one more token where the conversation ends.
        kept_spans = [span for span in alone_spans if followed.startswith(alone[: span[1]])]
        # In GLM's template the first token of the next message ends a turn.
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
        """Returns (begin, end, id) of the tokens with special=True, or of all added tokens if there
        are none."""
        spans = self._plain.special_spans(text)
        tokens = self._tokenizer.added_tokens_decoder
        return [span for span in spans if tokens[span[2]].special] or spans

    def _strips(self, turn: Message, answer: Message, tools: Tools) -> bool:
        """Returns whether thinking in the last turn disappears as soon as messages follow."""
        try:
            alone = self._render([*_TRIAL_PROMPT, turn], tools, generate=False)
            if _THINKING_WORD not in f"{alone}{turn['content']}":
                return False
            return _THINKING_WORD not in self._render([*_TRIAL_PROMPT, turn, answer], tools)
        except TemplateError:
            # gpt-oss refuses markup in a turn's text.
            return False

    # What the parser of turns needs.

    def _anchors(self, prompt: str, tools: Tools) -> list[str]:
        """Returns the texts after which a turn begins.

        There is one text, the generation prompt, or the ends of the last messages where the
        template has no generation prompt.
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
        """Checks that the parser reads back a call as the template writes it.

        Raises ConfigError if it does not, as where the format of calls is unknown.
        """
        turn = self._trial_pair("tool")[0]
        text = self._render([*_TRIAL_PROMPT, turn], tools, generate=False)
        # Compared letter by letter, which is what is wanted here.
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
    """Returns the messages with ids for calls that have none, and with the same ids in the calls'
    results.

    Contents of tool results that are neither text nor lists of blocks become text.
    """
    completed: list[Message] = []
    ids: list[str] = []
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


def _tool_name(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _call_id(number: int) -> str:
    # Mistral's templates insist on nine letters and digits.
    return f"call{number:05d}"


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a message in which `change` has replaced each string, except roles and field names.

    The strings are visited in order.
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
    return [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]

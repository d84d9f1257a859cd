"""Chat messages as templates take them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.episodes.plain_text import PlainText, Span, TemplateError, without_surrogates
from grpo_spmd.episodes.reply_parser import Parsed, ReplyParser

Message = dict[str, Any]
_FIELDS = {
    "role", "type", "content", "text", "name", "tool_call_id", "tool_calls", "id", "function", "arguments",
    "reasoning_content", "thinking",
}  # fmt: skip


def name_of(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else "" if content is None else str(content)


def call_id(number: int) -> str:
    return f"call{number:05d}"  # nine letters and digits, which Mistral's templates insist on


def called(new: Message, said: Message, otherwise: str) -> str:
    """The name of the tool that a message answers: gpt-oss writes the turn's, not the message's."""
    calls = said.get("tool_calls") or [{}]
    return str(new.get("name") or calls[0].get("function", {}).get("name") or otherwise)


def complete(messages: Sequence[Message]) -> list[Message]:
    """With ids for calls that have none, and the same in their results; contents that are nothing else are text."""
    found, ids = list[Message](), list[str]()
    for message in messages:
        made = dict(message)
        if calls := made.get("tool_calls"):
            made["tool_calls"] = [
                {"id": call_id(number), **call} for number, call in enumerate(calls)
            ]
            ids = [str(call["id"]) for call in made["tool_calls"]]
        if made["role"] == "tool":
            made.setdefault("tool_call_id", ids.pop(0) if ids else call_id(0))
            if not isinstance(made.get("content"), str | list):
                made["content"] = str(made.get("content"))
        found.append(made)
    return found


def mapped(message: Any, change: Callable[[str], str]) -> Any:
    """The same with each string in it changed, in their order, but for roles and the names of its fields."""
    if isinstance(message, str):
        return change(message)
    if isinstance(message, Mapping):
        return {
            (name if name in _FIELDS else change(name)): value
            if name in ("role", "type")
            else mapped(value, change)
            for name, value in message.items()
        }
    if isinstance(message, list | tuple):
        return [mapped(value, change) for value in message]
    return message


def form_of(slot: str, frame: str, text: str) -> str:
    """What stands in `text` where `frame` has the slot."""
    parts = frame.split(slot)
    length = (len(text) - sum(map(len, parts))) // (len(parts) - 1)
    form = text[len(parts[0]) : len(parts[0]) + max(length, 0)]
    if form.join(parts) != text:
        raise TemplateError(
            "the chat template looks into a message that has the text of special tokens in it"
        )
    return form


def moved(data: Sequence[Span], begin: int) -> list[Span]:
    return [(first - begin, last - begin) for first, last in data]


# Conversations as tokens, by the tokenizer's chat template: what was sampled stays as it was sampled, and only what is
# new is rendered and encoded, behind it.


Tools = Sequence[dict[str, Any]]
Kind = Literal["tool", "user"]
# No template, no tool and nobody's text has these words in it.
_SAID, _GIVEN, _THOUGHT = "said7c1f0b", "given7c1f0b", "thought7c1f0b"
_USER: list[Message] = [{"role": "user", "content": "asked7c1f0b"}]
_SLOT = re.compile(r"(slot\d+x7c1f0b)")
# What may differ where a template rewrites nothing but thinking, of which `history: append` keeps all.
_THINKING = re.compile(r"<think>.*?(?:</think>|$)\s*", re.DOTALL)
# The longest of canonical compositions (NFC) makes one letter of this many.
_MOST_COMPOSED = 4
_NO_TEMPLATE = "give the model's folder one (chat_template.jinja), or take an instruct model"


@dataclass(frozen=True)
class _End:
    """How the template ends a turn of the assistant that has new messages behind it."""

    text: str  # behind what was said, up to and with the token that ends the turn
    token: str
    token_id: int


@dataclass(frozen=True)
class _Found:
    """What the template does where such messages follow."""

    end: _End
    is_replaced: str | None  # how it ends a turn that nothing follows, where that is something else
    rewrites: bool  # more of what came before than thinking
    strips_thinking: bool

    @property
    def keeps(self) -> bool:
        return self.is_replaced is None and not self.rewrites and not self.strips_thinking


class ChatFormat:
    """Prompts, contexts of next turns, and what a turn says, in tokens.

    The next context is the last one with what was sampled, and behind it the new messages as the template writes them
    after a made-up turn of the assistant; that this is what the template makes of the whole conversation is tried at
    the start. Text of tools, users and policies is data: see PlainText. A prompt is encoded as data/tokens.py does it.
    """

    def __init__(
        self,
        tokenizer: Any,
        history: Literal["append", "fork"],
        tools: Tools,
        *,
        has_user_turns: bool,
        has_tool_results: bool,
    ) -> None:
        """`tools`: JSON schemas; the two say what follows turns of the policy for sure. Raises ConfigError for what the
        template does not do, or does so that no context can be appended to."""
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"environment: the tokenizer of model.path has no chat template; {_NO_TEMPLATE}"
            )
        if not getattr(tokenizer, "is_fast", False):
            what = "is not a fast one, which alone says where in a text a token stands"
            raise ConfigError(
                f"environment: the tokenizer of model.path {what}; save it as tokenizer.json"
            )
        self._tokenizer, self._history = tokenizer, history
        self._plain = PlainText(tokenizer)
        self.max_token_chars = _MOST_COMPOSED * max(map(len, tokenizer.get_vocab()))
        """A text with more characters than this times a budget of tokens is not tokenized to see that it has no room in
        it."""
        self._special_ids: dict[Any, list[int]] = {}
        try:
            prompt = self._render(_USER, tools)
        except TemplateError as error:
            raise ConfigError(
                f"environment: the chat template of model.path refuses a user's message: {error}"
            ) from None
        # No mistake: a policy may know its tools from its training.
        self._untold = [name for name in map(name_of, tools) if name not in prompt]
        self._name = name_of(tools[0]) if tools else "function"
        self._found: dict[Kind, _Found] = {}
        self._found_by_tools: dict[str, _Found | None] = {}
        self._is_rewritten = False  # each turn is rendered anew
        self._try("tool", tools, has_tool_results)
        self._try("user", tools, has_user_turns)
        if has_user_turns and has_tool_results:
            self._try_mixed(tools)
        is_talk = has_user_turns and not has_tool_results and not tools  # there is nobody to call
        self._parser = ReplyParser(
            tokenizer, self._anchors(prompt, tools), self._ends(), reads_calls=not is_talk
        )
        if tools:
            self._check_calls(prompt, tools)

    @property
    def note(self) -> str:
        """What the template does with earlier turns, and what is done about it; for the log."""
        words = {"tool": "results of tools", "user": "messages of users"}
        kept = [words[kind] for kind, found in self._found.items() if found.keeps]
        stripped = [
            words[kind]
            for kind, found in self._found.items()
            if not found.keeps and self._may_append(found)
        ]
        parts = [f"keeps earlier turns before {' and '.join(kept)}"] if kept else []
        if stripped:
            what = "stays" if self._history == "append" else "goes, in a segment of its own"
            parts.append(
                f"strips thinking before {' and '.join(stripped)}; here it {what} (environment.history)"
            )
        if self._is_rewritten or not parts:
            parts = ["is rendered anew for each turn"]
        if self._untold:
            parts.append(f"does not tell the policy of its tools ({', '.join(self._untold)})")
        return f"the chat template {', '.join(parts)}"

    def prompt_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """A first prompt, with the generation prompt. Raises TemplateError where the template refuses it."""
        return self._plain.encode(
            without_surrogates(self._render(messages, tools))
        )  # some that reset() gave

    def whole_ids(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """A conversation that an agent put together, with the generation prompt: all of its texts are data. Raises
        TemplateError."""
        return self._plain.encode(
            *self._with_data(complete(messages), tools, 0, self._plain.is_special)
        )

    def suffix_ids(self, messages: Sequence[Message], tools: Tools, said: Message) -> list[int]:
        """What new messages are behind a turn and the token that ends it, with the generation prompt. `said`: the
        turn, whose calls they answer. Raises TemplateError."""
        kind: Kind = "tool" if messages[0]["role"] == "tool" else "user"
        if (found := self._found_with(kind, tools)) is None:
            raise TemplateError(
                f"the chat template has no place for a message with role {messages[0]['role']!r}"
            )
        end = found.end
        new = complete([said, *messages])[1:]
        dummy = [*_USER, self._said(kind, called(new[0], said, self._name))]
        rendered = [*dummy, *new]
        text, data = self._with_data(rendered, tools, len(dummy), self._plain.is_special)
        ids = self._behind(text, data, end)
        if self._plain.special_ids(ids) != self._expected(dummy, new, tools, end):
            # What is encoded as special was not written as such (another form of a letter): all strings are watched.
            contents = {without_surrogates(text_of(message)) for message in new} - {""}
            text, data = self._with_data(
                rendered, tools, len(dummy), lambda string: string in contents
            )
            ids = self._behind(text, data, end)
        return ids

    def next_ids(
        self,
        context_ids: Sequence[int],
        so_far: Sequence[Message],
        new: Sequence[Message],
        tools: Tools,
    ) -> tuple[list[int], bool]:
        """The context of the next turn, and whether it begins with `context_ids`: the last one and what was sampled
        behind it. `so_far`: all messages of that, of which the last is the turn. A turn that ended with another stop
        token than the template's has that one put behind it. Raises TemplateError."""
        kind: Kind = "tool" if new[0]["role"] == "tool" else "user"
        found = None if self._is_rewritten else self._found_with(kind, tools)
        if found is not None and (
            found.keeps or (self._history == "append" and self._may_append(found))
        ):
            ids = [*context_ids] + [found.end.token_id] * (context_ids[-1] != found.end.token_id)
            return ids + self.suffix_ids(new, tools, so_far[-1]), True
        roles = [message["role"] for message in so_far]
        num_prompt = roles.index("assistant") if "assistant" in roles else len(roles)
        messages = complete([*so_far, *new])
        text, data = self._with_data(messages, tools, num_prompt, self._plain.is_special)
        before = self._tokenizer.decode(
            context_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        last = self._tokenizer.decode(context_ids[-1:])
        if self._plain.special_ids(context_ids[-1:]) and text.startswith(
            before
        ):  # it rewrote nothing this time
            begin = len(before) - len(last)
            return [*context_ids, *self._plain.encode(text[begin:], moved(data, begin))[1:]], True
        return self._plain.encode(text, data), False

    def parse(self, token_ids: Sequence[int], context_ids: Sequence[int], tools: Tools) -> Parsed:
        """What a turn says. Whatever the policy wrote, it is a message; calls that do not parse are counted."""
        return self._parser.parse([*token_ids], [*context_ids], tools)

    def _render(self, messages: Sequence[Message], tools: Tools, generate: bool = True) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [*messages],
                    tools=[*tools] or None,
                    tokenize=False,
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # a template may refuse with any error
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    def _with_data(
        self,
        messages: Sequence[Message],
        tools: Tools,
        num_first: int,
        is_measured: Callable[[str], bool],
    ) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the strings stand that are watched, of messages behind the first
        ones. Found by rendering with a word in the place of each, then with one of them as it is: what is then between
        the same rest is it, in whichever form the template writes it (trimmed, as JSON)."""
        clean = [
            *messages[:num_first],
            *(mapped(message, without_surrogates) for message in messages[num_first:]),
        ]
        text, watched = self._render(clean, tools), list[str]()

        def is_slot(string: str) -> bool:
            return is_measured(string) or _SLOT.search(string) is not None

        def noted(string: str) -> str:
            if is_slot(string):
                watched.append(string)
            return string

        for message in clean[num_first:]:
            mapped(message, noted)
        if not watched:
            return text, []

        def rendered(real: int | None) -> str:
            number = -1

            def slot(string: str) -> str:
                nonlocal number
                number += is_slot(string)
                return f"slot{number}x7c1f0b" if is_slot(string) and number != real else string

            return self._render(
                [*clean[:num_first], *(mapped(m, slot) for m in clean[num_first:])], tools
            )

        frame = rendered(None)
        forms = {f"slot{number}x7c1f0b": number for number in range(len(watched))}
        written = {
            slot: form_of(slot, frame, rendered(number))
            for slot, number in forms.items()
            if slot in frame
        }
        parts = [written.get(part, part) for part in _SLOT.split(frame)]
        if "".join(parts) != text:
            raise TemplateError(
                "the chat template rewrites a message that has the text of special tokens in it"
            )
        ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
        return text, [(ends[i] - len(part), ends[i]) for i, part in enumerate(parts) if i % 2]

    def _behind(self, text: str, data: Sequence[Span], end: _End) -> list[int]:
        """The tokens of a text behind the end of the made-up turn. Encoded from that token on, as blanks behind a
        special token may belong to it."""
        _, mark, rest = text.partition(_SAID)
        if not mark or not rest.startswith(end.text):
            raise TemplateError(
                "the chat template ends the assistant's turn otherwise before these messages"
            )
        begin = len(text) - len(rest) + len(end.text) - len(end.token)
        ids = self._plain.encode(text[begin:], moved(data, begin))
        if ids[:1] != [end.token_id]:
            raise TemplateError(f"the tokenizer does not find {end.token!r} before these messages")
        return ids[1:]

    def _expected(
        self, dummy: list[Message], new: Sequence[Message], tools: Tools, end: _End
    ) -> list[int]:
        """The special tokens that the template itself writes around such messages."""
        is_blank = [not text_of(message).strip() for message in new]
        names = [
            [str(message.get(name)) for name in ("role", "name", "tool_call_id")] for message in new
        ]
        key = json.dumps([dummy[-1], names, is_blank, [*tools]])
        if (found := self._special_ids.get(key)) is None:
            shown = [m if is_blank[i] else {**m, "content": _GIVEN} for i, m in enumerate(new)]
            shown = [mapped(message, self._harmless) for message in shown]
            text = self._render([*dummy, *shown], tools)
            found = self._special_ids[key] = self._plain.special_ids(self._behind(text, [], end))
            if len(self._special_ids) > 4096:  # names are the policy's, and may be many
                self._special_ids.clear()
        return found

    def _harmless(self, string: str) -> str:
        return "x" if self._plain.is_special(string) else without_surrogates(string)

    def _said(self, kind: Kind, name: str, thinking: bool = False) -> Message:
        """A made-up turn of the assistant; the last of what it says is the word by which it is found."""
        message: Message = {"role": "assistant", "content": "" if kind == "tool" else _SAID}
        if thinking:
            message |= {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        if kind == "tool":
            call = {"name": self._harmless(name), "arguments": {"text": _SAID}}
            message["tool_calls"] = [{"type": "function", "id": call_id(0), "function": call}]
        return message

    def _try(self, kind: Kind, tools: Tools, is_sure: bool) -> None:
        """What the template does before such messages. Raises ConfigError where they are sure to come, and it cannot be
        appended to as the config wants it, or not be rendered at all."""
        what = "results of tools" if kind == "tool" else "a user's messages behind the first turn"
        where = "environment: the chat template of model.path"
        try:
            found = self._look(kind, tools)
        except TemplateError as error:
            if is_sure:
                raise ConfigError(
                    f"{where} has no place for {what}: {error}; {_NO_TEMPLATE}"
                ) from None
            return
        if is_sure and self._history == "append" and not self._may_append(found):
            why = f"rewrites what came before {what}"
            if found.is_replaced is not None:
                why = (
                    f"puts {found.end.token!r} in the place of {found.is_replaced!r} before {what}"
                )
            rule = "so that earlier turns cannot stay as they were sampled"
            raise ConfigError(
                f"{where} {why}, {rule} (environment.history: append); set environment.history: fork"
            )
        self._found[kind] = found

    @staticmethod
    def _may_append(found: _Found) -> bool:
        return found.is_replaced is None and not found.rewrites

    def _found_with(self, kind: Kind, tools: Tools) -> _Found | None:
        """The same with these tools, which an agent brings itself: a template may move them to the last message."""
        key = json.dumps([kind, [*tools]])
        if key not in self._found_by_tools:
            try:
                self._found_by_tools[key] = self._look(kind, tools)
            except TemplateError:
                self._found_by_tools[key] = None
        return self._found_by_tools[key]

    def _look(self, kind: Kind, tools: Tools) -> _Found:
        """Two turns of the kind, rendered as they come: each text is to begin with the one before it."""
        turn = [self._said(kind, self._name), *self._given(kind)]
        texts = [self._render([*_USER, *turn * times], tools) for times in range(3)]
        if any(
            text.count(word) != times
            for times, text in enumerate(texts)
            for word in (_SAID, _GIVEN)
        ):
            raise TemplateError(
                "it leaves out the call or what answers it"
                if kind == "tool"
                else "it leaves it out"
            )
        alone = self._render([*_USER, turn[0]], tools, generate=False).partition(_SAID)[2]
        rest = texts[1].partition(_SAID)[2]
        end, is_replaced = self._end(alone, rest)
        rewrites = _rewrites(texts)
        if not rewrites and not texts[2].endswith(texts[1].partition(_SAID)[2]):
            raise TemplateError("it writes the same messages in two ways")
        thinking = [self._said(kind, self._name, thinking=True), *self._given(kind)]
        content = f"<think>\n{_THOUGHT}\n</think>\n\n" + turn[0]["content"]
        as_text = [[{**turn[0], "content": content}, turn[1]]] if kind == "user" else []
        return _Found(
            end, is_replaced, rewrites, any(self._strips(t, tools) for t in (thinking, *as_text))
        )

    def _end(self, alone: str, rest: str) -> tuple[_End, str | None]:
        """Of a turn, by what is behind it where nothing follows, and where messages do."""
        special, replaced = self._special_spans(alone), None
        kept = [
            span for span in special if rest.startswith(alone[: span[1]])
        ]  # Phi-3 writes one more where all ends
        if special and not kept:
            replaced = alone[slice(*special[-1][:2])]
        special = (
            kept[-1:] or self._special_spans(rest)[:1]
        )  # the next message's first token ends a turn of GLM's
        if not special:
            raise TemplateError("no special token ends the assistant's turn before them")
        begin, last, token_id = special[0]
        return _End(rest[:last], rest[begin:last], token_id), replaced

    def _special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """Where the tokens with special=True stand in it; of a text without such all added ones."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        added = self._tokenizer.added_tokens_decoder
        found = []
        for token_id, (begin, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            if self._plain.special_ids([token_id]):
                content = added[token_id].content
                begin = max(
                    begin, text.find(content, begin, end)
                )  # without the blanks that it swallows
                found.append((begin, min(end, begin + len(content)), token_id))
        return [span for span in found if added[span[2]].special] or found

    def _strips(self, turn: list[Message], tools: Tools) -> bool:
        """Whether thinking that a turn alone has is gone once messages follow."""
        try:
            shown = _THOUGHT in self._render([*_USER, turn[0]], tools, generate=False)
            in_text = _THOUGHT in str(turn[0]["content"])
            return (shown or in_text) and _THOUGHT not in self._render([*_USER, *turn], tools)
        except TemplateError:  # gpt-oss refuses markup in a turn's text
            return False

    def _try_mixed(self, tools: Tools) -> None:
        """Users' messages behind results of tools, and the other way round."""
        kinds: tuple[Kind, ...] = ("tool", "user", "tool")
        turns = [
            message
            for kind in kinds
            for message in [self._said(kind, self._name), *self._given(kind)]
        ]
        try:
            rewrites = _rewrites([self._render([*_USER, *turns[: 2 * n]], tools) for n in range(4)])
        except TemplateError as error:
            raise ConfigError(
                f"environment: the chat template of model.path refuses a conversation: {error}"
            ) from None
        if rewrites and self._history == "append":
            what = "rewrites earlier turns where results of tools and messages of users follow each other"
            raise ConfigError(
                f"environment: the chat template of model.path {what}; set environment.history: fork"
            )
        self._is_rewritten = rewrites

    def _given(self, kind: Kind) -> list[Message]:
        if kind == "user":
            return [{"role": "user", "content": _GIVEN}]
        return [{"role": "tool", "name": self._name, "tool_call_id": call_id(0), "content": _GIVEN}]

    def _anchors(self, prompt: str, tools: Tools) -> list[str]:
        """What is before a turn: the generation prompt, or the end of the last message where the template has none."""
        bare = self._render(_USER, tools, generate=False)
        if prompt.startswith(bare) and prompt != bare:
            return [prompt[len(bare) :].partition("<think>")[0] or prompt[len(bare) :]]
        texts = [prompt]
        for kind in self._found:
            texts.append(
                self._render([*_USER, self._said(kind, self._name), *self._given(kind)], tools)
            )
        begins = [self._special_spans(text)[-1:] for text in texts]
        anchors = [
            text[begin[0][0] :].partition("<think>")[0]
            for text, begin in zip(texts, begins, strict=True)
            if begin
        ]
        return [*dict.fromkeys(anchors)] or [prompt]

    def _ends(self) -> list[str]:
        ends = {found.end.token for found in self._found.values()} | {
            self._tokenizer.eos_token or ""
        }
        ends |= {
            found.is_replaced for found in self._found.values() if found.is_replaced is not None
        }
        return sorted(ends - {""}, key=len, reverse=True)

    def _check_calls(self, prompt: str, tools: Tools) -> None:
        """A call is written by the template, as a policy is taught it, and read back."""
        if self._parser.has_calls:
            said = self._said("tool", self._name)
            text = self._render([*_USER, said], tools, generate=False)
            head = prompt if text.startswith(prompt) else _common(prompt, text)
            parsed = self._parser.parse(self._ids(text[len(head) :]), self._ids(prompt), ())
            calls = [call["function"] for call in parsed.message.get("tool_calls", [])]
            if calls == [said["tool_calls"][0]["function"]] and not parsed.num_invalid:
                return
            what = f"writes a call as {text[len(head) :]!r}, and its response_template does not read that back"
        else:
            what = "writes calls in no format that is known"
        remedy = "put a response_template for transformers' parse_response into its tokenizer_config.json"
        raise ConfigError(f"environment: the chat template of model.path {what}; {remedy}")

    def _ids(self, text: str) -> list[int]:
        return self._plain.encode(text)


def _rewrites(texts: Sequence[str]) -> bool:
    """Whether more than thinking differs between a conversation and the beginning of what it becomes."""
    plain = [_THINKING.sub("", text) for text in texts]
    return any(not after.startswith(before) for before, after in pairwise(plain))


def _common(one: str, other: str) -> str:
    length = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return one[:length]

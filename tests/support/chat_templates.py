"""Chat templates of known models, written anew and cut down to what matters: headers, ends of
turns, tools."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_HERMES_TOOLS = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You help.{% endif %}

# Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Call by <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}"""
_HERMES_RESULT = """
{%- elif m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"""  # noqa: E501
_HERMES_CALLS = """
{%- for call in m.tool_calls or [] %}
{%- if not (loop.first and not text) %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"""  # noqa: E501
QWEN25 = (
    _HERMES_TOOLS
    + """
{%- for m in messages %}
{%- set text = m.content or '' %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + text }}"""
    + _HERMES_CALLS
    + _HERMES_RESULT
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
)
# Thinking is kept behind the last message of a user that is no result of a tool in disguise.
QWEN3 = (
    _HERMES_TOOLS
    + """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' and not (m.content.startswith('<tool_response>')
 and m.content.endswith('</tool_response>')) %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content or '' %}{% set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in text %}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}{% else %}{{ text }}{% endif %}"""  # noqa: E501
    + _HERMES_CALLS
    + _HERMES_RESULT
    + """{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""  # noqa: E501
)
LLAMA31 = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

{% set rest = messages %}{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}
{%- set rest = messages[1:] %}{% endif %}<|eot_id|>
{%- if tools %}<|start_header_id|>user<|end_header_id|>

Answer with {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{{ rest[0].content | trim }}<|eot_id|>{% set rest = rest[1:] %}{% endif %}
{%- for m in rest %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""  # noqa: E501
# The list of tools stands before the last message of a user, and moves with it.
MISTRAL = """{{ bos_token }}{% set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('roles') }}{% endif %}{% endfor %}"""  # noqa: E501
GEMMA = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""  # noqa: E501
# The tool's name in a result's header is the call's; an answer ends otherwise once something
# follows.
GPT_OSS = """<|start|>system<|message|>You think. Channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|># Tools
namespace functions {
{%- for tool in tools %}
type {{ tool.function.name }} = ({{ tool.function.parameters | tojson }});{% endfor %}
}<|end|>{% endif %}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in (m.content or '') %}{{ raise_exception('channels in a text') }}{% endif %}
{%- if m.tool_calls %}
{%- set later = namespace(final=false) %}
{%- for other in messages[loop.index:] %}{% if other.role == 'assistant' and not other.tool_calls %}
{%- set later.final = true %}{% endif %}{% endfor %}
{%- if m.thinking and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{%- set ns.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{ raise_exception('nobody called') }}{% endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (m.content | tojson) + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""  # noqa: E501

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
_HEADERS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
_INST = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
)
_HARMONY = (
    "<|startoftext|>",
    "<|return|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|call|>",
)


@dataclass(frozen=True)
class Family:
    """A chat template, and the tokens that its vocabulary has beside letters."""

    template: str
    special: tuple[str, ...]
    added: tuple[
        str, ...
    ]  # of a vocabulary, but not special: split_special_tokens does not split them
    eos: str
    bos: str | None = None


FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, _TAGS[:4], "<|im_end|>"),
    "qwen3": Family(QWEN3, _CHATML, _TAGS, "<|im_end|>"),
    "llama3.1": Family(LLAMA31, _HEADERS, (), "<|eot_id|>", "<|begin_of_text|>"),
    "mistral": Family(MISTRAL, (*_INST, "[/TOOL_RESULTS]"), (), "</s>", "<s>"),
    "gemma": Family(
        GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (), "<eos>", "<bos>"
    ),
    "gpt-oss": Family(GPT_OSS, _HARMONY, (), "<|return|>"),
}


@functools.cache
def letters() -> str:
    """A BPE over bytes without any added token, as tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [
        'the result of the tool is 12\n\n{"name": "add", "arguments": {"a": 1}} <|im_end|> user '
        "assistant\n"
    ] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return str(tokenizer.to_str())


@functools.cache
def make_chat_tokenizer(name: str, *, chat_template: str | None = None) -> Any:
    """A small tokenizer with the tokens and the chat template of a family."""
    family = FAMILIES[name]
    tokenizer = Tokenizer.from_str(letters())
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in family.special]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in family.added]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.eos, bos_token=family.bos
    )
    fast.chat_template = chat_template or family.template
    return fast

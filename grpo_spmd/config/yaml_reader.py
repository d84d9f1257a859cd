"""YAML that is read strictly, and what people meant where it cannot be read."""

from __future__ import annotations

import re
from typing import Any

import yaml

from grpo_spmd.config.errors import ConfigError

# What PyYAML raises for 2024-13-45, deep nesting, "!!bool x", "!!timestamp x", '!!int ""', a set as key, 1:1:[...]:1.0
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError, ArithmeticError)
_MOST_VALUES = 10_000


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML silently keeps the last, and what has no end: a few lines
    of aliases to aliases are billions of values."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._num_values, self._sizes = 0, dict[yaml.Node | None, int]()  # with every alias written out

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before, is_alias = self._num_values, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._num_values += self._sizes.get(node, _MOST_VALUES) if is_alias else 1  # an alias of what holds it: no size
        self._sizes[node] = self._num_values - before
        # Python takes long to make a number of "1:2:3:...", and refuses to print a long hexadecimal one.
        is_long = isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and len(node.value) > 1000
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int") and re.match(r"[-+]?0\d", node.value):
            rule = f"{node.value} is to the base 8 for YAML; leave the zeros at its front out, or put text in quotes"
            raise yaml.composer.ComposerError(None, None, rule, node.start_mark)
        if node is not None and (is_long or self._num_values > _MOST_VALUES):
            rule = f"more than {_MOST_VALUES} values, aliases written out, or a number of more than 1000 digits"
            raise yaml.composer.ComposerError(None, None, rule, node.start_mark)
        return node


def _strict_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":  # "<<: *anchor", whose keys may be given again
            continue
        name = loader.construct_object(key_node)
        if isinstance(name, list | dict):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
        if name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} is given twice", key_node.start_mark)
        seen.add(name)
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _strict_mapping)


def not_yaml(error: Exception, text: str, path: object) -> ConfigError:
    """The line for a file that is not YAML: where it is, and how what stands there is written."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
    if "could not find expected ':'" in str(problem):  # only seen at the end of the next line
        mark = getattr(error, "context_mark", None) or mark
    where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    return ConfigError(f"{where}: not valid YAML: {problem}{_meant(line, text)}")


def not_a_mapping(tree: object, text: str, path: object) -> ConfigError:
    return ConfigError(f"{path}: a config is a mapping of sections, got {type(tree).__name__}{_meant(text, text)}")


def _meant(line: str, text: str) -> str:
    """What was meant by `line`, in a file of `text`; "" where nothing is known."""
    if re.search(r"(?m)^(\[+[\w.-]+\]+ *$|[\w.-]+ = )", text):
        return "; it looks like TOML, and a config is YAML: model: {path: ...}"
    if found := re.search(r"[\xa0\u2000-\u200b\u202f\u3000\ufeff\t]", line):
        return f"; it holds the character {found[0]!a}: write a blank"
    if found := re.match(r"\s*-?\s*([\w.-]+):(?=[^\s:/])(\S.*)", line):
        return f"; a blank is missing after the colon: {found[1]}: {found[2]}"
    if re.match(r"\s*-?\s*[\w.-]+: [^'\"{\[].*: ", line):
        return "; text with a colon and a blank in it stands in quotes"
    return ""

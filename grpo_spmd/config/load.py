"""Reads a YAML file and overrides into a checked Config, and tells where each value came from.

A value is taken from the last of these that has it: the defaults, the recipe of `algorithm: NAME`,
the file, the overrides.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from grpo_spmd.config.coerce import CONTROL, NULLS, build, unknown_key
from grpo_spmd.config.describe import flat, flatten_config, join_key, read_recipes
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.rules import check_rules
from grpo_spmd.config.schema import DECIDED_KEYS, Config

# The source of a value that a recipe has set begins with this.
FROM_RECIPE = "from algorithm:"
_MAX_FILE_BYTES = 1 << 20
# On a CPU larger micro-batches are slower: in each pass the kernel has to map new pages for the
# memory of their tensors.
_CPU_MICRO_BATCH_TOKENS = 2048


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the checked config of a YAML file and `section.key=value` overrides.

    Raises ConfigError.
    """
    return load_config_with_sources(path, overrides)[0]


def load_config_with_sources(
    path: str | Path, overrides: Sequence[str] = (), *, on_cpu: bool = False
) -> tuple[Config, dict[str, str]]:
    """Returns (config, sources): the checked config, and where the value of each key came from.

    `sources` has the keys of `flatten_config`, in its order. A source is "default", "FILE:LINE",
    "command line" or "from algorithm: NAME". If file or command line replace a different value of
    the algorithm's recipe, the source also names that value. With `on_cpu` keys that are auto get
    the values for a CPU. Raises ConfigError.
    """
    tree, sources = read_tree(Path(path).expanduser())
    for override in overrides:
        name, value = apply_override(tree, override)
        # The override replaces the whole value of this key, with all keys in it.
        sources = {key: sources[key] for key in sources if not f"{key}.".startswith(f"{name}.")}
        sources |= dict.fromkeys(flat(value, name), "command line")
    config = build_config(tree, on_cpu=on_cpu)
    recipe = recipe_of(tree)
    origin = f"{FROM_RECIPE} {tree.get('algorithm')}"
    final_sources = {}
    for key, value in flatten_config(config).items():
        final_sources[key] = sources.get(key, origin if key in recipe else "default")
        if key in sources and recipe.get(key, value) != value:
            final_sources[key] += f", in place of {json.dumps(recipe[key])} {origin}"
    return config, final_sources


def build_config(tree: dict[str, Any], *, on_cpu: bool = False) -> Config:
    """Returns the checked config made from a tree of plain values, as YAML gives them.

    With `on_cpu` keys that are auto get the values for a CPU. Raises ConfigError.
    """
    # The recipe's values are filled in before coercion, so they are checked like the user's.
    recipe = recipe_of(tree)
    config: Config = build(Config, _fill_in_recipe(tree, recipe), "")
    if on_cpu:
        config = with_cpu_defaults(config)
    _check_recipe_needs(config)
    try:
        check_rules(config)
    except ConfigError as error:
        raise ConfigError(f"{error}{_recipe_remark(str(error), tree, recipe)}") from None
    return config


def read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns (a YAML file's unchecked values, {dotted key: "FILE:LINE"}). Raises ConfigError."""
    try:
        with path.open("rb") as file:
            # The number of bytes is limited, because the path may be a device without an end.
            text = file.read(_MAX_FILE_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config: cannot read {path}: {reason}{path_remark(path)}") from None
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(
            f"--config: {path} is larger than {_MAX_FILE_BYTES >> 20} MiB, which no config is"
        )
    sources: dict[str, str] = {}
    try:
        loader = StrictLoader(text)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node is not None else None
        # construct_document has to come first: it moves merged keys ("<<") into their mapping.
        _note_lines(node, "", path, sources)
    except YAML_ERRORS as error:
        raise _yaml_error(error, text, path) from None
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        remark = _yaml_remark(text, text)
        raise ConfigError(f"{path}: a config is a mapping of sections, got {kind}{remark}")
    return tree, sources


def _note_lines(node: yaml.Node | None, prefix: str, path: Path, sources: dict[str, str]) -> None:
    """Adds {dotted key: "FILE:LINE"} to `sources` for every key and list element in `node`.

    `prefix` is the dotted key of `node` itself, "" for the whole file."""
    if isinstance(node, yaml.MappingNode):
        items = [(str(key_node.value), key_node, value) for key_node, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, marked_node, value in items:
        key = join_key(prefix, name)
        sources[key] = f"{path}:{marked_node.start_mark.line + 1}"
        _note_lines(value, key, path, sources)


def path_remark(path: Path) -> str:
    """Returns a remark in brackets about a path that does not exist, to add to an error message; ""
    if there is nothing to remark."""
    if os.path.exists(path):
        return ""
    # Only a shell expands variables.
    if "$" in str(path):
        return (
            " (variables are not expanded in a config: give it on the command line, where the "
            "shell does)"
        )
    if path.is_absolute():
        return ""
    try:
        return f" (below the working folder, {Path.cwd()})"
    except FileNotFoundError:
        return " (and the working folder itself is gone: cd to it again)"


def apply_override(tree: dict[str, Any], override: str) -> tuple[str, Any]:
    """Sets the value of one `section.key=value` in `tree`. Returns (dotted key, value). Raises
    ConfigError."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    # Users of Hydra may write +key or ~key, and users of Python list[0].
    plain_name = re.sub(r"\[(\d+)\]", r".\1", name).lstrip("+~")
    if plain_name and plain_name != name:
        rule = "no + or ~ stands before a key" if name[0] in "+~" else "an index stands after a dot"
        raise ConfigError(f"{name}: {rule}: {plain_name}={text}")
    if CONTROL.search(override):
        rule = 'holds a control character; write it as YAML does, as in "a\\nb"'
        raise ConfigError(f"{name}: the value {text!r} {rule}")
    # A template is text, though YAML reads "{question}" as a mapping.
    is_template = name.endswith("prompt_template") and text.startswith("{")
    try:
        value = text if is_template else yaml.load(text, Loader=StrictLoader)
    except YAML_ERRORS as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{name}: the value {text!r} is not valid YAML: {problem}") from None
    # Walk down to the mapping or list that holds the key, and create missing sections.
    node: Any = tree
    prefix = ""
    *parents, last_name = name.split(".")
    for parent in parents:
        prefix = join_key(prefix, parent)
        if isinstance(node, dict) and node.get(parent) is None:
            node[parent] = {}
        node = node[_index(node, parent, prefix)]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{name}: {prefix} is a value, not a section")
    node[_index(node, last_name, name)] = value
    return name, value


def _index(node: dict[str, Any] | list[Any], text: str, key: str) -> Any:
    """Returns `text` as an index into `node`: a number if `node` is a list, else the text itself.
    Raises ConfigError if a list has no such index."""
    if isinstance(node, dict):
        return text
    if not text.isdecimal() or int(text) >= len(node):
        raise ConfigError(
            f"{key}: {text!r} is not an index into a list of {len(node)}; "
            f"to add one, give the whole list: {key.split('.')[0]}=[...]"
        )
    return int(text)


# PyYAML raises these for invalid YAML, and for 2024-13-45, deep nesting, "!!bool x",
# "!!timestamp x", '!!int ""', a set as a key, and 1:1:[...]:1.0.
YAML_ERRORS = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
)
_MAX_VALUES = 10_000
_MAX_DIGITS = 1000


class StrictLoader(yaml.SafeLoader):
    """A safe YAML loader that also refuses keys given twice, numbers that are easily misread, and
    documents with too many values.

    PyYAML silently keeps the last of two equal keys. With aliases to aliases a few lines can stand
    for billions of values.
    """

    def __init__(self, stream: Any) -> None:
        """`stream` is the YAML text, or an open file, as PyYAML takes it."""
        super().__init__(stream)
        # Number of values in the document so far, and in each node. An alias counts as many values
        # as the node that it stands for.
        self._num_values = 0
        self._sizes: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Returns the next node, as PyYAML does. Raises ComposerError for a number that is easily
        misread, and when the document has too many values."""
        values_before = self._num_values
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        # An alias inside the node that it stands for has no size yet. It is endless, so it counts
        # the maximum.
        self._num_values += self._sizes.get(node, _MAX_VALUES) if is_alias else 1
        self._sizes[node] = self._num_values - values_before
        rule = ""
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int"):
            # PyYAML takes long to read "1:2:3:...", and Python refuses to print a huge number.
            if len(node.value) > _MAX_DIGITS:
                rule = f"a number of more than {_MAX_DIGITS} digits"
            elif re.match(r"[-+]?0\d", node.value):
                remedy = "leave the zeros at its front out, or put text in quotes"
                rule = f"{node.value} is to the base 8 for YAML; {remedy}"
        if self._num_values > _MAX_VALUES:
            rule = f"more than {_MAX_VALUES} values, aliases written out"
        if node is not None and rule:
            raise yaml.composer.ComposerError(None, None, rule, node.start_mark)
        return node


def _construct_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Returns the mapping of a node. Raises ConstructorError if a key is given twice."""
    # Keys of a merged mapping ("<<: *anchor") may be given again. They are not in `node` yet.
    names: set[str] = set()
    for key_node, _ in node.value:
        name = str(key_node.value)
        if name in names:
            rule = f"the key {name!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, rule, key_node.start_mark)
        names.add(name)
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def _yaml_error(error: Exception, text: str, path: Path) -> ConfigError:
    """Returns the ConfigError for a file that is not valid YAML, with the line and the probable
    mistake."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or error
    # PyYAML reports a missing colon at the end of the next line; the context is the right line.
    if "could not find expected ':'" in str(problem):
        mark = getattr(error, "context_mark", None) or mark
    # Some errors of PyYAML have no position.
    prefix = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    return ConfigError(f"{prefix}: not valid YAML: {problem}{_yaml_remark(line, text)}")


def _yaml_remark(line: str, text: str) -> str:
    """Returns a remark about the probable mistake in `line` of a file with the contents `text`; ""
    if none is known."""
    # A line with "[section]" or "key = value", as in TOML.
    if re.search(r"(?m)^(\[+[\w.-]+\]+ *$|[\w.-]+ = )", text):
        return "; it looks like TOML, and a config is YAML: model: {path: ...}"
    if match := re.search(r"[\xa0\u2000-\u200b\u202f\u3000\ufeff\t]", line):
        return f"; it holds the character {match[0]!a}: write a blank"
    if match := re.match(r"\s*-?\s*([\w.-]+):(?=[^\s:/])(\S.*)", line):
        return f"; a blank is missing after the colon: {match[1]}: {match[2]}"
    if re.match(r"\s*-?\s*[\w.-]+: [^'\"{\[].*: ", line):
        return "; text with a colon and a blank in it stands in quotes"
    return ""


def recipe_of(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns {dotted key: value} of the recipe that `tree` names as its `algorithm`, or {}.

    An unknown name also gives {}; `build` refuses it later. Raises ConfigError if `algorithm` is a
    section.
    """
    name = tree.get("algorithm")
    # In configs of verl "algorithm" is a section.
    if isinstance(name, Mapping):
        raise ConfigError(unknown_key("algorithm", "", name))
    recipe = read_recipes().get(name) if isinstance(name, str) else None
    return {} if recipe is None else recipe.values


def _fill_in_recipe(tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `tree` with the recipe's values for the keys that it lacks."""
    filled = dict(tree)
    for key, value in recipe.items():
        section, _, name = key.partition(".")
        values = {} if filled.get(section) in NULLS else filled[section]
        # A section that is no mapping is refused later, by `build`.
        if isinstance(values, Mapping):
            filled[section] = {name: value, **values}
    return filled


def _check_recipe_needs(config: Config) -> None:
    """Raises ConfigError if the recipe of `algorithm` needs a key that the user has not set."""
    for key in read_recipes()[config.algorithm].needs if config.algorithm is not None else ():
        section, _, name = key.partition(".")
        # A recipe that needs teacher.path is also content with teacher.url.
        has_teacher = section == "teacher" and config.teacher.is_on
        if not getattr(getattr(config, section), name) and not has_teacher:
            raise ConfigError(
                f"algorithm: {config.algorithm} needs {key}; set it to a model's folder or hub id"
            )


def _recipe_remark(error: str, tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """Returns a remark to add to an error message that names keys which the recipe has set and not
    the user; "" if it names none."""
    # \b: loss.kl must not be found in loss.kl_coef.
    set_keys = flat(dict(tree))
    values = [
        f"{key}: {json.dumps(value)}"
        for key, value in recipe.items()
        if key not in set_keys and re.search(rf"\b{re.escape(key)}\b", error)
    ]
    return f" (algorithm: {tree['algorithm']} sets {', '.join(values)})" if values else ""


# Under WSL 2 the device file exists for GPUs of any vendor, and the library only with NVIDIA's
# driver.
_WSL_DEVICE = Path("/dev/dxg")
_WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")


def num_gpus() -> int:
    """Returns the number of NVIDIA GPUs that this process may open, even if torch cannot use them.

    It is 0 if no driver is loaded, or if the container or job has no GPU (/proc/driver/nvidia would
    still show all GPUs of the machine). It is 1 under WSL 2, which has one device file for all
    GPUs.
    """
    num_opened = sum(_can_open(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return num_opened or int(_WSL_CUDA.exists() and _can_open(_WSL_DEVICE))


def _can_open(path: Path) -> bool:
    """Returns True if this process may open a device file."""
    try:
        # A container may see device files that its cgroup does not allow it to open.
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def gpus_are_hidden() -> bool:
    """Returns True if CUDA_VISIBLE_DEVICES hides all GPUs.

    CUDA ignores the first name in it that is no device and all names after it, so the first name
    decides. Slurm writes NoDevFiles if a job has no GPU.
    """
    first_device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip().lower()
    return first_device in ("", "-1", "nodevfiles", "none", "void")


def trains_on_cpu() -> bool:
    """Returns True if a rank that is started here will train on the CPU, because it finds no GPU or
    its torch was built without CUDA."""
    return gpus_are_hidden() or not num_gpus() or is_built_for_cpu(find_spec("torch"))


def is_built_for_cpu(torch: ModuleSpec | None) -> bool:
    """Returns True if torch was built without CUDA, according to its version.py. This does not
    import torch, which would take seconds. `torch` is the result of find_spec."""
    if torch is None or torch.origin is None:
        return False
    try:
        text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b.*= *None\s*$", text, re.MULTILINE) is not None


def with_cpu_defaults(config: Config) -> Config:
    """Returns the config with the values that `auto` stands for on a CPU.

    They are no recomputation, one rank for each engine, and micro-batches of 2,048 tokens, or of
    two rollouts of full length if that is more, but not more than on a GPU.
    """
    two_rollouts = max(_CPU_MICRO_BATCH_TOKENS, 2 * config.max_rollout_tokens)
    values = (False, min(config.micro_batch_tokens, two_rollouts), 1)
    return decided(config, dict(zip(DECIDED_KEYS, values, strict=True)))


def decided(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with each key that is still "auto" set to its value in `values`.

    Keys that the user has set stay as they are."""
    for key, value in values.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        if getattr(section, field) == "auto":
            changed: Any = {name: dataclasses.replace(section, **{field: value})}
            config = dataclasses.replace(config, **changed)
    return config


def decided_values(config: Config) -> dict[str, Any]:
    """Returns the values of DECIDED_KEYS (the keys that may be auto) by key.

    For a key that is still auto this is the planner's first choice."""
    values = (config.model.recompute, config.micro_batch_tokens, config.rollout.engine_ranks)
    return dict(zip(DECIDED_KEYS, values, strict=True))

"""Reads a YAML file and overrides into a checked Config, and says where each value came from.

Order of the values, later ones win: defaults, the recipe of `algorithm: NAME`, the file, overrides.
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
from grpo_spmd.config.describe import flat, flatten_config, join_key
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.recipes import read_recipes
from grpo_spmd.config.rules import check_rules
from grpo_spmd.config.schema import DECIDED_KEYS, Config

FROM_RECIPE = "from algorithm:"  # begins the source of a value that a recipe gave
_MAX_FILE_BYTES = 1 << 20
# On a CPU the kernel has to find pages again for what a pass over more tokens writes.
_CPU_MICRO_BATCH_TOKENS = 2048


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the checked config of a YAML file and `section.key=value` overrides.

    Raises ConfigError.
    """
    return load_config_with_sources(path, overrides)[0]


def load_config_with_sources(
    path: str | Path, overrides: Sequence[str] = (), *, on_cpu: bool = False
) -> tuple[Config, dict[str, str]]:
    """Returns the config and the source of each key of `flatten_config`, in its order.

    A source is "default", "FILE:LINE", "command line" or "from algorithm: NAME"; after the file and
    the command line follows the value of the algorithm that they replace.
    """
    tree, sources = read_tree(Path(path).expanduser())
    for override in overrides:
        name, value = apply_override(tree, override)
        # Sources below this key are gone with the value that held them.
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
    """Returns the checked config of a tree of plain values; `on_cpu`: with a CPU's defaults.

    Raises ConfigError.
    """
    # The recipe is put below the tree before coercion, so its values are checked like typed ones.
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
    """Returns a YAML file's unchecked values and {dotted key: "FILE:LINE"}. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            # Bounded: the path may lead to a device, which has no end.
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
        # The construction comes before this. In it merged keys ("<<") became keys of their mapping.
        _note_lines(node, "", path, sources)
    except YAML_ERRORS as error:
        raise _yaml_error(error, text, path) from None
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        remark = _yaml_remark(text, text)
        raise ConfigError(f"{path}: a config is a mapping of sections, got {kind}{remark}")
    return tree, sources


def _note_lines(node: yaml.Node | None, prefix: str, path: Path, sources: dict[str, str]) -> None:
    """Enters {dotted key: "FILE:LINE"} for everything in `node`."""
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
    """Returns, in brackets, where a missing file was looked for, if its path does not say so."""
    if os.path.exists(path):
        return ""
    # A shell expands variables, and a YAML file does not.
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
    """Puts one `section.key=value` into `tree`; returns its dotted key and value."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    # Hydra writes +key and ~key, Python list[0].
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
    # Values are YAML as in the file, so that a list or a mapping can be given.
    # Walk down to the mapping or list that holds the key; missing sections are created.
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
    """Returns the index in a list, or the name in a mapping, that `text` is."""
    if isinstance(node, dict):
        return text
    if not text.isdecimal() or int(text) >= len(node):
        raise ConfigError(
            f"{key}: {text!r} is not an index into a list of {len(node)}; "
            f"to add one, give the whole list: {key.split('.')[0]}=[...]"
        )
    return int(text)


# What PyYAML raises for 2024-13-45, deep nesting, "!!bool x", "!!timestamp x", '!!int ""', a set as
# a key, and 1:1:[...]:1.0.
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
    """Safe YAML loader that also refuses keys given twice and documents without a bound.

    PyYAML silently keeps the last of two equal keys. A few lines of aliases to aliases are billions
    of values.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        # Both count values with every alias written out.
        self._num_values = 0
        self._sizes: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        values_before = self._num_values
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        # An alias inside the node that it stands for has no size yet: it never ends.
        self._num_values += self._sizes.get(node, _MAX_VALUES) if is_alias else 1
        self._sizes[node] = self._num_values - values_before
        rule = ""
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int"):
            # Python takes long to read "1:2:3:...", and refuses to print a long hexadecimal number.
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
    # The keys of a merged mapping ("<<: *anchor"), which may be given again, are not there yet.
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
    """Returns the error for a file that is not YAML, with its line and what is likely wrong."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or error
    # PyYAML notices a missing colon only at the end of the next line.
    if "could not find expected ':'" in str(problem):
        mark = getattr(error, "context_mark", None) or mark
    # Some errors of PyYAML have no position.
    prefix = f"{path}:{mark.line + 1}" if mark is not None else str(path)
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    return ConfigError(f"{prefix}: not valid YAML: {problem}{_yaml_remark(line, text)}")


def _yaml_remark(line: str, text: str) -> str:
    """Returns what is likely wrong with `line` of a file with `text`; "" if nothing is known."""
    # "[section]" or "key = value" at the start of a line.
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
    """Returns {dotted key: value} of the algorithm that a tree names, {} if it names none.

    A name that is not known is left to `build`. Raises ConfigError for a section of that name.
    """
    name = tree.get("algorithm")
    # In verl "algorithm" is a section.
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
        # Anything else is refused later, because it is no section.
        if isinstance(values, Mapping):
            filled[section] = {name: value, **values}
    return filled


def _check_recipe_needs(config: Config) -> None:
    """Raises ConfigError if the algorithm needs a key that is not set."""
    for key in read_recipes()[config.algorithm].needs if config.algorithm is not None else ():
        section, _, name = key.partition(".")
        # A teacher may be given by teacher.url in the place of teacher.path.
        has_teacher = section == "teacher" and config.teacher.is_on
        if not getattr(getattr(config, section), name) and not has_teacher:
            raise ConfigError(
                f"algorithm: {config.algorithm} needs {key}; set it to a model's folder or hub id"
            )


def _recipe_remark(error: str, tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """Returns what is added to an error that names keys which the algorithm set, not the user."""
    # \b keeps loss.kl_coef from being found in a longer key that begins alike.
    set_keys = flat(dict(tree))
    values = [
        f"{key}: {json.dumps(value)}"
        for key, value in recipe.items()
        if key not in set_keys and re.search(rf"\b{re.escape(key)}\b", error)
    ]
    return f" (algorithm: {tree['algorithm']} sets {', '.join(values)})" if values else ""


# Under Windows (WSL 2) the device file is there for GPUs of any maker; the library is NVIDIA's.
_WSL_DEVICE = Path("/dev/dxg")
_WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")


def num_gpus() -> int:
    """Returns how many NVIDIA GPUs this process may open, whether torch can use them or not.

    0 if no driver is loaded, or the container or job was given none; /proc/driver/nvidia would show
    all GPUs of the machine. 1 under WSL 2, which has one device file for all GPUs.
    """
    num_opened = sum(_can_open(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return num_opened or int(_WSL_CUDA.exists() and _can_open(_WSL_DEVICE))


def _can_open(path: Path) -> bool:
    try:
        # A container sees device files that its cgroup forbids to open.
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def gpus_are_hidden() -> bool:
    """Returns True if CUDA_VISIBLE_DEVICES hides all GPUs.

    CUDA stops at the first name that is no device. Slurm writes NoDevFiles.
    """
    first_device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip().lower()
    return first_device in ("", "-1", "nodevfiles", "none", "void")


def trains_on_cpu() -> bool:
    """Returns True if a rank started here will find no GPU, or has a torch that can use none."""
    return gpus_are_hidden() or not num_gpus() or is_built_for_cpu(find_spec("torch"))


def is_built_for_cpu(torch: ModuleSpec | None) -> bool:
    """Returns True if torch's own files say so; importing torch would take seconds."""
    if torch is None or torch.origin is None:
        return False
    try:
        text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b.*= *None\s*$", text, re.MULTILINE) is not None


def with_cpu_defaults(config: Config) -> Config:
    """Returns the config with the values that auto stands for on a CPU.

    Nothing is recomputed. A micro-batch has 2,048 tokens, or two of the longest rollouts if those
    have more, and never more than auto may choose elsewhere.
    """
    two_rollouts = max(_CPU_MICRO_BATCH_TOKENS, 2 * config.max_rollout_tokens)
    values = (False, min(config.micro_batch_tokens, two_rollouts), 1)
    return decided(config, dict(zip(DECIDED_KEYS, values, strict=True)))


def decided(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns the config with these values, by key, in the place of auto; what is set stays."""
    for key, value in values.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        if getattr(section, field) == "auto":
            changed: Any = {name: dataclasses.replace(section, **{field: value})}
            config = dataclasses.replace(config, **changed)
    return config


def decided_values(config: Config) -> dict[str, Any]:
    """Returns the values of DECIDED_KEYS; for those that are auto, the planner's first choice."""
    values = (config.model.recompute, config.micro_batch_tokens, config.rollout.engine_ranks)
    return dict(zip(DECIDED_KEYS, values, strict=True))

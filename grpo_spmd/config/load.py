"""YAML and overrides into a checked Config, and where each value came from."""

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

from grpo_spmd.config.coerce import CONTROL, build
from grpo_spmd.config.describe import flat, flatten_config, join_key
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.recipes import RECIPES
from grpo_spmd.config.rules import check_rules
from grpo_spmd.config.schema import Config

_MOST_BYTES = 1 << 20


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, coerce by declared type, cross-check; or ConfigError."""
    return load_config_with_sources(path, overrides)[0]


def load_config_with_sources(
    path: str | Path, overrides: Sequence[str] = (), *, on_cpu: bool = False
) -> tuple[Config, dict[str, str]]:
    """The config, and for each key of `flatten_config`, in order: "default", "FILE:LINE", "command line" or "from
    algorithm: NAME"; and behind the first two what of the algorithm's they stand in for."""
    tree, given = read_tree(Path(path).expanduser())
    for override in overrides:
        name, value = apply_override(tree, override)
        # What the file said below this key is gone with the value that held it.
        given = {
            known: source
            for known, source in given.items()
            if known != name and not known.startswith(f"{name}.")
        }
        given |= {join_key(name, inner) if inner else name: "command line" for inner in flat(value)}
    config = build_config(tree, on_cpu=on_cpu)
    values = flatten_config(config).items()
    return config, {
        name: source_of(name, value, given.get(name, "default"), tree) for name, value in values
    }


def build_config(tree: dict[str, Any], *, on_cpu: bool = False) -> Config:
    """Coerced by declared type and cross-checked; `on_cpu`: with a CPU's defaults. Raises ConfigError."""
    recipe = recipe_of(tree)
    config: Config = build(Config, with_recipe(tree, recipe), "")
    if on_cpu:
        config = fitted_to_cpu(config, tree)
    check_needs(config)
    try:
        check_rules(config)
    except ConfigError as error:
        raise ConfigError(f"{error}{of_recipe(str(error), tree, recipe)}") from None
    return with_home(config)


def read_tree(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What a YAML file says, unchecked, and {dotted key: "FILE:LINE"}. Raises ConfigError."""
    try:
        with path.open("rb") as file:  # a device has no end
            text = file.read(_MOST_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config: cannot read {path}: {why}{looked_for(path)}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(
            f"--config: {path} is larger than {_MOST_BYTES >> 20} MiB, which no config is"
        )
    given: dict[str, str] = {}
    try:
        loader = StrictLoader(text)
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node is not None else None
        _mark_lines(node, "", path, given)
    except YAML_ERRORS as error:
        raise not_yaml(error, text, path) from None
    if not isinstance(tree, dict):
        raise not_a_mapping(tree, text, path)
    return tree, given


def _mark_lines(node: yaml.Node | None, where: str, path: Path, given: dict[str, str]) -> None:
    """Enter {dotted key: "FILE:LINE"} for all in `node`. Once it is constructed, merged keys are its own."""
    if isinstance(node, yaml.MappingNode):
        items = [(str(key_node.value), key_node, value) for key_node, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for name, marked, value in items:
        full = join_key(where, name)
        given[full] = f"{path}:{marked.start_mark.line + 1}"
        _mark_lines(value, full, path, given)


# `section.key=value` put into the tree of a config.


def apply_override(tree: dict[str, Any], override: str) -> tuple[str, Any]:
    """Put one `section.key=value` into `tree`; returns its dotted key and value."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(f"an override is section.key=value, got {override!r}")
    _check_name(name, text)
    if CONTROL.search(override):
        raise ConfigError(
            f'{name}: the value {text!r} holds a control character; write it as YAML does, as in "a\\nb"'
        )
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except YAML_ERRORS as error:
        why = getattr(error, "problem", None) or ""
        why = f": {why}" if "base 8" in why else ""
        raise ConfigError(f"{name}: the value {text!r} is not valid YAML{why}") from None
    node: Any = tree
    *parents, last = name.split(".")
    for depth, parent in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(node, list):
            node = node[_list_index(node, parent, where)]
        elif isinstance(node, dict):
            if node.get(parent) is None:
                node[parent] = {}
            node = node[parent]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{name}: {where} is a value, not a section")
    if isinstance(node, list):
        node[_list_index(node, last, name)] = value
    else:
        node[last] = value
    return name, value


def _check_name(name: str, text: str) -> None:
    """Names as Hydra and Python write them."""
    ours = re.sub(r"\[(\d+)\]", r".\1", name).lstrip("+~")
    if ours != name and ours:
        rule = "no + or ~ stands before a key" if name[0] in "+~" else "an index stands after a dot"
        raise ConfigError(f"{name}: {rule}: {ours}={text}")


def _list_index(node: list[Any], text: str, where: str) -> int:
    if not text.isdecimal() or int(text) >= len(node):
        rule = f"{text!r} is not an index into a list of {len(node)}"
        whole = "[{name: exact}, {name: gsm8k}]" if where.startswith("rewards.") else "[...]"
        raise ConfigError(
            f"{where}: {rule}; to add one, give the whole list: {where.split('.')[0]}={whole}"
        )
    return int(text)


# YAML that is read strictly, and what people meant where it cannot be read.


# What PyYAML raises for 2024-13-45, deep nesting, "!!bool x", "!!timestamp x", '!!int ""', a set as key, 1:1:[...]:1.0
YAML_ERRORS = (
    yaml.YAMLError,
    ValueError,
    RecursionError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
)
_MOST_VALUES = 10_000


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice, where PyYAML silently keeps the last, and what has no end: a few lines
    of aliases to aliases are billions of values."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._num_values, self._sizes = (
            0,
            dict[yaml.Node | None, int](),
        )  # with every alias written out

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        before, is_alias = self._num_values, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._num_values += (
            self._sizes.get(node, _MOST_VALUES) if is_alias else 1
        )  # an alias of what holds it: no size
        self._sizes[node] = self._num_values - before
        # Python takes long to make a number of "1:2:3:...", and refuses to print a long hexadecimal one.
        is_long = (
            isinstance(node, yaml.ScalarNode)
            and node.tag.endswith(":int")
            and len(node.value) > 1000
        )
        if (
            isinstance(node, yaml.ScalarNode)
            and node.tag.endswith(":int")
            and re.match(r"[-+]?0\d", node.value)
        ):
            rule = f"{node.value} is to the base 8 for YAML; leave the zeros at its front out, or put text in quotes"
            raise yaml.composer.ComposerError(None, None, rule, node.start_mark)
        if node is not None and (is_long or self._num_values > _MOST_VALUES):
            rule = f"more than {_MOST_VALUES} values, aliases written out, or a number of more than 1000 digits"
            raise yaml.composer.ComposerError(None, None, rule, node.start_mark)
        return node


def _strict_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if (
            key_node.tag == "tag:yaml.org,2002:merge"
        ):  # "<<: *anchor", whose keys may be given again
            continue
        name = loader.construct_object(key_node)
        if isinstance(name, list | dict):
            raise yaml.constructor.ConstructorError(
                None, None, "a key must be a name", key_node.start_mark
            )
        if name in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {name!r} is given twice", key_node.start_mark
            )
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
    return ConfigError(
        f"{path}: a config is a mapping of sections, got {type(tree).__name__}{_meant(text, text)}"
    )


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


# Paths of a config: `~` is the home folder, and one that is relative is relative to the working folder. Variables
# ($SCRATCH) are left to the shell, which expands them on the command line: a config alone would mean another folder to
# each user.


_OF_REWARDS = ("function", "judge", "model", "template")


def with_home(config: Config) -> Config:
    """`~` and `~user` at the start of each path replaced."""
    for name, text in (
        ("run_dir", config.run_dir),
        ("model.path", config.model.path),
        ("checkpoint.resume", config.checkpoint.resume),
        ("critic.path", config.critic.path or ""),
        *(
            (f"teacher.path.{name}".removesuffix("."), path)
            for name, path in config.teacher.paths.items()
        ),
        *(
            (f"rewards.{n}.{key}", getattr(r, key) or "")
            for n, r in enumerate(config.rewards)
            for key in _OF_REWARDS
        ),
    ):
        _check_path(name, text)
    at_home, replace = os.path.expanduser, dataclasses.replace
    sets = config.data.eval
    evaluated = (
        at_home(sets) if isinstance(sets, str) else {name: at_home(sets[name]) for name in sets}
    )
    if os.path.realpath(at_home(config.run_dir)) == os.path.realpath(at_home(config.model.path)):
        raise ConfigError(
            f"run_dir: {config.run_dir} is the folder of model.path; a run has a folder of its own"
        )
    taught_by = config.teacher.path
    teachers = (
        at_home(taught_by)
        if isinstance(taught_by, str)
        else {n: at_home(p) for n, p in taught_by.items()}
    )
    return replace(
        config,
        teacher=replace(config.teacher, path=teachers),
        critic=replace(config.critic, path=config.critic.path and at_home(config.critic.path)),
        run_dir=at_home(config.run_dir),
        model=replace(config.model, path=at_home(config.model.path)),
        data=replace(config.data, train=at_home(config.data.train), eval=evaluated),
        rewards=tuple(
            replace(r, **{k: p and at_home(p) for k in _OF_REWARDS for p in [getattr(r, k)]})
            for r in config.rewards
        ),
        checkpoint=replace(config.checkpoint, resume=at_home(config.checkpoint.resume)),
    )


def _check_path(name: str, text: str) -> None:
    """What names another place than it says, or none."""
    parts, expanded = text.split("/"), os.path.expanduser(text)
    if len(os.fsencode(text)) > _MOST_BYTES_home or any(
        len(os.fsencode(part)) > _MOST_OF_A_NAME for part in parts
    ):
        most = (
            f"a path has {_MOST_BYTES_home} bytes at the most, and a name in it {_MOST_OF_A_NAME}"
        )
        raise ConfigError(f"{name}: {text[:40]}... is too long for a path: {most}")
    if (text[:1], text[-1:]) in _CURLY:
        raise ConfigError(
            f"{name}: {text} has the quotes of a text processor around it; write it without"
        )
    if name != "run_dir":
        return
    if re.match(r"[a-zA-Z][\w+.-]*://", text):
        raise ConfigError(
            f"{name}: {text} is a URL, and checkpoints are written to a folder; mount it, and name that"
        )
    if re.search(r"\$[{\w]", text):
        how = "give it on the command line, where the shell does"
        raise ConfigError(f"{name}: {text}: variables are not expanded in a config: {how}")
    if expanded.startswith("~"):
        user = parts[0].removeprefix("~")
        raise ConfigError(
            f"{name}: {text}: there is no user {user or 'with a home folder'}; name the folder itself"
        )


_MOST_BYTES_home, _MOST_OF_A_NAME = 4000, 255
_CURLY = {("\u201c", "\u201d"), ("\u2018", "\u2019"), ("\u201e", "\u201c")}


def looked_for(path: Path) -> str:
    """Of a path that is not there, in brackets, where it was looked for, if the path itself does not say so."""
    if os.path.exists(path):
        return ""
    if "$" in str(path):
        return " (variables are not expanded in a config: give it on the command line, where the shell does)"
    if path.is_absolute():
        return ""
    try:
        return f" (below the working folder, {Path.cwd()})"
    except FileNotFoundError:
        return " (and the working folder itself is gone: cd to it again)"


# The recipe of `algorithm: NAME` put below what a config says, and said where its values show.


FROM_RECIPE = "from algorithm:"  # begins the source of a value that a recipe gave


def recipe_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the algorithm that a config's tree names, by dotted key; {} where it names none. Raises
    ConfigError."""
    name = tree.get("algorithm")
    if isinstance(name, Mapping):  # verl's section
        from grpo_spmd.config.coerce import unknown_key

        raise ConfigError(unknown_key("algorithm", "", name))
    if name is None or str(name).strip().lower() in ("none", "null"):
        return {}
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name].values
    import difflib

    plain = {_plain(known): known for known in RECIPES}
    close = difflib.get_close_matches(_plain(str(name)), plain, n=1, cutoff=0.6)
    meant = f"; did you mean {plain[close[0]]}?" if close else ""
    raise ConfigError(f"algorithm must be one of {', '.join(RECIPES)}; got {name!r}{meant}")


def _plain(name: str) -> str:
    """REINFORCE++, reinforce_plus_plus and reinforce_pp are one."""
    spelt = name.lower().replace("++", "pp").replace("plus_plus", "pp").replace("plusplus", "pp")
    return re.sub(r"[^a-z0-9]", "", spelt)


def with_recipe(tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the recipe's values below its own; `tree` itself stays as it is."""
    filled = dict(tree)
    for key, value in recipe.items():
        section, _, name = key.partition(".")
        there = filled.get(section)
        there = {} if there in (None, "None", "null") else there
        if isinstance(there, Mapping):  # else it is refused as no section
            filled[section] = {name: value} | dict(there)
    return filled


def check_needs(config: Config) -> None:
    """Raises ConfigError where the algorithm needs a key that is not set."""
    for key in RECIPES[config.algorithm].needs if config.algorithm is not None else ():
        section, _, name = key.partition(".")
        if not getattr(getattr(config, section), name) and not (
            section == "teacher" and config.teacher.is_on
        ):
            raise ConfigError(
                f"algorithm: {config.algorithm} needs {key}; set it to a model's folder or hub id"
            )


def of_recipe(error: str, tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """What is added to a rule's line that names keys which nobody wrote: the algorithm sets them."""
    given = flat(dict(tree))
    named = [
        key for key in recipe if key not in given and re.search(rf"\b{re.escape(key)}\b", error)
    ]
    values = ", ".join(f"{key}: {json.dumps(recipe[key])}" for key in named)
    return f" (algorithm: {tree['algorithm']} sets {values})" if named else ""


def source_of(key: str, value: Any, source: str, tree: Mapping[str, Any]) -> str:
    """Where a value of the config that `tree` makes came from; `source`: where it was given, or "default"."""
    if key not in (recipe := recipe_of(tree)):
        return source
    origin = f"{FROM_RECIPE} {tree['algorithm']}"
    if source == "default":
        return origin
    return (
        source
        if recipe[key] == value
        else f"{source}, in place of {json.dumps(recipe[key])} {origin}"
    )


# Which kind of device this process will train on, without torch, and the defaults that follow it.


_CPU_TOKENS = 2048  # of a micro-batch: what a pass over more writes, the kernel has to find pages for again each time


_WSL_DEVICE, _WSL_CUDA = (
    Path("/dev/dxg"),
    Path("/usr/lib/wsl/lib/libcuda.so.1"),
)  # the device is any maker's


def num_gpus() -> int:
    """NVIDIA's devices that this process may open, whether torch can use them or not; 0 also where no driver is loaded,
    and in a container or a job that was given none (/proc/driver/nvidia would show it those of the machine). 1 under
    Windows (WSL 2) with NVIDIA's driver, which shows one device for all."""
    shown = sum(_can_be_opened(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return shown or int(_WSL_CUDA.exists() and _can_be_opened(_WSL_DEVICE))


def _can_be_opened(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def gpus_are_hidden() -> bool:
    """On purpose: CUDA takes no device from the first name on that is none (Slurm writes NoDevFiles)."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip().lower()
    return first in ("", "-1", "nodevfiles", "none", "void")


def trains_on_cpu() -> bool:
    """Whether a rank that starts here will find no GPU, or has a torch that can use none."""
    return gpus_are_hidden() or not num_gpus() or is_built_for_cpu(find_spec("torch"))


def is_built_for_cpu(torch: ModuleSpec | None) -> bool:
    """What torch would say of itself; it takes seconds to ask."""
    if torch is None or torch.origin is None:
        return False
    try:
        said = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b.*= *None\s*$", said, re.MULTILINE) is not None


def fitted_to_cpu(config: Config, tree: Mapping[str, Any]) -> Config:
    """`config` with the defaults of a CPU for what `tree`, which it was made from, does not say: micro-batches of 2,048
    tokens, or of the two longest rollouts where they are longer, and never of more than the default elsewhere."""
    training = config.training
    if "max_tokens_per_micro_batch" in (tree.get("training") or {}):
        return config
    tokens = min(
        training.max_tokens_per_micro_batch, max(_CPU_TOKENS, 2 * config.max_rollout_tokens)
    )
    return dataclasses.replace(
        config, training=dataclasses.replace(training, max_tokens_per_micro_batch=tokens)
    )

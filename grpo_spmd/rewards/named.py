"""Code of the user's that a config names, as "file.py:name"."""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Callable
from importlib import machinery, util
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.home import looked_for
from grpo_spmd.rewards.early import lacking_module
from grpo_spmd.rewards.imported import as_its_own_program

Modules = dict[str, types.ModuleType]  # by the file


def load_named(spec: str, key: str, what: str, modules: Modules | None = None) -> Callable[..., Any]:
    """What "file.py:name" names, out of the file, which is run, unless it is one of `modules`, where it is put. Raises
    ConfigError, which begins with `key`."""
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{key} must be "file.py:{what}"; got {spec!r}')
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {file}{looked_for(path)}")
    modules = {} if modules is None else modules
    if (place := os.path.abspath(path)) not in modules:
        modules[place] = _run(path, key)
    found = getattr(modules[place], name, None)
    if not callable(found):
        raise ConfigError(f"{key}: {file} has no {what} {name!r}")
    return found  # type: ignore[no-any-return]


def _run(path: Path, key: str) -> types.ModuleType:
    loader = _UncachedLoader(f"reward_{path.stem}", os.path.abspath(path))
    module_spec = util.spec_from_file_location(loader.name, path, loader=loader)
    assert module_spec is not None, path
    module = util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickling look their module up there
    try:
        with as_its_own_program(str(path)):
            loader.exec_module(module)
    except (Exception, SystemExit) as error:
        place, said = f"{path}{_line_in(error, os.path.abspath(path))}", f"{type(error).__name__}: {error}"
        said += lacking_module(error, path.parent)
        raise ConfigError(f"{key}: {place} cannot be imported: {said}") from error
    return module


class _UncachedLoader(machinery.SourceFileLoader):
    """Leaves no __pycache__ beside the user's file, and never runs an older version of it from there."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _line_in(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        return f":{error.lineno}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return f":{lines[-1]}" if lines else ""

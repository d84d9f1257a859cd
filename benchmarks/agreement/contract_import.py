"""What contract.py asks of a vLLM that it has unpacked, in a process of its own: python -m ...
FOLDER_OF_VLLM"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.agreement.contract_rows import OPTIONS, VLLM, Row


def main(package: Path) -> None:
    sys.path.insert(0, str(package.parent))
    import vllm

    assert Path(vllm.__file__).parent == package, vllm.__file__
    broken, bound, unseen = list[tuple[str, str]](), 0, 0
    for row in VLLM:
        target = _object(row.name) if row.call and not row.forwards_to else None
        if not callable(
            target
        ):  # made by an instance, or in a module that needs what is not here (a kernel library)
            unseen += bool(row.call) and not row.forwards_to
            continue
        try:
            _bind(row, target)
            bound += 1
        except ValueError:  # of the interpreter's own, such as a TypedDict: it tells no signature
            unseen += 1
        except TypeError as error:
            broken.append((row.label, str(error)))
    options_taken = _options_taken(broken)
    print(
        json.dumps(
            {
                "broken": broken,
                "summary": f"{bound} calls bound, {unseen} not to be had, {options_taken} options",
            }
        )
    )


def _object(name: str) -> Any:
    pieces = name.split(".")
    for cut in range(len(pieces), 0, -1):
        try:
            result: Any = importlib.import_module(".".join(pieces[:cut]))
        except ImportError:
            continue
        for piece in pieces[cut:]:
            result = (
                inspect.getattr_static(result, piece, None)
                if inspect.isclass(result)
                else getattr(result, piece, None)
            )
        return result.__func__ if isinstance(result, staticmethod | classmethod) else result
    return None


def _bind(row: Row, target: Any) -> None:
    def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    args, kwargs = eval(f"given{row.call}", {"given": given, **dict.fromkeys(_words(row.call))})
    is_method = (
        inspect.isfunction(target)
        and "." in target.__qualname__
        and "self" in inspect.signature(target).parameters
    )
    inspect.signature(target).bind(*([None] if is_method else []), *args, **kwargs)


def _words(call: str) -> list[str]:
    return [
        word
        for word in call.replace("(", " ").replace(")", " ").replace(",", " ").split()
        if word.isidentifier()
    ]


def _options_taken(broken: list[tuple[str, str]]) -> int:
    """How many of our options vLLM's dataclass of arguments takes."""
    from vllm import EngineArgs

    selected, expected_names = 0, inspect.signature(EngineArgs).parameters
    for row in OPTIONS:
        if row.forwards_to:
            name = row.call.removesuffix("=0)").rpartition(" ")[2]
            if name in expected_names:
                selected += 1
            elif not row.absent:
                broken.append((row.label, "EngineArgs has no such field"))
    return selected


if __name__ == "__main__":
    main(Path(sys.argv[1]))

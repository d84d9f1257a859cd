"""python -m grpo_spmd.prefetch --config x.yaml [section.key=value ...]: what a config names of the hub, into the cache.

For clusters whose compute nodes have no network: once where there is one, before the job, which sets HF_HUB_OFFLINE=1.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_spmd.config.command_line import OverridesParser
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.hub import check_reachable, is_offline, need_datasets
from grpo_spmd.data.rows import key_and_source, read_rows
from grpo_spmd.files import hold_standard_streams, show

_SAY_EVERY_S = 8.0


def main() -> None:
    hold_standard_streams()
    about = "Fetch the model and the data sets that a config names from the Hugging Face hub into the cache (HF_HOME)."
    parser = OverridesParser(prog="python -m grpo_spmd.prefetch", description=about)
    parser.add_argument("--config", required=True, help="a YAML file; configs/ has examples")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="values that replace the file's"
    )
    args = parser.parse()
    signal.signal(signal.SIGINT, _leave)
    os.environ |= {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }  # lines instead
    try:
        config = load_config(args.config, args.overrides)
        names = (None, *config.data.eval_sets)
        sets = [name for name in names if key_and_source(config.data, name)[1].startswith("hub:")]
        of_critic = None if config.critic.is_on_policy else config.critic.path
        paths = (config.model.path, of_critic, *config.teacher.paths.values())
        models = [path for path in paths if path and not Path(path).is_dir()]
        judges = {
            (r.model, r.revision)
            for r in config.rewards
            if r.model is not None and not Path(r.model).is_dir()
        }
        if not models and not sets and not judges:
            show("prefetch: the model and the data are local: nothing to fetch")
            return
        if is_offline():
            raise ConfigError(
                "HF_HUB_OFFLINE is set, and prefetch is what needs the network: unset it here"
            )
        from huggingface_hub import constants

        for model in dict.fromkeys(models):
            _fetch_model(model, Path(constants.HF_HUB_CACHE))
        for repo, revision in sorted(judges, key=str):
            _fetch_model(repo, Path(constants.HF_HUB_CACHE), revision)
        for name in sets:
            _fetch_rows(config.data, name)
    except ConfigError as error:
        refuse(
            ConfigError(str(error).replace("`python -m grpo_spmd.prefetch --config ...`", "this"))
        )
    show(f"prefetch: all of it is in {constants.HF_HOME}, which the nodes must see. In the job:")
    show(f"  export HF_HOME={constants.HF_HOME} HF_HUB_OFFLINE=1")


def _leave(number: int, frame: object) -> None:
    """At once: the library's threads would end what they fetch first. What is there of a file is gone on with."""
    say("prefetch: stopped; the next start goes on from here")
    os._exit(130)


def _fetch_model(repo: str, cache: Path, asked: str | None = None) -> None:
    from grpo_spmd.model.hf_files import fetch, files_at_hub

    files = files_at_hub(repo, asked)
    what = f"model {repo}, revision {files[0].commit_hash[:7]}: {len(files)} files"
    missing = [file.file_size or 0 for file in files if file.will_download]
    _check_room(cache, sum(missing), repo)
    start = time.monotonic()
    folder = cache / f"models--{repo.replace('/', '--')}"
    with _heartbeat(lambda: f"{repo}: {_size(_bytes_below(folder / 'blobs'))} so far"):
        fetch(repo, asked)
    took = (
        f"{_size(sum(missing))} fetched in {time.monotonic() - start:.0f} s"
        if missing
        else "already there"
    )
    show(f"prefetch: {what}, {_size(sum(file.file_size or 0 for file in files))}, {took}")
    show(f"  {folder}")


def _check_room(cache: Path, needed: int, repo: str) -> None:
    there = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        rule = f"{repo} needs {_size(needed)} more in {cache}, and {_size(free)} are free there"
        raise ConfigError(f"model.path: {rule}; make room, or name another place by HF_HOME")


def _fetch_rows(config: DataConfig, name: str | None) -> None:
    """By the run's own reader, which keeps what it made of the files, and refuses here what it would refuse there."""
    key, source = key_and_source(config, name)
    need_datasets(source, key)
    check_reachable(
        "datasets", source.split(":")[1], key
    )  # also where some is cached: datasets would try for long
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    before, start = _bytes_below(cache), time.monotonic()
    with _heartbeat(lambda: f"{source}: {_size(_bytes_below(cache) - before)} so far"):
        rows = read_rows(config, name)
    grown = _bytes_below(cache) - before
    took = (
        f"{_size(grown)} written in {time.monotonic() - start:.0f} s" if grown else "already there"
    )
    show(f"prefetch: data {source}: {len(rows)} rows, {took}")
    show(f"  {cache}")


@contextmanager
def _heartbeat(how_far: Callable[[], str]) -> Iterator[None]:
    done = threading.Event()

    def beat() -> None:
        start = time.monotonic()
        while not done.wait(_SAY_EVERY_S):
            show(f"prefetch: {how_far()}, {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(root, file)
            if not os.path.islink(path) and os.path.exists(
                path
            ):  # a partial file may be renamed meanwhile
                total += os.stat(path).st_size
    return total


def _size(size: int) -> str:
    unit, name = next(
        ((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if size >= unit), (1e3, "kB")
    )
    return f"{size / unit:.1f} {name}"


if __name__ == "__main__":
    main()

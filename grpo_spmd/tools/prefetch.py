"""Fetches the models and data sets that a config names from the Hugging Face hub into the cache.

python -m grpo_spmd.prefetch --config x.yaml [section.key=value ...]

It is for clusters whose compute nodes have no network. Run it before the job, on a machine that has
a network, and set HF_HUB_OFFLINE=1 in the job.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from huggingface_hub.utils import disable_progress_bars

from grpo_spmd.checks.memory import size_text
from grpo_spmd.config.command_line import OverridesParser
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import POLICY, Config, DataConfig
from grpo_spmd.data.hub import check_reachable, is_offline, need_datasets
from grpo_spmd.data.rows import key_and_source, read_rows
from grpo_spmd.files import hold_standard_streams, show

_PRINT_EVERY_S = 8.0
T = TypeVar("T")  # what a fetch returns


def main() -> None:
    """Runs the command: fetches what the config names, and prints what was fetched."""
    hold_standard_streams()
    parser = OverridesParser(
        prog="python -m grpo_spmd.prefetch",
        description="Fetch the models and data sets that a config names from the Hugging Face hub "
        "into the cache (HF_HOME).",
    )
    parser.add_argument("--config", required=True, help="YAML file; configs/ has examples")
    args = parser.parse()
    signal.signal(signal.SIGINT, _quit)
    # This command prints its own progress lines instead of the libraries' progress bars.
    # datasets reads a variable on import; huggingface_hub is imported already.
    disable_progress_bars()
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    try:
        _fetch(load_config(args.config, args.overrides))
    except ConfigError as error:
        # The remedy in some errors is to call this command, which has just failed.
        command = "`python -m grpo_spmd.prefetch --config ...`"
        refuse(ConfigError(str(error).replace(command, "this")))


def _fetch(config: Config) -> None:
    """Fetches every model, then every data set, that the config takes from the hub."""
    # None stands for the training set.
    names = (None, *config.data.eval_sets)
    sets = [name for name in names if key_and_source(config.data, name)[1].startswith("hub:")]
    models = (config.model.path, config.critic.path, *config.teacher.paths.values())
    rewards = [(reward.model, reward.revision) for reward in config.rewards]
    repos = [
        (repo, revision)
        for repo, revision in dict.fromkeys([*((path, None) for path in models), *rewards])
        if repo and repo != POLICY and not Path(repo).is_dir()
    ]
    if not repos and not sets:
        show("prefetch: the model and the data are local: nothing to fetch")
        return
    # What is local was left out above, so the network is needed now.
    if is_offline():
        raise ConfigError(
            "HF_HUB_OFFLINE is set, but prefetch needs the network: unset it for this command"
        )
    from huggingface_hub import constants

    for repo, revision in repos:
        _fetch_model(repo, revision, Path(constants.HF_HUB_CACHE))
    for name in sets:
        _fetch_rows(config.data, name)
    show(f"prefetch: all is in {constants.HF_HOME}, which the nodes must see. In the job:")
    show(f"  export HF_HOME={constants.HF_HOME} HF_HUB_OFFLINE=1")


def _quit(number: int, frame: object) -> None:
    """Exits at once on Ctrl-C: a normal exit would wait until the download threads have finished.

    Partial files stay, and the next start continues them.
    """
    say("prefetch: stopped; the next start goes on from here")
    os._exit(130)


def _fetch_model(repo: str, revision: str | None, cache: Path) -> None:
    """Fetches the files of the model `repo` that a run needs, and prints their number and size.

    They go into `cache`, the hub's cache folder. None as `revision` is the newest one."""
    # Not imported at the top, since it takes long.
    from grpo_spmd.model.config_json import fetch, files_at_hub

    files = files_at_hub(repo, revision)
    _check_disk(cache, sum(file.file_size or 0 for file in files if file.will_download), repo)
    folder = cache / f"models--{repo.replace('/', '--')}"
    _, outcome = _fetch_into(folder / "blobs", repo, lambda: fetch(repo, revision))
    commit = files[0].commit_hash[:7]
    size = size_text(sum(file.file_size or 0 for file in files))
    show(f"prefetch: model {repo}, revision {commit}: {len(files)} files, {size}, {outcome}")
    show(f"  {folder}")


def _check_disk(cache: Path, needed: int, repo: str) -> None:
    """Raises ConfigError if the cache's disk has less than `needed` bytes free."""
    # The cache itself may not exist yet.
    folder = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        sizes = f"{size_text(needed)} more in {cache}, and {size_text(free)} are free there"
        remedy = "make room, or name another place by HF_HOME"
        raise ConfigError(f"model.path: {repo} needs {sizes}; {remedy}")


def _fetch_rows(config: DataConfig, name: str | None) -> None:
    """Reads a data set as a run does, so that the cache gets the files that a run needs.

    Raises ConfigError for rows that a run would refuse. `name` is that of an evaluation set, or
    None for the training set.
    """
    key, source = key_and_source(config, name)
    need_datasets(source, key)
    # Checked even if the set is cached: `datasets` retries for a long time if the hub is away.
    check_reachable("datasets", source.split(":")[1], key)
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    rows, outcome = _fetch_into(cache, source, lambda: read_rows(config, name))
    show(f"prefetch: data {source}: {len(rows)} rows, {outcome}")
    show(f"  {cache}")


def _fetch_into(folder: Path, name: str, fetch: Callable[[], T]) -> tuple[T, str]:
    """Calls `fetch`. Returns its result and a text: how much was fetched, in which time.

    Prints the progress every few seconds. The libraries do not report it, so it is measured as the
    growth of `folder`.
    """
    start = time.monotonic()
    start_bytes = _bytes_below(folder)
    done = threading.Event()

    def describe() -> str:
        """Returns how much has been fetched so far, in which time."""
        written = size_text(_bytes_below(folder) - start_bytes)
        return f"{written} fetched in {time.monotonic() - start:.0f} s"

    def run() -> None:
        """Prints the progress until `done` is set. It runs in a thread of its own."""
        while not done.wait(_PRINT_EVERY_S):
            show(f"prefetch: {name}: {describe()} so far")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        result = fetch()
    finally:
        done.set()
        thread.join()
    return result, describe() if _bytes_below(folder) > start_bytes else "already there"


def _bytes_below(folder: Path) -> int:
    """Returns the size of all files below `folder`."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            # A partial file may have been renamed since it was listed.
            with suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


if __name__ == "__main__":
    main()

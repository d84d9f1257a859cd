"""What a save costs: how long training waits for one that is written in the background, and for one
written to its
end."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, ratios
from benchmarks.survival.faults.lab import Lab
from benchmarks.survival.faults.rows import row
from tests.support.models import make_model, write_config

_SIZES: dict[str, dict[str, Any]] = {
    "1 M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    "20 M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
    "100 M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
}


def save_time(lab: Lab, num: int) -> Iterator[Row]:
    """Training's wait for a save that is written in the background, against one that it waits for
    to the end."""
    repeats = max(3, num // 10)
    for size, sizes in _SIZES.items():
        folder = lab.root / f"save_{size.split()[0]}"
        model = make_model(
            folder / "model", "qwen3", tied=True, num_attention_heads=8, head_dim=64, **sizes
        )
        config = write_config(folder, model)
        for num_ranks in (1, 2):
            run_dir = folder / f"run_{num_ranks}"
            fault = f"save of {size} parameters, {num_ranks} ranks"
            arguments, env = (str(config), str(run_dir), str(repeats)), {"OMP_NUM_THREADS": "1"}
            try:
                (facts,) = measure(
                    num_ranks, "benchmarks.survival.faults.save_time_worker", *arguments, env=env
                )
            except RuntimeError as error:
                yield row(fault, 1, [str(error)[-300:]], "-")
                continue
            finally:
                shutil.rmtree(run_dir, ignore_errors=True)
            less = ratios(facts["saves_s"], facts["copies_s"])
            slow = [f"{ratio:.1f} x" for ratio in less if ratio < 5]
            copy, save = statistics.median(facts["copies_s"]), statistics.median(facts["saves_s"])
            worst = (
                f"{min(less):.1f} x less wait, median {statistics.median(less):.1f}, most "
                f"{max(less):.1f}"
            )
            times = (
                f"copy {1e3 * copy:.1f} ms (first {1e3 * facts['first_s']:.0f}), all "
                f"{1e3 * save:.0f} ms"
            )
            yield row(fault, len(less), slow, worst, f"{facts['bytes'] / 2**20:.0f} MiB: {times}")

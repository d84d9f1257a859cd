"""What this host is: device, driver, versions; and whether vLLM, from wherever it is found, can be
imported at all."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import time

from benchmarks.support.report import Row, arguments_parser, report


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    import torch

    row: Row = {
        "device": "CPU",
        "driver": "-",
        "memory_gib": "-",
        "free_gib": "-",
        "cuda": str(torch.version.cuda),
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        row |= {
            "device": torch.cuda.get_device_name(),
            "driver": _driver(),
            "memory_gib": total / 2**30,
        }
        row |= {
            "free_gib": free / 2**30
        }  # what is missing is another's, and would be in every ledger
        x = torch.randn(512, 512, device="cuda").bfloat16()
        assert torch.isfinite(x @ x).all(), "the GPU multiplies wrongly"
    start = time.perf_counter()
    import vllm  # the import alone needs most of its wheels

    row |= {"vllm_from": vllm.__file__, "vllm_import_s": time.perf_counter() - start}
    for package in ("datasets", "trl", "flash-attn", "flashinfer-python", "triton"):
        row[package] = _version(package)
    report("gpu_day_host", [row], args.json)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "-"
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "-"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


if __name__ == "__main__":
    main()

"""What torch, FSDP2 and ours ask of `torch.cuda` itself, answered for a device that is not
there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.support.dry_run.device import FakeCuda
from tests.support.dry_run.engine import StandInLLM

DEVICE_BYTES = 80 << 30
CAPABILITY = (9, 0)


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device, self.device_index, self.device_type, self.stream_id = (
            torch.device("cuda", 0),
            0,
            1,
            0,
        )

    def wait_stream(self, _: Any) -> None: ...
    def wait_event(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, _: Any = None) -> None: ...
    def wait(self, _: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def install(cuda: FakeCuda) -> None:
    """Into this process, for good."""
    only = Stream()

    @contextlib.contextmanager
    def stream(_: Any) -> Iterator[None]:
        yield

    def memory_stats(_: Any = None) -> dict[str, int]:
        # Torch goes on counting a pool that vLLM has unmapped.
        live, peak = (
            num_bytes + StandInLLM.unmapped_bytes
            for num_bytes in (cuda.ledger.live, cuda.ledger.peak)
        )
        names = {f"{name}_bytes.all.current": live for name in ("allocated", "reserved")}
        return names | {f"{name}_bytes.all.peak": peak for name in ("allocated", "reserved")}

    answers: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: only,
        "default_stream": lambda *_: only,
        "stream": stream,
        "set_stream": lambda _: None,
        "device": lambda _: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
        "get_device_properties": lambda *_: SimpleNamespace(
            name="NVIDIA H100 80GB HBM3", total_memory=DEVICE_BYTES
        ),
        "synchronize": cuda.host.synchronize,
        "empty_cache": lambda: None,
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda *_: cuda.ledger.reset(),
        "mem_get_info": lambda *_: (DEVICE_BYTES - cuda.ledger.live, DEVICE_BYTES),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=cuda.host.register, cudaHostUnregister=cuda.host.unregister
        ),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.pin_memory = lambda self, *_: cuda.host.pin(cast(torch.Tensor, self))  # type: ignore[method-assign]
    FakeTensor.record_stream = lambda self, s: None  # type: ignore[method-assign]
    # torch.tensor(..., device="cuda") makes its copy where no dispatch mode sees it, unless it is
    # told to make a CPU
    # tensor first, as FakeTensorMode tells it on a machine without CUDA.
    torch._C._set_only_lift_cpu_tensors(True)

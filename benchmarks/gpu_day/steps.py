"""The steps of the day in order of value, and their small forms. Limits are for a borrowed H200:
all of them together
stay under 29 minutes, so that 1 of 30 is left for what lies between them, and each fits into a
command of 9."""

from __future__ import annotations

from benchmarks.gpu_day.day import Step

_FOLDER, _JSON = ("--folder", "{folder}"), ("--json", "{json}")
_HOST = ("host", "what this host is, and whether vLLM can be imported")
_SMOKE = ("smoke", "whether a small run passes, and by which way of starting the engine")
_TESTS = ("tests", "the tests that need a GPU")
_PROOFS = (
    "proofs",
    "every sync and update of a run in bfloat16 proved; sleep; memory beside the planner's figures",
)
_PARKED = (
    "parked",
    "the same proofs with offload, a critic, a teacher and a reward model, parked on the host; "
    "then with adapters on a base that stays in the engine",
)
_FLOORS = (
    "floors",
    "each phase of a run beside the least time that its arithmetic or bytes take here, and beside "
    "the planner's time and memory",
)
_PACKING = ("packing", "packed rows beside padded batches; recomputation and compilation")
_LOGPROBS = ("logprobs", "the Triton kernels for logprobs beside the plain code")
_KERNELS = ("kernels", "what the update's time on the device is made of")
_TRL = ("trl", "the same step through TRL's GRPOTrainer")
_CRASH = ("crash", "all processes killed, the same command again")


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *arguments, *_JSON)


GPU = (
    Step(*_HOST, _module("gpu_day.host"), 75),
    Step(*_SMOKE, _module("gpu_day.smoke", "--size", "0.5b", "--within", "105", *_FOLDER), 240),
    Step(*_TESTS, _module("gpu_day.gpu_tests", "--marked", "gpu"), 60),
    Step(
        *_PROOFS,
        _module("gpu_day.proofs", "--size", "0.5b", "--steps", "20", "--within", "195", *_FOLDER),
        255,
    ),
    Step(
        *_PARKED,
        _module(
            "gpu_day.proofs",
            "--parked",
            "--size",
            "0.5b",
            "--steps",
            "4",
            "--within",
            "95",
            *_FOLDER,
        ),
        240,
    ),
    Step(*_LOGPROBS, _module("speed.logprob_kernels", "--size", "1.5b"), 45),
    Step(
        *_FLOORS,
        _module("speed.gpu", "--size", "3b,1.5b", "--steps", "4", "--variants", "plain", *_FOLDER),
        240,
    ),
    Step(*_PACKING, _module("speed.update", "--size", "0.5b"), 120),
    Step(*_KERNELS, _module("speed.kernels", "--size", "1.5b"), 75),
    Step(*_TRL, _module("gpu_day.trl", "--size", "0.5b", *_FOLDER), 225),
    Step(*_CRASH, _module("gpu_day.crash", "--size", "0.5b", *_FOLDER), 165),
)
_DRY_TESTS = ("tests/unit/test_attention.py", "tests/unit/test_gpu_benchmark.py")
_CPU = ("--device", "cpu", "--size", "tiny", "--steps", "2", "--variants", "plain")
# With limits for a busy machine.
DRY = (
    Step(*_HOST, _module("gpu_day.host"), 90),
    Step(*_SMOKE, _module("gpu_day.smoke", "--size", "tiny", "--within", "170", *_FOLDER), 180),
    Step(*_TESTS, _module("gpu_day.gpu_tests", *_DRY_TESTS), 180),
    Step(*_PROOFS, _module("gpu_day.proofs", "--size", "tiny", "--steps", "20", *_FOLDER), 180),
    Step(
        *_PARKED,
        _module("gpu_day.proofs", "--parked", "--size", "tiny", "--steps", "4", *_FOLDER),
        180,
    ),
    Step(*_LOGPROBS, _module("speed.logprob_kernels", "--size", "tiny"), 60),
    Step(*_FLOORS, _module("speed.gpu", *_CPU, *_FOLDER), 120),
    Step(*_PACKING, _module("speed.update", "--size", "tiny"), 300),
    Step(*_KERNELS, _module("speed.kernels", "--size", "tiny"), 90),
    Step(*_TRL, _module("gpu_day.trl", "--size", "tiny", *_FOLDER), 300),
    Step(*_CRASH, _module("gpu_day.crash", "--size", "tiny", *_FOLDER), 180),
)

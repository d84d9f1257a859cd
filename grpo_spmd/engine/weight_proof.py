"""The proof that every engine holds the policy's weights.

Every rank takes fingerprints of its FSDP shards, 8 bytes a row, one gather brings them to all ranks, and each engine
rank compares those of the rows that it holds. No rank needs a full copy of a tensor.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_map import EngineTensor
from grpo_spmd.model.lora import adapter_shards, hf_name, named_adapters
from grpo_spmd.model.policy import Policy, hf_named_shards
from grpo_spmd.model.sharding import gather_rows

_log = logging.getLogger("grpo_spmd")
_MAX_NAMED = 4  # tensors that an error describes
_Shard = tuple[
    DTensor, Callable[[], Tensor]
]  # a parameter; gives this rank's rows of what the engine must hold
_Shards = Mapping[str, _Shard]  # by HF name


class WeightProofError(RuntimeError):
    """An engine does not hold the policy's weights."""

    says_all = True  # in the report of a failure


@dataclass(frozen=True)
class _View:
    name: str  # of one HF tensor, whose rows are looked at
    by_probe: bool  # by their products with a random vector; else by their bytes
    num_slices: int  # of columns


@torch.no_grad()
def prove_weights(
    policy: Policy, engine: RolloutEngine, step: int, is_first: bool = False
) -> float:
    """Collective. Compare what every engine holds with the policy's shards, in the engine's dtype; the seconds it took.
    By bytes, where the engine's layout is plain: a 64-bit hash of each row, in which one flipped bit shows. By probe,
    where it packs or quantises: its own layer applied to a random vector, another at each step, within the rounding of
    such a product (`matches`). The first of a process logs what was compared how. Raises Rank0Error on every rank,
    naming the tensors that differ, on which ranks, and how."""
    start = time.perf_counter()
    shards = _expected_shards(policy, engine)
    tensors = engine.tensors(shards)
    known = [
        tensor
        for tensor in tensors
        if fits(tensor, {name: parameter for name, (parameter, _) in shards.items()})
    ]
    views = list(
        dict.fromkeys(_view(tensor, part.name) for tensor in known for part in tensor.parts)
    )
    expected = _gather_fingerprints(shards, views, engine.dtype, step)
    wrong: dict[str, str] = {}
    for tensor in known:
        wrong |= _differences(
            tensor, expected, _columns(shards[tensor.parts[0].name][0]), engine.dtype, step
        )
    if engine.takes_adapters:
        given = {part.name for tensor in tensors for part in tensor.parts}
        wrong |= {
            name: "the engine was not given it"
            for name, _ in named_adapters(policy.model)
            if name not in given
        }
    # No other check sees that replicas have drifted apart.
    digest = sum(
        int(fingerprints.sum()) for view, fingerprints in expected.items() if not view.by_probe
    )
    on_rank0(lambda of_ranks: _raise_if_replicas_differ(of_ranks, step), digest)
    num_names = len({view.name for view in views})
    on_rank0(lambda of_ranks: _raise_if_wrong(of_ranks, num_names, step), wrong)
    seconds = time.perf_counter() - start
    if is_first and engine.engine_rank == engine.tp_rank == 0:
        unknown = {tensor.engine_name for tensor in tensors} - {
            tensor.engine_name for tensor in known
        }
        _log_what_was_proved(seconds, views, shards, unknown)
    return seconds


def _log_what_was_proved(
    seconds: float, views: Sequence[_View], shards: _Shards, unknown: set[str]
) -> None:
    names, probed = {view.name for view in views}, {view.name for view in views if view.by_probe}
    by_bytes = len(names - probed)
    _log.info(
        "weight-sync proof: %.2f s, %d tensors by bytes, %d by probe",
        seconds,
        by_bytes,
        len(probed),
    )
    proved = {
        id(shards[name][0]) for name in names
    }  # a tied lm_head may be there as the embedding alone
    unproved = unknown | {
        name for name, (parameter, _) in shards.items() if id(parameter) not in proved
    }
    if unproved:
        text = "weight-sync proof: not proved, since their layout in the engine is not known: %s"
        _log.warning(text, ", ".join(sorted(unproved)))


def _expected_shards(policy: Policy, engine: RolloutEngine) -> dict[str, _Shard]:
    """Collective where adapters are merged. Also under the name of a tied lm_head, which an engine may pack apart."""
    by_parameter = {
        id(parameter): (parameter, shard) for _, parameter, shard in hf_named_shards(policy)
    }
    names = {
        hf_name(name): id(parameter)
        for name, parameter in policy.model.named_parameters(remove_duplicate=False)
    }
    expected = {name: by_parameter[which] for name, which in names.items() if which in by_parameter}
    if engine.takes_adapters:
        expected |= {
            name: (parameter, shard)
            for name, parameter, shard in adapter_shards(policy.model, policy.lora)
        }
    return expected


def fits(tensor: EngineTensor, parameters: Mapping[str, Tensor]) -> bool:
    """Whether the engine's parameter is what its name says, as far as shapes tell."""
    if not all(
        part.name in parameters and len(parameters[part.name]) == part.num_hf_rows
        for part in tensor.parts
    ):
        return False
    columns = {_columns(parameters[part.name]) for part in tensor.parts}
    if tensor.values is not None:
        columns.add(_columns(tensor.values) * tensor.num_column_slices)
    return len(columns) == 1


def _columns(tensor: Tensor) -> int:
    return tensor.shape[1:].numel()


def _as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), _columns(tensor))


def _view(tensor: EngineTensor, name: str) -> _View:
    return _View(name, tensor.values is None, tensor.num_column_slices)


def _coefficients(columns: int, by_probe: bool, dtype: torch.dtype, step: int) -> Tensor:
    """What columns are multiplied by, equal on all ranks: odd 64-bit numbers for a hash, or a probe in `dtype`."""
    if by_probe:
        return torch.randn(columns, generator=torch.Generator().manual_seed(step)).to(dtype)
    return (
        torch.randint(-(2**62), 2**62, (columns,), generator=torch.Generator().manual_seed(0)) * 2
        + 1
    )


def row_fingerprints(
    matrix: Tensor, coefficients: Tensor, num_slices: int, dtype: torch.dtype
) -> Tensor:
    """Fingerprints [rows, num_slices], int64, of a matrix [rows, columns] cast to `dtype`, for equal slices of columns.
    With int64 coefficients [columns]: sum of bits * coefficient modulo 2^64. With a probe: the product and the row's
    norm, two float32 in one int64."""
    out = torch.empty(len(matrix), num_slices, dtype=torch.int64, device=matrix.device)
    coefficients = coefficients.to(matrix.device)
    chunk = max(
        1, (1 << 22 if matrix.is_cuda else 1 << 16) // max(1, matrix.shape[1])
    )  # in a CPU's cache
    for rows, result in zip(matrix.split(chunk), out.split(chunk), strict=True):
        cast = rows.to(dtype)
        if coefficients.dtype == torch.int64:
            bits = cast.view(torch.int32 if dtype.itemsize == 4 else torch.int16).to(torch.int64)
            result.copy_(bits.mul_(coefficients).unflatten(1, (num_slices, -1)).sum(-1))
        else:
            parts = cast.float().unflatten(1, (num_slices, -1))
            products = (parts * coefficients.float().view(num_slices, -1)).sum(-1)
            result.copy_(torch.stack([products, parts.norm(dim=-1)], -1).view(torch.int64)[..., 0])
    return out


def _gather_fingerprints(
    shards: _Shards, views: list[_View], dtype: torch.dtype, step: int
) -> dict[_View, Tensor]:
    """Collective. The policy's fingerprints [rows, slices] in each view; each rank takes those of its shards."""

    def of_shards() -> Iterator[tuple[DTensor, Tensor]]:
        for view in views:
            parameter, shard = shards[view.name]
            coefficients = _coefficients(_columns(parameter), view.by_probe, dtype, step)
            yield (
                parameter,
                row_fingerprints(_as_matrix(shard()), coefficients, view.num_slices, dtype),
            )

    return dict(zip(views, gather_rows(of_shards()), strict=True))


def _differences(
    tensor: EngineTensor,
    of_policy: Mapping[_View, Tensor],
    columns: int,
    dtype: torch.dtype,
    step: int,
) -> dict[str, str]:
    """HF tensors that one of the engine's parameters does not hold as the policy does, and how they differ."""
    whole, differences = _coefficients(columns, tensor.values is None, dtype, step), {}
    coefficients = whole.chunk(tensor.num_column_slices)[tensor.column_slice]
    if tensor.product is not None:
        found = tensor.product(coefficients)
    else:
        assert tensor.values is not None
        found = row_fingerprints(_as_matrix(tensor.values), coefficients, 1, dtype)[:, 0]
    for part in tensor.parts:
        view, rows = _view(tensor, part.name), found[part.start : part.start + part.num_rows]
        here = slice(part.hf_start, part.hf_start + part.num_rows), tensor.column_slice

        def is_of(other: _View, rows: Tensor = rows, here: Any = here) -> Tensor:
            return matches(rows, of_policy[other][here], coefficients, dtype, tensor.is_quantised)

        same = is_of(view)
        if same.all():
            continue
        how = f"{int((~same).sum())} of its {len(same)} rows here differ"
        others = [
            other for other in of_policy if other != view and replace(other, name=view.name) == view
        ]
        others = [
            other
            for other in others
            if len(of_policy[other]) == part.num_hf_rows and is_of(other).all()
        ]
        expected = of_policy[view][here]
        by = (
            expected if rows.dtype == torch.int64 else _products_and_norms(expected)[0]
        )  # hash, or product
        if others:
            how += f", there are those of {others[0].name}"
        elif matches(rows.sort()[0], expected[by.argsort()], coefficients, dtype).all():
            how += ", they are there in another order"
        differences[part.name] = how
    return differences


def matches(
    found: Tensor,
    expected: Tensor,
    coefficients: Tensor,
    dtype: torch.dtype,
    is_quantised: bool = False,
) -> Tensor:
    """For each row, whether the engine's hash (int64) or product (in `dtype`) is that in the policy's fingerprint.

    Both sides sum a product of n terms in float32, in different order: at most 1.4e-7 of |row| * |probe| was seen in
    1e5 rows (oneDNN), 1e-6 is allowed. A bfloat16 result is rounded by up to 2^-8 of itself, twice that is allowed. An
    FP8 weight, and what it is applied to, is off by up to 2^-4 of itself: at most 0.15 of |row| * |probe| / sqrt(n) was
    seen (vLLM's fp8_per_channel), 0.4 is allowed, enough to see a wrong tensor, not a stale one.
    """
    if coefficients.dtype == torch.int64:
        return found == expected
    product, row_norm = _products_and_norms(expected)
    scale = row_norm * coefficients.float().norm().to(row_norm.device)
    rounding = (dtype.itemsize < 4) * 2.0**-7 * product.abs()
    if is_quantised:
        rounding = 0.4 / math.sqrt(len(coefficients)) * scale
    same: Tensor = (
        found.float() - product
    ).abs() <= rounding + 1e-6 * scale  # False where one is NaN
    return same


def _products_and_norms(fingerprints: Tensor) -> tuple[Tensor, Tensor]:
    pairs = fingerprints.contiguous().view(torch.float32).view(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _raise_if_replicas_differ(digests: list[int], step: int) -> None:
    """On rank 0, from every rank's digest of the policy's weights."""
    if differing := ", ".join(
        str(rank) for rank, digest in enumerate(digests) if digest != digests[0]
    ):
        raise WeightProofError(
            f"step {step}: the replicas of the policy (model.num_replicas) hold different weights: those of rank "
            f"{differing} are not those of rank 0, likely because an update ran on some ranks only, or their gradients "
            "were not summed over all"
        )


def _raise_if_wrong(of_ranks: list[dict[str, str]], num_tensors: int, step: int) -> None:
    """On rank 0, from every rank's differences."""
    where: dict[str, dict[str, list[int]]] = {}
    for rank, differences in enumerate(of_ranks):
        for name, how in differences.items():
            where.setdefault(name, {}).setdefault(how, []).append(rank)
    if not where:
        return
    described = []
    for name, by_how in list(where.items())[:_MAX_NAMED]:
        on_ranks = (f"rank {', '.join(map(str, ranks))}: {how}" for how, ranks in by_how.items())
        described.append(f"{name} ({'; '.join(on_ranks)})")
    if len(where) > _MAX_NAMED:
        described.append(f"and {len(where) - _MAX_NAMED} more")
    stale = "the sync left them stale, or put something else there"
    likely = "the last update did not reach it" if len(where) == num_tensors else stale
    what = f"the engine does not hold the policy's weights in {len(where)} of {num_tensors} tensors"
    raise WeightProofError(f"step {step}: {what}, likely because {likely}: {'; '.join(described)}")

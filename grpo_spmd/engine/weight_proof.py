"""Proves that every engine holds the policy's weights.

A fingerprint is 8 bytes that stand for one row of a tensor. Every rank computes the fingerprints of
its FSDP shards. One gather sends them to all ranks, and each rank compares them with the
fingerprints of the rows in its part of the engine. No rank needs a full copy of a tensor.

A fingerprint is either a hash of the row's bytes or, if the engine stores the row packed, the row's
product with a random vector, called the probe. This module also combines the hashes of rows to a
hash of all weights.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.activations import ACT2FN

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_map import EngineTensor
from grpo_spmd.model.families.build import constants
from grpo_spmd.model.lora import Shard, adapter_shards, base_parameters, named_adapters
from grpo_spmd.model.policy import Policy, hf_named_shards
from grpo_spmd.model.sharding import (
    as_matrix,
    first_matrix_row,
    gather_rows,
    is_first_replica,
    num_columns,
    num_rows,
)

_log = logging.getLogger("grpo_spmd")
# Number of differences that an error message describes.
_MAX_DESCRIBED = 8


class WeightProofError(RuntimeError):
    """Raised if an engine does not hold the policy's weights."""

    # The failure report then prints the message alone, without a traceback.
    says_all = True


@dataclass(frozen=True)
class _View:
    """Describes one way to fingerprint the rows of an HF tensor.

    The policy's side computes the fingerprints of each view that some engine tensor needs."""

    name: str
    """Name of the HF tensor."""
    by_probe: bool
    """True: products with a random vector. False: a hash of the bytes."""
    num_slices: int
    """Number of equal slices of the columns. Each row has one fingerprint for each slice, since a
    rank of a tensor-parallel engine may hold only one slice."""
    gate_up: str | None = None
    """Only for `down_proj` of packed experts, which the engine can only apply as whole experts: the
    name of their `gate_up_proj`."""


@torch.no_grad()
def prove_weights(
    policy: Policy, engine: RolloutEngine, step: int, is_first: bool = False
) -> float:
    """Collective. Compares every engine's weights with the policy's. Returns the seconds it took.

    Weights are compared in the engine's dtype. Where the engine stores rows plainly, 64-bit hashes
    of the rows are compared, which any single flipped bit changes. Where the engine packs a weight,
    its own layer is applied to a random vector, a new one at each step, and the products are
    compared within the rounding error (`matches`). With `is_first` it is logged how the tensors
    were compared. Raises Rank0Error on every rank if weights differ; its message names the tensors
    and the ranks."""
    start = time.perf_counter()
    shards = _expected_shards(policy, engine)
    parameters = {name: shard.parameter for name, shard in shards.items()}
    tensors = engine.tensors(shards, policy.saved)
    # Tensors of unknown layout are not compared; the first proof names them in a warning.
    known_tensors = [tensor for tensor in tensors if fits(tensor, parameters)]
    views = list(
        dict.fromkeys(
            _view(tensor, tensor_part.name)
            for tensor in known_tensors
            for tensor_part in tensor.parts
        )
    )
    activation = ACT2FN[getattr(policy.model.config, "hidden_act", "silu")]
    expected = _gather_fingerprints(shards, views, engine.dtype, step, activation)
    differences: dict[str, str] = {}
    for tensor in known_tensors:
        columns = num_columns(parameters[tensor.all_parts[-1].name].shape)
        differences |= _differences(tensor, expected, columns, engine.dtype, step)
    in_policy = constants(policy.model)
    for name, values in engine.constants().items():
        if values.dtype != in_policy[name].dtype or not torch.equal(values, in_policy[name]):
            differences[name] = "the constants differ"
    if engine.takes_adapters:
        in_engine = {tensor_part.name for tensor in tensors for tensor_part in tensor.parts}
        for name, _ in named_adapters(policy.model):
            if name not in in_engine:
                differences[name] = "it is missing in the engine"
    # Only this check detects replicas of the policy that have drifted apart. Products depend on the
    # order of summation and may differ between equal replicas, so compare the hashes alone.
    digest = sum(int(rows.sum()) for view, rows in expected.items() if not view.by_probe)
    on_rank0(lambda digests: _raise_if_replicas_differ(digests, step), digest)
    num_names = len(_names(views)) + len(in_policy)
    on_rank0(lambda by_rank: _raise_if_different(by_rank, num_names, step), differences)
    seconds = time.perf_counter() - start
    if is_first and engine.engine_rank == engine.tp_rank == 0:
        known_names = {tensor.engine_name for tensor in known_tensors}
        unknown = {tensor.engine_name for tensor in tensors} - known_names
        _log_proof(seconds, views, shards, unknown=unknown, num_constants=len(in_policy))
    return seconds


def _log_proof(
    seconds: float,
    views: Sequence[_View],
    shards: Mapping[str, Shard],
    *,
    unknown: set[str],
    num_constants: int,
) -> None:
    """Logs how many tensors were compared by hash and by probe, and warns of tensors that could not
    be compared."""
    names = _names(views)
    probed = _names(view for view in views if view.by_probe)
    _log.info(
        "weight-sync proof: %.2f s, %d tensors by bytes, %d by probe",
        seconds,
        len(names - probed) + num_constants,
        len(probed),
    )
    # Compare parameters, not names: a tied lm_head may be in the engine only as the embedding.
    proved = {id(shards[name].parameter) for name in names}
    unproved = unknown | {
        name for name, shard in shards.items() if id(shard.parameter) not in proved
    }
    if unproved:
        _log.warning(
            "weight-sync proof: not proved, since their layout in the engine is not known: %s",
            ", ".join(sorted(unproved)),
        )


def _names(views: Iterable[_View]) -> set[str]:
    """Returns the names of all HF tensors whose rows are covered by the views."""
    return {name for view in views for name in (view.name, view.gate_up) if name is not None}


def _expected_shards(policy: Policy, engine: RolloutEngine) -> dict[str, Shard]:
    """Collective if adapters are merged. Returns the shards that the engines must hold, by HF name.

    A tied lm_head is listed under its own name too, since an engine may have a packed copy of
    it."""
    by_parameter = {id(shard.parameter): shard for shard in hf_named_shards(policy)}
    parameters = base_parameters(policy.model)
    shards = {name: by_parameter[id(parameter)] for name, parameter in parameters.items()}
    if engine.takes_adapters:
        shards |= {shard.name: shard for shard in adapter_shards(policy.model, policy.lora)}
    return shards


def fits(tensor: EngineTensor, parameters: Mapping[str, Tensor]) -> bool:
    """Returns True if the layout of the engine tensor is known: `parameters` has all HF tensors
    from which it is made, with the numbers of rows and columns that it implies."""
    if not all(
        tensor_part.name in parameters
        and num_rows(parameters[tensor_part.name].shape) == tensor_part.num_hf_rows
        for tensor_part in tensor.all_parts
    ):
        return False
    columns = {num_columns(parameters[tensor_part.name].shape) for tensor_part in tensor.parts}
    # Packed values (None) have no shape to compare. A rank of a tensor-parallel engine may hold
    # only a slice of the columns.
    if tensor.values is not None:
        columns.add(num_columns(tensor.values.shape) * tensor.num_column_slices)
    return len(columns) == 1


def _view(tensor: EngineTensor, name: str) -> _View:
    """Returns the view in which the HF tensor `name` is compared with this engine tensor."""
    gate_up = tensor.gate_up.name if tensor.gate_up is not None else None
    return _View(name, tensor.values is None, tensor.num_column_slices, gate_up)


def _coefficients(columns: int, by_probe: bool, dtype: torch.dtype, step: int) -> Tensor:
    """Returns the numbers [columns] by which the columns are multiplied, equal on all ranks.

    For a hash they are odd 64-bit integers, always the same. With `by_probe` they are the probe of
    this step: normal random numbers in `dtype`."""
    if by_probe:
        return torch.randn(columns, generator=torch.Generator().manual_seed(step)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (columns,), generator=generator) * 2 + 1


def row_fingerprints(
    matrix: Tensor, coefficients: Tensor, num_slices: int, dtype: torch.dtype
) -> Tensor:
    """Returns fingerprints [rows, num_slices], int64, of a matrix [rows, columns] cast to `dtype`.

    With int64 `coefficients` [columns] a fingerprint is a hash: the sum over the columns of
    (the value's bits as an integer) * coefficient, modulo 2^64. With a probe it is the slice's
    product with the probe and the slice's norm, two float32 in one int64."""
    fingerprints = torch.empty(len(matrix), num_slices, dtype=torch.int64, device=matrix.device)
    coefficients = coefficients.to(matrix.device)
    # Elements that are processed at a time; on a CPU few enough to stay in its cache.
    chunk_elements = 1 << 22 if matrix.is_cuda else 1 << 16
    chunk = max(1, chunk_elements // max(1, matrix.shape[1]))
    for rows, result in zip(matrix.split(chunk), fingerprints.split(chunk), strict=True):
        values = rows.to(dtype)
        if coefficients.dtype == torch.int64:
            bits = values.view(torch.int32 if dtype.itemsize == 4 else torch.int16).to(torch.int64)
            result.copy_(bits.mul_(coefficients).unflatten(1, (num_slices, -1)).sum(-1))
        else:
            slices = values.float().unflatten(1, (num_slices, -1))
            products = (slices * coefficients.float().view(num_slices, -1)).sum(-1)
            pairs = torch.stack([products, slices.norm(dim=-1)], -1)
            result.copy_(pairs.view(torch.int64)[..., 0])
    return fingerprints


def rows_hash(name: str, start: int, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what some rows of tensor `name` add to the hash of all weights, int64 [].

    `rows` are cast to `dtype`; `start` is the index of the first of them in the tensor. The hash of
    all weights is the sum of such parts modulo 2^64, so it does not depend on how the rows are
    distributed over ranks. Each row adds its own hash, multiplied by a factor for its index and one
    for the tensor's name. All factors are odd, so that a single changed bit always changes the
    result. It does not protect against forgery, as a signature would."""
    matrix = as_matrix(rows)
    coefficients = _coefficients(matrix.shape[1], by_probe=False, dtype=dtype, step=0)
    hashes = row_fingerprints(matrix, coefficients, 1, dtype)[:, 0]
    places = torch.arange(start, start + len(matrix), device=matrix.device)
    key = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (hashes * (2 * places + 1)).sum() * (int.from_bytes(key, "big", signed=True) | 1)


@torch.no_grad()
def local_weights_hash(shards: Iterable[Shard], dtype: torch.dtype) -> int:
    """Returns the part of this rank's rows in the hash of all `shards`.

    It is 0 on all replicas but the first, since all of them hold the same weights."""
    parts = [
        rows_hash(name, first_matrix_row(parameter), local_rows(), dtype)
        for name, parameter, local_rows in shards
        if is_first_replica(parameter)
    ]
    return int(torch.stack(parts).sum()) if parts else 0


def weights_id(local_hashes: Sequence[int]) -> str:
    """Returns the hash of all weights as 16 hexadecimal digits, from the parts of all ranks
    (`local_weights_hash`)."""
    return f"{sum(local_hashes) % 2**64:016x}"


def _gather_fingerprints(
    shards: Mapping[str, Shard],
    views: list[_View],
    dtype: torch.dtype,
    step: int,
    activation: Callable[[Tensor], Tensor],
) -> dict[_View, Tensor]:
    """Collective. Returns the policy's fingerprints [rows, slices] in each view.

    `activation` is the activation function of the model's experts."""

    def fingerprints_of(view: _View) -> Tensor:
        """Returns the fingerprints [rows, slices] of this rank's rows of the view's tensor."""
        rows = shards[view.name].local_rows()
        source = shards[view.gate_up or view.name]
        columns = num_columns(source.parameter.shape)
        coefficients = _coefficients(columns, view.by_probe, dtype, step)
        if view.gate_up is None:
            return row_fingerprints(as_matrix(rows), coefficients, view.num_slices, dtype)
        # Both parameters are sharded by experts, so that a rank has both matrices of its experts.
        experts = zip(source.local_rows(), rows, strict=True)
        results = [
            _expert_fingerprints(
                gate_up.to(dtype).float(),
                down.to(dtype).float(),
                coefficients.float().to(down.device),
                num_slices=view.num_slices,
                activation=activation,
                is_rounded=dtype.itemsize < 4,
            )
            for gate_up, down in experts
        ]
        shape = (0, view.num_slices)
        return torch.cat([torch.empty(shape, dtype=torch.int64, device=rows.device), *results])

    def local_fingerprints() -> Iterator[tuple[DTensor, Tensor]]:
        """Yields for each view (parameter, fingerprints of this rank's rows), for `gather_rows`."""
        for view in views:
            parameter = shards[view.name].parameter
            # `gather_rows` takes one row for each index of the parameter's first dimension. Such a
            # row has the fingerprints of all matrix rows at that index.
            height = parameter.shape[1:-1].numel() * view.num_slices
            fingerprints = fingerprints_of(view)
            yield parameter, fingerprints.view(fingerprints.numel() // height, height)

    gathered = gather_rows(local_fingerprints())
    return {
        view: rows.reshape(-1, view.num_slices) for view, rows in zip(views, gathered, strict=True)
    }


def _expert_fingerprints(
    gate_up: Tensor,
    down: Tensor,
    probe: Tensor,
    *,
    num_slices: int,
    activation: Callable[[Tensor], Tensor],
    is_rounded: bool,
) -> Tensor:
    """Returns fingerprints [hidden, num_slices] of one expert: its output for the probe as input.

    The output is down @ (activation(gate @ probe) * (up @ probe)). Each slice has the part of this
    sum that comes from one of `num_slices` equal parts of the intermediate dimension. In place of a
    row's norm a fingerprint has a number so large that `matches` allows for the rounding of both
    products. With `is_rounded` it also allows for rounding the intermediate states to bfloat16."""
    gate_rows, up_rows = gate_up.chunk(2)
    gate, up = gate_rows @ probe, up_rows @ probe
    states = (activation(gate) * up).view(num_slices, -1)
    # Rounding errors of the states, up to a factor. The activation's slope is at most about 1.
    errors = gate_rows.norm(dim=1) * up.abs() + up_rows.norm(dim=1) * activation(gate).abs()
    rounding = 2.0**-6 / 1e-6 if is_rounded else 1.0
    errors = errors.view(num_slices, -1) + states.abs() * (rounding / probe.norm())
    rows = down.unflatten(1, (num_slices, -1))
    products = (rows * states).sum(-1)
    # The errors of the states are independent, so that their squares add up.
    norms = (rows * errors).norm(dim=-1)
    return torch.stack([products, norms], -1).view(torch.int64)[..., 0]


def _differences(
    tensor: EngineTensor,
    expected: Mapping[_View, Tensor],
    columns: int,
    dtype: torch.dtype,
    step: int,
) -> dict[str, str]:
    """Compares one engine tensor with the policy. Returns a description of the difference for each
    HF tensor in it that differs, by name.

    `expected` has the policy's fingerprints in each view. `columns` is the length of the vector by
    which a whole row, or for packed experts `gate_up_proj`, is multiplied."""
    coefficients = _coefficients(columns, tensor.values is None, dtype, step)
    # A rank that holds a slice of the columns takes the same slice of the coefficients. Not so for
    # packed experts: they take the whole probe, and only the states inside them are split.
    if tensor.gate_up is None:
        coefficients = coefficients.chunk(tensor.num_column_slices)[tensor.column_slice]
    if tensor.product is not None:
        in_engine = tensor.product(coefficients)
    else:
        assert tensor.values is not None
        in_engine = row_fingerprints(as_matrix(tensor.values), coefficients, 1, dtype)[:, 0]
    differences = {}
    for tensor_part in tensor.parts:
        rows = in_engine[tensor_part.start : tensor_part.start + tensor_part.num_rows]
        in_policy = expected[_view(tensor, tensor_part.name)][
            tensor_part.hf_start : tensor_part.hf_start + tensor_part.num_rows, tensor.column_slice
        ]
        same = matches(rows, in_policy, coefficients, dtype)
        if not same.all():
            text = f"{int((~same).sum())} of its {len(same)} rows here differ"
            differences[tensor_part.name] = text
    return differences


def matches(
    in_engine: Tensor, expected: Tensor, coefficients: Tensor, dtype: torch.dtype
) -> Tensor:
    """Returns bool [rows]: whether the engine's hashes (int64) or products match the policy's
    fingerprints `expected`.

    Hashes must be equal. Products may differ, because the engine and this module sum the same terms
    in float32 in different order: the largest difference in 1e5 rows (oneDNN) was 1.4e-7 * |row| *
    |probe|, and 1e-6 * |row| * |probe| is allowed. Rounding a result to bfloat16 changes it by up
    to 2^-8 of itself; twice that is allowed.
    """
    if coefficients.dtype == torch.int64:
        return in_engine == expected
    # The policy's fingerprint is the product and the row's norm, float32 each.
    product, row_norm = expected.contiguous().view(torch.float32).view(-1, 2).unbind(1)
    scale = row_norm * coefficients.float().norm().to(row_norm.device)
    rounding = (dtype.itemsize < 4) * 2.0**-7 * product.abs()
    # Comparisons with NaN are False, so that a NaN in the engine or the policy does not match.
    same: Tensor = (in_engine.float() - product).abs() <= rounding + 1e-6 * scale
    return same


def _raise_if_replicas_differ(digests: list[int], step: int) -> None:
    """Raises WeightProofError if the ranks' digests of the weights differ. Runs on rank 0."""
    differing = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
    if differing:
        raise WeightProofError(
            f"step {step}: the replicas of the policy (model.num_replicas) hold different weights: "
            f"those of rank {', '.join(differing)} are not those of rank 0, likely because an "
            "update ran on some ranks only, or their gradients were not summed over all"
        )


def _raise_if_different(by_rank: list[dict[str, str]], num_tensors: int, step: int) -> None:
    """Raises WeightProofError if any rank found a difference. Runs on rank 0.

    `by_rank` has the result of `_differences` on each rank."""
    ranks: dict[tuple[str, str], list[str]] = {}
    for rank, differences in enumerate(by_rank):
        for name_and_text in differences.items():
            ranks.setdefault(name_and_text, []).append(str(rank))
    if not ranks:
        return
    num_different = len({name for name, _ in ranks})
    descriptions = [
        f"{name} (rank {', '.join(on_ranks)}: {text})"
        for (name, text), on_ranks in list(ranks.items())[:_MAX_DESCRIBED]
    ]
    cause = "the sync left them stale, or put something else there"
    if num_different == num_tensors:
        cause = "the last update did not reach it"
    raise WeightProofError(
        f"step {step}: the engine does not hold the policy's weights in {num_different} of "
        f"{num_tensors} tensors, likely because {cause}: {'; '.join(descriptions)}"
    )

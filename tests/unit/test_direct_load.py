"""Copies of gathered pieces into an engine's matrices, against plain slices of the whole tensor;
and the name that the
weights get on their way, against any other cut of them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_spmd.engine.direct_load import DirectLoad, _Matrix
from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart
from grpo_spmd.engine.weight_proof import rows_hash, weights_id


def blocks(complete: Tensor, ranks: int) -> tuple[Tensor, int]:
    """[ranks, elements] as FSDP deals rows, padding as -1; and the rows of a block."""
    rows = -(-len(complete) // ranks)
    padded = torch.full((ranks * rows, complete.shape[1]), -1.0)
    padded[: len(complete)] = complete
    return padded.view(ranks, -1), rows


def cuts(width: int, chance: random.Random) -> list[tuple[int, int]]:
    bounds = sorted({0, width, *(chance.randint(0, width) for _ in range(chance.randint(0, 5)))})
    return list(itertools.pairwise(bounds))


def test_any_cut_fills_any_slice_of_rows_and_columns() -> None:
    chance = random.Random(0)
    for _ in range(1500):
        ranks, num_rows, columns = (
            chance.randint(1, 5),
            chance.randint(1, 14),
            chance.choice([1, 2, 3, 4, 6]),
        )
        slices = chance.choice([n for n in (1, 2, 3) if columns % n == 0])
        retained, selection, start = (
            chance.randint(1, num_rows),
            chance.randrange(slices),
            chance.randint(0, 2),
        )
        initial = chance.randint(0, num_rows - retained)
        full, width = (
            torch.arange(1.0, num_rows * columns + 1).view(num_rows, columns),
            columns // slices,
        )
        out = torch.zeros(start + retained, width)
        # rows above it, which another tensor fills
        pieces = (
            TensorPart("a", num_rows, initial, start, retained),
            TensorPart("b", start, 0, 0, start),
        )
        matrix = _Matrix(
            EngineTensor("x", pieces, out, None, selection, slices, nn.Module()),
            torch.float32,
        )
        matrix.begin()
        inputs, rows = blocks(full, ranks)
        for low, high in cuts(inputs.shape[1], chance):
            matrix.copy(pieces[0], inputs[:, low:high], low, (rows, columns))
        expected = full[initial : initial + retained, selection * width : (selection + 1) * width]
        assert torch.equal(out[start:], expected), (
            ranks,
            num_rows,
            columns,
            slices,
            initial,
            retained,
        )
        assert not out[:start].any()
        if start:
            with pytest.raises(EngineStateError, match="x was not covered by the policy"):
                matrix.end()
        else:
            matrix.end()


@pytest.mark.parametrize("retained", [torch.float32, torch.bfloat16])
def test_what_comes_unrounded_is_rounded_to_the_engines_format_however_it_is_kept(
    retained: torch.dtype,
) -> None:
    """From one rank's parameters; some layers of a bfloat16 engine keep their bias in float32."""
    bias, out = torch.randn(1, 9), torch.zeros(9, dtype=retained)
    pieces = (TensorPart("a", 9, 0, 0, 9),)
    matrix = _Matrix(EngineTensor("x", pieces, out, layer=nn.Module()), torch.bfloat16)
    matrix.begin()
    matrix.copy(pieces[0], bias, 0, (9, 1))
    matrix.end()
    assert torch.equal(out, bias[0].bfloat16().to(retained))
    assert not torch.equal(out.float(), bias[0])


class Copies(TorchDispatchMode):
    """Launches on a device: copies and what else writes; and what was allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = list[str]()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operators.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_ranks_cost_no_copies_and_nothing_is_allocated() -> None:
    """64 ranks, a layer of 3 fused tensors and a norm, in pieces of a third of a block: one copy
    for each piece of a
    tensor that this rank of 2 holds half of, and one for the rank in the middle of which its half
    ends."""
    layer, rows, columns = nn.Module(), 4 * 66, 8
    names = ["q", "k", "v"]
    sections = tuple(
        TensorPart(name, rows, 0, at * rows // 2, rows // 2) for at, name in enumerate(names)
    )
    layer.weight = nn.Parameter(torch.zeros(3 * rows // 2, columns))
    layer.norm = nn.Parameter(torch.zeros(rows))
    tensors = [
        EngineTensor("qkv", sections, layer.weight, layer=layer),
        EngineTensor("norm", (TensorPart("norm", rows, 0, 0, rows),), layer.norm, layer=layer),
    ]
    direct = DirectLoad(layer, tensors, {name: name for name in (*names, "norm")}, torch.float32)
    assert direct.names == {*names, "norm"}
    full = {name: torch.randn(rows, columns if name != "norm" else 1) for name in direct.names}
    result, pieces = Copies(), list[Any]()
    for name, tensor in full.items():
        inputs, block = blocks(tensor, 64)
        third = -(-inputs.shape[1] // 3)
        pieces += [
            ((name, tensor, None), low, inputs[:, low : low + third])
            for low in range(0, inputs.shape[1], third)
        ]
    assert block == 5
    # Pieces that another way takes are left to be drawn.
    drawn = iter([*pieces, ((), 0, None)])
    with result:
        direct(drawn)
    assert len(list(drawn)) == 1
    expected = torch.cat([full[name][: rows // 2] for name in names])
    assert torch.equal(layer.weight, expected)
    assert torch.equal(layer.norm[:, None], full["norm"])
    copies = result.operators.count("aten.copy_.default")
    # 9 pieces of weights; rows 130 and 131 of the 132 are of the rank in the middle, and in 2 of 3
    # pieces each; the
    # norm: 3 pieces, of whose last block (rows 260 to 264) 4 are there
    assert 12 <= copies <= 12 + 3 * 2 + 3, copies
    created = [
        name for name in result.operators if "empty" in name or "clone" in name or "new_" in name
    ]
    assert created == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_name_does_not_depend_on_the_cut_and_does_on_every_bit_and_place(
    dtype: torch.dtype,
) -> None:
    chance = random.Random(1)
    # more than one chunk of 2^16 elements
    tensors = {"a": torch.randn(300, 500).to(dtype), "b": torch.randn(5).to(dtype)}

    def named(inputs: dict[str, Tensor]) -> str:
        """In any number of pieces, in any order."""
        pieces = [
            int(rows_hash(name, low, tensor[low:high], dtype))
            for name, tensor in inputs.items()
            for low, high in cuts(len(tensor), chance)
        ]
        chance.shuffle(pieces)
        return weights_id(pieces)

    names = {named(tensors) for _ in range(5)}
    assert len(names) == 1
    a, bits = tensors["a"], torch.int32 if dtype == torch.float32 else torch.int16
    highest = 8 * dtype.itemsize - 1
    for bit, place in itertools.product((0, 8, highest), ((0, 0), (0, 1), (1, 0), (299, 499))):
        changed = a.clone()
        changed.view(bits)[place] ^= -1 << bit if bit == highest else 1 << bit
        names.add(named({**tensors, "a": changed}))
    names.add(named({**tensors, "a": a.roll(1, 0)}))
    names.add(named({**tensors, "a": a.roll(1, 1)}))
    names.add(named({**tensors, "a": a[[1, 0, *range(2, 300)]]}))
    swapped = a.clone()
    swapped[0, :5] = tensors["b"]
    names.add(named({"a": swapped, "b": a[0, :5]}))
    names.add(named({"a": a, "c": tensors["b"]}))
    names.add(named({"a": a[:100], "b": a[100:]}))
    assert len(names) == 1 + 12 + 6
    # Unrounded weights have the name of those that the engine gets.
    full = torch.randn(300, 500)
    assert weights_id([int(rows_hash("a", 0, full, dtype))]) == named({"a": full.to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_of_two_weights_show_in_the_name(dtype: torch.dtype) -> None:
    """They are the highest bits, which products with odd numbers modulo 2^32 would lose in
    pairs."""
    chance = random.Random(2)
    tensor = torch.randn(512, 1024).to(dtype)

    def name(*places: int) -> str:
        """Of the weights with the signs of these elements turned."""
        changed = tensor.clone()
        changed.view(-1)[list(places)] *= -1
        return weights_id([int(rows_hash("a", 0, changed, dtype))])

    pairs = [chance.sample(range(tensor.numel()), 2) for _ in range(40)]
    pairs += [[0, 1], [0, 1024], [5, 5 + (1 << 17)]]  # a row, a column, a place
    names = {
        name(),
        *(name(*pair) for pair in pairs),
        name(0, 1, 1024, 1026),
        name(*chance.sample(range(tensor.numel()), 1000)),
    }
    assert len(names) == 1 + len(pairs) + 2


class _Method(nn.Module):
    """vLLM's method of a layer of experts, which is a module (CustomOp, 0.32)."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise AssertionError("copies do not need it")


def test_plain_experts_are_copied_and_a_model_that_derives_more_is_not() -> None:
    """As Triton's kernels take them; another module's hook may derive weights from any layer."""
    gate_up, down = torch.randn(3, 16, 5), torch.randn(3, 5, 8)
    layer = nn.Module()
    layer.w13_weight, layer.w2_weight = (
        nn.Parameter(torch.zeros(shape)) for shape in (gate_up.shape, down.shape)
    )
    layer.quant_method = _Method()
    model = nn.Module()
    model.experts = layer
    tensors = [
        EngineTensor(name, (TensorPart(name, rows, 0, 0, rows),), weight, layer=layer)
        for name, weight, rows in (
            ("gate_up", layer.w13_weight, 48),
            ("down", layer.w2_weight, 15),
        )
    ]
    names = {name: name for name in ("gate_up", "down")}
    direct = DirectLoad(model, tensors, names, torch.float32)
    assert direct.names == set(names)
    assert direct.covered == {"experts.w13_weight", "experts.w2_weight"}
    # From two ranks, of which each has two experts, the second one a padded one.
    pieces: list[Any] = []
    for name, whole in (("gate_up", gate_up), ("down", down)):
        padded = torch.cat([whole, torch.full_like(whole[:1], -1.0)])
        pieces.append(((name, whole, None), 0, padded.view(2, -1)))
    direct(pieces)
    assert torch.equal(layer.w13_weight, gate_up)
    assert torch.equal(layer.w2_weight, down)
    model.other = _Method()
    assert not DirectLoad(model, tensors, names, torch.float32).names

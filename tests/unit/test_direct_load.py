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
from grpo_spmd.engine.gather import WeightDigest, weights_id
from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart


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
    with result:
        direct(pieces)
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
    stretch = WeightDigest(torch.device("cpu")).stretch(dtype.itemsize)  # 2^17 words
    assert stretch == 2**20 // dtype.itemsize
    chance, tensors = (
        random.Random(1),
        {"a": torch.randn(2 * stretch + 7).to(dtype), "b": torch.randn(5).to(dtype)},
    )

    def named(inputs: dict[str, Tensor], num_ranks: int) -> str:
        """In pieces of any size and alignment, in any order, over so many ranks."""
        digests = [WeightDigest(torch.device("cpu")) for _ in range(num_ranks)]
        pieces = [
            (name, *bounds)
            for name, tensor in inputs.items()
            for bounds in cuts(len(tensor), chance)
        ]
        chance.shuffle(pieces)
        for name, low, high in pieces:
            chance.choice(digests).add(name, low, inputs[name][low:high])
        return weights_id([digest.totals() for digest in digests])

    names = {named(tensors, ranks) for ranks in (1, 1, 2, 5)}
    assert len(names) == 1
    a, bits = tensors["a"], torch.int32 if dtype == torch.float32 else torch.int16
    for bit, position in itertools.product(
        (0, 8, 8 * dtype.itemsize - 1), (0, 1, 3, stretch + 3, len(a) - 1)
    ):
        changed = a.clone()
        changed.view(bits)[position] ^= -1 << bit if bit == 8 * dtype.itemsize - 1 else 1 << bit
        names.add(named({**tensors, "a": changed}, 2))
    names.add(named({**tensors, "a": a.roll(1)}, 1))
    names.add(named({**tensors, "a": torch.cat([a[stretch:], a[:stretch]])}, 1))  # by a stretch
    in_rows = 1024 // dtype.itemsize  # elements of a row of the sums
    names.add(
        named(
            {**tensors, "a": torch.cat([a[in_rows : 2 * in_rows], a[:in_rows], a[2 * in_rows :]])},
            1,
        )
    )
    swapped = a.clone()
    swapped[:5] = tensors["b"]
    names.add(named({"a": swapped, "b": a[:5]}, 1))
    names.add(named({"a": a, "c": tensors["b"]}, 1))
    assert len(names) == 1 + 15 + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_of_two_weights_show_in_the_name(dtype: torch.dtype) -> None:
    """They are the highest bits of words, which any product of words with odd numbers would lose in
    pairs."""
    chance, per_word = random.Random(2), 8 // dtype.itemsize
    tensor = torch.randn(1 << 19).to(dtype)
    num_words = len(tensor) // per_word

    def name(*words: int) -> str:
        """Of the weights with the signs of the last elements of these words turned."""
        changed = tensor.clone()
        changed[[word * per_word + per_word - 1 for word in words]] *= -1
        digest = WeightDigest(torch.device("cpu"))
        digest.add("a", 0, changed)
        return weights_id([digest.totals()])

    pairs = [chance.sample(range(num_words), 2) for _ in range(40)]
    pairs += [
        [0, 1],
        [0, 128],
        [5, 5 + (1 << 17)] if num_words > 1 << 17 else [5, 6],
    ]  # a row, a column, a place
    names = {
        name(),
        *(name(*pair) for pair in pairs),
        name(0, 1, 128, 130),
        name(*chance.sample(range(num_words), 1000)),
    }
    assert len(names) == 1 + len(pairs) + 2

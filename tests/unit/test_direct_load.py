"""Copies of gathered tensors into an engine's, against plain slices; and the name that the weights
get on their way, against any other cut of them."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from grpo_spmd.engine.reload import DirectLoad
from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart
from grpo_spmd.engine.weight_proof import rows_hash, weights_id


def cuts(width: int, chance: random.Random) -> list[tuple[int, int]]:
    bounds = sorted({0, width, *(chance.randint(0, width) for _ in range(chance.randint(0, 5)))})
    return list(itertools.pairwise(bounds))


def test_any_slice_of_rows_and_columns_is_filled() -> None:
    chance = random.Random(0)
    for _ in range(300):
        num_rows, columns = chance.randint(1, 14), chance.choice([1, 2, 3, 4, 6])
        slices = chance.choice([n for n in (1, 2, 3) if columns % n == 0])
        retained, selection = chance.randint(1, num_rows), chance.randrange(slices)
        start, initial = chance.randint(0, 2), chance.randint(0, num_rows - retained)
        full = torch.arange(1.0, num_rows * columns + 1).view(num_rows, columns)
        layer, width = nn.Module(), columns // slices
        layer.weight = nn.Parameter(torch.zeros(start + retained, width))
        # rows above it, which another tensor fills
        above_it = [TensorPart("b", start, 0, 0, start)] if start else []
        parts = (TensorPart("a", num_rows, initial, start, retained), *above_it)
        tensor = EngineTensor("x", parts, layer.weight, None, selection, slices, layer)
        direct = DirectLoad(layer, [tensor], {"a": "a", "b": "b"}, torch.float32)
        above = torch.full((start, columns), -1.0)
        later = iter([("a", full), *([("b", above)] if start else []), ("c", full)])
        direct(later)
        expected = full[initial : initial + retained, selection * width : (selection + 1) * width]
        assert torch.equal(layer.weight[start:], expected)
        assert torch.equal(layer.weight[:start], above[:, :width])
        # What another way takes is left to be drawn.
        assert [name for name, _ in later] == ["c"]
        if start:
            with pytest.raises(EngineStateError, match="b was not covered by the policy"):
                direct([("a", full)])


def test_each_gathered_tensor_is_dropped_before_the_next_is_made() -> None:
    """Two whole tensors of a large model at a time would be gigabytes of a GPU's memory."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(12, 4))
    parts = tuple(TensorPart(name, 4, 0, 4 * i, 4) for i, name in enumerate("abc"))
    tensor = EngineTensor("x", parts, layer.weight, layer=layer)
    num_alive: list[int] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        made: list[weakref.ref[Tensor]] = []
        for value, name in enumerate("abc", start=1):
            num_alive.append(sum(reference() is not None for reference in made))
            full = torch.full((4, 4), float(value))
            made.append(weakref.ref(full))
            yield name, full
            del full

    DirectLoad(layer, [tensor], {name: name for name in "abc"}, torch.float32)(gathered())
    assert num_alive == [0, 0, 0]
    assert layer.weight[::4, 0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("retained", [torch.float32, torch.bfloat16])
def test_what_comes_unrounded_is_rounded_to_the_engines_format_however_it_is_kept(
    retained: torch.dtype,
) -> None:
    """From one rank's parameters; some layers of a bfloat16 engine keep their bias in float32."""
    bias, layer = torch.randn(9), nn.Module()
    layer.bias = nn.Parameter(torch.zeros(9, dtype=retained))
    tensor = EngineTensor("x", (TensorPart("a", 9, 0, 0, 9),), layer.bias, layer=layer)
    DirectLoad(layer, [tensor], {"a": "a"}, torch.bfloat16)([("a", bias)])
    assert torch.equal(layer.bias, bias.bfloat16().to(retained))
    assert not torch.equal(layer.bias.float(), bias)


@pytest.mark.parametrize("shape", [(8, 4), (1, 4), (9, 3), (9, 1)])
def test_a_tensor_that_is_too_small_is_neither_spread_nor_leaves_stale_rows(
    shape: tuple[int, int],
) -> None:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(18, 4))
    parts = (TensorPart("a", 9, 0, 0, 9), TensorPart("b", 9, 0, 9, 9))
    tensor = EngineTensor("x", parts, layer.weight, layer=layer)
    direct = DirectLoad(layer, [tensor], {"a": "a", "b": "b"}, torch.float32)
    with pytest.raises(EngineStateError, match="x was not covered by the policy"):
        direct([("a", torch.randn(9, 4)), ("b", torch.randn(shape))])


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
    direct([("gate_up", gate_up), ("down", down)])
    assert torch.equal(layer.w13_weight, gate_up)
    assert torch.equal(layer.w2_weight, down)
    model.other = _Method()
    assert not DirectLoad(model, tensors, names, torch.float32).names

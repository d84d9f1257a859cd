"""When a sync goes which way and is proved, what it counts, and that a bucket's copies do not wait
for the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from grpo_spmd.engine import weight_proof, weight_sync
from grpo_spmd.engine.weight_sync import WeightSync, gather_tensors
from grpo_spmd.model.lora import Shard
from grpo_spmd.records import SyncStats
from tests.support.full_tensors import gather_full_tensors


class Engine:
    """What a sync asks of one; draws all that it is given."""

    takes_adapters, needs_weights, dtype = False, True, torch.float32

    def __init__(self) -> None:
        self.way, self.copied, self.loaded = "", list[Any](), dict[str, Tensor]()

    def tensors(self, _: Any) -> list[Any]:
        return []

    def wake_weights(self) -> None: ...
    def wake_kv_cache(self) -> None: ...

    def load_weights(self, weights: Any, step: int, direct: Any, gathered: Any) -> None:
        self.way = "loader" if direct is None else "direct"
        # One tensor is copied.
        self.copied = [] if direct is None else [next(gathered)]
        self.loaded = dict(weights)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of one replica, all of which have what this one has; what is on its way is noted."""
    world = SimpleNamespace(size=1, events=list[str]())

    def all_gather(piece: Tensor, group: object) -> list[Any]:
        world.events.append("start")
        piece[1:] = piece[0]
        return [None]

    def wait_for(works: list[Any]) -> None:
        if works:
            world.events.append("wait")
            works.clear()

    monkeypatch.setattr(weight_sync, "start_all_gather", all_gather)
    monkeypatch.setattr(weight_sync, "wait_for", wait_for)
    monkeypatch.setattr(weight_sync, "num_shards", lambda parameter: world.size)
    monkeypatch.setattr(weight_proof, "is_first_replica", lambda parameter: True)
    monkeypatch.setattr(weight_proof, "first_matrix_row", lambda parameter: 0)
    monkeypatch.setattr(weight_sync, "shard_group", lambda parameter: None)
    monkeypatch.setattr(weight_sync.dist, "get_rank", lambda group: 0)
    return world


def entry(name: str, tensor: Tensor, ranks: int = 1) -> Any:
    return Shard(name, cast(Any, tensor), lambda: tensor[: len(tensor) // ranks])


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch, ranks: SimpleNamespace) -> SimpleNamespace:
    """WeightSync over three tensors, of which "b" can be copied directly; its proofs are noted."""
    tensors = {name: torch.randn(8, 4) for name in "abc"}
    result = SimpleNamespace(engine=Engine(), tensors=tensors, proved=0, lists=0, asked=0)

    def prove(*_: Any, is_first: bool) -> float:
        result.proved += 1
        return 1.0

    def direct_load(_: WeightSync) -> Any:
        result.lists += 1
        return SimpleNamespace(names={"b"})

    def on_rank0(fn: Any, value: Any) -> Any:
        result.asked += 1
        return fn([value])

    monkeypatch.setattr(weight_sync, "refuse_unsynced_tensors", lambda *_: None)
    monkeypatch.setattr(weight_sync, "prove_weights", prove)
    monkeypatch.setattr(weight_sync, "on_rank0", on_rank0)
    monkeypatch.setattr(WeightSync, "_proved_direct_load", direct_load)
    monkeypatch.setattr(
        weight_sync,
        "hf_named_shards",
        lambda _: (entry(name, tensor, ranks.size) for name, tensor in tensors.items()),
    )
    result.policy = SimpleNamespace(model=nn.Linear(1, 1), saved={})
    return result


def syncs(synced: SimpleNamespace, num_steps: int, every: int) -> str:
    """Of each step: l for loader or d for direct, a capital where it was proved."""
    of, ways = WeightSync(synced.policy, cast(Any, synced.engine), 64, every), ""
    for step in range(1, num_steps + 1):
        synced.proved = 0
        stats = of.sync(step)
        assert (stats.proof_s > 0) == (synced.proved == 1)
        assert (stats.weights_id, synced.asked) == ("", 0)  # nobody asked for it
        way = synced.engine.way[0]
        ways += way.upper() if synced.proved else way
    return ways


def test_adapters_on_another_base_have_another_name(
    synced: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is sent, and named, once; what is named later is the same base with its adapters."""
    adapters = [entry("x.lora_A.weight", torch.randn(4, 4))]
    monkeypatch.setattr(weight_sync, "adapter_shards", lambda *_: adapters)
    monkeypatch.setattr(weight_sync, "gather_adapters", lambda shards, dtype: {})
    synced.policy.lora = None
    engine = synced.engine
    engine.takes_adapters, engine.load_adapters = True, lambda adapters, step: None

    def names() -> list[str]:
        of, result = WeightSync(synced.policy, cast(Any, engine), 64, is_named=True), list[str]()
        for step in (1, 2):
            engine.needs_weights = step == 1
            result.append(of.sync(step).weights_id)
        return result

    initial = names()
    assert initial[0] == initial[1]
    synced.tensors["a"][0, 0] += 1
    assert names()[0] == names()[1] != initial[0]
    synced.tensors["a"][0, 0] -= 1
    adapters[0][1][0, 0] += 1
    assert names()[0] != initial[0]


def test_the_proofs_see_both_ways_in_turn_and_direct_copies_also_after_many_of_them(
    synced: SimpleNamespace,
) -> None:
    assert syncs(synced, 5, 0) == "LDDdd"
    assert syncs(synced, 6, 1) == "LDLDLD"
    # Due at 1, 3, 4, 8, 12, 16: brought by the loader and copied by turns. What the loader brought
    # is copied at the next step by a map that was made anew, which is proved too.
    assert syncs(synced, 17, 4) == "LDDLDddDdddLDddDd"
    assert syncs(synced, 4, 2) == "LDLD"


def test_weights_are_named_where_that_is_asked_for_alone(
    synced: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = WeightSync(synced.policy, cast(Any, synced.engine), 64, is_named=True)
    initial, second = (
        of.sync(1).weights_id,
        of.sync(2).weights_id,
    )  # by the loader, and partly directly
    assert initial == second
    assert len(initial) == 16
    synced.tensors["b"][0, 0] += 1
    assert of.sync(3).weights_id != initial
    assert synced.asked == 3
    synced.asked = 0
    monkeypatch.setattr(weight_sync, "local_weights_hash", None)
    assert syncs(synced, 4, 0) == "LDDd"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sync_that_is_partly_direct_counts_as_one_that_is_not(
    synced: SimpleNamespace, ranks: SimpleNamespace, size: int
) -> None:
    """96 elements in buckets of 20: two rows of buckets would take more."""
    ranks.size = size
    of = WeightSync(synced.policy, cast(Any, synced.engine), 80)
    initial, second = of.sync(1), of.sync(2)
    assert (initial.bytes, initial.num_collectives) == (second.bytes, second.num_collectives)
    assert initial.bytes == 3 * 32 * 4
    assert initial.num_collectives == (-(-96 // 20) if size > 1 else 0)
    assert [name for name, _ in synced.engine.copied] == ["b"]
    assert list(synced.engine.loaded) == ["a", "c"]
    for name, tensor in (*synced.engine.copied, *synced.engine.loaded.items()):
        assert torch.equal(tensor, synced.tensors[name][: 8 // size].repeat(size, 1))


def test_the_next_bucket_is_under_way_while_one_is_copied(ranks: SimpleNamespace) -> None:
    """So on a GPU, where the copies are issued on the stream of the host and an all-gather runs on
    one of its own."""
    ranks.size = 2
    entries = [entry("a", torch.randn(8, 4), 2), entry("b", torch.randn(6, 4), 2)]
    # 8 columns of each rank: 4 buckets, of which tensor "a" has the first two.
    for name, _ in gather_tensors(entries, torch.float32, 64, SyncStats()):
        ranks.events.append(name)
    under_way = ["wait", "start"] * 2
    assert ranks.events == ["start", *under_way, "a", "wait", "start", "wait", "b"]


def test_one_rank_needs_no_bucket(ranks: SimpleNamespace) -> None:
    entries = [entry("a", torch.randn(2**18, 4)), entry("b", torch.randn(3, 4))]
    for dtype in (torch.float32, torch.bfloat16):
        stats = SyncStats()
        tensors = dict(gather_tensors(entries, dtype, 64, stats))
        for name, tensor, _ in entries:
            assert torch.equal(tensors[name], tensor.to(dtype))
        # What is copied at once are the parameters themselves.
        of_one = dict(gather_tensors(entries, dtype, 64, SyncStats(), copied_at_once=["b"]))
        held = entries[1].parameter
        assert (of_one["b"].data_ptr(), of_one["b"].dtype) == (held.data_ptr(), held.dtype)
        assert of_one["a"].data_ptr() != entries[0].parameter.data_ptr()
        assert (stats.bytes, stats.num_collectives) == ((2**20 + 12) * dtype.itemsize, 0)
    assert ranks.events == []


def test_full_tensors_are_new_ones(ranks: SimpleNamespace) -> None:
    entries = [
        entry("a", torch.randn(8, 4)),
        entry("b", torch.randn(0, 4)),
        entry("c", torch.randn(5, 4)),
    ]
    full = dict(gather_full_tensors(entries, torch.float32, 64, SyncStats()))
    assert torch.equal(full["a"], entries[0][1])
    assert full["a"].data_ptr() != entries[0][1].data_ptr()

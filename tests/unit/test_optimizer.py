"""AdamW with 8-bit moments: its arithmetic by hand, its independence of how ranks cut a tensor, and
its distance from AdamW."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from grpo_spmd.config.schema import OptimizerConfig
from grpo_spmd.model import optimizer as module
from grpo_spmd.model.optimizer import AdamW8bit, build_optimizer, initial_state

Shape = tuple[int, ...]


def adamw_8bit(parameters: list[nn.Parameter], **options: float) -> AdamW8bit:
    decay = options.pop("weight_decay", 0.0)
    groups = [{"params": parameters, "weight_decay": decay}]
    return AdamW8bit(groups, lr=options.get("lr", 1e-2), betas=(0.9, 0.95))


def test_two_steps_by_hand() -> None:
    """Blocks of one row: gradients 1, -1/4, 0 of a block whose largest is 1."""
    parameter = nn.Parameter(torch.tensor([[0.0, 0.0, 1.0]]))
    optimizer = adamw_8bit([parameter], weight_decay=0.5)
    parameter.grad = torch.tensor([[1.0, -0.25, 0.0]])
    optimizer.step()
    state = optimizer.state[parameter]
    # m = 0.1 g, v = 0.05 g^2; the largest of each is its block's scale
    assert state["exp_avg_scale"].tolist() == [[pytest.approx(0.1)]]
    assert state["exp_avg_sq_scale"].tolist() == [[pytest.approx(0.05)]]
    # m: sqrt(1/4) x 127 = 63.5, and the first step's threshold 0.618 makes it 64.1; v: sqrt(1/16)
    # x 255 = 63.75, with 0.618 64.4; the smallest square is 1 and not 0
    assert state["exp_avg"].tolist() == [[127, -64, 0]]
    assert state["exp_avg_sq"].tolist() == [[255, 64, 1]]
    # without its bias m is g and v is g^2: a step of lr, whatever the codes; decay 0.01 x 0.5
    assert parameter.tolist() == [[pytest.approx(-0.01), pytest.approx(0.01), pytest.approx(0.995)]]
    parameter.grad = torch.zeros(1, 3)
    optimizer.step()
    # m = 0.9 x (0.1, -(64/127)^2 x 0.1, 0) / (1 - 0.81), v = 0.95 x 0.05 (1, (64/255)^2, ..) /
    # (1 - 0.9025): 0.473684 / sqrt(0.487179) = 0.678653; the second: 0.120293 / 0.175180 = 0.686682
    assert parameter[0, 0].item() == pytest.approx(-0.01 * 0.995 - 0.00678653, rel=1e-5)
    assert parameter[0, 1].item() == pytest.approx(0.01 * 0.995 + 0.00686682, rel=1e-5)


def trained(shape: Shape, cuts: int, chunk: int = 1 << 16) -> tuple[Tensor, ...]:
    """Weights, codes and scales after 8 steps of a tensor that FSDP2 has dealt to so many ranks."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(shape, generator=generator)
    gradients = torch.randn(8, *shape, generator=generator)
    parameters = [nn.Parameter(rows.clone()) for rows in whole.chunk(cuts)]
    optimizer = adamw_8bit(parameters, weight_decay=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._STEP_CHUNK, "cpu", chunk)
        for gradient in gradients:
            for parameter, rows in zip(parameters, gradient.chunk(cuts), strict=True):
                parameter.grad = rows.clone()
            optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    names = [name for name in states[0] if name != "step"]
    moments = (torch.cat([state[name] for state in states]) for name in names)
    return torch.cat([parameter.detach() for parameter in parameters]), *moments


@pytest.mark.parametrize("shape", [(64, 256), (64, 320), (7, 100), (97,), (5, 6, 130), (9, 3)])
def test_nothing_depends_on_the_number_of_ranks_or_on_chunks(shape: Shape) -> None:
    whole = trained(shape, 1)
    assert len(whole) == (3 if len(shape) == 1 else 5)
    for other in [trained(shape, cuts) for cuts in (2, 3, 5)] + [trained(shape, 1, chunk=1)]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(whole, other, strict=True))


def losses(make: Callable[[list[nn.Parameter]], Optimizer]) -> tuple[float, Tensor]:
    """The mean loss of the last 30 of 300 steps of a small network, and its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        student = nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32)
        )
        teacher = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 32))
    optimizer = make(list(student.parameters()))
    generator = torch.Generator().manual_seed(1)
    total = 0.0
    for step in range(300):
        inputs = torch.randn(128, 64, generator=generator)
        loss = (student(inputs) - teacher(inputs).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / 30 if step >= 270 else 0.0
    return total, torch.cat([p.detach().flatten() for p in student.parameters()])


def test_300_steps_stay_beside_adamw() -> None:
    plain, weights = losses(lambda p: AdamW(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0))
    coded, ours = losses(lambda p: adamw_8bit(p, lr=1e-3))
    assert plain < 0.01  # it has learned: 0.11 at first
    assert coded == pytest.approx(plain, rel=1e-2)
    assert float((ours - weights).norm() / weights.norm()) < 0.02


def test_a_mean_that_moves_by_less_than_half_a_code_still_moves() -> None:
    """200 steps whose gradient is 0.7 of the block's largest, after 200 of the same size: rounded
    to the nearest code the square would stay far from 0.49."""
    parameter = nn.Parameter(torch.zeros(1, 2))
    optimizer = adamw_8bit([parameter])
    for step in range(400):
        parameter.grad = torch.tensor([[1.0, 1.0 if step < 200 else 0.7]])
        optimizer.step()
    state = optimizer.state[parameter]
    square = (state["exp_avg_sq"][0, 1].item() / 255) ** 2 * state["exp_avg_sq_scale"].item()
    assert square == pytest.approx(0.49, rel=0.02)


def test_bytes_of_a_parameter_and_where_moments_stay_float32() -> None:
    def num_bytes(shape: Shape, name: str) -> float:
        parameter = nn.Parameter(torch.zeros(shape))
        model = nn.ParameterList([parameter])
        optimizer, _ = build_optimizer(model, OptimizerConfig(name=name))  # type: ignore[arg-type]
        state = initial_state(optimizer, parameter)
        return sum(value.nbytes for value in state.values() if value.ndim) / parameter.numel()

    assert num_bytes((16, 1024), "adamw") == 8
    assert num_bytes((16, 1024), "adamw_8bit") == 2 + 8 / 128
    assert num_bytes((4, 16, 1024), "adamw_8bit") == 2 + 8 / 128
    assert num_bytes((16, 64), "adamw_8bit") == 2 + 8 / 64
    assert num_bytes((1024,), "adamw_8bit") == 8

"""Writes and reads token_scores/step_N.jsonl: per-token figures of a step's rollouts.

A token has two scores: the difference of its logprobs (policy minus engine), and the entropy of the
policy's distribution. Both are measured before the step's first update. Each rollout has one line,
in a file that is named like the rollout's dump in rollouts/: {"rollout_id", "difference_mean",
"difference_max", "difference", "entropy"}, with "advantages" if these differ from token to token,
and "loss_mask" if some token does not count in the loss. Per-token values are base64 of
little-endian float16 (the mask: of one byte, 0 or 1), one per sampled token, in the order of the
dump's `completion_ids`. A rollout has no line if it was not trained on, or if it was not scored
before the first update (with `loss.old_logprobs: engine`, from the second mini-batch on). Reading
imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.records import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

_Floats = npt.NDArray[np.float32]
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e39)]


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The scores of one rollout.

    Arrays have one value per sampled token: float32 values that were rounded to float16.
    """

    rollout_id: int
    difference: _Floats
    """The policy's logprob minus the engine's."""
    entropy: _Floats
    """The entropy of the policy's distribution at the token, in nats."""
    difference_mean: float | None
    """Mean of the absolute differences, not rounded; None if one is not finite."""
    difference_max: float | None
    """The largest absolute difference."""
    advantages: _Floats | None
    """The advantage of each token; None if all tokens have the rollout's."""
    loss_mask: npt.NDArray[np.bool_] | None
    """Whether each token counts in the loss; None if all do."""


class TokenScoresError(RuntimeError):
    """The scores to be written are not those that the update computed."""


class KeptScores:
    """Collects a step's scores on this rank and keeps them on the device until `lines`."""

    def __init__(self) -> None:
        # (micro-batch, logprobs, entropy) by the id() of the micro-batch, which stays unique
        # because the tuple keeps the micro-batch alive
        self._kept: dict[int, tuple[MicroBatch, Tensor, Tensor]] = {}

    def __call__(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Keeps the policy's first scores of a micro-batch. Does not wait for the device."""
        # setdefault keeps the first scores: later epochs score it again, after an update
        self._kept.setdefault(id(micro_batch), (micro_batch, logprobs.detach(), entropy.detach()))

    def lines(self, tilt_squares: float | None = None) -> list[bytes]:
        """Returns the lines of this rank's rollouts in the order of their ids. Waits for the device
        once.

        `tilt_squares` is the update's own sum of (logprob + entropy)^2 over the tokens that count
        in the loss (losses.mismatch_sums); give it only if there was exactly one update. Raises
        TokenScoresError if the kept scores have another sum, for example because they are shifted
        by a token."""
        # imported here, since commands that only read a run folder must not need torch
        import torch

        entries = [entry for entry in self._kept.values() if entry[0].rollout_ids]
        if not entries:
            return []
        rows = []
        for micro_batch, logprobs, entropy in entries:
            scores = (
                logprobs - micro_batch.rollout_logprobs,
                entropy,
                micro_batch.advantages,
                micro_batch.loss_mask,
                micro_batch.rollout_logprobs,
                micro_batch.sequence_index,
            )
            # one float32 tensor, one copy to the host: sequence indices below 2^24 stay exact
            rows.append(torch.stack([column.float() for column in scores]))
        *columns, rollout_logprobs, sequence_index = torch.cat(rows, dim=1).cpu().numpy()
        # each micro-batch counts from 0, so the index need not change at its first token
        is_begin = np.diff(sequence_index, prepend=-1) != 0
        is_begin[np.cumsum([0, *(len(logprobs) for _, logprobs, _ in entries[:-1])])] = True
        ids = [rollout_id for entry in entries for rollout_id in entry[0].rollout_ids]
        names = [name for name, _, _ in _ARRAYS]
        by_name = dict(zip(names, columns, strict=True))
        if tilt_squares is not None:
            _check_squares(by_name, rollout_logprobs, tilt_squares)
        lines = _encode_lines(ids, np.flatnonzero(is_begin), by_name)
        return [line for _, line in sorted(zip(ids, lines, strict=True))]


def _check_squares(
    columns: Mapping[str, _Floats], rollout_logprobs: _Floats, expected: float
) -> None:
    """Raises TokenScoresError if the columns do not belong to the tokens that the update scored."""
    # As in losses.mismatch_sums, the logprob is the mean of the policy's and the engine's.
    surprise = rollout_logprobs + columns["difference"] / 2 + columns["entropy"]
    total = float(np.square(surprise[columns["loss_mask"] > 0], dtype=np.float64).sum())
    # The tolerance is for float32 sums in another order. A sum that is NaN passes.
    if abs(total - expected) > 1e-3 * max(expected, 1.0):
        raise TokenScoresError(
            f"token_scores: the sum of (logprob + entropy)^2 over this rank's tokens is {total:.6g}"
            f", and {expected:.6g} in the update: a fault of this program, please report it; "
            "logging.rollouts_every_steps=0 writes none"
        )


def _encode_lines(
    ids: Sequence[int], begins: npt.NDArray[np.int64], columns: dict[str, _Floats]
) -> Iterator[bytes]:
    """Yields the line of each rollout; rollout i begins at token begins[i] of the columns.

    Means and maxima are computed for all rollouts at once: one call of NumPy for each rollout,
    which may have few tokens, would be slow.
    """
    sizes = np.abs(columns["difference"])
    ends = np.append(begins[1:], len(sizes))
    means = np.add.reduceat(sizes, begins, dtype=np.float64) / (ends - begins)
    maxima = np.maximum.reduceat(sizes, begins)
    advantages = columns["advantages"]
    # whether each rollout's line has the optional columns
    is_written = {
        "advantages": np.maximum.reduceat(advantages, begins)
        != np.minimum.reduceat(advantages, begins),
        "loss_mask": np.minimum.reduceat(columns["loss_mask"], begins) == 0,
    }
    # values beyond 65504 become infinite
    with np.errstate(over="ignore"):
        packed = {name: columns[name].astype(stored) for name, stored, _ in _ARRAYS}
    for i, rollout_id in enumerate(ids):
        values: dict[str, object] = {
            "rollout_id": rollout_id,
            # what is not finite becomes null
            "difference_mean": float(means[i]),
            "difference_max": float(maxima[i]),
        }
        for name, array in packed.items():
            if name not in is_written or is_written[name][i]:
                # msgspec writes and reads bytes as base64
                values[name] = array[begins[i] : ends[i]].tobytes()
        yield msgspec.json.encode(values)


class _ScoresLine(msgspec.Struct, gc=False):
    rollout_id: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    difference: bytes
    entropy: bytes
    difference_mean: _Size | None
    difference_max: _Size | None
    advantages: bytes | None = None
    loss_mask: bytes | None = None


_DECODER = msgspec.json.Decoder(_ScoresLine)
# (field, type in the file, type in TokenScores)
_ARRAYS = (
    ("difference", "<f2", np.float32),
    ("entropy", "<f2", np.float32),
    ("advantages", "<f2", np.float32),
    ("loss_mask", "u1", np.bool_),
)


def parse_scores(line: bytes, line_name: str) -> TokenScores:
    """Returns the scores of one line.

    Raises ConfigError, whose message begins with `line_name` ("FILE:NUMBER").
    """
    try:
        values = msgspec.structs.asdict(_DECODER.decode(line))
        arrays = {
            # ValueError if the bytes are no whole number of values
            name: np.frombuffer(values[name], stored).astype(loaded)
            for name, stored, loaded in _ARRAYS
            if values[name] is not None
        }
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the numbers of tokens differ: {lengths}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{line_name}: {error}; this is no file of token scores") from None
    return TokenScores(**values | arrays)

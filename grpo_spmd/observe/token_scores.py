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
    """The scores of one rollout's tokens.

    Arrays have one value per sampled token. The file has them as float16, so the float32 values are
    rounded.
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
    """Keeps a step's scores on this rank's device until `lines` turns them into lines.

    The updater calls it with each micro-batch that it scores.
    """

    def __init__(self) -> None:
        """Begins without scores; there is a new object for each step."""
        # (micro-batch, logprobs, entropy) by the id() of the micro-batch, which stays unique
        # because the tuple keeps the micro-batch alive
        self._kept: dict[int, tuple[MicroBatch, Tensor, Tensor]] = {}

    def __call__(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Keeps the policy's first scores of a micro-batch, float [C] for its C sampled tokens.

        Does not wait for the device.
        """
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
        lines = dict[int, bytes]()
        total = 0.0
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
        sizes = [len(logprobs) for _, logprobs, _ in entries]
        content = torch.cat(rows, dim=1).cpu().numpy()
        columns = np.split(content, np.cumsum(sizes)[:-1], axis=1)
        for (micro_batch, _, _), row in zip(entries, columns, strict=True):
            total += _sum_of_squares(row)
            # Index of each rollout's first token: the sequence index grows there.
            begins = np.flatnonzero(np.diff(row[-1], prepend=-1))
            parts = np.split(row[:4], begins[1:], axis=1)
            for rollout_id, part in zip(micro_batch.rollout_ids, parts, strict=True):
                lines[rollout_id] = _encode_line(rollout_id, part)
        # The tolerance is for float32 sums in another order. Sums that are NaN cannot be compared,
        # and pass.
        if tilt_squares is not None and abs(total - tilt_squares) > 1e-3 * max(tilt_squares, 1.0):
            raise TokenScoresError(
                "token_scores: the sum of (logprob + entropy)^2 over this rank's tokens is "
                f"{total:.6g}, and {tilt_squares:.6g} in the update: a fault of this program, "
                "please report it; logging.rollouts_every_steps=0 writes none"
            )
        return [lines[rollout_id] for rollout_id in sorted(lines)]


def _sum_of_squares(row: _Floats) -> float:
    """Returns the sum of (logprob + entropy)^2 over the tokens of a micro-batch that count.

    As in losses.mismatch_sums, the logprob is the mean of the policy's and the engine's.
    """
    difference, entropy, _, loss_mask, rollout_logprobs, _ = row
    surprise = rollout_logprobs + difference / 2 + entropy
    return float(np.square(surprise[loss_mask > 0], dtype=np.float64).sum())


def _encode_line(rollout_id: int, columns: _Floats) -> bytes:
    """Returns the line of a rollout.

    `columns` is [4, tokens of the rollout]: the arrays of _ARRAYS, in the same order.
    """
    difference, _, advantages, loss_mask = columns
    sizes = np.abs(difference)
    # what is not finite becomes null
    values: dict[str, object] = {
        "rollout_id": rollout_id,
        "difference_mean": float(sizes.mean(dtype=np.float64)),
        "difference_max": float(sizes.max()),
    }
    is_left_out = {"advantages": np.ptp(advantages) == 0, "loss_mask": loss_mask.all()}
    # values beyond 65504 become infinite
    with np.errstate(over="ignore"):
        for (name, stored, _), array in zip(_ARRAYS, columns, strict=True):
            if not is_left_out.get(name):
                # msgspec writes and reads bytes as base64
                values[name] = array.astype(stored).tobytes()
    return msgspec.json.encode(values)


class _ScoresLine(msgspec.Struct, gc=False):
    """The fields of a line, with the types that a reader checks. Bytes are base64 in JSON."""

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

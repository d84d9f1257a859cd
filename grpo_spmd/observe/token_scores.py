"""token_scores/step_N.jsonl: of each token that was trained on, how far engine and policy were apart, and the policy's
entropy, both before the step's first update; a line a rollout, beside its dump. Imports no torch.

A line is {"rollout_id", "difference_mean", "difference_max", "difference", "entropy"}, with "advantages" where these
differ from token to token, and "loss_mask" where a token does not count. Values of tokens are base64 of little-endian
float16 (of the mask a byte, 0 or 1), one a sampled token, in the order of the dump's `completion_ids`. A rollout that
was not trained on has no line, nor one that nobody scored before the first update (`loss.old_logprobs: engine`, from
the second mini-batch on)."""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import Rule, check_fields, open_regular, or_null, parse_object, text, whole
from grpo_spmd.observe.rollout_reader import rollouts_parts
from grpo_spmd.records import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "token_scores"
_ENCODER = msgspec.json.Encoder()
_LONGEST, _MOST = 1 << 24, 1 << 31  # bytes of a line, 2 million tokens; of a file, unpacked
_BASE64 = text(r"[A-Za-z0-9+/]*={0,2}", "base64")
_SIZE = or_null(
    Rule("from 0 to 1e39", lambda value: type(value) in (int, float) and 0 <= value <= 1e39)
)
_FIELDS = {
    "rollout_id": whole(0, 2**31),
    "difference": _BASE64,
    "entropy": _BASE64,
    "difference_mean": _SIZE,
    "difference_max": _SIZE,
    "advantages": _BASE64,
    "loss_mask": _BASE64,
}
_NEEDED = "rollout_id", "difference", "entropy", "difference_mean", "difference_max"
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Of one rollout. Arrays have one value a sampled token, float32 of what was rounded to float16."""

    difference: _Floats
    """The policy's logprob less the engine's."""
    entropy: _Floats
    """Of the policy's distribution that the token was drawn from, in nats."""
    difference_mean: float | None
    """Of the absolute differences, not rounded; None where one is not finite."""
    difference_max: float | None
    """The largest of them."""
    advantages: _Floats | None
    """None: all tokens have the rollout's."""
    loss_mask: npt.NDArray[np.bool_] | None
    """None: all tokens count."""


class KeptScores:
    """A step's scores on this rank, which stay on the device until the step's updates are over."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[MicroBatch, Tensor, Tensor]] = {}

    def __call__(self, micro_batch: MicroBatch, logprobs: Tensor, entropy: Tensor) -> None:
        """Keep what the policy scored; what was said of a micro-batch before stays. Waits for nothing."""
        self._kept.setdefault(id(micro_batch), (micro_batch, logprobs.detach(), entropy.detach()))

    def lines(self) -> list[bytes]:
        """Of this rank's rollouts, in the order of their ids. Waits for the device once."""
        import torch  # not for those who only read

        kept = [each for each in self._kept.values() if each[0].rollout_ids]
        if not kept:
            return []
        rows = (
            (s - m.rollout_logprobs, e, m.advantages, m.loss_mask, m.sequence_index)
            for m, s, e in kept
        )
        columns = [torch.stack([each.float() for each in row]) for row in rows]
        values = (
            torch.cat(columns, dim=1).cpu().numpy()
        )  # float32 has the places of 2^24 rollouts in a row
        places = np.concatenate([[0], values[4]])
        begins = np.flatnonzero(
            (places[1:] != places[:-1]) | _first_of([len(scored) for _, scored, _ in kept])
        )
        ids = [
            rollout_id for m, _, _ in kept for rollout_id in m.rollout_ids
        ]  # each has tokens, one behind the other
        lines = zip(ids, _lines(ids, begins, *values[:4]), strict=True)
        return [line for _, line in sorted(lines)]


def _first_of(lengths: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Of places in parts of these lengths, one behind the other, whether they are a part's first."""
    is_first = np.zeros(sum(lengths), np.bool_)
    is_first[np.cumsum([0, *lengths[:-1]])] = True
    return is_first


def _lines(
    ids: Sequence[int],
    begins: npt.NDArray[np.int64],
    difference: _Floats,
    entropy: _Floats,
    advantages: _Floats,
    loss_mask: _Floats,
) -> Iterator[bytes]:
    """Of rollouts that begin at these places. Over all tokens at once: a rollout may have very few."""
    size, ends = np.abs(difference), np.append(begins[1:], len(difference))
    means = np.add.reduceat(size, begins, dtype=np.float64) / (ends - begins)
    differ = np.maximum.reduceat(advantages, begins) != np.minimum.reduceat(advantages, begins)
    masked = np.minimum.reduceat(loss_mask, begins) == 0
    with np.errstate(over="ignore"):  # beyond 65504 it is infinite
        halves = [values.astype("<f2").tobytes() for values in (difference, entropy, advantages)]
    mask = loss_mask.astype(np.uint8).tobytes()
    columns = means, np.maximum.reduceat(size, begins), differ, masked, begins, ends
    for rollout_id, mean, largest, has_own, is_masked, begin, end in zip(
        ids, *(c.tolist() for c in columns), strict=True
    ):
        packed = [
            binascii.b2a_base64(half[2 * begin : 2 * end], newline=False).decode()
            for half in halves[: 2 + has_own]
        ]
        values = dict(zip(("difference", "entropy", "advantages"), packed, strict=False))
        if is_masked:
            values["loss_mask"] = binascii.b2a_base64(mask[begin:end], newline=False).decode()
        # what is not finite becomes null
        yield _ENCODER.encode(
            {"rollout_id": rollout_id, "difference_mean": mean, "difference_max": largest, **values}
        )


def read_token_scores(run_dir: Path, step: int) -> dict[int, TokenScores]:
    """By rollout id; {} where there is none. Raises ConfigError, which names the file and the line, for one that is
    broken."""
    found: dict[int, TokenScores] = {}
    for where, rollout_id, scores in each_token_scores(run_dir, step):
        if rollout_id in found:
            raise ConfigError(
                f"{where}: the rollout id {rollout_id} is there twice; is one of the files another run's?"
            )
        found[rollout_id] = scores
    return found


def each_token_scores(run_dir: Path, step: int) -> Iterator[tuple[str, int, TokenScores]]:
    """File and line, rollout id and scores, one after the other: all of a large step need not be held. As
    `read_token_scores`, but for ids that are there twice."""
    for path in rollouts_parts(run_dir, step, FOLDER).values():
        for number, line in enumerate(_lines_of(path), start=1):
            where = Path(f"{path}:{number}")
            values = parse_object(line, where)
            check_fields(values, _FIELDS, where, _NEEDED)
            arrays = {
                name: _array(values, name, where)
                for name in ("difference", "entropy", "advantages")
            }
            loss_mask = _array(values, "loss_mask", where, np.uint8)
            scores = TokenScores(
                **arrays,  # type: ignore[arg-type]
                difference_mean=values["difference_mean"],
                difference_max=values["difference_max"],
                loss_mask=None if loss_mask is None else loss_mask.astype(np.bool_),
            )
            for name, of_tokens in vars(scores).items():
                if isinstance(of_tokens, np.ndarray) and len(of_tokens) != len(scores.difference):
                    raise ConfigError(
                        f"{where}: {len(scores.difference)} differences, but {len(of_tokens)} of {name}"
                    )
            yield str(where), values["rollout_id"], scores


def _array(
    values: dict[str, Any], name: str, where: Path, kind: Any = "<f2"
) -> npt.NDArray[Any] | None:
    if name not in values:
        return None
    try:
        found = np.frombuffer(base64.b64decode(values[name], validate=True), kind)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} is no base64 of whole values: {error}") from None
    return found if kind is np.uint8 else found.astype(np.float32)


def _lines_of(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            lines = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            left = _MOST
            while line := lines.readline(_LONGEST):
                left -= len(line)
                if len(line) == _LONGEST or left < 0:
                    raise ConfigError(
                        f"{path}: larger than the scores of a step are ({_MOST >> 20} MiB)"
                    )
                yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"{path}: not a whole gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None

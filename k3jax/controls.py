"""What the device keeps of a request's sampling controls between steps, and how the host sets it.
NumPy only.

Penalties need to know which tokens were in the prompt and how often each was generated; biases are
pairs of a token and a number. Both belong to a row, so they lie in the row buffers of the device. A
request that asks for them has its entry set when it is admitted, before its first step (again when
it is resumed after a preemption, with all that it has generated). From there on the steps count
what they generate themselves: the host, which plans one step ahead of the tokens that it knows, has
no part in it, and a block of drafts is penalised place by place. Entries of requests that ask for
nothing hold whatever was there, and are not read.

| Buffer | Type | Holds |
|---|---|---|
| counts | int32 [R, V] | how often a token was generated, and `IN_PROMPT` if the prompt has it |
| biases | int32 [R, 3, K] | tokens, bits of the float32 to add, position from which on no more |
| masks | int32 [R, W] | a bit for each token, 32 a word, lowest first: whether it may come next |

A call that sets entries takes one int32 array `[dp, n]` of one row a replica: its slot, whether it
is the first call for this row, up to `COUNT_WIDTH` tokens with their counts, and the biases.

What a grammar lets come next depends on the token before. So the host sets the mask of such a row
before every step that draws a token of it, and does not plan these rows ahead. A call takes
`[dp, MASK_ROWS, 1 + W]`: slots and words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

IN_PROMPT = 1 << 30
MAX_BIASES = 1024  # K, of a row
COUNT_WIDTH = 2048  # tokens of one call
CALL_SIZE = 2 + 2 * COUNT_WIDTH + 3 * MAX_BIASES
MASK_ROWS = 4  # of one call
FOREVER = 2**31 - 1
NO_TOKEN = FOREVER  # beyond every vocabulary: such an entry is dropped


class Bias(NamedTuple):
    """Add `value` to the logit of `token` at all positions below `until`."""

    token: int
    value: float
    until: int = FOREVER


class RowControls(NamedTuple):
    """The controls of a request that enters a row.

    Attributes:
      prompt, output: token ids; empty if nothing is penalised.
      biases: at most `MAX_BIASES`.
    """

    slot: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    biases: tuple[Bias, ...]


class RowMask(NamedTuple):
    """Which tokens may come next in a row; see `masks` above."""

    slot: int
    words: Int32[np.ndarray, " W"]


def mask_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Int32[np.ndarray, " W"]:
    """The mask that lets these tokens come; those beyond the vocabulary have no bit."""
    ids = np.fromiter(token_ids, np.int64)
    bits = np.zeros(32 * mask_words(vocab_size), np.bool_)
    bits[ids[ids < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_calls(
    masks: Sequence[Sequence[RowMask]], vocab_size: int, scratch_slot: int
) -> Iterator[Int32[np.ndarray, "dp rows n"]]:
    """Arrays of the calls that set the masks of each replica's rows.

    Args:
      scratch_slot: as for `calls`.
    """
    for start in range(0, max(map(len, masks)), MASK_ROWS):
        packed = np.zeros((len(masks), MASK_ROWS, 1 + mask_words(vocab_size)), np.int32)
        packed[..., 0] = scratch_slot
        for places, of_replica in zip(packed, masks, strict=True):
            for place, mask in zip(places, of_replica[start : start + MASK_ROWS], strict=False):
                place[0], place[1:] = mask
        yield packed


def calls(
    controls: Sequence[Sequence[RowControls]], scratch_slot: int
) -> Iterator[Int32[np.ndarray, "dp n"]]:
    """Arrays of the calls that set the controls of each replica's rows, in order.

    Args:
      scratch_slot: entry that no request owns, for replicas that have nothing to set.
    """
    queues = [[call for one in row for call in _calls_of(one)] for row in controls]
    for number in range(max(map(len, queues))):
        packed = np.zeros((len(queues), CALL_SIZE), np.int32)
        packed[:, 0] = scratch_slot
        for place, queue in zip(packed, queues, strict=True):
            if number < len(queue):
                place[:] = queue[number]
        yield packed


def _calls_of(one: RowControls) -> Iterator[Int32[np.ndarray, " n"]]:
    tokens, numbers = np.unique(np.array(one.output, np.int32), return_counts=True)
    in_prompt = np.unique(np.array(one.prompt, np.int32))
    known = np.union1d(tokens, in_prompt)
    values = np.where(np.isin(known, in_prompt), IN_PROMPT, 0)
    values[np.searchsorted(known, tokens)] += numbers
    biases = np.full((3, MAX_BIASES), NO_TOKEN, np.int32)
    if one.biases:
        column, amounts, until = zip(*one.biases, strict=True)
        bits = np.array(amounts, np.float32).view(np.int32)
        biases[:, : len(column)] = np.stack([np.array(column), bits, np.array(until)])
    for start in range(0, max(1, len(known)), COUNT_WIDTH):
        counts = np.full((2, COUNT_WIDTH), NO_TOKEN, np.int32)
        part = slice(start, start + COUNT_WIDTH)
        counts[:, : len(known[part])] = np.stack([known[part], values[part]])
        head = np.array([one.slot, start == 0], np.int32)
        yield np.concatenate([head, counts.reshape(-1), biases.reshape(-1)])

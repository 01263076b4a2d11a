"""Host inputs of one step, and their packing into one int32 buffer. NumPy only.

One buffer means one host-to-device transfer a step. `FIELDS` is the only description of its layout;
`k3jax.step` unpacks with the same table.

Letters: `T` tokens, `S` rows (`S1 = S + 1`), `M` attention pages a row, `G` recurrent layer groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from k3jax.buckets import Bucket

EXPORT_TOKENS = 64  # a state inside a row's tokens can be kept after a multiple of these
GIVEN = 2  # what a row's last token yields is not sampled, but known
FROM_DEVICE = -1  # a token that the previous step left in the device's token buffer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Arrays of one step, padded to a bucket.

    Attributes:
      tokens: token ids; `FROM_DEVICE` reads `slots[row]` of the device's token buffer.
      row_offsets: row `s` owns tokens `row_offsets[s]:row_offsets[s + 1]`; later tokens are
        padding. Rows not in use are empty and come last.
      computed: tokens of the row that the cache already holds.
      slots: entry of the row in the device's token buffer. The last entry is scratch, for rows not
        used.
      attention_pages: page of each `page_tokens` positions; 0 beyond the row's pages.
      state_source, state_target: pages that hold the row's KDA state before and after the step.
      export_tokens: of the row's tokens in this step, after how many its KDA state is stored as
        well: a multiple of `EXPORT_TOKENS` below the row's length, or 0 for no export. Decode
        programs ignore it.
      export_pages: pages that the exported state goes to; 0 where there is none.
      sample: 1 where the row's last token yields a new one; `GIVEN` where that is `following`.
      temperature: 0 is greedy.
      top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
      seeds: of the row's random stream.
      presence, frequency: penalties; 0 is off. repetition: 1 is off.
      biased: 1 where the biases of the row's slot count.
      masked: 1 where the mask of the row's slot counts.
      logprobs: 1 where the log probabilities of new tokens are asked for.
      scored: 1 where those of the row's tokens, of a prompt, are asked for; only in prefill.
      following: the token behind those of the row, for that and where it is `GIVEN`.
    """

    tokens: Int32[np.ndarray, " T"]
    row_offsets: Int32[np.ndarray, " S1"]
    computed: Int32[np.ndarray, " S"]
    slots: Int32[np.ndarray, " S"]
    attention_pages: Int32[np.ndarray, "S M"]
    state_source: Int32[np.ndarray, "S G"]
    state_target: Int32[np.ndarray, "S G"]
    export_tokens: Int32[np.ndarray, " S"]
    export_pages: Int32[np.ndarray, "S G"]
    sample: Int32[np.ndarray, " S"]
    temperature: Float32[np.ndarray, " S"]
    top_k: Int32[np.ndarray, " S"]
    top_p: Float32[np.ndarray, " S"]
    min_p: Float32[np.ndarray, " S"]
    seeds: UInt32[np.ndarray, " S"]
    presence: Float32[np.ndarray, " S"]
    frequency: Float32[np.ndarray, " S"]
    repetition: Float32[np.ndarray, " S"]
    biased: Int32[np.ndarray, " S"]
    masked: Int32[np.ndarray, " S"]
    logprobs: Int32[np.ndarray, " S"]
    scored: Int32[np.ndarray, " S"]
    following: Int32[np.ndarray, " S"]


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One array of the packed buffer; `shape(bucket, G)` gives its dims."""

    name: str
    dtype: type[np.generic]
    shape: Callable[[Bucket, int], tuple[int, ...]]


FIELDS: tuple[Field, ...] = (
    Field("tokens", np.int32, lambda b, g: (b.tokens,)),
    Field("row_offsets", np.int32, lambda b, g: (b.rows + 1,)),
    Field("computed", np.int32, lambda b, g: (b.rows,)),
    Field("slots", np.int32, lambda b, g: (b.rows,)),
    Field("attention_pages", np.int32, lambda b, g: (b.rows, b.pages)),
    Field("state_source", np.int32, lambda b, g: (b.rows, g)),
    Field("state_target", np.int32, lambda b, g: (b.rows, g)),
    Field("export_tokens", np.int32, lambda b, g: (b.rows,)),
    Field("export_pages", np.int32, lambda b, g: (b.rows, g)),
    Field("sample", np.int32, lambda b, g: (b.rows,)),
    Field("temperature", np.float32, lambda b, g: (b.rows,)),
    Field("top_k", np.int32, lambda b, g: (b.rows,)),
    Field("top_p", np.float32, lambda b, g: (b.rows,)),
    Field("min_p", np.float32, lambda b, g: (b.rows,)),
    Field("seeds", np.uint32, lambda b, g: (b.rows,)),
    Field("presence", np.float32, lambda b, g: (b.rows,)),
    Field("frequency", np.float32, lambda b, g: (b.rows,)),
    Field("repetition", np.float32, lambda b, g: (b.rows,)),
    Field("biased", np.int32, lambda b, g: (b.rows,)),
    Field("masked", np.int32, lambda b, g: (b.rows,)),
    Field("logprobs", np.int32, lambda b, g: (b.rows,)),
    Field("scored", np.int32, lambda b, g: (b.rows,)),
    Field("following", np.int32, lambda b, g: (b.rows,)),
)


def packed_size(bucket: Bucket, num_recurrent_groups: int) -> int:
    """Length of the packed buffer in int32 words."""
    return sum(math.prod(field.shape(bucket, num_recurrent_groups)) for field in FIELDS)


def spans(
    bucket: Bucket, num_recurrent_groups: int
) -> Iterator[tuple[Field, int, tuple[int, ...]]]:
    """Yield each field with its offset in the buffer and its shape."""
    offset = 0
    for field in FIELDS:
        shape = field.shape(bucket, num_recurrent_groups)
        yield field, offset, shape
        offset += math.prod(shape)


def empty_inputs(bucket: Bucket, num_recurrent_groups: int, *, scratch_slot: int) -> StepInputs:
    """Inputs with no row in use: fresh arrays to be filled once, before they are packed."""
    arrays = {
        field.name: np.zeros(shape, field.dtype)
        for field, _, shape in spans(bucket, num_recurrent_groups)
    }
    arrays["slots"][:] = scratch_slot
    arrays["top_p"][:] = 1.0
    arrays["repetition"][:] = 1.0
    return StepInputs(**arrays)


def pack(inputs: StepInputs, bucket: Bucket, num_recurrent_groups: int) -> Int32[np.ndarray, " n"]:
    """Copy all arrays into one fresh buffer; floats and unsigned numbers keep their bits.

    Raises:
      ValueError: an array does not have the bucket's shape or the field's dtype.
    """
    buffer = np.empty(packed_size(bucket, num_recurrent_groups), np.int32)
    for field, offset, shape in spans(bucket, num_recurrent_groups):
        array = getattr(inputs, field.name)
        if array.shape != shape or array.dtype != field.dtype:
            raise ValueError(
                f"{field.name} does not fit the bucket: got {array.dtype}{array.shape}; expected "
                f"{np.dtype(field.dtype)}{shape}"
            )
        buffer[offset : offset + array.size] = array.reshape(-1).view(np.int32)
    return buffer

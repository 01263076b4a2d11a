"""The Triton program of `triton_decode`. Imports Triton: only for use where that is installed."""

from typing import no_type_check

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
@no_type_check
def decode_block(
    qkv, f, b, gate, taps, A_log, dt_bias, o_norm, pool, position, source, target, y,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    TAPS: tl.constexpr, TAP_ROWS: tl.constexpr,
    PAGES: tl.constexpr, PAGE_WORDS: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """One token of one head of one row, `ROWS` value rows of the state at a time.

    `BOUND` 0 selects the softplus gate. The pool is changed in place, and the target page may be
    the source page: what a step writes there is read before the barrier in front of it.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    dtype = y.dtype.element_ty
    channel = tl.arange(0, DIM)
    place = (row * HEADS + head) * DIM
    target_page = tl.load(target + row)
    if target_page == 0:
        tl.store(y + place + channel, tl.zeros([DIM], dtype))
        return
    source_page = tl.load(source + row)
    first_page = tl.load(position).to(tl.int64) * PAGES
    old = pool + (first_page + source_page) * PAGE_WORDS
    new = pool + (first_page + target_page) * PAGE_WORDS

    rate = tl.exp(tl.load(A_log + head))
    x = tl.load(f + place + channel).to(tl.float32) + tl.load(dt_bias + head * DIM + channel)
    if BOUND == 0:
        g = -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))
    else:
        g = BOUND * tl.sigmoid(rate * x)
    decay = tl.exp(g)
    beta = tl.sigmoid(tl.load(b + row * HEADS + head).to(tl.float32))
    out_scale = tl.load(gate + place + channel).to(tl.float32)
    out_scale = tl.load(o_norm + channel) * tl.sigmoid(out_scale)

    args = (row, head, source_page, old, new, qkv, taps)
    q = _convolve(channel, 0, args, HEADS, DIM, TAPS, TAP_ROWS)
    k = _convolve(channel, 1, args, HEADS, DIM, TAPS, TAP_ROWS)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (DIM**-0.5))
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)

    PLANE: tl.constexpr = HEADS * DIM * DIM
    for part in tl.static_range(DIM // ROWS):
        value = part * ROWS + tl.arange(0, ROWS)
        tile = (head * DIM + value[:, None]) * DIM + channel[None, :]
        is_kept = (source_page != 0) & (tile >= 0)
        high = tl.load(old + tile, mask=is_kept, other=0)
        low = tl.load(old + PLANE + tile, mask=is_kept, other=0)
        v = _convolve(value, 2, args, HEADS, DIM, TAPS, TAP_ROWS)
        state = _join(high, low) * decay[None, :]
        u = beta * (v - tl.sum(state * k[None, :], 1))
        state = state + u[:, None] * k[None, :]
        # The output is rounded here anyway, so it waits for the others in its own place.
        tl.store(y + place + value, tl.sum(state * q[None, :], 1).to(dtype))
        high, low = _split(state)
        tl.debug_barrier()
        tl.store(new + tile, high)
        tl.store(new + PLANE + tile, low)
    tl.debug_barrier()
    o = tl.load(y + place + channel).to(tl.float32)
    normed = o * tl.rsqrt(tl.sum(o * o, 0) / DIM + EPS)
    tl.debug_barrier()
    tl.store(y + place + channel, (normed * out_scale).to(dtype))


@triton.jit
@no_type_check
def _convolve(
    channel, PART: tl.constexpr, args,
    HEADS: tl.constexpr, DIM: tl.constexpr, TAPS: tl.constexpr, TAP_ROWS: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a part of q, k, v, and move their window by a token."""
    row, head, source_page, old, new, qkv, taps = args
    dtype = qkv.dtype.element_ty
    tap = tl.arange(0, TAP_ROWS)[:, None]
    channel = channel[None, :]
    entry = 2 * HEADS * DIM * DIM + ((tap * 3 + PART) * HEADS + head) * DIM + channel
    LOW: tl.constexpr = (TAPS - 1) * 3 * HEADS * DIM  # second plane of a float32 window
    is_old = (source_page != 0) & (tap < TAPS - 1) & (channel >= 0)
    words = tl.load(old + entry, mask=is_old, other=0)
    if dtype == tl.float32:
        kept = _join(words, tl.load(old + LOW + entry, mask=is_old, other=0))
    else:
        kept = words.to(dtype, bitcast=True).to(tl.float32)
    token = tl.load(qkv + ((row * 3 + PART) * HEADS + head) * DIM + channel).to(tl.float32)
    inputs = tl.where(tap < TAPS - 1, kept, token)
    weight = ((PART * HEADS + head) * DIM + channel) * TAPS + tap
    total = tl.sum(inputs * tl.load(taps + weight, mask=tap < TAPS, other=0.0), 0)

    before = new + (entry - 3 * HEADS * DIM)
    is_new = (tap >= 1) & (tap < TAPS) & (channel >= 0)
    tl.debug_barrier()
    if dtype == tl.float32:
        high, low = _split(inputs)
        tl.store(before, high, mask=is_new)
        tl.store(before + LOW, low, mask=is_new)
    else:
        tl.store(before, inputs.to(dtype).to(tl.uint16, bitcast=True), mask=is_new)
    return (total * tl.sigmoid(total)).to(dtype).to(tl.float32)


@triton.jit
@no_type_check
def _join(high, low):
    return ((high.to(tl.uint32) << 16) | low.to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _split(x):
    bits = x.to(tl.uint32, bitcast=True)
    return (bits >> 16).to(tl.uint16), bits.to(tl.uint16)

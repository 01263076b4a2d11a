"""Boundary of two sub-layers as one kernel for Hopper: a block takes one token after the other.

A warpgroup owns a chunk of 1,024 columns, so a block of K3's width has seven. The rows of a token
(bank, prefix, addend) are copied into a ring in shared memory, which also takes the first rows of
the block's next token. For the scores each row is read by one warpgroup; the first one turns them
into weights. Then every warpgroup mixes and norms its chunk. The order of every sum is fixed.

Bytes are the limit with many tokens; with few, latency and the number of launches are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import pdl as pdl_switch
from pallas_kernels import settings
from pallas_kernels.hopper import require_hopper

WARPS = 4  # of a warpgroup
WARP_COLUMNS = 256
CHUNK = WARPS * WARP_COLUMNS  # columns of a warpgroup
LANES = 32
MAX_CHUNKS = LANES // WARPS
MAX_SOURCES = 16
MAX_BANK = 8
NUM_BLOCKS = 132  # multiprocessors of an H100 or H200
MAX_BARRIERS = 32  # of one array of them, in Mosaic
SHARED_BYTES = 217 * 1024  # of a block, for the ring and the query; the rest is small

# A warp has a row of 256 columns, four neighbours a lane.
_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
# Every warp has everything: a lane has the sums of the four warps that read one source.
_SUMS = plgpu.Layout.TILED(
    plgpu.Tiling(((MAX_SOURCES, WARPS),)),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(plgpu.Replicated(LANES // MAX_SOURCES), -2),
    vector_dim=-1,
)
_LANES = plgpu.Layout.TILED(
    plgpu.Tiling(((LANES,), (1,))),
    warp_dims=(plgpu.Replicated(WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)


def attn_res_norm(
    bank: tuple[Float[Array, "T H"], ...],
    prefix_TH: Float[Array, "T H"],
    addend_TH: Float[Array, "T H"] | None,
    mix_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
    gain_H: Float[Array, " H"],
    *,
    eps: float,
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """See `api.attn_res_norm`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments that the kernel does not take.
    """
    require_hopper()
    if prefix_TH.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 activations: got {prefix_TH.dtype}")
    hidden = prefix_TH.shape[1]
    if hidden % CHUNK or hidden > MAX_CHUNKS * CHUNK:
        expected = f"multiples of {CHUNK} up to {MAX_CHUNKS * CHUNK}"
        raise NotImplementedError(f"takes widths in {expected}: got {hidden}")
    if len(bank) > MAX_BANK:
        raise NotImplementedError(f"takes banks of up to {MAX_BANK}: got {len(bank)}")
    return launch(
        bank, prefix_TH, addend_TH, mix_weights, gain_H, eps=eps, pdl=settings.current().pdl
    )


# Jitted, so that a program of many layers lowers and compiles each form of the kernel once.
@functools.partial(
    jax.jit, static_argnames=("eps", "pdl", "max_blocks", "shared_bytes", "interpret")
)
def launch(
    bank: tuple[Array, ...],
    prefix_TH: Array,
    addend_TH: Array | None,
    mix_weights: tuple[Array, Array] | None,
    gain_H: Array,
    *,
    eps: float,
    pdl: bool = False,
    max_blocks: int = NUM_BLOCKS,
    shared_bytes: int = SHARED_BYTES,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array]:
    """Run the kernel, or interpret it on a CPU.

    Arguments as in `attn_res_norm`, and the limits of the grid and of a block's shared memory.
    """
    num_tokens, hidden = prefix_TH.shape
    sources = [*bank, prefix_TH, *([] if addend_TH is None else [addend_TH])]
    weights = [*(mix_weights or ()), gain_H]
    chunks, num_blocks = hidden // CHUNK, min(num_tokens, max_blocks)
    num_slots = (shared_bytes - 4 * hidden) // (2 * hidden)
    num_slots = min(num_slots, MAX_BARRIERS, -(-num_tokens // num_blocks) * len(sources))
    rows = hidden // WARP_COLUMNS
    out_type = jax.ShapeDtypeStruct((num_tokens, rows, WARP_COLUMNS), prefix_TH.dtype)
    outputs = plgpu.kernel(
        functools.partial(
            _block,
            num_blocks=num_blocks,
            num_bank=len(bank),
            has_addend=addend_TH is not None,
            eps=eps,
            pdl=pdl,
        ),
        out_type=(out_type,) * (1 if addend_TH is None else 2),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=chunks,
        thread_name="chunk",
        scratch_types={
            "ring_s": plgpu.SMEM((num_slots, rows, WARP_COLUMNS), prefix_TH.dtype),
            "query_s": plgpu.SMEM((rows, WARP_COLUMNS), jnp.float32),
            "sums_s": plgpu.SMEM((2, MAX_SOURCES, WARPS), jnp.float32),
            "weights_s": plgpu.SMEM((MAX_SOURCES,), jnp.float32),
            "mix_sums_s": plgpu.SMEM((2, LANES), jnp.float32),
            "full": plgpu.Barrier(num_barriers=num_slots),
            "scored": plgpu.Barrier(num_arrivals=chunks),
            "weighted": plgpu.Barrier(),
            "mixed": plgpu.Barrier(num_arrivals=chunks),
        },
        # Every place is written by one warpgroup and read only behind one of the barriers above.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(
        *(source.reshape(num_tokens, rows, WARP_COLUMNS) for source in sources),
        *(weight.reshape(rows, WARP_COLUMNS) for weight in weights),
    )
    new_prefix, x = outputs if addend_TH is not None else (prefix_TH, *outputs)
    return new_prefix.reshape(prefix_TH.shape), x.reshape(prefix_TH.shape)


def _block(
    *refs: Any, ring_s, query_s, sums_s, weights_s, mix_sums_s, full, scored, weighted, mixed,
    num_blocks: int, num_bank: int, has_addend: bool, eps: float, pdl: bool,
) -> None:  # fmt: skip
    num_sources = num_bank + 1 + has_addend
    sources, refs = refs[:num_sources], refs[num_sources:]
    mix_weights, (gain_g, *new_prefix_g, x_g) = (refs[:2], refs[2:]) if num_bank else ((), refs)
    num_tokens, rows, _ = x_g.shape
    num_slots, chunks = ring_s.shape[0], rows // WARPS
    block, chunk = lax.axis_index("block"), lax.axis_index("chunk")
    num_steps = (num_tokens - 1 - block) // num_blocks + 1
    mine = pl.ds(chunk * WARPS, WARPS)

    def load(ref: Any, layout: Any = _ROWS) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def fetch(step: Any, source: int, slot: Any) -> None:
        token = sources[source].at[block + step * num_blocks]
        plgpu.copy_gmem_to_smem(token, ring_s.at[slot], full.at[slot])

    # Weights come after the wait as well: they are slices, which the step may have copied.
    pdl_switch.wait(pdl)
    pdl_switch.launch_dependents(pdl and num_tokens <= num_blocks)
    gain = load(gain_g.at[mine])
    query = [load(weight.at[mine]) for weight in mix_weights]

    @pl.when(chunk == 0)
    def _() -> None:
        for row in range(num_slots):
            ahead, source = divmod(row, num_sources)
            pl.when(ahead < num_steps)(functools.partial(fetch, ahead, source, row))

    if num_bank:
        query_s[mine] = query[0] * query[1]
        plgpu.barrier_arrive(scored)
        plgpu.barrier_wait(scored)

    @pl.loop(0, num_steps)
    def _(step: Array) -> None:
        token = block + step * num_blocks

        def slot(source: Any) -> Array:
            return lax.rem(step * num_sources + source, jnp.int32(num_slots))

        slots = [slot(jnp.int32(source)) for source in range(num_sources)]
        for each in slots:
            plgpu.barrier_wait(full.at[each])

        def prefix_at(columns: Any) -> Array:
            prefix = load(ring_s.at[slots[num_bank], columns])
            if has_addend:
                prefix = prefix + load(ring_s.at[slots[-1], columns])
            return prefix.astype(x_g.dtype)

        prefix = prefix_at(mine)
        if has_addend:
            new_prefix_g[0][token, mine] = prefix
        mix = prefix.astype(jnp.float32)

        def add_up(place: Any, values_at: Callable[[Any], Array]) -> None:
            squares = dots = 0.0
            for part in range(chunks):
                columns = pl.ds(part * WARPS, WARPS)
                values = values_at(columns)
                squares = squares + values * values
                dots = dots + values * load(query_s.at[columns])
            sums_s[0, place] = jnp.sum(squares, axis=1)
            sums_s[1, place] = jnp.sum(dots, axis=1)

        if num_bank:
            others = max(1, chunks - 1)

            @pl.loop(jnp.where(chunk < others, chunk, num_bank), num_bank, step=others)
            def _(place: Array) -> None:
                row = ring_s.at[slot(place)]
                add_up(place, lambda columns: load(row.at[columns]))

            @pl.when(chunk == chunks - 1)
            def _() -> None:
                add_up(num_bank, lambda columns: prefix_at(columns).astype(jnp.float32))

            plgpu.barrier_arrive(scored)
            plgpu.barrier_wait(scored)

            @pl.when(chunk == 0)
            def _() -> None:
                squares, dots = (jnp.sum(load(sums_s.at[i], _SUMS), axis=1) for i in range(2))
                places = plgpu.broadcasted_iota(
                    jnp.int32, (MAX_SOURCES,), 0, layout=_SUMS.reduce(1)
                )
                score = lax.rsqrt(squares * (1 / (rows * WARP_COLUMNS)) + eps) * dots
                score = jnp.where(places <= num_bank, score, -jnp.inf)
                weight = jnp.exp(score - jnp.max(score))
                weights_s[...] = weight * (1 / jnp.sum(weight))
                plgpu.barrier_arrive(weighted)

            plgpu.barrier_wait(weighted)
            mix = mix * weights_s[num_bank]
            for source in range(num_bank):
                mix = mix + weights_s[source] * load(ring_s.at[slots[source], mine])
            mix = mix.astype(x_g.dtype).astype(jnp.float32)

        # Two sets of sums: a warpgroup may be one token ahead of one that still reads.
        mix_sums = mix_sums_s.at[lax.rem(step, jnp.int32(2))]
        mix_sums[mine] = jnp.sum(mix * mix, axis=1)
        plgpu.commit_smem()  # the reads of these slots come before the next copies into them
        plgpu.barrier_arrive(mixed)
        plgpu.barrier_wait(mixed)

        @pl.when(chunk == 0)
        def _() -> None:
            for i, each in enumerate(slots):
                ahead, source = divmod(num_slots + i, num_sources)

                @pl.when(step + ahead < num_steps)
                def _(ahead: int = ahead, source: int = source, each: Array = each) -> None:
                    fetch(step + ahead, source, each)

        lanes = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=_LANES)
        squares = jnp.sum(jnp.where(lanes < rows, load(mix_sums, _LANES), 0.0))
        x = mix * lax.rsqrt(squares * (1 / (rows * WARP_COLUMNS)) + eps) * gain
        x_g[token, mine] = x.astype(x_g.dtype)

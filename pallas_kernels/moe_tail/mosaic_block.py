"""Steps of one block of the MoE tail's kernel.

    push         block b sends latent columns [64 b, 64 b + 64) to all ranks, and to each rank the
                 64 / R columns of the shared experts that the rank's block b adds
    add_latents  block b sums its latent columns, in float32 and in the order of the ranks; writes
                 sum * gain, rounded, and the sum of squares of each token
    project      block b multiplies what all blocks wrote with 64 / R rows of the up-projection,
                 scales by rsqrt(mean square), adds the shared experts and sends to all ranks

A token's scale comes behind the product, so that the norm costs no exchange of its own. Tokens are
the left operand of `wgmma` and have 64 rows, of which those behind the last token are never written
nor sent. A block begins to copy its weights before anything else.

Data that another block or rank reads by a bulk copy is also written by one. A flag is signalled
once the copies before it have ended, as in JAX's own kernels for several GPUs.

Flags are semaphores that are zero when a launch begins and when it ends:

| flag | signalled by | how often | taken by |
|---|---|---|---|
| latent[b] | block b of every rank | R | block b |
| shared[b] | block b of every rank | R | block b |
| added | the blocks that sum latents | L / 64 | seen by all blocks, taken by block 0 |
| passed | all blocks that have seen `added` | H / 64 | block 0 |
| arrived | all blocks of all ranks | R H / 64 | block 0 |

No state outlives a launch, so launches may follow each other at once. JAX zeroes the flags, and
begins each launch with a barrier of all devices: before it no rank can send, so nothing comes while
an earlier kernel uses the memory or the zeroes are to be written. A rank ends only when everything
that is sent to it has come, so nothing comes later either.

Dims: `R` ranks, `Tx` tokens, padded to a multiple of 8, `C` = H / R columns of a rank.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

TILE = 64  # columns that a block sends
ROWS = 64  # of a left operand
K_STEP = 256
INPUT_STEPS = 2  # depth of the ring of inputs
WEIGHT_BYTES = 128 * 1024  # of shared memory

F32, BF16 = jnp.float32, jnp.bfloat16

# Of 8 tokens a warp has two, four neighbouring columns are on a lane.
_TOKENS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, TILE), (2, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of one rank's arrays."""

    ranks: int
    tokens: int
    latent: int
    hidden: int

    @property
    def padded_tokens(self) -> int:
        return -(-self.tokens // 8) * 8

    @property
    def columns(self) -> int:
        """Output columns of a rank."""
        return self.hidden // self.ranks

    @property
    def blocks(self) -> int:
        return self.hidden // TILE

    @property
    def block_columns(self) -> int:
        """Output columns of a block."""
        return TILE // self.ranks

    @property
    def latent_blocks(self) -> int:
        """Blocks that have latent columns: the first ones."""
        return self.latent // TILE

    @property
    def steps(self) -> int:
        """Of a product."""
        return self.latent // K_STEP

    @property
    def weight_steps(self) -> int:
        """Depth of the ring of weights."""
        return min(self.steps, WEIGHT_BYTES // (2 * K_STEP * self.block_columns))

    @property
    def shared_flags(self) -> int:
        """First flag of its kind; those of the latents come before."""
        return self.latent_blocks

    @property
    def added(self) -> int:
        return self.shared_flags + self.blocks

    @property
    def passed(self) -> int:
        return self.added + 1

    @property
    def arrived(self) -> int:
        return self.added + 2

    @property
    def num_flags(self) -> int:
        return self.added + 3


class Peers:
    """Memory and flags of all ranks of a mesh axis, this one included."""

    def __init__(self, axis: str, flags: Any):
        self.axis, self.flags = axis, flags
        self.rank = lax.axis_index(axis)

    def remote(self, ref: Any, rank: Any) -> Any:
        """The same array of another rank."""
        return plgpu.remote_ref(ref, {self.axis: jnp.int32(rank)})

    def signal(self, *flags: tuple[Any, Any]) -> None:
        """Add 1 to flags, given as (rank, index); who sees one sees all stores before it.

        One after the other: `plgpu.semaphore_signal_parallel` of JAX 0.11.2 and 0.12.0 has its
        fence behind each flag, so that the first is not ordered behind the stores.
        """
        for rank, index in flags:
            pl.semaphore_signal(self.flags.at[index], device_id={self.axis: jnp.int32(rank)})

    def wait(self, index: Any, count: int, *, take: bool = True) -> None:
        """Wait until this rank's flag is at `count`, and take that off."""
        pl.semaphore_wait(self.flags.at[index], count, decrement=take)


def exchanged(size: Sizes, dtype: DTypeLike) -> list[jax.ShapeDtypeStruct]:
    """What blocks and ranks write for each other.

    Returns:
      latents [R, Tx, L] and columns [R, 64, C] of each rank's partials; scaled [Tx, L] and squares
      [L / 64, 64], of the summed latents.
    """
    return [
        jax.ShapeDtypeStruct((size.ranks, size.padded_tokens, size.latent), dtype),
        jax.ShapeDtypeStruct((size.ranks, ROWS, size.columns), dtype),
        jax.ShapeDtypeStruct((size.padded_tokens, size.latent), BF16),
        jax.ShapeDtypeStruct((size.latent_blocks, ROWS), F32),
    ]


def scratch(size: Sizes, dtype: DTypeLike) -> dict[str, Any]:
    """Shared memory and barriers of a block."""
    swizzled = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    tiles = functools.partial(plgpu.SMEM, dtype=BF16, transforms=swizzled)
    return {
        "weights": (
            tiles((size.weight_steps, size.block_columns, K_STEP)),
            plgpu.Barrier(num_barriers=size.weight_steps),
        ),
        "inputs": (
            tiles((INPUT_STEPS, ROWS, K_STEP)),
            plgpu.Barrier(num_barriers=INPUT_STEPS),
        ),
        "latents": (plgpu.SMEM((size.tokens, TILE), dtype), plgpu.Barrier()),
        # Padded, since a copy of several rows needs places that are multiples of 128 bytes.
        "columns": (
            plgpu.SMEM((size.ranks, size.padded_tokens, size.block_columns), dtype),
            plgpu.Barrier(num_arrivals=size.ranks),
        ),
        "squares_s": plgpu.SMEM((size.padded_tokens,), F32),
        "scaled_s": plgpu.SMEM((size.padded_tokens, TILE), BF16),
        "out_s": plgpu.SMEM((ROWS, size.block_columns), BF16),
    }


def start_weights(up_g, weights: Any, size: Sizes, peers: Peers) -> None:
    """Begin to fill the ring of weights."""
    for step in range(size.weight_steps):
        _fetch_weights(up_g, weights, step, step, size, peers)


def push(
    routed_g, shared_g, latents_g, columns_g, latents: Any, columns: Any, size: Sizes, peers: Peers
) -> None:
    """Send partials to the ranks that sum them."""
    (latents_s, latents_full), (columns_s, columns_full) = latents, columns
    block, tokens = lax.axis_index("block"), pl.ds(0, size.tokens)
    tile = pl.ds(block * TILE, TILE)
    own = pl.ds(block * size.block_columns, size.block_columns)  # of the columns of each rank
    has_latents = block < size.latent_blocks

    @pl.when(has_latents)
    def _() -> None:
        plgpu.copy_gmem_to_smem(routed_g.at[:, tile], latents_s, latents_full)

    for peer in range(size.ranks):
        source = shared_g.at[:, pl.ds(peer * size.columns + own.start, own.size)]
        plgpu.copy_gmem_to_smem(source, columns_s.at[peer, tokens], columns_full)

    @pl.when(has_latents)
    def _() -> None:
        plgpu.barrier_wait(latents_full)
        for peer in range(size.ranks):
            target = peers.remote(latents_g, peer).at[peers.rank, tokens, tile]
            plgpu.copy_smem_to_gmem(latents_s, target)
        plgpu.wait_smem_to_gmem(0)
        peers.signal(*((peer, block) for peer in range(size.ranks)))

    plgpu.barrier_wait(columns_full)
    for peer in range(size.ranks):
        target = peers.remote(columns_g, peer).at[peers.rank, tokens, own]
        plgpu.copy_smem_to_gmem(columns_s.at[peer, tokens], target)
    plgpu.wait_smem_to_gmem(0)
    peers.signal(*((peer, size.shared_flags + block) for peer in range(size.ranks)))


def add_latents(
    latents_g, gain_g, scaled_g, squares_g, scaled_s, squares_s, size: Sizes, peers: Peers
) -> None:
    """Sum this block's columns of the latents."""
    block = lax.axis_index("block")
    tile = pl.ds(block * TILE, TILE)

    @pl.when(block < size.latent_blocks)
    def _() -> None:
        peers.wait(block, size.ranks)
        latent = _sum(latents_g.at[:, :, tile], _TOKENS)
        gain = plgpu.load(gain_g.at[tile], layout=_TOKENS.reduce(0), optimized=False).astype(F32)
        scaled_s[...] = (latent * lax.broadcast_in_dim(gain, latent.shape, (1,))).astype(BF16)
        squares_s[...] = jnp.sum(latent * latent, axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scaled_s, scaled_g.at[:, tile])
        plgpu.copy_smem_to_gmem(squares_s, squares_g.at[block, pl.ds(0, size.padded_tokens)])
        plgpu.wait_smem_to_gmem(0)
        peers.signal((peers.rank, size.added))


def project(
    scaled_g, squares_g, columns_g, up_g, out_g, weights: Any, inputs: Any, out_s,
    size: Sizes, peers: Peers, *, eps: float,
) -> None:  # fmt: skip
    """Compute this block's columns of the output and send them to all ranks."""
    (weights_s, weights_full), (inputs_s, inputs_full) = weights, inputs
    block, rank = lax.axis_index("block"), peers.rank

    def fetch_inputs(step: Any, slot: Any) -> None:
        source = scaled_g.at[:, pl.ds(step * K_STEP, K_STEP)]
        target = inputs_s.at[slot, pl.ds(0, size.padded_tokens)]
        plgpu.copy_gmem_to_smem(source, target, inputs_full.at[slot])

    peers.wait(size.added, size.latent_blocks, take=False)
    peers.signal((rank, size.passed))
    for step in range(min(INPUT_STEPS, size.steps)):
        fetch_inputs(step, step)

    def products(total: Any) -> jax.Array:
        @pl.loop(0, size.steps)
        def _(step: jax.Array) -> None:
            input_slot = lax.rem(step, jnp.int32(INPUT_STEPS))
            weight_slot = lax.rem(step, jnp.int32(size.weight_steps))
            plgpu.barrier_wait(inputs_full.at[input_slot])
            plgpu.barrier_wait(weights_full.at[weight_slot])
            plgpu.wgmma(total, inputs_s.at[input_slot], weights_s.at[weight_slot].T)
            plgpu.wgmma_wait(0)

            @pl.when(step + INPUT_STEPS < size.steps)
            def _() -> None:
                fetch_inputs(step + INPUT_STEPS, input_slot)

            @pl.when(step + size.weight_steps < size.steps)
            def _() -> None:
                later = step + size.weight_steps
                _fetch_weights(up_g, weights, later, weight_slot, size, peers)

        return total[...]

    shape = (ROWS, size.block_columns)
    accumulator = plgpu.ACC(shape, F32)  # pyright: ignore[reportPrivateImportUsage]
    projected = pl.run_scoped(products, accumulator)
    squares = _sum(squares_g, plgpu.Layout.WGMMA.reduce(1))
    scale = lax.broadcast_in_dim(lax.rsqrt(squares / size.latent + eps), shape, (0,))
    peers.wait(size.shared_flags + block, size.ranks)
    own = pl.ds(block * size.block_columns, size.block_columns)
    shared = _sum(columns_g.at[:, :, own], plgpu.Layout.WGMMA)
    out_s[...] = (projected * scale + shared).astype(BF16)
    plgpu.commit_smem()
    columns = pl.ds(rank * size.columns + block * size.block_columns, size.block_columns)
    for peer in range(size.ranks):
        target = peers.remote(out_g, peer).at[:, columns]
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, size.tokens)], target)
    plgpu.wait_smem_to_gmem(0)
    peers.signal(*((peer, size.arrived) for peer in range(size.ranks)))

    @pl.when(block == 0)
    def _() -> None:
        peers.wait(size.arrived, size.ranks * size.blocks)
        peers.wait(size.passed, size.blocks)
        peers.wait(size.added, size.latent_blocks)


def _fetch_weights(up_g, weights: Any, step, slot, size: Sizes, peers: Peers) -> None:
    weights_s, full = weights
    block, rank = lax.axis_index("block"), peers.rank
    first = rank * size.columns + block * size.block_columns
    rows, columns = pl.ds(first, size.block_columns), pl.ds(step * K_STEP, K_STEP)
    plgpu.copy_gmem_to_smem(up_g.at[rows, columns], weights_s.at[slot], full.at[slot])


def _sum(ref: Any, layout: Any) -> jax.Array:
    """Sum over the first dim, in its order, in float32."""
    parts = (
        plgpu.load(ref.at[i], layout=layout, optimized=False).astype(F32)
        for i in range(ref.shape[0])
    )
    return functools.reduce(jnp.add, parts)

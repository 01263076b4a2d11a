"""Collectives and matrix products read from HLO text: compiled programs, and forms of GPUs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from sharding.axes import DP, TP, ParallelConfig
from sharding.hlo import Collective, collectives, dot_flops
from sharding.mesh import make_mesh

TOKENS, WIDTH = 8, 16  # of one rank
BF16 = TOKENS * WIDTH * 2
F32 = TOKENS * WIDTH * 4
Program = tuple[str, str]


def build(body: Callable[..., object], *shapes: tuple[int, ...]) -> Program:
    """Text of a program on dp2xtp4, after and before optimisation."""
    mesh = make_mesh(ParallelConfig(dp=2, tp=4))
    everywhere = PartitionSpec()
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    lowered = jax.jit(mapped).lower(*arguments)
    return lowered.compile().as_text(), lowered.as_text(dialect="hlo", debug_info=True)


@pytest.fixture(scope="module")
def each_kind() -> dict[tuple[int | None, str], Collective]:
    """One collective of each kind by layer and scope, and two that are combined."""

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        x32 = x.astype(jnp.float32)
        with jax.named_scope("embed"):
            own = lax.psum_scatter(x, TP, scatter_dimension=0, tiled=True)
        with jax.named_scope("layer_3"):
            with jax.named_scope("moe/tail"):
                latent = lax.psum(x32 + 1, TP)
            with jax.named_scope("moe/shared"):
                shared = lax.psum(x32[:, :5] * 2, TP)
            with jax.named_scope("gather"):
                all_tokens = lax.all_gather(x, (DP, TP), axis=0, tiled=True)
        with jax.named_scope("layer_12"):
            with jax.named_scope("swap"):
                swapped = lax.all_to_all(x, DP, 0, 0, tiled=True)
            with jax.named_scope("shift"):
                shifted = lax.ppermute(x32, TP, [(0, 1), (1, 0)])
            with jax.named_scope("loop"):

                def again(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                    return lax.psum(x, DP) * 0.5, None

                looped, _ = lax.scan(again, x32, None, length=3)
        return own, latent, shared, all_tokens, swapped, shifted, looped

    text, lowered = build(body, (TOKENS, WIDTH))
    found = collectives(text, lowered=lowered)
    by_place = {(c.layer, c.scope): c for c in found}
    assert len(by_place) == len(found)
    return by_place


@pytest.mark.parametrize(
    ("place", "kind", "dtype", "size", "bytes_in", "bytes_out", "link_bytes"),
    [
        ((None, "embed"), "reduce-scatter", "bf16", 4, BF16, BF16 / 4, BF16 * 3 / 4),
        ((3, "moe/tail"), "all-reduce", "f32", 4, F32, F32, F32 * 6 / 4),
        ((3, "moe/shared"), "all-reduce", "f32", 4, TOKENS * 20, TOKENS * 20, TOKENS * 30),
        ((3, "gather"), "all-gather", "bf16", 8, BF16, 8 * BF16, 7 * BF16),
        ((12, "swap"), "all-to-all", "bf16", 2, BF16, BF16, BF16 / 2),
        ((12, "shift"), "collective-permute", "f32", 2, F32, F32, F32),
        ((12, "loop"), "all-reduce", "f32", 2, F32, F32, F32),
    ],
    ids=str,
)
def test_each_kind(
    each_kind: dict[tuple[int | None, str], Collective],
    place: tuple[int | None, str],
    kind: str,
    dtype: str,
    size: int,
    bytes_in: float,
    bytes_out: float,
    link_bytes: float,
) -> None:
    one = each_kind[place]
    assert (one.kind, one.dtype, one.group_size) == (kind, dtype, size)
    assert (one.bytes_in, one.bytes_out, one.link_bytes) == (bytes_in, bytes_out, link_bytes)
    assert one.times == (3 if place[1] == "loop" else 1)


def test_parts_of_a_combined_collective_share_its_name(
    each_kind: dict[tuple[int | None, str], Collective],
) -> None:
    assert each_kind[3, "moe/tail"].name == each_kind[3, "moe/shared"].name
    assert len({one.name for one in each_kind.values()}) == len(each_kind) - 1


def test_a_loop_of_unknown_length_is_refused_by_name_unless_its_trips_are_given() -> None:
    def body(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer_1/rounds"):
            rounds = x[0, 0].astype(jnp.int32)
            return lax.fori_loop(0, rounds, lambda _, x: lax.pmax(x * 2, DP), x)

    text, _ = build(body, (TOKENS, WIDTH))
    with pytest.raises(ValueError, match=r"it is inside while.* \(while, scope 'rounds'\)"):
        collectives(text)
    (one,) = collectives(text, trips={"rounds": 5})
    assert (one.layer, one.scope, one.times) == (1, "rounds", 5)


def test_a_collective_in_a_branch_is_refused_unless_it_is_left_out() -> None:
    def body(x: jax.Array) -> jax.Array:
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, DP), lambda x: x * 2, x)

    text, _ = build(body, (TOKENS, WIDTH))
    with pytest.raises(ValueError, match=r"unknown number of times.*conditional"):
        collectives(text)
    assert collectives(text, trips={"": 0}) == []


def test_products_by_scope() -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
        with jax.named_scope("layer_2/moe/up"):
            whole = x @ w
        with jax.named_scope("layer_2/moe/tail"):
            part = jnp.einsum("tl,ol->to", x, w.T[:6])
        with jax.named_scope("layer_2/loop"):
            looped, _ = lax.scan(lambda x, _: (x @ w @ w.T, None), x, None, length=4)
        return whole, part, looped

    text, _ = build(body, (TOKENS, WIDTH), (WIDTH, 24))
    whole = 2 * TOKENS * WIDTH * 24
    assert dot_flops(text, scope="moe") == {(2, "moe/up"): whole, (2, "moe/tail"): whole // 4}
    assert dot_flops(text, layer=2, scope="loop") == {(2, "loop"): 4 * 2 * whole}
    assert dot_flops(text, layer=1) == {}


# Forms that XLA:CPU does not print: asynchronous pairs, groups as iotas, types before operands.
GPU_TEXT = """HloModule jit_step, num_partitions=8

%add (x: bf16[], y: bf16[]) -> bf16[] {
  ROOT %sum = bf16[] add(bf16[] %x, bf16[] %y)
}

%wrapped (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %rs = f32[2,4]{1,0} reduce-scatter(f32[8,4]{1,0} %p), channel_id=3, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
}

ENTRY %main (x: bf16[8,4], y: f32[8,4]) -> bf16[64,4] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[8,4]{1,0} parameter(1)
  %gs = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(bf16[8,4]{1,0} %x), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}, metadata={op_name="jit(f)/layer_0/moe/all_gather"}
  %gd = bf16[64,4]{1,0:T(8,128)} all-gather-done((bf16[8,4]{1,0}, bf16[64,4]{1,0}) %gs)
  %rss = ((f32[8,4]{1,0}), f32[2,4]{1,0}) async-start(%y), calls=%wrapped
  %rsd = f32[2,4]{1,0} async-done(((f32[8,4]{1,0}), f32[2,4]{1,0}) %rss)
  %s = f32[8,4]{1,0} all-reduce-start(%y), channel_id=4, replica_groups={}, to_apply=%add
  %r = bf16[8,4]{1,0} ragged-all-to-all(%x, %x, %x), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %d = f32[8,4]{1,0} all-reduce-done(f32[8,4]{1,0} %s)
}
"""


def test_asynchronous_pairs_count_once_and_groups_are_read_in_every_notation() -> None:
    gather, scatter, reduce, ragged = collectives(GPU_TEXT)
    assert (gather.kind, gather.scope, gather.bytes_out) == ("all-gather", "moe", 512)
    assert gather.groups == (tuple(range(8)),)
    assert (scatter.kind, scatter.bytes_in, scatter.bytes_out) == ("reduce-scatter", 128, 32)
    assert scatter.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert (reduce.kind, reduce.group_size, reduce.channel) == ("all-reduce", 8, 4)
    assert (ragged.kind, ragged.bytes_in, ragged.group_size) == ("ragged-all-to-all", 64, 2)


def test_scopes_of_a_combined_collective_are_in_the_order_of_its_operands() -> None:
    combined = """HloModule jit_step, num_partitions=2

ENTRY %main (x: f32[8,4], y: f32[8,2]) -> (f32[8,4], f32[8,2]) {
  %x = f32[8,4]{1,0} parameter(0)
  %y = f32[8,2]{1,0} parameter(1)
  ROOT %both = (f32[8,4]{1,0}, f32[8,2]{1,0}) all-reduce(%x, %y), replica_groups={{0,1}}, \
metadata={op_name="jit(f)/shard_map/layer_3/moe/(tail/psum:shared/psum)"}
}
"""
    tail, shared = collectives(combined)
    assert (tail.layer, tail.scope, tail.bytes_in) == (3, "moe/tail", 128)
    assert (shared.layer, shared.scope, shared.bytes_in) == (3, "moe/shared", 64)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "{{0,1,2},{3}}", "groups of r differ in size"),
        ("ragged-all-to-all(", "collective-broadcast(", "got collective-broadcast; expected one"),
        ("replica_groups={}", "replica_groups=V2[8]", "replica_groups of s is not understood"),
        ("HloModule", "module", "text is no HLO module"),
        ("ENTRY ", "", "no entry"),
    ],
)
def test_what_is_not_understood_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collectives(GPU_TEXT.replace(old, new))


def test_a_product_in_a_library_call_is_refused() -> None:
    hidden = GPU_TEXT.replace(
        "all-gather-done(", 'custom-call(%gs), custom_call_target="__cublas$gemm", old=('
    )
    with pytest.raises(ValueError, match="gd is a library call"):
        dot_flops(hidden)

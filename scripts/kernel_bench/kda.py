"""Cases of KDA on the page pool: decode, verification and commit, on one rank of eight or of one.

A call is a whole chain of layers, since one layer takes less time than the host needs to start a
program. Layers of decode and commit depend on each other through the pool, a mutable array that
stays in place; those of verification through their gates. Rows move from one page to another, so
that all calls read the same states.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from kernel_bench.case import Case, Work

from pallas_kernels.kda import KdaRecords, kda_commit_paged, kda_decode_paged, kda_verify_paged
from pallas_kernels.words import to_words

PAGE_WORDS = 36864  # of a head: 128 x 128 float32, 9 x 128 bfloat16, and padding
ENTRY_WORDS = 576
TAPS = 4
GATES = {"lower_bound": -5.0}

Arrays = tuple[jax.Array, ...]


def cases() -> list[Case]:
    """Decode batches at 12 heads (eight ranks) and 96 (one rank); 1, 4 and 8 tokens on trial."""
    shapes = [(rows, heads) for heads in (12, 96) for rows in (1, 8, 32, 64, 256)]
    full = [
        Case(
            op="kda_decode_paged",
            shape=f"rows{rows}-heads{heads}-layers{_num_layers(rows, heads)}",
            build=functools.partial(_decode, rows, heads, 128, _num_layers(rows, heads)),
            implementations=("xla", "mosaic", "mosaic+pdl", "triton"),
            peers={"fla": functools.partial(_fla, rows, heads, _num_layers(rows, heads))},
        )
        for rows, heads in shapes
    ]
    for op, build in (("kda_verify_paged", _verify), ("kda_commit_paged", _commit)):
        full += [
            Case(
                op=op,
                shape=f"rows{rows}-tokens{slots}-heads12-layers32",
                build=functools.partial(build, rows, slots, 12, 128, 32),
            )
            for rows in (8, 64)
            for slots in (1, 4, 8)
        ]
    smoke = [
        Case(op=op, shape="smoke", build=build, implementations=("xla",), smoke=True)
        for op, build in (
            ("kda_decode_paged", functools.partial(_decode, 3, 2, 16, 2)),
            ("kda_verify_paged", functools.partial(_verify, 3, 2, 2, 16, 2)),
            ("kda_commit_paged", functools.partial(_commit, 3, 2, 2, 16, 2)),
        )
    ]
    return [*full, *smoke]


def _num_layers(rows: int, heads: int) -> int:
    return 32 if rows * heads <= 800 else 8


class _Random:
    """Draws the arguments of a case, and its pages: one set of rows for each set of inputs."""

    def __init__(self, rows: int, heads: int, dim: int, layers: int) -> None:
        self._rng = np.random.default_rng(rows)
        self.num_sets = 4 if rows <= 8 else 1
        self.pages = 1 + self._rng.permutation(2 * self.num_sets * rows).reshape(-1, 2, rows)
        self.parameters = (
            self.normal(layers, 3, heads, dim, TAPS),
            self.normal(layers, heads, scale=0.3),
            self.normal(layers, heads, dim, scale=0.3),
            1 + self.normal(layers, dim, scale=0.1),
        )
        state = to_words(self.normal(heads * dim * dim, scale=0.3), jnp.float32)
        window = to_words(self.normal((TAPS - 1) * 3 * heads * dim), jnp.bfloat16)
        used = jnp.concatenate([state, window])
        self.page_bytes = 2 * used.size
        page = jnp.pad(used, (0, heads * PAGE_WORDS - used.size)).reshape(-1, ENTRY_WORDS)
        shape = (layers, 1 + 2 * self.num_sets * rows, *page.shape)
        self.pool = jax.new_ref(jax.jit(lambda page: jnp.broadcast_to(page, shape))(page))

    def normal(self, *shape: int, scale: float = 1.0, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.asarray(self._rng.standard_normal(shape, np.float32) * scale, dtype)

    def activations(self, *lead: int, heads: int, dim: int) -> Arrays:
        """Raw qkv, f, b and gate."""
        shapes = [(3, heads, dim), (heads, dim), (heads,), (heads, dim)]
        return tuple(self.normal(*lead, *shape, dtype=jnp.bfloat16) for shape in shapes)

    def work(
        self,
        call: object,
        inputs: list[Arrays],
        *,
        row_bytes: int,
        flops: int,
        heads: int,
        dim: int,
    ) -> Work:
        """Costs of a call: `row_bytes` of every row and layer, and what a layer's rows share."""
        layers, rows = self.parameters[0].shape[0], self.pages.shape[-1]
        return Work(
            call=call,  # pyright: ignore[reportArgumentType]
            inputs=inputs,
            weights=(*self.parameters, self.pool),
            num_bytes=layers * (rows * row_bytes + heads * dim * 5 * 4),
            num_flops=layers * rows * heads * dim * dim * flops,
        )


def _decode(rows: int, heads: int, dim: int, layers: int) -> Work:
    rng = _Random(rows, heads, dim, layers)
    inputs = [
        (*rng.activations(rows, heads=heads, dim=dim), *jnp.asarray(pages, jnp.int32))
        for pages in rng.pages
    ]
    row_bytes = 2 * rng.page_bytes + heads * dim * 6 * 2  # activations, output
    return rng.work(_call_decode, inputs, row_bytes=row_bytes, flops=7, heads=heads, dim=dim)


def _verify(rows: int, slots: int, heads: int, dim: int, layers: int) -> Work:
    rng = _Random(rows, heads, dim, layers)
    lengths = jnp.full((rows,), slots, jnp.int32)
    inputs = [
        (
            *rng.activations(rows, slots, heads=heads, dim=dim),
            jnp.asarray(source, jnp.int32),
            lengths,
        )
        for source, _ in rng.pages
    ]
    # The state, read; activations, output, k and, in float32, u.
    row_bytes = rng.page_bytes + slots * heads * dim * (7 * 2 + 4)
    flops = 7 * slots
    return rng.work(_call_verify, inputs, row_bytes=row_bytes, flops=flops, heads=heads, dim=dim)


def _commit(rows: int, slots: int, heads: int, dim: int, layers: int) -> Work:
    rng = _Random(rows, heads, dim, layers)
    accepted = jnp.full((rows,), slots, jnp.int32)
    inputs = []
    for pages in rng.pages:
        qkv, f, _, k = rng.activations(rows, slots, heads=heads, dim=dim)
        u = rng.normal(rows, slots, heads, dim)
        inputs.append((u, k, qkv, f, *jnp.asarray(pages, jnp.int32), accepted))
    row_bytes = 2 * rng.page_bytes + slots * heads * dim * (5 * 2 + 4)
    flops = 3 * slots
    return rng.work(_call_commit, inputs, row_bytes=row_bytes, flops=flops, heads=heads, dim=dim)


def _call_decode(implementation: str, inputs: Arrays, weights: Arrays) -> jax.Array:
    *activations, source, target = inputs
    *parameters, pool_ref = weights
    pool, outputs = pool_ref[...], []
    for layer in range(pool.shape[0]):
        y, pool = kda_decode_paged(
            *activations,
            *(stack[layer] for stack in parameters),
            pool,
            source,
            target,
            position=layer,
            eps=1e-5,
            implementation=implementation,
            **GATES,
        )
        outputs.append(y)
    pool_ref[...] = pool
    return jnp.stack(outputs).astype(jnp.float32)


def _call_verify(implementation: str, inputs: Arrays, weights: Arrays) -> jax.Array:
    *activations, gate, source, lengths = inputs
    *parameters, pool_ref = weights
    pool, outputs = pool_ref[...], []
    for layer in range(pool.shape[0]):
        gate, records = kda_verify_paged(
            *activations,
            gate,
            *(stack[layer] for stack in parameters),
            pool,
            source,
            lengths,
            position=layer,
            eps=1e-5,
            implementation=implementation,
            **GATES,
        )
        outputs.append(records.u_SXND[..., 0])
    return jnp.stack(outputs)


def _call_commit(implementation: str, inputs: Arrays, weights: Arrays) -> jax.Array:
    u, k, qkv, f, source, target, accepted = inputs
    _, A_log, dt_bias, _, pool_ref = weights
    pool = pool_ref[...]
    for layer in range(pool.shape[0]):
        pool = kda_commit_paged(
            KdaRecords(u_SXND=u, k_SXND=k),
            qkv,
            f,
            A_log[layer],
            dt_bias[layer],
            pool,
            source,
            target,
            accepted,
            position=layer,
            taps=TAPS,
            implementation=implementation,
            **GATES,
        )
    high = pool[:, target, 0, :256]  # words of the first numbers, the upper halves
    pool_ref[...] = pool
    return lax.bitcast_convert_type(high, jnp.bfloat16).astype(jnp.float32)


def _fla(rows: int, heads: int, layers: int) -> dict[str, Any]:
    """flash-linear-attention's `fused_recurrent_kda`: gate, L2 norms, beta and the delta rule.

    The convolution, the output norm and the pages are not part of it.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import fused_recurrent_kda  # pyright: ignore[reportMissingImports]
    from kernel_bench.torch_peer import time_calls

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, device="cuda").to(dtype)

    def a_layer() -> Any:
        q, k, v, f = (normal(rows, 1, heads, 128) for _ in range(4))
        return functools.partial(
            fused_recurrent_kda,
            q=q,
            k=k,
            v=v,
            g=f,
            beta=normal(rows, 1, heads),
            A_log=normal(heads, dtype=torch.float32),
            dt_bias=normal(heads * 128, dtype=torch.float32),
            initial_state=normal(rows, heads, 128, 128, dtype=torch.float32),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=GATES["lower_bound"],
            state_v_first=True,
        )

    times = time_calls([a_layer() for _ in range(layers)], graph=True)
    return {name: layers * time for name, time in times.items()}

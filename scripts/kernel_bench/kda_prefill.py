"""Cases of `kda_prefill`: prompts on one rank of eight (12 heads) and on one (96), against fla."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from kernel_bench.case import Case, Work

from pallas_kernels.kda import kda_prefill

DIM = 128
LOWER_BOUND = -5.0
FLOPS = 262_000  # of the chunked form, a token and head


def cases() -> list[Case]:
    """One prompt of several lengths, and eight prompts at once."""
    shapes = [(12, (1024,)), (12, (8192,)), (12, (32768,)), (96, (8192,)), (96, (1024,) * 8)]
    full = [
        Case(
            op="kda_prefill",
            shape=f"heads{heads}-{len(lengths)}x{lengths[0]}",
            build=functools.partial(_build, heads, lengths, DIM),
            implementations=("xla", "mosaic"),
            peers={"fla": functools.partial(_fla, heads, lengths)},
            tolerance=2e-2,  # bfloat16 operands on one side
            limit_s=200.0,  # fla tunes itself
        )
        for heads, lengths in shapes
    ]
    smoke = Case(
        op="kda_prefill",
        shape="smoke",
        build=functools.partial(_build, 2, (70, 3), 16),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _num_sets(heads: int, lengths: tuple[int, ...]) -> int:
    return 4 if heads * sum(lengths) < 20_000 else 2


def _build(heads: int, lengths: tuple[int, ...], dim: int) -> Work:
    num_tokens, num_rows = sum(lengths), len(lengths)
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def normal(*shape: int, scale: float = 1.0, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * scale).astype(dtype)

    wide = (num_tokens, heads, dim)
    # b comes first, since what makes calls depend on each other is added to it.
    inputs = [
        (normal(num_tokens, heads), *(normal(*wide) for _ in range(3)), normal(*wide, scale=2.0))
        for _ in range(_num_sets(heads, lengths))
    ]
    weights = (
        normal(heads, scale=0.3, dtype=jnp.float32),
        normal(heads, dim, scale=0.3, dtype=jnp.float32),
        normal(num_rows, heads, dim, dim, scale=0.1, dtype=jnp.float32),
        jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32),
        jnp.zeros(num_rows, jnp.int32),
    )
    state_bytes = num_rows * heads * dim * dim * 4
    return Work(
        call=_call,
        inputs=inputs,
        weights=weights,
        num_bytes=num_tokens * heads * (5 * dim + 1) * 2 + 2 * state_bytes,
        num_flops=num_tokens * heads * FLOPS * (dim / DIM) ** 2,
    )


def _call(
    implementation: str, inputs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]
) -> jax.Array:
    b, q, k, v, f = inputs
    o, _, _ = kda_prefill(
        q, k, v, f, b, *weights, lower_bound=LOWER_BOUND, implementation=implementation
    )
    return o.astype(jnp.float32)


def _fla(heads: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """flash-linear-attention's `chunk_kda`, with the gate, the L2 norm and beta in its kernels."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]
    from kernel_bench.torch_peer import time_calls

    def normal(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, device="cuda").to(dtype)

    num_tokens = sum(lengths)
    state = normal(len(lengths), heads, DIM, DIM, dtype=torch.float32) * 0.1
    A_log, dt_bias = (normal(n, dtype=torch.float32) * 0.3 for n in (heads, heads * DIM))
    ends = np.concatenate([[0], np.cumsum(lengths)])
    rows = torch.tensor(ends, device="cuda") if len(lengths) > 1 else None

    def a_call() -> Any:
        q, k, v, f = (normal(1, num_tokens, heads, DIM) for _ in range(4))
        return functools.partial(
            chunk_kda,
            q=q,
            k=k,
            v=v,
            g=f,
            beta=normal(1, num_tokens, heads),
            A_log=A_log,
            dt_bias=dt_bias,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=LOWER_BOUND,
            cu_seqlens=rows,
        )

    return time_calls([a_call() for _ in range(_num_sets(heads, lengths))])

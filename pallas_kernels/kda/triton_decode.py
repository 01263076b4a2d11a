"""`kda_decode_paged` in Triton, through jax-triton: for GPUs before Hopper.

One program a row and head takes the state through registers, 64 value rows at a time. The pool is
a reference that the program changes, so it stays in place if it was donated.
"""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt16

PROVEN_ROWS = 8  # up to here measured to be faster than XLA, on an H200

_PACKAGES = ("jax_triton", "triton")
_LEAST_CAPABILITY = 8  # bfloat16 arithmetic
_DIMS = (16, 32, 64, 128)
_ROWS = 64  # value rows of a state that are in registers at a time


def kda_decode_paged(
    qkv_S3ND: Float[Array, "S 3 N D"],
    f_SND: Float[Array, "S N D"],
    b_SN: Float[Array, "S N"],
    gate_SND: Float[Array, "S N D"],
    taps_3NDX: Float32[Array, "3 N D X"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    o_norm_D: Float32[Array, " D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "S N D"], UInt16[Array, "Z P W E"]]:
    """See `paged.kda_decode_paged`.

    Raises:
      NotImplementedError: no GPU that can run it, no jax-triton, or another head dim.
    """
    require_triton()
    if qkv_S3ND.shape[-1] not in _DIMS:
        raise NotImplementedError(f"takes a head dim of {_DIMS}: got {qkv_S3ND.shape[-1]}")
    return _launch(
        qkv_S3ND, f_SND, b_SN, gate_SND, taps_3NDX, A_log_N, dt_bias_ND, o_norm_D, pool_ZPWE,
        jnp.full((1,), position, jnp.int32), source_S, target_S, lower_bound=lower_bound, eps=eps,
    )  # fmt: skip


def unproven(qkv_S3ND: Float[Array, "S 3 N D"], *_args: object, **_kwargs: object) -> str | None:
    """Why the automatic choice passes this kernel over, for arguments that it would take."""
    if qkv_S3ND.dtype != jnp.bfloat16 or qkv_S3ND.shape[-1] != max(_DIMS):
        return f"shown to be faster than xla only in bfloat16 with head dim {max(_DIMS)}"
    if qkv_S3ND.shape[0] > PROVEN_ROWS:
        return f"not shown to be faster than xla above {PROVEN_ROWS} rows"
    return None


def require_triton() -> None:
    """Raise NotImplementedError unless jax-triton is there and JAX's GPUs can run its programs."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise NotImplementedError(f"the JAX backend is {device.platform}, not a GPU")
    capability = str(getattr(device, "compute_capability", "unknown"))
    major = re.match(r"(\d+)\.\d+$", capability)
    if major is None or int(major[1]) < _LEAST_CAPABILITY:
        raise NotImplementedError(
            f"the GPU has compute capability {capability}, not {_LEAST_CAPABILITY}.0 or more"
        )
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise NotImplementedError(f"the package {package} is not installed")


# Jitted, and the position an operand, so that a program of many layers lowers the call once.
@functools.partial(jax.jit, static_argnames=("lower_bound", "eps"))
def _launch(
    qkv_S3ND: Array,
    f_SND: Array,
    b_SN: Array,
    gate_SND: Array,
    taps_3NDX: Array,
    A_log_N: Array,
    dt_bias_ND: Array,
    o_norm_D: Array,
    pool_ZPWE: Array,
    position_1: Array,
    source_S: Array,
    target_S: Array,
    *,
    lower_bound: float | None,
    eps: float,
) -> tuple[Array, Array]:
    import jax_triton  # pyright: ignore[reportMissingImports]

    from pallas_kernels.kda.triton_kernel import decode_block

    num_rows, _, heads, dim = qkv_S3ND.shape
    num_taps = taps_3NDX.shape[-1]
    pool_ref = jax.new_ref(pool_ZPWE)
    y_SND = jax_triton.triton_call(
        qkv_S3ND, f_SND, b_SN, gate_SND, taps_3NDX, A_log_N, dt_bias_ND, o_norm_D, pool_ref,
        position_1, source_S, target_S,
        kernel=decode_block,
        name="kda_decode_paged",
        out_type=jax.ShapeDtypeStruct(gate_SND.shape, gate_SND.dtype),
        grid=(num_rows, heads),
        num_warps=max(1, dim * min(dim, _ROWS) // 2048),
        HEADS=heads,
        DIM=dim,
        ROWS=min(dim, _ROWS),
        TAPS=num_taps,
        TAP_ROWS=1 << (num_taps - 1).bit_length(),
        PAGES=pool_ZPWE.shape[1],
        PAGE_WORDS=pool_ZPWE.shape[2] * pool_ZPWE.shape[3],
        BOUND=0.0 if lower_bound is None else lower_bound,
        EPS=eps,
    )  # fmt: skip
    return y_SND, jax.freeze(pool_ref)

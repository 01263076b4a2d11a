"""Public MoE tail: checks and dispatch.

    out = norm(sum_r routed_r) up^T + sum_r shared_r        norm(z) = z rsqrt(mean(z^2) + eps) gain

over the ranks `r` of a mesh axis. Unlike other operators this one talks to other devices: it is
called inside `shard_map`, by all ranks of the axis equally often, and is not in `registry.OPS`.
"""

from jaxtyping import Array, Float

from pallas_kernels.checks import bind_dims, check_activations, check_dtypes
from pallas_kernels.dispatch import Op, run
from pallas_kernels.moe_tail import mosaic_gpu, reference
from pallas_kernels.numerics import COMPUTE_DTYPES

MOE_TAIL = Op(
    name="moe_tail",
    implementations={"reference": reference.moe_tail, "mosaic": mosaic_gpu.moe_tail},
)


def moe_tail(
    routed_TL: Float[Array, "T L"],
    shared_TH: Float[Array, "T H"],
    gain_L: Float[Array, " L"],
    up_HL: Float[Array, "H L"],
    *,
    axis: str,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "T H"]:
    """Sum the latents of all ranks, norm and project them up, and add the sum of shared partials.

    Args:
      routed_TL, shared_TH: this rank's partials, both float32 or both bfloat16; summed in float32.
      gain_L: gain of the RMSNorm, float32 or bfloat16.
      up_HL: the whole up-projection, the same on all ranks, in the compute dtype.
      axis: the mesh axis of the ranks.
      eps: of the norm.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      The output in the dtype of `up_HL`, equal on all ranks.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree.
    """
    op = "moe_tail"
    bind_dims(op, routed_TL=routed_TL, shared_TH=shared_TH, gain_L=gain_L, up_HL=up_HL)
    check_activations(op, routed_TL=routed_TL, shared_TH=shared_TH)
    check_dtypes(op, COMPUTE_DTYPES, gain_L=gain_L, up_HL=up_HL)
    return run(MOE_TAIL, implementation, routed_TL, shared_TH, gain_L, up_HL, axis=axis, eps=eps)

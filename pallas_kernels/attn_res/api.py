"""Public attention-residual mix: checks and dispatch.

    score_i = rsqrt(mean(s_i^2) + eps) * sum_h s_i[h] norm[h] proj[h]
    mix     = sum_i softmax(score)_i s_i

per token, in float32. Scores see normed sources, the mix takes the raw ones.
"""

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.attn_res import reference, xla
from pallas_kernels.checks import bind_dims, check_activations, check_dtypes, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.numerics import COMPUTE_DTYPES

ATTN_RES_MIX = Op(
    name="attn_res_mix",
    implementations={"reference": reference.attn_res_mix, "xla": xla.attn_res_mix},
)


def attn_res_mix(
    sources: Sequence[Float[Array, "T H"]],
    norm_weight_H: Float[Array, " H"],
    proj_weight_H: Float[Array, " H"],
    *,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "T H"]:
    """Mix block snapshots and the running prefix.

    Args:
      sources: one or more arrays of one shape and compute dtype; separate, so that a bank need not
        be stacked.
      norm_weight_H, proj_weight_H: gain of the norm and scoring vector, float32 or bfloat16.
      eps: of the norm.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      The mix in the dtype of the sources; a single source comes back unchanged.

    Raises:
      ValueError, TypeError: no source, or shapes or dtypes disagree.
    """
    op = "attn_res_mix"
    if not sources:
        raise ValueError(wrong(op, "number of sources", 0, "at least 1", "pass the prefix"))
    named = {f"source{i}_TH": source for i, source in enumerate(sources)}
    bind_dims(op, **named, norm_weight_H=norm_weight_H, proj_weight_H=proj_weight_H)
    check_activations(op, **named)
    check_dtypes(op, COMPUTE_DTYPES, norm_weight_H=norm_weight_H, proj_weight_H=proj_weight_H)
    return run(ATTN_RES_MIX, implementation, tuple(sources), norm_weight_H, proj_weight_H, eps=eps)

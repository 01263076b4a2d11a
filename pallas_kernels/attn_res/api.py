"""Public boundary of two sub-layers: checks and dispatch.

    p       = prefix + addend, rounded
    score_i = rsqrt(mean(s_i^2) + eps) * sum_h s_i[h] norm[h] proj[h]    s = (*bank, p)
    mix     = sum_i softmax(score)_i s_i, rounded
    x       = mix * rsqrt(mean(mix^2) + eps) * gain, rounded

per token, in float32. Scores see normed sources, the mix takes the raw ones. Without a bank the mix
is p, which makes it a plain residual add and RMSNorm.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.attn_res import mosaic_gpu, reference, xla
from pallas_kernels.checks import bind_dims, check_activations, check_dtypes, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.numerics import COMPUTE_DTYPES

_FEWEST_TOKENS = 256


def _not_shown_faster(
    bank: Sequence[Float[Array, "T H"]], prefix_TH: Float[Array, "T H"], *_: Any, **__: Any
) -> str | None:
    """On an H200 the kernel lost to xla without a bank, and is not clearly ahead for few tokens."""
    if not bank:
        return "without a bank it is slower than xla"
    if prefix_TH.shape[0] < _FEWEST_TOKENS:
        return f"for less than {_FEWEST_TOKENS} tokens it is not clearly faster than xla"
    return None


ATTN_RES_NORM = Op(
    name="attn_res_norm",
    implementations={
        "reference": reference.attn_res_norm,
        "xla": xla.attn_res_norm,
        "mosaic": mosaic_gpu.attn_res_norm,
    },
    unproven={"mosaic": _not_shown_faster},
)


def attn_res_norm(
    bank: Sequence[Float[Array, "T H"]],
    prefix_TH: Float[Array, "T H"],
    addend_TH: Float[Array, "T H"] | None,
    mix_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
    gain_H: Float[Array, " H"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """Add a sub-layer's output to the residual stream; mix and norm the input of the next one.

    Args:
      bank: block snapshots, possibly none; of one shape and compute dtype with the prefix, and
        separate, so that a bank need not be stacked.
      prefix_TH: the running residual stream.
      addend_TH: what is added to it first, or None.
      mix_weights: gain of the scores' norm, and scoring vector; unused, and may be None, without a
        bank. These and `gain_H` are float32 or bfloat16.
      gain_H: gain of the RMSNorm behind the mix.
      eps: of both norms.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      The new prefix and x, both in the dtype of the prefix.

    Raises:
      ValueError, TypeError: a bank without weights, or shapes or dtypes disagree.
    """
    op = "attn_res_norm"
    sources = {f"bank{i}_TH": source for i, source in enumerate(bank)} | {"prefix_TH": prefix_TH}
    if addend_TH is not None:
        sources["addend_TH"] = addend_TH
    weights: dict[str, jax.Array] = {"gain_H": gain_H}
    if bank:
        if mix_weights is None:
            raise ValueError(wrong(op, "mix_weights", None, "norm and proj", "or pass no bank"))
        weights |= {"norm_H": mix_weights[0], "proj_H": mix_weights[1]}
    bind_dims(op, **sources, **weights)
    check_activations(op, **sources)
    check_dtypes(op, COMPUTE_DTYPES, **weights)
    return run(
        ATTN_RES_NORM,
        implementation,
        tuple(bank),
        prefix_TH,
        addend_TH,
        mix_weights if bank else None,
        gain_H,
        eps=eps,
    )

"""Public routed experts: checks and dispatch.

    y_t = sum_a weights[t, a] * W2_e act(W1_e z_t, W3_e z_t),   e = ids[t, a]

with float32 accumulation, activation and sum.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.checks import bind_dims, check_activations, check_dtypes, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.moe import mosaic_gpu, reference, xla
from pallas_kernels.moe.mxfp4 import GROUP, PackedWeight
from pallas_kernels.numerics import COMPUTE_DTYPES

MOE_EXPERTS = Op(
    name="moe_experts",
    implementations={
        "reference": reference.moe_experts,
        "xla": xla.moe_experts,
        "mosaic": mosaic_gpu.moe_experts,
    },
    unproven={"mosaic": mosaic_gpu.unproven},
)


def moe_experts(
    z_TL: Float[Array, "T L"],
    ids_TA: Int32[Array, "T A"],
    weights_TA: Float32[Array, "T A"],
    w13: Float[Array, "Z E 2 F L"] | PackedWeight,
    w2: Float[Array, "Z E L F"] | PackedWeight,
    *,
    layer: int,
    first_expert: int | Int32[Array, ""],
    activation: Callable[[Array, Array], Array],
    implementation: str | None = None,
) -> Float32[Array, "T L"]:
    """Run the chosen experts of every token and sum their weighted outputs.

    Args:
      z_TL: inputs, float32 or bfloat16 (the compute dtype).
      ids_TA: global expert ids. Ids outside [first_expert, first_expert + E) contribute nothing, so
        a padding token has ids of -1; what it holds in `z_TL` and `weights_TA` does not matter.
      weights_TA: router weights.
      w13: gate (index 0) and up (index 1) matrices of all Z layers, [Z, E, 2, F, L], dense or
        packed along L.
      w2: down matrices of all layers, [Z, E, L, F], dense or packed along F.
      layer: which of the Z layers, static. The whole stack comes in so that nothing slices a copy
        out of it.
      first_expert: global id of the first expert held here; may be traced.
      activation: (gate, up) -> activation; called with float32, returns float32.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      y_TL in float32, the part of the local experts; zero for tokens without any. No token is
      dropped, and a token's result does not depend on the other tokens.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree, or `layer` is out of range.
    """
    op = "moe_experts"
    check_activations(op, z_TL=z_TL)
    check_dtypes(op, [jnp.int32], ids_TA=ids_TA)
    check_dtypes(op, [jnp.float32], weights_TA=weights_TA)
    arrays = {"z_TL": z_TL, "ids_TA": ids_TA, "weights_TA": weights_TA}
    dims = bind_dims(op, **arrays, w13_ZE2FL=_dense(op, "w13", w13), w2_ZELF=_dense(op, "w2", w2))
    if not 0 <= layer < dims["Z"]:
        raise ValueError(wrong(op, "layer", layer, f"0 to {dims['Z'] - 1}", "index the stack"))
    return run(
        MOE_EXPERTS,
        implementation,
        *arrays.values(),
        w13,
        w2,
        layer=layer,
        first_expert=first_expert,
        activation=activation,
    )


def _dense(op: str, name: str, weight: Array | PackedWeight) -> Array | jax.ShapeDtypeStruct:
    """Check dtypes and packing of a weight; return something of its unpacked shape."""
    if not isinstance(weight, PackedWeight):
        check_dtypes(op, COMPUTE_DTYPES, **{name: weight})
        return weight
    check_dtypes(
        op, [jnp.uint8], **{f"{name}.codes": weight.codes, f"{name}.scales": weight.scales}
    )
    *lead, last = weight.shape
    if weight.scales.shape != (*lead, last // GROUP) or last % GROUP:
        expected = f"one for every {GROUP} numbers of {name}, {weight.shape}"
        raise ValueError(
            wrong(op, f"shape of {name}.scales", weight.scales.shape, expected, "check the packing")
        )
    return jax.ShapeDtypeStruct(weight.shape, jnp.uint8)

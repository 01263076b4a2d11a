"""Public router: checks and dispatch.

    s = sigmoid(logits);  ids = top_k(s + bias);  w = s[ids] / (sum s[ids] + 1e-20) * scaling

all in float32 (KF-M01). The bias chooses and nothing else (KF-M03). Equal scores go to the lowest
expert id.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.checks import bind_dims, check_dtypes, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.router import mosaic_gpu, reference, xla

ROUTE = Op(
    name="route",
    implementations={
        "reference": reference.route,
        "xla": xla.route,
        "mosaic": mosaic_gpu.route,
    },
)


def route(
    logits_TE: Float32[Array, "T E"],
    bias_E: Float32[Array, " E"],
    *,
    top_k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    renormalize: bool,
    scaling: float,
    implementation: str | None = None,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """Choose `top_k` experts for every token.

    Args:
      logits_TE: router logits, float32.
      bias_E: correction bias, float32, added to the sigmoid for the selection only.
      top_k: experts a token (A).
      num_groups: equal, consecutive groups of experts; with more than one, only the experts of the
        `topk_groups` groups with the largest sum of their two best biased scores are eligible.
      topk_groups: groups that stay eligible.
      renormalize: divide the weights by their sum; has no effect when `top_k` is 1.
      scaling: factor of all weights.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Returns:
      Expert ids in descending biased score, and their weights.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree, or the counts do not fit together.
    """
    num_experts = bind_dims("route", logits_TE=logits_TE, bias_E=bias_E)["E"]
    check_dtypes("route", [jnp.float32], logits_TE=logits_TE, bias_E=bias_E)
    if num_groups < 1 or num_experts % num_groups or not 1 <= topk_groups <= num_groups:
        got = f"{topk_groups} of {num_groups} groups for {num_experts} experts"
        raise ValueError(
            wrong(
                "route",
                "groups",
                got,
                "a divisor of the experts, and no more than it",
                "use 1 of 1",
            )
        )
    group_size = num_experts // num_groups
    if num_groups > 1 and group_size < 2:
        raise ValueError(
            wrong(
                "route", "experts a group", group_size, "at least 2, to rank it", "use fewer groups"
            )
        )
    if not 1 <= top_k <= topk_groups * group_size:
        expected = f"1 to the {topk_groups * group_size} eligible experts"
        raise ValueError(wrong("route", "top_k", top_k, expected, "lower it or raise topk_groups"))
    return run(
        ROUTE,
        implementation,
        logits_TE,
        bias_E,
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        renormalize=renormalize,
        scaling=scaling,
    )

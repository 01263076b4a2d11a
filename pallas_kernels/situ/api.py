"""Public gated activations: checks and dispatch.

    situ_glu = beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)
    swiglu   = gate sigmoid(gate) * up

evaluated in float32. The sigmoid takes the gate as it is, not the capped one.
"""

from jaxtyping import Array, Float

from pallas_kernels.checks import check_activations, wrong
from pallas_kernels.dispatch import Op, run
from pallas_kernels.situ import reference, xla

SITU_GLU = Op(
    name="situ_glu", implementations={"reference": reference.situ_glu, "xla": xla.situ_glu}
)
SWIGLU = Op(name="swiglu", implementations={"reference": reference.swiglu, "xla": xla.swiglu})


def situ_glu(
    gate: Float[Array, "*dims"],
    up: Float[Array, "*dims"],
    *,
    beta: float,
    linear_beta: float | None,
    implementation: str | None = None,
) -> Float[Array, "*dims"]:
    """Return SiTU-GLU of two arrays of one shape and dtype, in that dtype.

    Args:
      gate, up: float32 or bfloat16.
      beta: bound of the gate branch, positive.
      linear_beta: bound of the up branch, positive; None leaves it unclipped.
      implementation: a name of `settings.IMPLEMENTATIONS`, or None for the automatic choice.

    Raises:
      ValueError, TypeError: shapes or dtypes disagree, or a bound is not positive.
    """
    _check("situ_glu", gate, up)
    for name, bound in (("beta", beta), ("linear_beta", linear_beta)):
        if bound is not None and not bound > 0:
            raise ValueError(
                wrong("situ_glu", name, bound, "a positive number", "check the config")
            )
    return run(SITU_GLU, implementation, gate, up, beta=beta, linear_beta=linear_beta)


def swiglu(
    gate: Float[Array, "*dims"], up: Float[Array, "*dims"], *, implementation: str | None = None
) -> Float[Array, "*dims"]:
    """Return SwiGLU of two arrays of one shape and dtype, in that dtype; raises as `situ_glu`."""
    _check("swiglu", gate, up)
    return run(SWIGLU, implementation, gate, up)


def _check(op: str, gate: Array, up: Array) -> None:
    check_activations(op, gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(wrong(op, "shape of up", up.shape, f"{gate.shape}, as gate", "align them"))

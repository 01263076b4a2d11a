"""What a verification leaves for the commit of the tokens that are accepted."""

from typing import NamedTuple

from jaxtyping import Array, Float, Float32


class KdaRecords(NamedTuple):
    """One layer's records of X token slots; with raw qkv and f, they give the state after any.

    | field | meaning |
    |---|---|
    | `u_SXND` | what each token adds to the state along its key, float32 |
    | `k_SXND` | keys after the convolution, before the norm, in the compute dtype |

    The numbers of token slots that were not in use have no meaning.
    """

    u_SXND: Float32[Array, "S X N D"]
    k_SXND: Float[Array, "S X N D"]

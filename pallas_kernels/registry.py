"""The one list of operators, for whoever walks them all: tests and benchmarks."""

from pallas_kernels.attn_res.api import ATTN_RES_NORM
from pallas_kernels.dispatch import Op
from pallas_kernels.kda.api import KDA_DECODE, KDA_PREFILL
from pallas_kernels.kda.paged import KDA_DECODE_PAGED
from pallas_kernels.kda.verify import KDA_COMMIT_PAGED, KDA_VERIFY_PAGED
from pallas_kernels.mla.api import MLA_DECODE, MLA_PREFILL, MLA_WRITE
from pallas_kernels.moe.api import MOE_EXPERTS
from pallas_kernels.router.api import ROUTE
from pallas_kernels.short_conv.api import SHORT_CONV, SHORT_CONV_STEP
from pallas_kernels.situ.api import SITU_GLU, SWIGLU

OPS: tuple[Op, ...] = (
    SHORT_CONV,
    SHORT_CONV_STEP,
    KDA_PREFILL,
    KDA_DECODE,
    KDA_DECODE_PAGED,
    KDA_VERIFY_PAGED,
    KDA_COMMIT_PAGED,
    MLA_WRITE,
    MLA_DECODE,
    MLA_PREFILL,
    ROUTE,
    SITU_GLU,
    SWIGLU,
    ATTN_RES_NORM,
    MOE_EXPERTS,
)

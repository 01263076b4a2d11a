"""Weights: from a released checkpoint to the described tree on a mesh, and to a converted one.

`folder` finds the files, `names` binds their tensors to the described sources, `plan` cuts the tree
into pieces, `fill` reads a piece, `loader` streams pieces to the devices, `journal` keeps them for
a restart, `converted` writes and restores Orbax checkpoints. `synthetic` makes random checkpoints,
`embedded` names the one that comes with the package.
"""

from k3jax.weights.embedded import EMBEDDED_DRAFT, EMBEDDED_MODEL
from k3jax.weights.errors import Problem, WeightError
from k3jax.weights.folder import read_draft_config, read_model_config
from k3jax.weights.loader import load, load_params
from k3jax.weights.progress import Progress, progress_bar

__all__ = [
    "EMBEDDED_DRAFT",
    "EMBEDDED_MODEL",
    "Problem",
    "Progress",
    "WeightError",
    "load",
    "load_params",
    "progress_bar",
    "read_draft_config",
    "read_model_config",
]

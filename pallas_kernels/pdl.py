"""Programmatic dependent launch inside a kernel (kernels.md section 4.6).

Every block calls `wait` before it reads what an earlier kernel of the step wrote and before its
first global store; only parameters of the program may be read earlier. The wait is transitive only
if each kernel of a chain waits, so no kernel may leave it out. Both do nothing if `on` is false;
interpreted kernels pass false, since the interpreter knows neither.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu


def wait(on: bool) -> None:
    """Wait until all kernels before this one have ended and their stores are visible."""
    if on:
        plgpu.griddepcontrol_wait()


def launch_dependents(on: bool) -> None:
    """Let the next kernel start once every block has called this or ended."""
    if on:
        plgpu.griddepcontrol_launch_dependents()

"""What the kernels for Hopper GPUs ask of the device."""

import jax

HOPPER = "9.0"  # compute capability


def require_hopper() -> None:
    """Raise NotImplementedError unless JAX's default devices are Hopper GPUs."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise NotImplementedError(f"the JAX backend is {device.platform}, not a Hopper GPU")
    capability = getattr(device, "compute_capability", "unknown")
    if capability != HOPPER:
        raise NotImplementedError(f"the GPU has compute capability {capability}, not {HOPPER}")

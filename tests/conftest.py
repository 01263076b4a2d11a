"""Common set-up of all tests: eight simulated CPU devices, strict JAX, checked annotations.

The environment is set before anything imports jax, and child processes inherit it. With
`JAX_PLATFORMS=cuda` in the environment the same tests run on a GPU.
"""

import os

_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Every test's programs are small: compiling them is most of the work.
    "--xla_backend_optimization_level": "0",
    # A rendezvous of eight simulated devices on two busy cores may be slow without being stuck.
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
    "--xla_cpu_collective_call_terminate_timeout_seconds": "240",
}


def _prepare_environment() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # XLA:CPU sizes its thread pool by this; with fewer threads than simulated devices,
    # queued collectives can wait for each other forever.
    os.environ.setdefault("NPROC", "64")
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in _XLA_FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


_prepare_environment()

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Shapes and dtypes in annotations are checked in tests only.
jaxtyping.install_import_hook(["k3jax", "pallas_kernels", "sharding"], "beartype.beartype")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs, for this process and its children."""
    folder = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(config.cache.mkdir("jax")))
    jax.config.update("jax_compilation_cache_dir", folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, saying why, where JAX has no GPU."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (backend := jax.default_backend()) != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU: the JAX backend is {backend}")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture
def key() -> jax.Array:
    """A fixed random key."""
    return jax.random.key(20240607)

"""Traces of JAX's profiler: what the host and the devices do, for XProf and Perfetto."""

from __future__ import annotations

from pathlib import Path

import jax


class XlaTracer:
    """Records into `FOLDER/plugins/profile/TIME`."""

    def start(self, folder: Path, *, with_python: bool) -> None:
        """Begin to record."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(with_python)
        jax.profiler.start_trace(  # pyright: ignore[reportUnknownMemberType]
            folder, profiler_options=options, create_perfetto_trace=True
        )

    def stop(self) -> None:
        """End the record and write it."""
        jax.profiler.stop_trace()  # pyright: ignore[reportUnknownMemberType]

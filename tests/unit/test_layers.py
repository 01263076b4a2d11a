"""The layers of the code base: who may import whom, and which modules load no device library.

The contracts live in `pyproject.toml` (`tool.importlinter`); they follow imports in the source.
The run-time test adds what a static look cannot see: package `__init__` files and third parties.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOST_CONTRACTS = {"host-shared", "host"}
SERVING_CONTRACTS = {"host", "executor", "front"}

# Imports each module named on the command line, and reports after each which of the
# forbidden libraries (first argument) are loaded. A module that fails to import ends the run.
PROBE = """
import importlib, json, sys
forbidden = sys.argv[1].split(",")
loaded = {}
for name in sys.argv[2:]:
    importlib.import_module(name)
    loaded[name] = [library for library in forbidden if library in sys.modules]
print(json.dumps(loaded))
"""


def contracts() -> dict[str, dict]:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {entry["id"]: entry for entry in options["tool"]["importlinter"]["contracts"]}


def modules_below(name: str) -> list[str]:
    """Return `name` and, if it is a package, every module in it."""
    path = ROOT.joinpath(*name.split("."))
    files = [path.with_suffix(".py"), *sorted(path.rglob("*.py"))]
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files if file.is_file()]
    return [".".join(part).removesuffix(".__init__") for part in parts]


def host_modules() -> list[str]:
    """Return every existing module that a contract of `HOST_CONTRACTS` covers."""
    sources = [name for key in HOST_CONTRACTS for name in contracts()[key]["source_modules"]]
    return sorted(module for name in sources for module in modules_below(name))


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_import_contracts_are_kept():
    run = run_python(
        "-c",
        "from importlinter.cli import lint_imports_command as main; main()",
        "--no-cache",
        "--no-logo",
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_host_modules_load_no_device_or_rpc_library():
    forbidden = contracts()["host"]["forbidden_modules"]
    modules = host_modules()
    run = run_python("-c", PROBE, ",".join(forbidden), *modules)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {name: [] for name in modules}


def test_the_library_probe_sees_jax():
    run = run_python("-c", PROBE, "jax,flax,grpc", "jax.numpy")
    assert json.loads(run.stdout) == {"jax.numpy": ["jax"]}


def test_every_serving_module_is_in_a_contract():
    covered = {name for key in SERVING_CONTRACTS for name in contracts()[key]["source_modules"]}
    entries = (ROOT / "serving").iterdir()
    present = {
        f"serving.{entry.stem}"
        for entry in entries
        if (entry.suffix == ".py" or (entry / "__init__.py").is_file()) and entry.stem != "__init__"
    }
    missing = sorted(present - covered)
    assert not missing, f"name {missing} in a contract of tool.importlinter in pyproject.toml"


@pytest.mark.parametrize("package", ["k3jax", "pallas_kernels", "sharding", "serving"])
def test_package_carries_its_type_marker(package: str):
    assert (ROOT / package / "py.typed").is_file()

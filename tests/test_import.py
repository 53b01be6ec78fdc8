"""Importing is cheap, and either package can come first."""

import subprocess
import sys

import pytest

import autopar

HEAVY = ("torch", "numpy", "ortools", "sympy", "pydantic", "transformers")


def _python(code, *arguments):
    return subprocess.run([sys.executable, *arguments, "-c", code], capture_output=True, text=True, check=False)


def test_importing_autopar_loads_nothing_heavy():
    code = f"import autopar, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert _python(code).stdout.strip() == "[]"


def test_help_loads_nothing_heavy():
    code = f"""
import sys
from autopar.cli import main
try:
    main(["--help"])
except SystemExit as stop:
    assert not stop.code
print([name for name in {(*HEAVY, "rich")} if name in sys.modules])"""
    done = _python(code)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    assert "plan" in done.stdout


def test_importing_autopar_is_fast():
    done = _python("import autopar", "-X", "importtime")
    cumulative_us = int(done.stderr.strip().splitlines()[-1].split("|")[1])
    assert cumulative_us < 200_000


@pytest.mark.parametrize("order", ["import autopar, passes", "import passes, autopar"])
def test_either_package_can_be_imported_first(order):
    done = _python(f"{order}; autopar.compile")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_export_exists(name):
    assert callable(getattr(autopar, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = autopar.nope

"""8 simulated CPU devices for every test, and compiled programs that are kept between runs."""

import os
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# the programs are tiny and run once: most of a test's time is LLVM's, and its optimizations do not pay
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """The simulated devices are asserted, never skipped."""
    assert jax.device_count() == 8, jax.devices()

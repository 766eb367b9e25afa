"""Flags of XLA with which tests compile: programs are tiny and run once."""

from importlib.metadata import version

# Most of a test's time is the compiler's, and what makes programs fast does not pay. The fusion emitters
# would build an MLIR context for each kernel, half of all the time.
QUICK_COMPILATION = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # later ones have no other emitters, and end a process that has the flag
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib").startswith("0.10.") else []),
    "--xla_cpu_parallel_codegen_split_count=1",
)

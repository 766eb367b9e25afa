"""The benchmark of collective matmul: what it counts in a compiled program."""

import importlib.util
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "collective_matmul.py"
HLO = """HloModule step, is_scheduled=true, num_partitions=2

%multiplied (a: f32[1024,1024], b: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  %b = f32[1024,1024]{1,0} parameter(1)
  ROOT %dot = f32[1024,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0} parameter(0)
  %start = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}) collective-permute-start(%x), channel_id=1
  %fusion = f32[1024,1024]{1,0} fusion(%x, %x), kind=kOutput, calls=%multiplied
  %done = f32[1024,1024]{1,0} collective-permute-done(%start)
  %second = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}) collective-permute-start(%done), channel_id=1
  %last = f32[1024,1024]{1,0} collective-permute-done(%second)
  %gathered = f32[2048,1024]{1,0} all-gather(%last), replica_groups={{0,1}}, dimensions={0}
  %small = f32[2]{0} all-reduce(%norm), replica_groups={{0,1}}, to_apply=%sum
  ROOT %sum = f32[1024,1024]{1,0} add(%last, %fusion)
}

%condition (x: f32[1024,1024]) -> pred[] {
  %x.1 = f32[1024,1024]{1,0} parameter(0)
  ROOT %again = pred[] constant(false)
}

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0} parameter(0)
  ROOT %loop = f32[1024,1024]{1,0} while(%p), condition=%condition, body=%body
}
"""


def test_it_counts_exchanges_that_have_a_product_between_start_and_end():
    """Of activations: a sum of a few numbers is none."""
    spec = importlib.util.spec_from_file_location("collective_matmul_benchmark", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert list(module.exchanges(HLO)) == [True, False, False]

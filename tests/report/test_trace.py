"""What a trace says: of a small one like that of a GPU, by value; and damaged files."""

import gzip
import json
import re

import pytest

from shardtrain.report.trace import find_kind, find_operations, read_trace, summarise, summary_text
from shardtrain.report.trace_programs import Source, read_sources


def named(kind, pid, label, tid=None):
    return {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": label}}


def ran(pid, tid, start, length, kernel, operation, path=""):
    arguments = {"hlo_op": operation, "name": path}
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": length, "name": kernel, "args": arguments}


GPU = [
    named("process", 1, "/device:GPU:0"),
    named("thread", 1, "Stream #1(Compute)", 10),
    named("thread", 1, "Stream #2(NCCL)", 20),
    named("thread", 1, "XLA Modules", 30),
    named("process", 2, "/device:GPU:1"),
    named("thread", 2, "Stream #1(Compute)", 10),
    named("process", 3, "/host:CPU"),
    named("thread", 3, "python", 1),
    ran(1, 10, 0, 40, "nvjet_hsh_128x256", "gemm_fusion_dot.1"),
    ran(1, 10, 40, 20, "flash_fwd_kernel", "custom-call.2"),
    ran(1, 10, 60, 10, "loop_convert_fusion", "loop_convert_fusion", "jit(step)/dot_general"),
    # hidden from 60 to 70, exposed from 70 to 90
    ran(1, 20, 60, 30, "ncclDevKernel_AllReduce", "all-reduce-start.3"),
    ran(1, 10, 95, 5, "input_reduce_fusion", "input_reduce_fusion"),
    ran(1, 30, 0, 100, "jit_step", "jit_step"),
    ran(2, 10, 0, 100, "nvjet", "gemm.1"),
    ran(3, 1, 0, 500, "Python", "host"),
]


def test_every_instant_of_a_gpu_is_of_one_kind():
    summary = summarise(find_operations(GPU))
    assert summary.seconds == pytest.approx(1e-4)
    assert summary.shares == pytest.approx(
        {"matmul": 0.4, "attention": 0.2, "other": 0.15, "collectives": 0.2, "idle": 0.05}
    )
    assert summary.hidden == pytest.approx(0.1)
    assert summary.top[0] == ("gemm_fusion_dot.1", "matmul", pytest.approx(4e-5), 1)
    assert [row[0] for row in summary.top[1:3]] == ["all-reduce-start.3", "custom-call.2"]
    first = summary_text(summary, 2).splitlines()[0]
    assert first == (
        "profile of 2 steps, 0.05 ms each: matmul 40%, attention 20%, other 15%, collectives 20%, idle 5%;"
        " collectives overlapped 10%"
    )


def test_a_loop_is_not_counted_beside_what_runs_in_it():
    events = [
        named("process", 3, "/host:CPU"),
        ran(3, 1, 0, 100, "while.1", "while.1"),
        ran(3, 1, 0, 100, "loop", "repeat", ""),
        ran(3, 1, 10, 20, "fusion.2", "fusion.2"),
    ]
    origin = {
        ("", "repeat"): Source("while", ""),
        ("", "fusion.2"): Source("fusion  dot", "jit(step)/attention/mul"),
    }
    summary = summarise(find_operations(events, origin))
    assert summary.shares["attention"] == 1
    assert summary.seconds == pytest.approx(2e-5)


def test_kernels_of_a_cuda_graph_have_their_own_names_and_sources():
    events = [
        named("process", 1, "/device:GPU:0"),
        named("thread", 1, "Stream #14(Compute)", 14),
        ran(1, 14, 0, 100, "loop_add_fusion_36", "command_buffer_1"),
        ran(1, 14, 100, 50, "nvjet_sm90_tst_128x128", "command_buffer_1"),
        ran(1, 14, 150, 50, "cudnn::fusion::convert_dq_to_16bits<true>", "command_buffer_1"),
    ]
    origin = {("", "loop_add_fusion.36"): Source("fusion add", "jit(step)/attention/add")}
    summary = summarise(find_operations(events, origin))
    assert [(name, kind) for name, kind, *_ in summary.top] == [
        ("loop_add_fusion_36", "attention"),
        ("nvjet_sm90_tst_128x128", "matmul"),
        ("cudnn::fusion::convert_dq_to_16bits<true>", "attention"),
    ]


@pytest.mark.parametrize(
    ("name", "source", "kind"),
    [
        ("reduce-scatter.1", Source("reduce-scatter", "attention"), "collectives"),
        ("custom-call.1", Source("custom-call __cudnn$fmhaSoftmax", ""), "attention"),
        ("fusion", Source("fusion dot", ""), "matmul"),
        ("fusion", Source("fusion convert", "x/dot_general"), "other"),
        ("wrapped_convert", Source("convert", ""), "other"),
        ("convolution.4", Source("convolution", ""), "matmul"),
    ],
)
def test_kinds(name, source, kind):
    assert find_kind(name, source) == kind


def test_a_damaged_trace_is_named(tmp_path):
    path = tmp_path / "a.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": GPU}).encode()))
    assert len(read_trace(path)) == len(GPU)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=re.escape(f"{path} is no trace of jax's profiler")):
        read_trace(path)
    with pytest.raises(ValueError, match="no operations of a device"):
        summarise({})
    program = tmp_path / "a.xplane.pb"
    program.write_bytes(bytes([10, 200]))
    with pytest.raises(ValueError, match="a message Space of 2 bytes is damaged"):
        read_sources(program)
    program.write_bytes(b"")
    assert read_sources(program) == {}

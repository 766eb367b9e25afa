"""Python programs that start in a quarter of a second: forked from a process that has imported everything.

`python warm_python.py SOCKET` imports jax, flax, Orbax and shardtrain, and forks a child for each request.
`python -S -I warm_python.py SOCKET -m MODULE ... | PROGRAM ...` is a request: it stands for
`python -m MODULE ... | PROGRAM ...`, with this process's environment, folder, standard streams, signals and
exit code. The child has imported modules but has no backend of jax, no MPI and no thread. Its
runs draw no loss curve.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WARM = (
    "compiled_programs",
    "jaxlib.mlir.dialects.mhlo",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "tensorboardX",
    "orbax.checkpoint",
    "rich._emoji_codes",
    "shardtrain.cli.train",
    "shardtrain.trainer.train",
)


def request(address: str, words: list[str]) -> int:
    """Ask for a child and wait for it; return its exit code, or minus the signal that ended it."""
    # MPICH's mpiexec talks to each rank through a descriptor that it inherits
    descriptors = [0, 1, 2, *([int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else [])]
    asked = {"words": words, "environ": dict(os.environ), "folder": os.getcwd(), "descriptors": descriptors}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"!"], descriptors)
        connection.sendall(json.dumps(asked).encode() + b"\n")
        with connection.makefile() as answers:
            child = int(answers.readline())
            for number in FORWARDED:
                signal.signal(number, lambda number, frame: os.kill(child, number))
            return int(answers.readline())


def trace_a_step() -> None:
    """Trace a step, which needs no backend: what jax does only the first time, no child has to do."""
    import jax
    import jax.numpy as jnp
    import optax
    from tiny_language_model import TinyConfig

    from shardtrain.functional.loss import next_token_loss
    from shardtrain.functional.nnx_model import from_nnx

    model, optimizer = from_nnx(TinyConfig(num_layers=2)), optax.adam(1.0)

    def step(seed, batch):
        key = jax.random.key(seed)
        params, _ = model.init(key)

        def loss(params):
            return next_token_loss(lambda *inputs: model.apply(params, {}, key, True, *inputs)[0], batch)[0]

        return optimizer.update(jax.grad(loss)(params), optimizer.init(params), params)

    shapes = {"tokens": ((4, 9), jnp.int32), "weights": ((4,), jnp.float32)}
    batch = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}
    jax.eval_shape(step, jax.ShapeDtypeStruct((), jnp.uint32), batch)


def serve(address: str) -> dict:
    """Fork children until standard input is closed; returns, in each child, what was asked of it."""
    import gc
    import importlib
    import selectors

    for name in WARM:
        importlib.import_module(name)
    # a loss curve takes a tenth of the time of a run here
    setattr(sys.modules["shardtrain.trainer.train"], "draw_curve", lambda folder, output: None)  # noqa: B010
    trace_a_step()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    children: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a child or its connection -> both
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                for child, _ in children.values():
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj is listening:
                connection = listening.accept()[0]
                _, received, _, _ = socket.recv_fds(connection, 1, 8)
                with connection.makefile() as lines:
                    asked = json.loads(lines.readline())
                child = os.fork()
                if not child:
                    listening.close()
                    connection.close()
                    selector.close()
                    for _, other in children.values():
                        other.close()
                    return {**asked, "received": received}
                for descriptor in received:
                    os.close(descriptor)
                connection.sendall(b"%d\n" % child)
                ended = os.pidfd_open(child)
                for file in (ended, connection):
                    selector.register(file, selectors.EVENT_READ, (child, ended, connection))
                children[child] = (child, connection)
            else:
                # the child has ended; or its connection is closed, as whoever asked was killed
                child, ended, connection = key.data
                if child not in children:
                    continue
                if key.fileobj is connection:
                    os.kill(child, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                del children[child]
                for file in (ended, connection):
                    selector.unregister(file)
                with suppress(BrokenPipeError):
                    connection.sendall(b"%d\n" % code)
                connection.close()
                os.close(ended)


def become(asked: dict) -> None:
    """Take the place of who asked: its environment, folder and descriptors."""
    import fcntl

    # out of the way first: a descriptor may have come as the number that another shall have
    above = [fcntl.fcntl(received, fcntl.F_DUPFD, 200) for received in asked["received"]]
    for received in asked["received"]:
        os.close(received)
    for descriptor, number in zip(above, asked["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # streams remember whether their old files could seek
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["folder"])


def run(words: list[str]) -> None:
    """What `python WORDS` does."""
    import runpy

    from compiled_programs import keep_every_program

    keep_every_program()
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        code = request(sys.argv[1], sys.argv[2:])
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    here = serve(sys.argv[1])
    become(here)
    run(here["words"])

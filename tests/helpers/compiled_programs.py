"""Every program that a test compiles is kept for all processes; who needs it meanwhile waits for it."""

import fcntl
import functools
import os
import threading

import jax
from jax._src import compilation_cache, compiler, lru_cache


@functools.cache
def keep_every_program() -> None:
    """Keep small programs too: hundreds of processes run the same, and reading is quicker than compiling.

    Jax writes a file in place, and lets processes that come together compile the same program. Here
    a file appears whole, also where its process is killed, and who comes second waits for the first.
    """
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    plain = compiler._compile_and_write_cache

    def put(self, key: str, value: bytes) -> None:
        path = self.path / f"{key}-cache"
        beside = self.path / f"{key}.{os.getpid()}.{threading.get_ident()}"
        beside.write_bytes(value)
        beside.replace(path)

    def shared(backend, computation, devices, options, callbacks, name, key):
        folder = f"{os.environ['JAX_COMPILATION_CACHE_DIR']}/locks"
        os.makedirs(folder, exist_ok=True)
        with open(f"{folder}/{key}", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # jax 0.11 keeps programs that call Python too: without their callbacks they crash
                given = (callbacks,) if jax.__version_info__ >= (0, 11) else ()
                found, _ = compilation_cache.get_executable_and_time(key, options, backend, devices, *given)
                if found is not None:
                    return found
            return plain(backend, computation, devices, options, callbacks, name, key)

    lru_cache.LRUCache.put = put
    compiler._compile_and_write_cache = shared

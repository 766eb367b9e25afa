"""A process that proposes epochs in threads: FOLDER PROCESS THREADS EPOCHS; prints what it was told."""

import json
import sys
import threading
from pathlib import Path

from shardtrain.elastic.run_files import RunFiles

folder, process = Path(sys.argv[1]), sys.argv[2]
num_threads, num_epochs = map(int, sys.argv[3:])
files = RunFiles(folder)
found, ready = [], threading.Barrier(num_threads)


def propose_all(thread):
    ready.wait()
    texts = [f"{process} {thread} {number} " * 1000 for number in range(1, num_epochs + 1)]
    found.append([files.propose(i, text.encode()).decode() for i, text in enumerate(texts, 1)])


threads = [threading.Thread(target=propose_all, args=(i,)) for i in range(num_threads)]
for each in threads:
    each.start()
for each in threads:
    each.join()
sys.stdout.write(json.dumps(found))

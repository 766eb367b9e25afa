#!/bin/bash
# 2 islands of 1,3 processes

# flux: --job-name=shardtrain
# flux: --nodes=4
# flux: --exclusive
# flux: --output=logs/shardtrain-{{id.dec}}.log
# flux: '--requires=host:a b'
# flux: --urgency=20

module load openmpi
export SHARDTRAIN_ISLAND_PROCESSES=1,3
export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184

job=$(flux job id "$(flux getattr jobid)")  # as a decimal number
logs=logs/"$job"
mkdir -p "$logs" && rm -f "$logs"/rank-*.json  # how ranks ended in an earlier start of this job
flux run --nodes=4 --exclusive --tasks-per-node=1 -o exit-on-error -o exit-timeout=none -o pmi=pmix -o cpu-affinity=off \
  python -m shardtrain.launch.rank "$logs" -- \
  python -m shardtrain train examples/gpt_text.py --run-dir 'runs/my run'

# the error of the rank that failed first, and its exit code
python -m shardtrain.launch.outcome "$logs" --code $? --launcher 'flux run'
code=$?
exit $code

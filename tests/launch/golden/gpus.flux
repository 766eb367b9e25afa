#!/bin/bash
# an island a node, each of 2 processes

# flux: --job-name=gpt
# flux: --nodes=4
# flux: --nslots=8
# flux: --cores-per-slot=16
# flux: --gpus-per-slot=2
# flux: --queue=pbatch
# flux: --setattr=system.bank=physics
# flux: --time-limit=3600s
# flux: --output=logs/gpt-{{id.dec}}.log

export SHARDTRAIN_ISLAND_PROCESSES=2
export GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184
export SHARDTRAIN_BIND=no

job=$(flux job id "$(flux getattr jobid)")  # as a decimal number
logs=logs/"$job"
mkdir -p "$logs" && rm -f "$logs"/rank-*.json  # how ranks ended in an earlier start of this job
left=$(($(flux job timeleft) - 10))
flux run --nodes=4 --ntasks=8 --cores-per-task=16 --gpus-per-task=2 --time-limit="$left"s --signal=USR1@300s -o exit-on-error -o exit-timeout=none -o pmi=simple -o cpu-affinity=per-task -o gpu-affinity=per-task \
  python -m shardtrain.launch.rank "$logs" -- \
  python -m shardtrain train examples/gpt_text.py --run-dir 'runs/my run'

# the error of the rank that failed first, and its exit code
python -m shardtrain.launch.outcome "$logs" --code $? --launcher 'flux run'
code=$?
if [ $code -eq 75 ] || [ $code -eq 138 ]; then  # a rank was lost or hung; or the time is over, and the state saved
  flux --parent batch "$0"
fi
exit $code

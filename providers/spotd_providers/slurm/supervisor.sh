#!/bin/sh
# What Slurm runs, on the first node of the job. The address of the grant is not in it: others may read it.
# With a word behind it: what srun runs on each of several nodes. Each has a folder of its own on the shared disk.
cd '@HOME@' || exit 70
up() { read -r uptime _ </proc/uptime; echo "${uptime%%.*}"; }
# Slurm signals every process: the shells between here and the runner must outlive what the runner acts upon.
begin() { # FOLDER
  (trap '' TERM && cd "$1" && SPOTD_MACHINE='@HOME@' SPOTD_HOME=$PWD/work exec /bin/sh ../boot.sh) </dev/null &
  first=$!
}
if [ $# -gt 0 ]; then
  trap '' TERM USR1
  place=job.$SLURM_NODEID near=${SPOTD_PEERS#* }
  [ "$SLURM_NODEID" = 0 ] && place=job || near=${SPOTD_PEERS%% *}
  # Not through srun, which waits for the last process that holds its pipe; and no two nodes append to one shared file.
  exec >>"log${place#job}" 2>&1
  # The address that leads to another node: what a node's own name stands for may be its loopback interface.
  SPOTD_NODE_ADDRESS=$(python3 -c 'import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s: s.connect((sys.argv[1], 9)); print(s.getsockname()[0])' "$near")
  export SPOTD_NODE_ADDRESS SPOTD_NODE_RANK="$SLURM_NODEID"
  mkdir -p "$place/work"
  begin "$place"
  while [ ! -e "$place/over" ] && kill -0 "$first" 2>/dev/null; do sleep 1; done
  [ -e "$place/over" ] || { wait "$first"; echo $? >"$place/over"; }
  # A runner without a lease took no part, so that the others would wait for it in vain.
  [ -e "$place/machine-lease" ] || { echo "spotd: node $SLURM_NODEID of @NODES@ did not begin"; : >not-begun; }
  # What is left of its group, which Slurm finds only while a parent of it lives, unless it tracks by cgroup.
  for pid in $(cat /proc/[0-9]*/stat 2>/dev/null | sed -n "s/^\([0-9]*\) (.*) [^ZX] [0-9-]* $$ .*/\1/p"); do
    [ "$pid" = $$ ] || kill -KILL "$pid"
  done 2>/dev/null
  exit 0
fi
mkdir started 2>/dev/null
if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || ! ( set -C; echo "$SLURM_JOB_ID" >started/id ) 2>/dev/null; then
  echo "spotd: this job was started before, so it ends"
  exit 0
fi
[ -f boot.sh ] || { echo "spotd: its end was ordered before it began"; exit 0; }
began=$(up) until=$(($(date +%s) + @LIMIT@))
tell() { { echo "{\"reason\": \"$1\"$2}" >notice && mv notice job/work/notice; } 2>/dev/null; }
# The same signal stands for the time limit and for a preemption; at its own time it is the first of these.
warn() {
  if [ @LIMIT@ -gt 0 ] && [ $(($(up) - began)) -ge $((@LIMIT@ - @GRACE@ - 90)) ]; then
    tell "its time limit comes" ", \"at\": \"$(date -u -d "@$until" +%Y-%m-%dT%H:%M:%SZ)\""
  else
    tell "Slurm takes its place away" ""
  fi
}
trap warn USR1
trap 'tell "Slurm ends it" ""' TERM
code=0
if [ @NODES@ = 1 ]; then
  begin job
else
  two=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 2 | paste -s -d , -)
  SPOTD_PEERS=$(scontrol show node -o "$two" | sed -n 's/.* NodeAddr=\([^ ]*\) .*/\1/p' | paste -s -d ' ' -)
  export SPOTD_PEERS
  # A member that ends says so to the first one, which alone ends all.
  srun --nodes=@NODES@ --ntasks=@NODES@ --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --wait=0 \
    --kill-on-bad-exit=0 --input=none /bin/sh '@HOME@/run.sh' member &
  first=$!
fi
while [ ! -e job/over ] && [ ! -e not-begun ]; do
  kill -0 "$first" 2>/dev/null || { wait "$first"; code=$?; break; }
  sleep 1
done
[ -e not-begun ] && code=70 && tail -q -n 5 log.[0-9]*
if [ @NODES@ != 1 ] && [ "$code" = 0 ]; then
  read -r code <job/over 2>/dev/null || code=0
  n=0 # the others end now, each by itself; one that cannot is ended with the job
  while kill -0 "$first" 2>/dev/null && [ "$n" -lt 10 ]; do n=$((n + 1)); sleep 1; done
fi
echo "$code" >exit
rm -rf boot.sh job job.[0-9]*
exit "$code"

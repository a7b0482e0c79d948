#!/bin/sh
# What Slurm runs, on the first node of the job. The address of the grant is not in it: others may read it.
cd '@HOME@' || exit 70
mkdir started 2>/dev/null
if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] || ! ( set -C; echo "$SLURM_JOB_ID" >started/id ) 2>/dev/null; then
  echo "spotd: this job was started before, so it ends"
  exit 0
fi
[ -f boot.sh ] || { echo "spotd: its end was ordered before it began"; exit 0; }
up() { read -r uptime _ </proc/uptime; echo "${uptime%%.*}"; }
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
# Slurm signals every process: the shells between here and the runner must outlive what the runner acts upon.
(trap '' TERM && cd job && SPOTD_MACHINE='@HOME@' SPOTD_HOME=$PWD/work exec /bin/sh ../boot.sh) </dev/null &
first=$!
while [ ! -e job/over ]; do
  kill -0 "$first" 2>/dev/null || { wait "$first"; code=$?; break; }
  sleep 1
done
echo "$code" >exit
rm -rf boot.sh job
exit "$code"

#!/bin/sh
# A plain shell job: counts slowly, saves its place, and goes on from there after a preemption.
# The resume line is the `if` below; a checkpoint is a folder, written under a temporary name and renamed.
set -eu
last=${1:-60}
dir=${SPOTD_CHECKPOINT_DIR:-checkpoints}
out=${SPOTD_OUTPUT_DIR:-out}
mkdir -p "$dir" "$out"

i=0
if [ -n "${SPOTD_RESUME:-}" ]; then i=$(cat "$SPOTD_RESUME/count"); fi
echo "starting at $i"

save() {
  tmp="$dir/tmp-$i"
  rm -rf "$tmp" && mkdir "$tmp"
  echo "$i" > "$tmp/count"
  touch "$tmp/DONE"
  [ -e "$dir/count-$i" ] || mv "$tmp" "$dir/count-$i"
}
trap 'save; echo "asked to stop at $i: saved"; exit 143' TERM

while [ "$i" -lt "$last" ]; do
  sleep 1 &
  wait $! || true
  i=$((i + 1))
  [ $((i % 10)) -ne 0 ] || { save; echo "saved at $i"; }
done
echo "$i" > "$out/count"
echo "done at $i"

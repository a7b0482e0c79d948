# What spotd runs on a host, by any POSIX shell, as an ordinary user. It is sent whole with each call.
#
# Layout below $DIR: `lock`; `devices/ID`, which holds the key that has this GPU; `machines/KEY/`, a folder a machine:
# `meta` (price, devices, the host's name then; of several machines also rank and hosts, as answers.py reads them),
# `boot.sh` (what it runs), `started` and `child` (pid, the kernel's start time of it, boot, uptime), `exit` (code,
# uptime, reason), `ended` (its end was ordered), `leave` (when its owner comes), `log`, `job/`. One that has the place
# of a lost one of several has a folder KEY.ROUND, so that a host may have its part again.
# A folder is made before anything else and is kept for a day after the end, so that a key is used once.
#
# A process is named by its pid, its start time and the boot: a pid alone is given away again. Ages are taken from the
# uptime of the host, which is never set. Nothing runs before the last line of what is sent has arrived.

say() { printf '%s' "$1"; shift; for word in "$@"; do printf '\t%s' "$word"; done; echo; }
refuse() { say refused "$1" "$2"; }
up() { read -r uptime _ </proc/uptime; echo "${uptime%%.*}"; }
stat_of() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f"$2"; }
# Empty for a process that is over and was not collected by its parent: in containers none may do that.
begun() { sed -n 's/.*) [^ZX] //p' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f19; }
line_of() { text=''; { read -r text <"$1"; } 2>/dev/null; }
lines() { while read -r line; do say "$@" "$line"; done; }

# Ten seconds at most: who holds it longer hangs. Nothing that is started may inherit it (9>&-), or it is held for ever.
lock() { exec 9>"$DIR/lock" && flock -w 10 9 || { echo "spotd: busy, ask again in 15 s" >&2; exit 75; }; }
unlock() { exec 9>&-; }

# The processes of a machine: its supervisor, those that inherited its mark, and those in the session of its first child
# while that lives. One that clears its environment and leaves its session is ended by systemd or docker only.
is_process() { [ -n "$1" ] && [ -n "$2" ] && [ "$3" = "$BOOT" ] && [ "$(begun "$1")" = "$2" ]; }
leader() {
  pid='' since='' booted=''
  { read -r pid since booted _ <"$DIR/machines/$1/started"; } 2>/dev/null
  is_process "$pid" "$since" "$booted"
}
members() {
  grep -lszxF "SPOTD_MACHINE=$DIR/machines/$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
  child='' since='' booted=''
  { read -r child since booted _ <"$DIR/machines/$1/child"; } 2>/dev/null
  is_process "$child" "$since" "$booted" || return 0
  cat /proc/[0-9]*/stat 2>/dev/null | sed -n "s/^\([0-9]*\) (.*) [^ZX] [0-9-]* [0-9-]* $child .*/\1/p"
}
lives() { leader "$1" || [ -n "$(members "$1")" ]; }
end_members() {
  [ -e "$DIR/machines/$1/docker" ] && timeout -k 5 30 docker rm -f "$1" >/dev/null 2>&1 </dev/null
  tries=0
  while found=$(members "$1"); [ -n "$found" ] && [ $tries -lt 50 ]; do
    if [ $tries = 0 ]; then kill -TERM $found; elif [ $tries -ge 20 ]; then kill -KILL $found; fi 2>/dev/null
    tries=$((tries + 1))
    sleep 0.2
  done
}

holds() { key_of=''; { read -r key_of <"$DIR/devices/$1"; } 2>/dev/null; [ -n "$key_of" ] && lives "$key_of"; }
release() {
  for device in "$DIR"/devices/*; do
    { read -r key_of <"$device"; } 2>/dev/null && [ "$key_of" = "$1" ] && rm -f "$device"
  done
}
undo() { release "$1"; rm -rf "${DIR:?}/machines/$1"; }
marked() { grep -zhasE '^SPOTD_MACHINE=' /proc/[0-9]*/environ 2>/dev/null | tr '\0' '\n' | sort -u; }
row() { # KEY MARKED
  folder=$DIR/machines/$1 lead=0 some=0 over=0 last=''
  leader "$1" && lead=1
  case "
$2
" in *"
SPOTD_MACHINE=$folder
"*) some=1 ;; esac
  [ -e "$folder/ended" ] && over=1
  [ -e "$folder/exit" ] && last=$(tail -n 1 "$folder/log" 2>/dev/null | head -c 300 | tr -d '\t')
  line_of "$folder/meta"; meta=$text
  line_of "$folder/started"; started=$text
  line_of "$folder/exit"
  say machine "$1" "$lead" "$some" "$meta" "$started" "$text" "$over" "$last"
}
op_greet() { say host "$BOOT" "$(up)" "$(date +%s)" "$(id -un)" "$(sha256sum /etc/machine-id 2>/dev/null | cut -c1-16)"; }

# A program that hangs is killed: a card that fell off its bus blocks whoever asks for it.
ask() { timeout -k 2 20 "$@" 2>/dev/null </dev/null 9>&-; }
smi() { ask nvidia-smi "$@" --format=csv,noheader,nounits; }
probe_gpus() {
  if command -v nvidia-smi >/dev/null; then
    found=$(smi --query-gpu=index,uuid,name,memory.total,driver_version); code=$?
    say nvidia "$code"
    printf '%s\n' "$found" | lines gpu
    [ $code -ge 124 ] && return
    # A name that this driver does not know fails the whole call, so each is asked for alone.
    for name in mig.mode.current memory.used ecc.errors.uncorrected.volatile.total; do
      found=$(smi --query-gpu="uuid,$name") && printf '%s\n' "$found" | lines more "$name"
    done
    ask nvidia-smi -L | lines listed
    smi --query-compute-apps=gpu_uuid,pid | lines app
  fi
  if command -v amd-smi >/dev/null; then
    say amd "$(ask amd-smi static --asic --vram --json | tr -d '\n\t' | head -c 100000)"
  elif command -v rocm-smi >/dev/null; then
    say rocm "$(ask rocm-smi --showproductname --showmeminfo vram --showuniqueid --json | tr -d '\n\t' | head -c 100000)"
  fi
}
op_probe() {
  op_greet
  say cpus "$(nproc)"
  say memory "$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)"
  say disk "$(df -Pk "$DIR" | tail -n 1 | tr -s ' ' | cut -d' ' -f4)"
  for name in flock timeout setsid sha256sum docker python3; do command -v $name >/dev/null && say has $name; done
  manager && say has manager
  probe_gpus
  lock
  for device in "$DIR"/devices/*; do holds "${device##*/}" && say held "${device##*/}" "$key_of"; done
  unlock
  grep -lszE '^SPOTD_MACHINE=' /proc/[0-9]*/environ 2>/dev/null | head -n 5000 | cut -d/ -f3 | lines own
}

op_list() { # INSTALL LEAVE_S LEAVE_AT
  lock
  op_greet
  for one in $(find "$DIR/machines" -mindepth 2 -maxdepth 2 -name ended -mmin +1440 2>/dev/null | head -n 20); do
    key=${one%/ended}; key=${key##*/}
    lives "$key" || undo "$key"
  done
  alive=$(marked)
  for one in "$DIR"/machines/*; do
    [ -d "$one" ] || continue
    key=${one##*/}
    case $key in "spotd-$1-"*|"spotd-$1."*) expect_owner "$one" "$2" "$3" ;; esac
    row "$key" "$alive"
  done
  unlock
}
expect_owner() {
  if [ "$2" = never ]; then rm -f "$1/leave"; return; fi
  { echo "$(($(up) + $2)) $3" >"$1/leave.new" && mv "$1/leave.new" "$1/leave"; } 2>/dev/null
}
op_show() { # KEY
  op_greet
  lock
  alive=''
  for one in "$DIR/machines/$1" "$DIR/machines/$1".[0-9]*; do
    [ -d "$one" ] || continue
    alive=${alive:-$(marked)}
    row "${one##*/}" "$alive"
  done
  unlock
}
op_log() { op_greet; tail -n "$2" "$DIR/machines/$1/log" 2>/dev/null | tail -c 100000 | tr -d '\t' | lines log; } # KEY LINES

# systemd of the user, where it outlives the log-out: its group holds whatever a job starts.
manager() {
  command -v systemd-run >/dev/null || return 1
  export XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-/run/user/$(id -u)}"
  [ "$(ask loginctl show-user "$(id -un)" -p Linger --value)" = yes ] && ask systemctl --user show-environment >/dev/null
}
# Of the devices that are named: those that the driver does not show now, or shows in use; all if it does not answer.
lost_of() {
  case "$*" in *GPU-*|*MIG-*) ;; *) return ;; esac
  command -v nvidia-smi >/dev/null || return
  shown=$(ask nvidia-smi -L) && used=$(smi --query-compute-apps=gpu_uuid) || { echo "$*"; return; }
  for name in "$@"; do
    case $shown in *"$name)"*) ;; *) echo "$name" ;; esac
    case $used in *"$name"*) echo "$name" ;; esac
  done | tr '\n' ' '
}

# The own address that leads to another host: what a host's own name stands for may be its loopback interface.
way_to() {
  ask python3 -c 'import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s: s.connect((sys.argv[1], 9)); print(s.getsockname()[0])' "$1"
}
# A port that nothing listens on is refused where it is reached; one behind a firewall does not answer.
op_reach() { # ADDRESS...
  op_greet
  for one in "$@"; do
    say reached "$one" "$(ask python3 -c 'import errno, random, socket, sys
def way(port):
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.settimeout(4)
        try: return s.connect_ex((sys.argv[1], port))
        except OSError as error: return str(error) or "no answer"
found = [way(random.randint(20000, 60000)) for _ in range(2)]
bad = [one for one in found if one not in (0, errno.ECONNREFUSED)]
print("yes" if not bad else errno.errorcode.get(bad[0], bad[0]))' "$one")"
  done
}

# A launch that arrives late must not start what is taken for absent by then: boot and uptime bound it.
op_launch() { # KEY BOOT LATEST PRICE COUNT CONTAINER VARIABLE LEAVE_S LEAVE_AT GRACE NAME RANK ROUND PLACES NEAR DEVICE...
  key=$1 boot=$2 latest=$3 price=$4 count=$5 container=$6 variable=$7 leave_s=$8 leave_at=$9
  shift 9
  grace=$1 called=$2 rank=$3 round=${4#0} places=$5 near=$6 place='' address=''
  shift 6
  if [ "$places" != - ]; then
    place=" $rank $places" address=$(way_to "$near")
    [ -n "$address" ] || { op_greet; refuse disk "$near, which another machine of it is at, is not reached"; return; }
  fi
  home=$DIR/machines/$key taken='' lost=" $(lost_of "$@") "
  lock
  op_greet
  if [ "$boot" != "$BOOT" ] || [ "$(up)" -gt "$latest" ]; then refuse late "it came too late"; return; fi
  if ! mkdir "$home" 2>/dev/null; then
    if [ -d "$home" ]; then row "$key" "$(marked)"; else refuse disk "$home cannot be made"; fi
    return
  fi
  for name in "$@"; do
    [ "$count" = 0 ] && break
    case $lost in *" $name "*) continue ;; esac
    holds "$name" && continue
    rm -f "$DIR/devices/$name"
    (set -C; echo "$key" >"$DIR/devices/$name") 2>/dev/null || continue
    taken="$taken${taken:+,}$name" count=$((count - 1))
  done
  if [ "$count" != 0 ]; then undo "$key"; refuse taken "no longer free"; return; fi
  { echo "$price $taken $called$place" >"$home/meta" && payload >"$home/boot.sh" && library >"$home/run.sh" &&
    mkdir -p "$home/job/work" && sync "$home/meta" "$home/boot.sh" "$home/run.sh"; } 2>/dev/null ||
    { undo "$key"; refuse disk "the folder of the machine cannot be written"; return; }
  [ "$leave_s" = never ] || expect_owner "$home" "$leave_s" "$leave_at"
  [ "$container" = docker ] && : >"$home/docker"
  case $taken in cpu-*) visible='' ;; *) visible=$taken ;; esac
  set -- env -i PATH="$PATH" HOME="$home/job" USER="$(id -un)" LOGNAME="$(id -un)" LANG=C.UTF-8 SHELL=/bin/sh \
    SPOTD_DIR="$DIR" SPOTD_KEY="$key" SPOTD_GRACE="$grace" SPOTD_DEVICES="$taken" "$variable=$visible" \
    ${address:+SPOTD_NODE_RANK="$rank"} ${address:+SPOTD_NODE_ADDRESS="$address"} \
    ${round:+SPOTD_NODE_ROUND="$round"} /bin/sh "$home/run.sh"
  if manager; then
    systemd-run --user --quiet --unit="$key" --property=KillMode=control-group --property=TimeoutStopSec=20 \
      --working-directory="$home" "$@" >/dev/null 2>&1 </dev/null 9>&-
  else
    (cd "$home" && exec setsid "$@") >/dev/null 2>&1 </dev/null 9>&- &
  fi
  # By the clock and not by the number of tries: a slow host would hold the lock for longer than others wait for it.
  until=$(($(up) + 8))
  while [ ! -s "$home/child" ] && [ "$(up)" -lt "$until" ]; do sleep 0.1; done
  if [ ! -s "$home/child" ]; then
    : >"$home/ended"
    end_members "$key"
    leader "$key" && kill -KILL "$pid"
    undo "$key"
    refuse disk "its first process does not start"
    return
  fi
  row "$key" "$(marked)"
}

# Which hosts carry an attempt together: the first of them keeps it, and changes it only for who knows what it was.
op_record() { # KEY FORMER META
  home=$DIR/machines/$1
  lock
  op_greet
  line_of "$home/meta"
  if [ -e "$home/ended" ] || ! leader "$1"; then refuse over "it does not run"; return; fi
  if [ "$text" != "$3" ]; then
    [ "$text" = "$2" ] || { refuse changed "another call has changed which hosts take part"; return; }
    { echo "$3" >"$home/meta.new" && sync "$home/meta.new" && mv "$home/meta.new" "$home/meta"; } 2>/dev/null ||
      { refuse disk "the folder of the machine cannot be written"; return; }
  fi
  row "$1" "$(marked)"
}

# With META a launch that is still on its way finds the end of it.
op_end() { # KEY [META]
  op_greet
  home=$DIR/machines/$1
  lock
  if [ ! -d "$home" ]; then
    [ -n "$2" ] || { say absent "$1"; return; }
    { mkdir "$home" && : >"$home/ended" && echo "$2" >"$home/meta"; } 2>/dev/null
    [ -e "$home/ended" ] || { refuse disk "$home cannot be made"; return; }
  fi
  : >"$home/ended"
  unlock
  manager && ask systemctl --user stop "$1" >/dev/null
  end_members "$1"
  leader "$1" && kill -KILL "$pid" 2>/dev/null
  tries=0
  while lives "$1" && [ $tries -lt 20 ]; do tries=$((tries + 1)); sleep 0.1; done
  lives "$1" && { refuse alive "processes of it do not end"; return; }
  lock
  release "$1"
  rm -rf "${DIR:?}/machines/$1/job" "$DIR/machines/$1/boot.sh" "$DIR/machines/$1/leave"
  : >"$DIR/machines/$1/ended" # once more: on a full disk there was no room for it before
  row "$1" "$(marked)"
  unlock
}

# The first process of a machine: it names itself before it starts anything, watches for its owner, and ends the rest.
op_supervise() { # GRACE DEVICES KEY
  cd "$DIR/machines/$3" || return
  trap : TERM HUP INT
  [ -e ended ] && return
  for name in $(echo "$2" | tr , ' '); do [ "$(cat "$DIR/devices/$name")" = "$3" ] || return; done
  (set -C; echo "$$ $(begun $$) $BOOT $(up)" >started) || return
  [ -e ended ] && return
  unset SPOTD_DIR SPOTD_KEY SPOTD_GRACE SPOTD_DEVICES
  (cd job && SPOTD_MACHINE=$DIR/machines/$3 SPOTD_HOME=$PWD/work exec setsid /bin/sh ../boot.sh) >log 2>&1 </dev/null &
  first=$! why=itself code=0 noticed=''
  # Until it has its own session, an end would not find it.
  tries=0
  while [ "$(stat_of $first 4)" = "$(stat_of $$ 4)" ] && [ $tries -lt 50 ]; do tries=$((tries + 1)); sleep 0.1; done
  echo "$first $(begun $first) $BOOT" >child.new && mv child.new child
  while [ ! -e job/over ]; do
    kill -0 "$first" 2>/dev/null || { wait "$first"; code=$?; break; }
    if { read -r leave_up leave_at <leave; } 2>/dev/null; then
      now=$(up)
      if [ -z "$noticed" ] && [ "$now" -ge $((leave_up - $1)) ]; then
        noticed=$now
        echo "{\"reason\": \"its owner's hours begin\", \"at\": \"$leave_at\"}" >notice && mv notice job/work/notice
      fi
      [ -n "$noticed" ] && [ "$now" -ge "$leave_up" ] && [ "$now" -ge $((noticed + $1)) ] && break
    fi
    sleep 1
  done
  [ -n "$noticed" ] && why=owner
  echo "$code $(up) $why" >exit.new && mv exit.new exit
  end_members "$3"
}

spotd_run() { # DIR PATH OPERATION ARGUMENT...
  DIR=$1 PATH=$2 op=$3
  export PATH
  shift 3
  case $DIR in /*) ;; *) DIR=$HOME/$DIR ;; esac
  BOOT=$(cat /proc/sys/kernel/random/boot_id)
  umask 077
  mkdir -p "$DIR/machines" "$DIR/devices" 2>/dev/null || { refuse disk "$DIR cannot be made"; return; }
  "op_$op" "$@"
}

# What spotd runs on a login node, by any POSIX shell, as an ordinary user. It is sent whole with each call.
#
# Layout below $DIR, which login node and nodes share: a folder a key, made before anything else, so that a key is used
# once. In it: `meta` (price, market), `boot.sh` (what the job runs, with the address of its grant: readable by its user
# only), `id` (the number of the job), `started` (made by the job: it starts once), `exit` (its code), `ended` (its end
# was ordered), `log`, `job/`, and on further nodes `job.1/` and so on.
#
# Slurm's commands run without the environment of the login: SBATCH_*, SQUEUE_* and a format of time would change what
# they do. Their fields stand between marks that were drawn for this call, so that no name of a job can imitate one.

say() { printf '%s' "$1"; shift; for word in "$@"; do printf '\t%s' "$word"; done; echo; }
up() { read -r uptime _ </proc/uptime; echo "${uptime%%.*}"; }
clean_env() {
  env -i PATH="$PATH" HOME="$HOME" USER="$ME" LOGNAME="$ME" LANG=C.UTF-8 SLURM_TIME_FORMAT=%s \
    ${CONF:+SLURM_CONF="$CONF"} "$@"
}
# One command, what it prints and its status. One that hangs is killed: a controller that is away blocks who asks it.
slurm() { clean_env timeout -k 2 20 "$@" 2>&1 </dev/null; echo "$MARK $?"; }
# Of that: rows of N fields (0: lines), all or ours; then the status with the first line that is no row.
rows() { # TAG N OURS
  awk -v FS="$MARK" -v tag="$1" -v n="$2" -v ours="$3" '
    NF == 2 && $1 == "" && $2 ~ /^ [0-9]+$/ { status = $2 + 0; next }
    { gsub(/\t/, " ") }
    n == 0 { if (++kept <= 20000) print tag "\t" $0; said = said == "" ? $0 : said; next }
    NF != n + 1 { if (ours == "" ? NF > 1 : index($0, ours)) odd++; if (NF < 2 && said == "") said = $0; next }
    { line = tag; for (i = 1; i <= n; i++) { sub(/ +$/, "", $i); line = line "\t" $i } }
    ours == "" || index($2, ours) == 1 || index($3, ours) == 1 { if (++kept <= 20000) print line }
    END {
      if (status != 0 && tolower(said) ~ /rate limit|temporarily unavailable/) print "busy"
      odd += kept > 20000 ? kept - 20000 : 0
      print "ran\t" tag "\t" (status == "" ? "cut" : status) "\t" (odd + 0) "\t" substr(said, 1, 300)
    }'
}
fields() { # LETTERS:WIDTH ... as squeue and sinfo take them
  list=''
  for one in "$@"; do list="$list${list:+,}$one$MARK"; done
  echo "$list"
}
queue() { # OURS ARGUMENT...
  ours=$1
  shift
  slurm squeue -h -t all -O "$(fields JobID:24 Name:256 Comment:256 UserName:64 State:24 Reason:80 SubmitTime:24 \
    StartTime:24 EndTime:24 PreemptTime:24 RestartCnt:8 NodeList:64 exit_code:16 JobArrayID:48)" "$@" |
    rows job 14 "$ours"
}
greet() { say host "$BOOT" "$(up)" "$(date +%s)" "$ME" "$DIR"; }
meta() { # KEY
  price='' ended=0 code=''
  { read -r price <"$DIR/$1/meta"; } 2>/dev/null
  { read -r code <"$DIR/$1/exit"; } 2>/dev/null
  [ -e "$DIR/$1/ended" ] && ended=1
  say meta "$1" "$price" "$ended" "$code"
}

op_greet() { greet; }
op_offers() { # PARTITIONS
  greet
  slurm sinfo -N -h -p "$1" -O "$(fields NodeList:80 Partition:70 StateCompact:24 Gres:400 GresUsed:400 CPUsState:40 \
    Memory:24 AllocMem:24)" | rows node 8 ''
  slurm scontrol show partition -o | rows partition 0 ''
  slurm scontrol show config | rows config 0 '' | grep -E '^ran|	(PreemptType|ClusterName|AccountingStorageType) '
}
op_list() { # INSTALL
  greet
  listed=$(queue "spotd-$1" --user="$ME")
  echo "$listed"
  for one in "$DIR/spotd-$1"[-.]*; do
    key=${one##*/}
    case $listed in *"	$key	"*) meta "$key" ;; esac
  done
  # What Slurm has forgotten keeps no address of a grant, and its log for two weeks.
  case $listed in *"ran	job	0	0"*) ;; *) return ;; esac
  find "$DIR" -mindepth 2 -maxdepth 2 -name meta -mmin +60 2>/dev/null | while read -r one; do
    key=${one%/meta}; key=${key##*/}
    case $listed in *"	$key	"*) continue ;; esac
    [ -e "$DIR/$key/ended" ] || { rm -rf "${DIR:?}/$key/boot.sh" "$DIR/$key"/job*; : >"$DIR/$key/ended"; }
  done
  find "$DIR" -mindepth 2 -maxdepth 2 -name ended -mmin +20160 2>/dev/null | head -n 100 | while read -r one; do
    rm -rf "${one%/ended}"
  done
}
op_find() { # INSTALL KEY
  greet
  queue "spotd-$1" --user="$ME"
  meta "$2"
  # A request that is under way ends within two minutes, with a number or without.
  [ -s "$DIR/$2/id" ] || [ -z "$(find "$DIR/$2" -maxdepth 0 -mmin -2 2>/dev/null)" ] || say begun "$2"
  slurm sacct -n -X --user="$ME" --name="$2" -S now-7days -E now -o JobIDRaw%24,State%24 | rows past 0 ''
}
op_show() { greet; queue '' -j "$1"; meta "$2"; } # ID KEY
op_log() { greet; tail -n "$2" "$DIR/$1/log" 2>/dev/null | tail -c 100000 | tr -d '\t' | sed 's/^/log	/'; } # KEY LINES

# The folder first, which fails for a key that was used; then what the job runs; then one request, 40 s at most. A call
# that arrives late would start what is taken for absent by then: boot and uptime of the login node bound it.
op_launch() { # KEY BOOT LATEST META DEFINITE OPTION...
  key=$1 home=$DIR/$1 definite=$5
  greet
  if [ "$2" != "$BOOT" ] || [ "$(up)" -gt "$3" ]; then say refused late; return; fi
  if ! mkdir "$home" 2>/dev/null; then
    if [ -d "$home" ]; then say refused used; else say refused disk; fi
    return
  fi
  { echo "$4" >"$home/meta" && payload >"$home/boot.sh" && supervisor >"$home/run.sh" && mkdir -p "$home/job/work" &&
    [ -s "$home/run.sh" ] && : >"$home/log"; } 2>/dev/null || { rm -rf "$home"; say refused disk; return; }
  shift 5
  said=$(clean_env timeout -k 2 40 sbatch --parsable --job-name="$key" --comment="$key" --no-requeue \
    --open-mode=append --output="$home/log" --chdir="$home" --export=ALL "$@" <"$home/run.sh" 2>&1)
  code=$?
  id=$(echo "$said" | sed -n 's/^\([0-9]\{1,18\}\)\(;.*\)\{0,1\}$/\1/p' | tail -n 1)
  said=$(echo "$said" | tr '\t\n' '  ' | cut -c 1-500)
  say sbatch "$code" "$id" "$said"
  echo "$id" >"$home/id" # empty where there is no number: what was under way is over
  if [ "$code" = 0 ] && [ -n "$id" ]; then
    queue '' -j "$id"
    meta "$key"
  elif [ "$code" != 0 ] && echo "$said" | grep -Eq "$definite"; then
    rm -rf "$home"
  fi
}
# Slurm itself compares user and name, so that a number that was given away again ends nothing else.
op_end() { # ID KEY
  greet
  [ -d "$DIR/$2" ] && { : >"$DIR/$2/ended"; rm -f "$DIR/$2/boot.sh"; } 2>/dev/null
  slurm scancel --user="$ME" --name="$2" "$1" | rows end 0 ''
}
op_check() { # PARTITIONS
  op_offers "$1"
  for name in sbatch squeue scontrol scancel sinfo python3; do
    command -v "$name" >/dev/null || say lacks "$name"
  done
  slurm sinfo --version | rows version 0 ''
  slurm sacct -n -X -S now-1hour -E now -o JobIDRaw | rows past 0 '' | grep '^ran'
  for name in $(echo "$1" | tr , ' '); do
    slurm sbatch --test-only -p "$name" --wrap true | rows "may $name" 0 '' | grep '^ran'
  done
  { mkdir -p "$DIR/check.$$" && rmdir "$DIR/check.$$"; } 2>/dev/null || say lacks "a folder $DIR that can be written"
}

spotd_run() { # DIR PATH CONF MARK OPERATION ARGUMENT...
  DIR=$1 PATH=$2 CONF=$3 MARK=$4 op=$5
  shift 5
  export PATH
  ME=$(id -un) BOOT=$(cat /proc/sys/kernel/random/boot_id)
  case $DIR in /*) ;; *) DIR=$HOME/$DIR ;; esac
  umask 077
  mkdir -p "$DIR" 2>/dev/null
  answer=$("op_$op" "$@")
  case "
$answer
" in *"
busy
"*) echo "spotd: busy, ask again in 60 s"; return 75 ;; esac
  printf '%s\n' "$answer"
}

#!/usr/bin/env bash
# A Slurm cluster of two nodes, n1 and n2, on this machine, while this script runs:
#   slurm_cluster.sh FOLDER CONTROLLER_PORT N1_PORT N2_PORT
# It prints "ready" once both nodes are idle, or "SKIPPED: reason". Clients need SLURM_CONF=FOLDER/slurm.conf. FOLDER is new,
# below /tmp, and holds all that the cluster writes. The cluster ends with this script, or with the process that started it.
# Needs root and the packages slurm-wlm and munge.
set -u
folder=$1 controller=$2 ports=("$3" "$4")
starter=$PPID
skip() {
  echo "SKIPPED: $1"
  exit 0
}
PATH=$PATH:/usr/sbin:/sbin
[ "$(id -u)" = 0 ] || skip "Slurm's daemons need root"
for program in slurmctld slurmd srun munged mungekey unshare; do
  command -v $program > /dev/null || skip "no $program (packages slurm-wlm and munge)"
done
mkdir -m 755 "$folder" || skip "$folder exists"

daemons=() control=
end() {
  trap - EXIT
  trap : TERM INT HUP  # a second signal does not interrupt the end
  if [ -n "$control" ] && kill -0 "$control" 2> /dev/null; then
    timeout -s KILL 5 scancel --state=PENDING 2> /dev/null
    timeout -s KILL 5 scancel --full --signal=KILL --state=RUNNING 2> /dev/null
    for _ in $(seq 40); do
      kill -0 "$control" 2> /dev/null || break
      jobs=$(timeout -s KILL 2 squeue --noheader 2> /dev/null) && [ -z "$jobs" ] && break
      sleep 0.1
    done
  fi
  for daemon in "${daemons[@]}"; do kill "$daemon" 2> /dev/null; done
  for _ in $(seq 50); do
    alive=0
    for daemon in "${daemons[@]}"; do kill -0 "$daemon" 2> /dev/null && alive=1; done
    [ $alive = 0 ] && break
    sleep 0.1
  done
  for daemon in "${daemons[@]}"; do kill -9 "$daemon" 2> /dev/null; done
  wait
  rm -rf "$folder"
}
trap end EXIT
trap 'exit 0' TERM INT HUP

# A munged of its own: the system's, if there is one, is left alone.
mungekey --create --keyfile "$folder/munge.key" 2> "$folder/munge.out" || skip "mungekey: $(tail -n 1 "$folder/munge.out")"
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munge.log" --seed-file="$folder/munge.seed" > "$folder/munge.out" 2>&1 &
daemons+=($!)
for _ in $(seq 50); do
  munge --no-input --socket="$folder/munge.socket" > /dev/null 2>&1 && break
  sleep 0.1
done
munge --no-input --socket="$folder/munge.socket" > /dev/null 2>&1 || skip "munged does not start: $(tail -n 1 "$folder/munge.out")"

mkdir "$folder/state" "$folder/tmp.n1" "$folder/tmp.n2"
printf '127.0.0.1 localhost n1 n2 %s\n' "$(hostname)" > "$folder/hosts"
echo CgroupPlugin=cgroup/v1 > "$folder/cgroup.conf"
# Eight GPUs for each node, which Slurm only counts: it wants a device file of each.
for gpu in 0 1 2 3 4 5 6 7; do mknod "$folder/gpu$gpu" c 1 3 || skip "mknod does not work here"; done
echo "Name=gpu File=$folder/gpu[0-7]" > "$folder/gres.conf"
cat > "$folder/slurm.conf" << CONF
ClusterName=lockstep
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
TmpFS=$folder/tmp.%n
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
SlurmctldPort=$controller
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
KillWait=5
JobRequeue=1
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname=n1 NodeAddr=127.0.0.1 Port=${ports[0]} CPUs=4 Gres=gpu:8 State=UNKNOWN
NodeName=n2 NodeHostname=n2 NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=4 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf
slurmctld -D -f "$SLURM_CONF" > "$folder/slurmctld.out" 2>&1 &
control=$!
daemons+=("$control")
# Each node has a name and a hosts file of its own. slurmd refuses to start without a mounted cgroup folder.
for node in n1 n2; do
  unshare --mount --uts sh -c 'mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/freezer &&
    mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"' sh "$folder/hosts" $node \
    slurmd -D -N $node -f "$SLURM_CONF" > "$folder/$node.out" 2>&1 &
  daemons+=($!)
done
for _ in $(seq 100); do
  [ "$(timeout -s KILL 5 sinfo --noheader --format=%D --states=idle 2> /dev/null)" = 2 ] && break
  sleep 0.2
done
[ "$(timeout -s KILL 5 sinfo --noheader --format=%D --states=idle 2> /dev/null)" = 2 ] ||
  skip "the nodes do not start: $(tail -q -n 1 "$folder"/slurmctld.out "$folder"/n[12].out | tr '\n' ';')"
echo ready
# `wait` alone would not see that the starter is gone.
while [ -d "/proc/$starter" ]; do
  sleep 1 &
  wait $!
done

#!/usr/bin/env bash
# A SLURM of one node and two GPUs that do not exist, for tests: everything below FOLDER, on ports of its own.
#   usage: slurm.sh start FOLDER PORT     then put FOLDER/bin first on the PATH
#          slurm.sh stop FOLDER
# FOLDER/bin holds SLURM's programs with this configuration: the executor plugin drops SLURM_CONF.
set -euo pipefail
folder=$2

if [ "$1" = stop ]; then
  for name in slurmd slurmctld munged; do
    [ ! -s "$folder/$name.pid" ] || kill "$(cat "$folder/$name.pid")" || true
  done
  exit
fi

port=$3
mkdir -p "$folder"/{bin,munge,state,spool}
chmod 755 "$folder"
chmod 700 "$folder/munge"
head -c 1024 /dev/urandom >"$folder/munge/key"
chmod 400 "$folder/munge/key"
cat >"$folder/slurm.conf" <<END
ClusterName=loopback
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
KillWait=2
GresTypes=gpu
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=4 RealMemory=16000 Gres=gpu:2 State=UNKNOWN
PartitionName=gpu Nodes=$(hostname -s) Default=YES MaxTime=60 State=UP
END
echo "NodeName=$(hostname -s) Name=gpu File=/dev/null
NodeName=$(hostname -s) Name=gpu File=/dev/zero" >"$folder/gres.conf"
for name in sbatch scancel sinfo squeue srun scontrol sacct sacctmgr sshare; do
  program=$(command -v "$name")
  printf '#!/bin/sh\nSLURM_CONF=%q exec %q "$@"\n' "$folder/slurm.conf" "$program" >"$folder/bin/$name"
  chmod +x "$folder/bin/$name"
done
munged --force --key-file="$folder/munge/key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munge/seed" --num-threads=2
slurmctld -f "$folder/slurm.conf"
slurmd -f "$folder/slurm.conf"
for _ in $(seq 100); do
  ! "$folder/bin/sinfo" -h -o %T 2>/dev/null | grep -q idle || exit 0
  sleep 0.1
done
echo "error: no node within 10 s: $(tail -n 1 "$folder/slurmd.log")" >&2
exit 1

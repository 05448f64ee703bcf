#!/usr/bin/env bash
# A real Slurm with two nodes, n1 and n2, on one machine. Usage, as root: one_machine_slurm.sh start|stop DIR
# DIR holds all of it: state, logs, munge's socket, PMIx's folders. `start` prints DIR/slurm.conf, the SLURM_CONF to
# export. Needs Debian's slurm-wlm and munge.
set -euo pipefail
dir=$(realpath "${2:?usage: one_machine_slurm.sh start|stop DIR}")

stop() {
  local name pid
  for name in slurmctld slurmd.n1 slurmd.n2 munged; do
    pid=$(cat "$dir/$name.pid" 2>/dev/null) || continue
    kill "$pid" 2>/dev/null || continue
    timeout 10 tail --pid="$pid" -f /dev/null || kill -9 "$pid"
  done
}

start() {
  local host ports cpus=8
  host=$(hostname -s)
  # free ones: the daemons of a suite that was killed may still hold theirs
  read -ra ports < <(python3 -c 'import socket
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
print(*(s.getsockname()[1] for s in held))')
  mkdir -p "$dir"/{state,log,spool,tmp/n1,tmp/n2}
  cat >"$dir/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# an expired credential holds a requeued job back; the default is 120 s
AuthInfo=socket=$dir/munge.sock,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
# PMIx makes a folder of its number for each job step here, on each node, and a killed step leaves its own behind
TmpFS=$dir/tmp/%n
SlurmctldPort=${ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=pmix
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=$cpus RealMemory=20000 State=UNKNOWN
NodeName=n2 NodeHostname=second NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=$cpus RealMemory=20000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
  export SLURM_CONF=$dir/slurm.conf
  ( umask 077; dd if=/dev/urandom of="$dir/munge.key" bs=1024 count=1 status=none )
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.sock" --pid-file="$dir/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge.seed"
  slurmctld -f "$SLURM_CONF"
  slurmd -f "$SLURM_CONF" -N n1
  # With a host name and /dev/shm of its own: with one name Open MPI takes both nodes for one, and their shared-memory
  # segments collide.
  unshare --mount --uts --propagation private bash -ec "
    hostname second
    mount -t tmpfs tmpfs /dev/shm
    exec slurmd -f '$SLURM_CONF' -N n2"
  for _ in $(seq 100); do
    if [ "$(sinfo --noheader --Node --format %t | sort -u)" = idle ]; then echo "$SLURM_CONF"; return; fi
    sleep 0.2
  done
  echo "one_machine_slurm: the nodes did not come up: $(sinfo --noheader --Node); see $dir/log" >&2
  return 1
}

case "$1" in
  start) start || { stop; exit 1; } ;;
  stop) stop ;;
  *) echo "usage: one_machine_slurm.sh start|stop DIR" >&2; exit 2 ;;
esac

#!/usr/bin/env bash
# Measures a config in N SLURM jobs at once, each one Snakemake on its share of the cells, then collects and reports.
#   usage: slurm.sh PLATFORM N [OPTION OF SBATCH FOR THE SHARES ...] [-- OPTION OF SNAKEMAKE ...]
#   such as: slurm.sh nvidia-h200 4 --gpus=h200:1 --time=2:00:00 -- --configfile config/h200.yaml
# Options of all jobs are SLURM's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, ...). REPORT_OPTIONS are those of the last
# job, which has no GPU. LAUNCH is put before snakemake, such as "apptainer exec --nv IMAGE", and finds it. Submit again to go on.
set -euo pipefail

die() { echo "error: $*" >&2; exit 2; }
[ $# -ge 2 ] || die "slurm.sh: got $# arguments; allowed: PLATFORM N [option of sbatch ...] [-- option of snakemake ...]"
platform=$1 shares=$2
shift 2
[[ $shares =~ ^[1-9][0-9]{0,3}$ ]] || die "shares: got '$shares'; allowed: an integer from 1 to 9999"
command -v sbatch >/dev/null || die "sbatch: not found; allowed: a login node of a SLURM cluster; hint: module load slurm"
[ -f Snakefile ] || die "folder: got '$PWD'; allowed: one with a Snakefile, as the checkout has; hint: cd there"
program=snakemake  # a container has its own; without one, a job may have another PATH
[ -n "${LAUNCH:-}" ] || program=$(command -v snakemake) || die "snakemake: not found; allowed: an environment on the PATH; hint: . .venv/bin/activate"
for_sbatch=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do for_sbatch+=("$1"); shift; done
[ $# = 0 ] || shift

# Prints a command line that runs snakemake with the user's options and these keys of the config. Of two --config
# Snakemake takes the last, so the keys join the user's. No lock: two shares write no file in common, jobs of another
# submission wait, and a job that was killed must not be in the way of the next.
snakemake_with() {
  local keys=("$@") words=() word
  words=(${LAUNCH:-} "$program" --cores 1 --resources gpu=1 --nolock --rerun-incomplete --keep-going)
  for word in "${for_snakemake[@]}"; do
    words+=("$word")
    case $word in --config | -C) words+=("${keys[@]}"); keys=() ;; esac
  done
  [ ${#keys[@]} = 0 ] || words+=(--config "${keys[@]}")
  printf '%q ' "${words[@]}"
}
for_snakemake=("$@")

# A mistake in the config ends here, before any job is submitted.
planned=$(eval "$(snakemake_with "platform=$platform") --dry-run" 2>&1) ||
  die "$(grep -m 1 '^error: ' <<<"$planned" | cut -c8- | grep . || tail -n 1 <<<"$planned")"

name=moe-$platform-$(pwd -P | cksum | cut -d' ' -f1)
logs=results/$platform/logs/slurm
mkdir -p "$logs"
earlier=$(squeue --noheader --user="$(id -un)" --name="$name" --format=%A | paste -sd:)
submit() { # KEYS -- OPTIONS OF SBATCH
  local keys=()
  while [ "$1" != -- ]; do keys+=("$1"); shift; done
  shift
  printf '#!/bin/bash\nexec %s\n' "$(snakemake_with "${keys[@]}")" |
    sbatch --parsable --job-name="$name" --output="$logs/%j.log" "$@" | cut -d';' -f1
}

# Before its time is up a share is told to finish the cell at work; `exec`, so that Snakemake is who is told.
jobs=
for i in $(seq "$shares"); do
  job=$(submit "platform=$platform" "share=$i/$shares" -- --signal=B:TERM@60 --open-mode=append \
    ${earlier:+--dependency=afterany:$earlier} "${for_sbatch[@]}")
  echo "share $i/$shares: job $job, $logs/$job.log"
  jobs+=:$job
done
# shellcheck disable=SC2086  # the options are words
job=$(submit "platform=$platform" -- --dependency="afterok$jobs" --kill-on-invalid-dep=yes ${REPORT_OPTIONS:-})
echo "report: job $job, $logs/$job.log"

#!/usr/bin/env bash
# Creates .venv and installs the project into it, pinned by constraints.txt; what is there already stays.
#   usage: install.sh [--print] [--report] [--system-torch] [PYTHON]
#     --report: only what `make report` needs on this machine     --print: only say which pip commands this machine gets
#     --system-torch: the torch of PYTHON, with what it brings, in place of a pinned one
# With an NVIDIA GPU: torch as PyPI has it (CUDA), compilers of kernels and the peers. Without one: the CPU build of the same
# version, from find-links where pip is configured with one that has it, else from PyTorch's own index; never a CUDA build.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() { echo "error: $*" >&2; exit 1; }
not_fetched() {
  die "pip could not get $1, and says why above. Without a network, name a folder of wheels: PIP_FIND_LINKS=/folder;" \
    "a torch that your Python has is taken by make report SYSTEM_TORCH=1"
}
interrupted() { trap - INT; echo "interrupted; the same command goes on from here" >&2; exit 130; }
trap interrupted INT
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

print='' report='' system_torch='' python=python3
for word in "$@"; do
  case $word in
    --print) print=yes ;;
    --report) report=yes ;;
    --system-torch) system_torch=yes ;;
    *) python=$word ;;
  esac
done
venv_python=.venv/bin/python
constraints=constraints.txt
borrowed=.venv/constraints.txt # there where the torch of another Python is used: it goes on being so
[ ! -e $borrowed ] || system_torch=yes
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

cpu_index=https://download.pytorch.org/whl/cpu
version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
[ -n "$version" ] || die "constraints.txt pins no torch"
pip=$(sed -n 's/^pip==\([^ ;]*\).*/\1/p' constraints.txt)
cpu_torch="torch==$version+cpu" # only a CPU build satisfies this, so pip cannot take a CUDA one

# Says what pip is at, in one line that changes on a terminal and in one line per 15 seconds elsewhere.
progress() {
  local said='starting' next='' last=-15 every=15 form='%4d s: %.100s\n' status
  if [ -t 1 ]; then every=1 form='\r\033[K%4d s: %.100s'; fi
  while true; do
    status=0
    read -r -t 1 next || status=$?
    if [ $status = 0 ]; then
      case $next in
        Installing\ collected*) said="unpacking $(wc -w <<<"${next#*:}") packages" ;;
        Attempting* | Found* | Uninstalling* | Successfully\ uninstalled*) ;; # what is left of an older version goes while others come
        *) said=$next ;;
      esac
    fi
    [ $((SECONDS - last)) -lt $every ] || { printf "$form" "$SECONDS" "$said"; last=$SECONDS; }
    [ $status = 0 ] || [ $status -gt 128 ] || break # 1: pip has ended; above 128: it has said nothing for a second
  done
  [ ! -t 1 ] || printf '\r\033[K'
}

# --no-compile: pip compiles one file after the other; all cores do it at the end.
pip() {
  if [ -n "$print" ]; then echo "pip $*"; else "$venv_python" -m pip "$@" | progress; fi
}

find_links_have_cpu_torch() {
  "$pip_python" -m pip install --quiet --dry-run --ignore-installed --no-deps --no-index "$cpu_torch" >/dev/null 2>&1
}

# The environment finds the packages of the folder that torch lies in after its own; pins of torch and of what belongs to its
# build do not hold for it.
borrow_torch() {
  local folder
  folder=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])') ||
    die "$python has no torch; leave out SYSTEM_TORCH=1, or name a Python that has one: make PYTHON=/path/to/python3"
  echo "$folder" >"$("$venv_python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/system-torch.pth"
  constraints=$borrowed
  grep -vE '^(torch|triton|cuda-|nvidia-(cublas|cuda-|cudnn|cufft|cufile|curand|cusolver|cusparse|nccl|nvjitlink|nvshmem|nvtx))' \
    constraints.txt >$constraints
  version=$("$venv_python" -c 'import importlib.metadata as m; print(m.version("torch"))')
}

if [ -n "$print" ]; then
  pip_python=$python
else
  pip_python=$venv_python
  if [ ! -x "$venv_python" ] || [ ! -e .venv/bin/pip ]; then # an interrupt may have left one without pip
    command -v "$python" >/dev/null || die "no $python here; name one with: make PYTHON=/path/to/python3.12"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
      die "$python is $("$python" -V 2>&1), but 3.11 to 3.13 is needed; name one with: make PYTHON=/path/to/python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      die "$python has no venv module (Debian and Ubuntu: apt-get install python3-venv)"
    "$python" -m venv .venv
    # That of an older Python searches lists of files for twice as long. Everything can be installed with it, too.
    "$venv_python" -m pip install --quiet --no-compile --retries 0 "pip==$pip" ||
      echo "pip $pip could not be had; the one of $python installs instead, and takes longer"
  fi
  [ -z "$system_torch" ] || borrow_torch
fi

extras=(bench)
[ -n "$report" ] || extras+=(dev slurm)
[ -n "$report" ] && ! has_gpu || extras+=(gpu)
! has_gpu || extras+=(peers)
project=".[$(IFS=,; echo "${extras[*]}")]"

if [ -n "$system_torch" ]; then
  torch=("torch==$version")
elif has_gpu; then
  torch=()
else
  torch=("$cpu_torch")
  find_links_have_cpu_torch || pip install --no-compile --no-deps --index-url "$cpu_index" "$cpu_torch" ||
    not_fetched "$cpu_torch from $cpu_index"
fi
[ -n "$print" ] || echo "installing ${report:+what the report needs }into .venv, in a minute or two"
pip install --no-compile --constraint $constraints --editable src/moe_routing_kernels --editable "$project" "${torch[@]}" ||
  not_fetched "the packages of $constraints"
[ -z "$print" ] || exit 0
# What nobody runs here, 210 MB: torch's wheel for CPUs has the programs of its own tests in it, other wheels have their tests, and
# that of pulp, which Snakemake plans with, solvers for other systems.
(
  shopt -s globstar
  cd .venv/lib/python3.*/site-packages
  rm -rf torch/{test,bin/test_*,bin/*Test} pulp/solverdir/cbc/{osx,win,linux/i32}
  rm -rf {matplotlib,networkx,numpy,pandas,pyarrow,scipy,sympy}/**/tests # of a borrowed torch some lie elsewhere, and stay
)
# What cannot be compiled (templates, code for other versions) is never imported, and of the packages left out nothing or little.
echo "compiling .venv"
"$venv_python" -m compileall -q -j 0 -x '/(tests?|testing|onnx|pip|setuptools|sqlalchemy|networkx|fontTools|docutils|distributed|transformers/models|pygments/lexers|sympy/physics)/' .venv/lib >/dev/null || true

cuda=$("$venv_python" -c 'import torch; print(torch.version.cuda or "")') || die "torch cannot be imported"
if has_gpu; then
  [ -n "$cuda" ] || die "this machine has an NVIDIA GPU, but the installed torch is a CPU build (is there a find-links?)"
elif [ -z "$system_torch" ]; then
  [ -z "$cuda" ] || die "this machine has no NVIDIA GPU, but the installed torch is the CUDA $cuda build"
fi

#!/usr/bin/env bash
# Creates .venv and installs the project into it, pinned by constraints.txt.
#   usage: install.sh [--print] [PYTHON]      --print: only say which pip commands this machine gets
# With an NVIDIA GPU: torch as PyPI has it (CUDA) and the peers. Without one: the CPU build of the same version,
# from find-links where pip is configured with one that has it, else from PyTorch's own index; never a CUDA build.
set -euo pipefail
cd "$(dirname "$0")/../.."

die() { echo "error: $*" >&2; exit 1; }
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

print=
if [ "${1:-}" = --print ]; then print=yes; shift; fi
python=${1:-python3}
venv_python=.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

cpu_index=https://download.pytorch.org/whl/cpu
version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)
[ -n "$version" ] || die "constraints.txt pins no torch"
cpu_torch="torch==$version+cpu" # only a CPU build satisfies this, so pip cannot take a CUDA one

# --no-compile, below: pip compiles one file after the other; all cores do it at the end.
pip() {
  echo "pip $*"
  [ -n "$print" ] || "$venv_python" -m pip "$@"
}

find_links_have_cpu_torch() {
  "$pip_python" -m pip install --quiet --dry-run --ignore-installed --no-deps --no-index "$cpu_torch" >/dev/null 2>&1
}

if [ -n "$print" ]; then
  pip_python=$python
else
  pip_python=$venv_python
  if [ ! -x "$venv_python" ]; then
    command -v "$python" >/dev/null || die "no $python here; name one with: make PYTHON=/path/to/python3.12"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null ||
      die "$python is $("$python" -V 2>&1), but 3.11 to 3.13 is needed; name one with: make PYTHON=/path/to/python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      die "$python has no venv module (Debian and Ubuntu: apt-get install python3-venv)"
    "$python" -m venv .venv
  fi
fi

if has_gpu; then
  pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,slurm,peers]'
else
  find_links_have_cpu_torch || pip install --quiet --no-compile --no-deps --index-url "$cpu_index" "$cpu_torch"
  pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev,slurm]' "$cpu_torch"
fi
[ -z "$print" ] || exit 0
# What cannot be compiled (templates, code for other versions) is never imported; tests of packages are not run.
"$venv_python" -m compileall -q -j 0 -x '/tests?/' .venv/lib >/dev/null || true

cuda=$("$venv_python" -c 'import torch; print(torch.version.cuda or "")') || die "torch cannot be imported"
if has_gpu; then
  [ -n "$cuda" ] || die "this machine has an NVIDIA GPU, but the installed torch is a CPU build (is there a find-links?)"
else
  [ -z "$cuda" ] || die "this machine has no NVIDIA GPU, but the installed torch is the CUDA $cuda build"
fi

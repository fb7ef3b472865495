#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   launch/bootstrap.sh python   print the path of a Python that megatron-core has wheels for
#   launch/bootstrap.sh venv     create or update the environment in $VENV (default .venv)
#   launch/bootstrap.sh release 0.18.2
#                                install that megatron-core alone under $VENV/releases; print its path
#   launch/bootstrap.sh bridge   install Megatron-Bridge there, with what it imports; print its path
#   launch/bootstrap.sh verl     install verl there, with what it imports beside Megatron-Bridge
#   launch/bootstrap.sh hf       likewise transformers: Megatron imports it at every start, where it is installed
#
# TTRACE_PYTHON names the interpreter to use instead of searching for one.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-.venv}
VERSIONS="3.12 3.13" # the versions of megatron-core's wheels, the preferred one first
CONSTRAINTS=requirements/constraints.txt
# pip waits 15 seconds for an answer, which is short where much else happens.
export PIP_DEFAULT_TIMEOUT=${PIP_DEFAULT_TIMEOUT:-60} PIP_RETRIES=${PIP_RETRIES:-10}

fail() {
  echo "ttrace: $*" >&2
  exit 2
}

# Whether $1 is a Python of version $2 that can create environments. It is run to find out: pyenv has
# shims of versions that are not activated, and Debian ships Python without ensurepip.
usable() {
  "$1" -c "
import ensurepip, sys, venv
raise SystemExit('%d.%d' % sys.version_info[:2] != '$2' or sys.implementation.name != 'cpython')
" >/dev/null 2>&1
}

real_path() {
  "$1" -c 'import os, sys; print(os.path.abspath(sys.executable))'
}

candidates() { # for version $1, the nearest first
  local version=$1 found
  type -aP "python$version" python3 python 2>/dev/null || true
  for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python; do
    if [[ -x $found ]]; then echo "$found"; fi
  done
  if command -v uv >/dev/null; then
    uv python find --no-project "$version" 2>/dev/null || true
  fi
}

find_python() {
  local version candidate
  if [[ -n ${TTRACE_PYTHON:-} ]]; then
    for version in $VERSIONS; do
      if usable "$TTRACE_PYTHON" "$version"; then
        real_path "$TTRACE_PYTHON"
        return
      fi
    done
    fail "TTRACE_PYTHON=$TTRACE_PYTHON is not a CPython ${VERSIONS/ / or } with venv and ensurepip"
  fi
  for version in $VERSIONS; do
    while IFS= read -r candidate; do
      if usable "$candidate" "$version"; then
        real_path "$candidate"
        return
      fi
    done < <(candidates "$version")
  done
  fail "no Python ${VERSIONS/ / or } found: install one (apt-get install python3.12-venv," \
    "pyenv install 3.12, or uv python install 3.12), or name one with TTRACE_PYTHON=/path/to/python"
}

# What the environment was made from. An environment cannot be moved, so its path is included.
fingerprint() {
  (echo "$ROOT/$VENV" && cat pyproject.toml setup.py megatron_ttrace/*/*.c \
    "$CONSTRAINTS" launch/bootstrap.sh) | cksum
}

make_venv() {
  cd "$ROOT"
  local stamp=$VENV/ttrace-installed unfinished=$VENV/ttrace-unfinished want python
  want=$(fingerprint)
  if [[ -f $stamp && $(cat "$stamp") == "$want" ]] && "$VENV/bin/python" -c '' 2>/dev/null; then
    return # nothing to install
  fi
  if [[ -d $VENV && ! -e $stamp && ! -e $unfinished && -n $(ls -A "$VENV") ]]; then
    fail "$VENV exists and was not created by make: remove it, or choose another with VENV=DIR"
  fi
  # An interrupted install can leave a partial package that pip takes for a complete one.
  if [[ -e $unfinished ]] || ! "$VENV/bin/python" -c '' 2>/dev/null; then
    python=$(find_python)
    rm -rf "$VENV"
    mkdir -p "$VENV"
    touch "$unfinished"
    echo "ttrace: creating $VENV with $("$python" -V) (takes a few minutes and 6 GB)"
    "$python" -m venv "$VENV"
  fi
  touch "$unfinished"
  rm -f "$stamp"
  local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -qq -c "$CONSTRAINTS")
  "${pip[@]}" setuptools
  "${pip[@]}" --no-build-isolation --no-compile -e '.[test]'
  # pip would compile on one core. Some packages have files for other versions of Python.
  "$VENV/bin/python" -W ignore -m compileall -q -q -j 0 "$VENV/lib" || true
  echo "$want" >"$stamp"
  rm -f "$unfinished"
}

# A release without its dependencies. On PYTHONPATH it precedes the environment's release, as a
# Megatron-LM checkout does; everything else comes from the environment.
add_release() {
  [[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "$1 is not a release of megatron-core, such as 0.18.2"
  put_beside "$1" "megatron-core==$1"
}

# Trainers declare packages that need a GPU: only those that they import are installed.
add_trainer() {
  local list=requirements/$1.txt made
  made=$(cksum <"$ROOT/$list")
  put_beside "$1-${made%% *}" -r "$list"
}

put_beside() { # the folder of the package $1, for PYTHONPATH, with what the other words install
  cd "$ROOT"
  local name=$1 home unfinished
  shift
  [[ -x $VENV/bin/python ]] || fail "$VENV does not exist: run make venv first"
  home=$(cd "$VENV" && pwd)/releases
  unfinished=$home/$name.unfinished
  if [[ ! -d $home/$name ]]; then
    rm -rf "$unfinished"
    mkdir -p "$home"
    "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-deps \
      --no-build-isolation --no-compile --target "$unfinished" "$@"
    rm -rf "$unfinished/tests" # of verl: they would hide ours
    mv "$unfinished" "$home/$name"
  fi
  echo "$home/$name"
}

case ${1:-} in
  python) find_python ;;
  release) add_release "${2:-}" ;;
  bridge | verl | hf) add_trainer "$1" ;;
  venv)
    if command -v flock >/dev/null; then # of two makes at once, the second waits for the first
      exec 9>"$ROOT/.${VENV//\//_}.lock"
      flock 9
    fi
    make_venv
    ;;
  *) fail "usage: launch/bootstrap.sh python|venv|release VERSION|bridge|verl|hf" ;;
esac

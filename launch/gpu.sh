#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
#   launch/gpu.sh wheels         download what a machine without a network lacks into $WHEELS
#   launch/gpu.sh te-wheels      likewise TransformerEngine, in pieces, into $TE
#   launch/gpu.sh run [OPTIONS]  make an environment over $PYTHON from $WHEELS and run the tests of
#                                tests/gpu/run.py, with its options; results go to $RESULTS
#
# $PYTHON (default python3) must have PyTorch; its packages are used where $WHEELS has no other.
# No network and no administrator's rights are needed to run. $TE is used with the option --te.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-gpu-wheels}
TE=${TE:-gpu-te}
RESULTS=${RESULTS:-gpu-results}
CONSTRAINTS=$ROOT/requirements/constraints.txt
# The machine's PyTorch and what comes with it, and what only development needs.
LEFT_OUT='^(torch|triton|nvidia-.*|cuda-.*|numpy|sympy|mpmath|networkx|mypy.*|ruff|librt|ast-serialize|pre-commit|cfgv|distlib|identify|nodeenv|virtualenv|python-discovery|pathspec|pytest.*|hypothesis|execnet|mkdocs.*|babel|backrefs|ghp-import|markdown|mergedeep|paginate|pymdown-extensions|pyyaml-env-tag|watchdog)=='
TE_VERSION=${TE_VERSION:-2.17.1}
ARCHITECTURE=${ARCHITECTURE:-} # 90: only kernels of this one are carried
PIECE=56m # a piece and the checkout stay below 64 MiB

fail() {
  echo "ttrace: $*" >&2
  exit 2
}

download() { # into folder $1, the rest as pip has it
  local folder=$1 platforms=() tag
  shift
  for tag in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${tag}_x86_64")
  done
  platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  mkdir -p "$folder"
  "$PYTHON" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp "${platforms[@]}" -d "$folder" "$@"
}

make_wheels() {
  local wanted
  mapfile -t wanted < <(grep -v '^#' "$CONSTRAINTS" | grep -Ev "$LEFT_OUT")
  download "$WHEELS" "${wanted[@]}"
  echo "ttrace: $(find "$WHEELS" -name '*.whl' | wc -l) wheels, $(du -sm "$WHEELS" | cut -f1) MiB, in $WHEELS"
}

make_te_wheels() {
  local whole=$TE.whole wheel piece
  download "$whole" "transformer-engine-cu13==$TE_VERSION" "transformer-engine==$TE_VERSION"
  "$PYTHON" -m pip --disable-pip-version-check download -q --no-deps --no-build-isolation \
    --no-binary=:all: -d "$whole" "transformer-engine-torch==$TE_VERSION" ||
    echo "ttrace: no source of transformer-engine-torch $TE_VERSION: get it by hand" >&2
  if [[ -n $ARCHITECTURE ]]; then
    wheel=$(realpath "$whole"/transformer_engine_cu*.whl)
    PYTHONPATH=$ROOT "$PYTHON" -m tests.gpu.slim "$wheel" "$ARCHITECTURE"
  fi
  mkdir -p "$TE"
  for wheel in "$whole"/*; do
    split -b $PIECE -d "$wheel" "$TE/$(basename "$wheel").part"
  done
  # One folder per piece, so that they can be carried one by one.
  for piece in "$TE"/*.part??; do
    mkdir -p "$TE/${piece: -2}"
    mv "$piece" "$TE/${piece: -2}/"
  done
  du -m "$TE"/*
}

# Pieces lie in $TE itself or in folders below it, as they were carried.
install_te() {
  local whole=$1/te first name
  mkdir -p "$whole"
  while IFS= read -r first; do
    name=$(basename "${first%.part00}")
    find "$TE" -name "$name.part??" -print0 | sort -z | xargs -0 cat >"$whole/$name"
  done < <(find "$TE" -name '*.part00' | sort)
  compgen -G "$whole/*.whl" >/dev/null || fail "$TE has no pieces of TransformerEngine's wheels"
  install "$1" "$whole"/*.whl
  for name in "$whole"/*.tar.gz; do
    [[ -e $name ]] || continue
    echo "ttrace: compiling $(basename "$name")"
    # It would look for a wheel on the network first, and for cuDNN's headers in the toolkit only.
    PYTHONPATH=$1/site CPATH=$(headers) NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=$(nproc) \
      "$PYTHON" -m pip --disable-pip-version-check install -q --no-index --no-deps \
      --no-build-isolation --target "$1/site" "$name"
  done
}

headers() { # of the libraries that PyTorch's packages bring
  "$PYTHON" -c "
import glob, nvidia
print(*(found for home in nvidia.__path__ for found in glob.glob(home + '/*/include')), sep=':')"
}

install() { # into environment $1, the wheels that follow
  local home=$1
  shift
  "$PYTHON" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile \
    --no-cache-dir --upgrade --target "$home/site" "$@"
}

run() {
  "$PYTHON" -c 'import sys, torch; sys.exit(sys.version_info < (3, 12))' ||
    fail "$PYTHON is not a Python 3.12 or newer with PyTorch: name one with PYTHON=..."
  compgen -G "$WHEELS/*.whl" >/dev/null || fail "$WHEELS has no wheels: run make gpu-wheels first"
  local home
  home=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$home'" EXIT
  install "$home" "$WHEELS"/*.whl
  [[ " $* " != *" --te "* || " $* " == *" --dry "* ]] || install_te "$home"
  export PYTHONPATH=$ROOT:$home/site PYTHONUNBUFFERED=1
  mkdir -p "$RESULTS"
  RESULTS=$(cd "$RESULTS" && pwd)
  cd "$ROOT"
  "$PYTHON" -m tests.gpu.run --results "$RESULTS" "$@"
}

case ${1:-} in
  wheels) make_wheels ;;
  te-wheels) make_te_wheels ;;
  run)
    shift
    run "$@"
    ;;
  *) fail "usage: launch/gpu.sh wheels|te-wheels|run [OPTIONS]" ;;
esac

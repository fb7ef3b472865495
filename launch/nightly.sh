#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One nightly run: known bugs, healthy configurations, recipes. Arguments go to `ttrace eval nightly`.
#
#   launch/nightly.sh                      everything
#   launch/nightly.sh --minutes 60         as much as fits in an hour
#
# With cron, at two in the morning, mail only if something is wrong (crontab -e):
#
#   0 2 * * * /path/to/megatron_ttrace/launch/nightly.sh > /tmp/ttrace-nightly.log 2>&1 || cat /tmp/ttrace-nightly.log
#
# Results are kept in $TTRACE_NIGHTLY_DIR (default: ttrace-out/nightly of the checkout):
# nights.jsonl, logs. TTRACE_NIGHTLY_PULL=1 updates the checkout first. If the previous
# night is still running, this one ends with exit code 2.
#
# exit code: 0 all good, 1 a healthy job diverged, 2 a bug was missed or could not run
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
DIR=${TTRACE_NIGHTLY_DIR:-$ROOT/ttrace-out/nightly}

fail() {
  echo "ttrace: nightly: $*" >&2
  exit 2
}

mkdir -p "$DIR" || fail "$DIR cannot be created: set TTRACE_NIGHTLY_DIR"
exec 9>"$DIR/.lock"
flock -n 9 || fail "the previous night is still running (it holds $DIR/.lock)"

if [[ ${TTRACE_NIGHTLY_PULL:-0} == 1 ]]; then
  git pull --ff-only --quiet || fail "git pull failed: fix the checkout, or unset TTRACE_NIGHTLY_PULL"
fi

# $TTRACE comes first, then an active environment, then that of make.
if [[ -n ${TTRACE:-} ]]; then
  read -ra ttrace <<<"$TTRACE"
elif [[ -n ${VIRTUAL_ENV:-} ]] && command -v ttrace >/dev/null; then
  ttrace=(ttrace)
else
  launch/bootstrap.sh venv >&2 || fail "the environment could not be created (see above)"
  ttrace=("${VENV:-$ROOT/.venv}/bin/ttrace")
fi

# More threads than cores slow down small jobs of several ranks, and change the order of sums.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Ranks must not hold the lock: the night ends when this script does.
code=0
"${ttrace[@]}" eval nightly --directory "$DIR" "$@" 9>&- || code=$?
exit "$code"

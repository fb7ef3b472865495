#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One night: known bugs, healthy configurations, mutants. All arguments go to `ttrace nightly`.
#
#   launch/nightly.sh                      everything
#   launch/nightly.sh --minutes 60         as much as fits in an hour
#
# With cron, at two in the morning, mail only when something is wrong (crontab -e):
#
#   0 2 * * * /path/to/megatron_ttrace/launch/nightly.sh > /tmp/ttrace-nightly.log 2>&1 || cat /tmp/ttrace-nightly.log
#
# Results stay in $TTRACE_NIGHTLY_DIR (ttrace-out/nightly of the checkout): history.sqlite,
# trend.html, logs. TTRACE_NIGHTLY_PULL=1 updates the checkout first. A night that is still running
# when the next one begins is left alone.
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

mkdir -p "$DIR" || fail "$DIR cannot be made: set TTRACE_NIGHTLY_DIR"
exec 9>"$DIR/.lock"
flock -n 9 || fail "the night before is still running (it holds $DIR/.lock)"

if [[ ${TTRACE_NIGHTLY_PULL:-0} == 1 ]]; then
  git pull --ff-only --quiet || fail "git pull failed: mend the checkout, or unset TTRACE_NIGHTLY_PULL"
fi

# An environment that is active, or $TTRACE on its own, comes first; else make's.
if [[ -n ${TTRACE:-} ]]; then
  read -ra ttrace <<<"$TTRACE"
elif [[ -n ${VIRTUAL_ENV:-} ]] && command -v ttrace >/dev/null; then
  ttrace=(ttrace)
else
  launch/bootstrap.sh venv >&2 || fail "no environment could be made (see above)"
  ttrace=("${VENV:-$ROOT/.venv}/bin/ttrace")
fi

# More threads than cores make small jobs of several ranks slower, and sums differ with the number.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Ranks must not hold the lock: the night ends when this script does.
code=0
"${ttrace[@]}" nightly --directory "$DIR" "$@" 9>&- || code=$?
exit "$code"

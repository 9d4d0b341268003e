# What the scripts share; they source it. Bash.

# Runs a command with a line every five seconds; its output is added to a log.
#   with_progress WHO LOG COMMAND [ARGUMENT ...]
with_progress() {
  local who=$1 log=$2 started=$SECONDS pid status=0
  shift 2
  "$@" >>"$log" 2>&1 9<&- &
  pid=$!
  trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    # Short sleeps, so that no step lasts longer than it must.
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.25
    done
    kill -0 "$pid" 2>/dev/null && printf '%s:   ... %s s\n' "$who" "$((SECONDS - started))"
  done
  wait "$pid" || status=$?
  trap - INT TERM
  return "$status"
}

# Installs packages of the system, where that can be done (root, Debian or Ubuntu). If not,
# or if it fails, says why on standard error.
#   install_packages WHO PACKAGE [PACKAGE ...]
install_packages() {
  local who=$1 log
  shift
  if [ "$(id -u)" != 0 ]; then
    printf '%s: only root can install packages; install %s, then run this again\n' "$who" "$*" >&2
    return 1
  fi
  if ! command -v apt-get >/dev/null; then
    printf '%s: there is no apt-get to install packages with; install %s, then run this again\n' \
      "$who" "$*" >&2
    return 1
  fi
  printf '%s: installing the system packages %s\n' "$who" "$*"
  log=$(mktemp)
  if with_progress "$who" "$log" _apt_get update &&
    with_progress "$who" "$log" _apt_get install -y --no-install-recommends "$@"; then
    rm -f "$log"
    return
  fi
  tail -n 5 "$log" >&2
  printf '%s: the packages %s could not be installed (all of apt-get'\''s output: %s)\n' \
    "$who" "$*" "$log" >&2
  return 1
}

_apt_get() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 "$@"; }

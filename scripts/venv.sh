# Sourced by the other scripts: finds a Python, keeps .venv in step with pyproject.toml.
# ensure_venv EXTRA installs `.[EXTRA]` (EXTRA may be empty) when pyproject.toml changed since.
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$top/.venv
# Tests start hundreds of processes, each of which would compile all of the sources again.
unset PYTHONDONTWRITEBYTECODE

say() { echo "$(basename "$0"): $*" >&2; }

# Whether a Python is new enough and made for this machine: under Rosetta one for Intel runs too, and
# there is no mlx for it.
suits() {
  "$1" -c '
import platform, sys
sys.exit(sys.version_info < (3, 11) or (sys.platform, platform.machine()) == ("darwin", "x86_64"))
' 2>/dev/null
}

# /usr/bin/python3 of a Mac without developer tools opens a dialog.
opens_dialog() {
  [ "$(uname -s)" = Darwin ] && [ "$(command -v "$1")" = /usr/bin/python3 ] &&
    ! xcode-select -p >/dev/null 2>&1
}

find_python() {
  local candidate intel=
  for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
    command -v "$candidate" >/dev/null && ! opens_dialog "$candidate" || continue
    if suits "$candidate"; then
      command -v "$candidate"
      return
    fi
    if "$candidate" -c 'import platform; assert platform.machine() == "x86_64"' 2>/dev/null; then
      intel=$(command -v "$candidate")
    fi
  done
  if [ "$(uname -s)" = Darwin ] && [ -n "$intel" ]; then
    say "$intel is a Python for Intel, for which there is no mlx; install one for Apple silicon" \
      "(/opt/homebrew/bin/brew install python@3.13, or python.org) and run this again."
    return 1
  fi
  say "Python 3.11 or newer is needed and none was found; install it (macOS: brew install" \
    "python@3.13; Debian, Ubuntu: apt-get install python3 python3-venv) and run this again."
  return 1
}

make_venv() {
  local python
  python=$(find_python) || return 1
  say "making $venv with $python"
  rm -rf "$venv"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    say "$python cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
    return 1
  fi
}

ensure_venv() {
  local extra=$1 stamp wanted quiet=-qq
  suits "$venv/bin/python" || make_venv || return 1
  stamp=$venv/.installed${extra:+-$extra}
  wanted="$top $(cksum <"$top/pyproject.toml")"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
  say "installing Kakeya into .venv (once; a few minutes on a slow line)"
  [ -t 2 ] && quiet= # a person watches: pip shows its progress
  # stdout is that of the program that runs next.
  if ! "$venv/bin/python" -m pip install $quiet --disable-pip-version-check \
    --editable "$top${extra:+[$extra]}" >&2; then
    say "the installation failed; what pip says above names the package. Run this again to retry."
    return 1
  fi
  # The test extra contains the plain installation.
  printf '%s\n' "$wanted" | tee "$stamp" >"$venv/.installed"
}

hint_openblas() {
  [ "$(uname -s)" = Linux ] || return 0
  [ -e "$venv/.openblas-hint" ] && return 0
  touch "$venv/.openblas-hint"
  # Not through a pipe: grep would end before ldconfig, which pipefail takes for a failure.
  case $({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null) in *libopenblas*) return 0 ;; esac
  say "OpenBLAS is not installed. Kakeya works without it; with it, expect prompts to be read" \
    "10 to 40 times faster: apt-get install libopenblas0-pthread"
}

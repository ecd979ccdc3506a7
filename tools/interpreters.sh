# Finds the Pythons of this machine; sourced by tools/pythons and tools/dist.
# A Python is looked for in PATH, then where pyenv keeps its own: in PYENV_ROOT, or in ~/.pyenv.

# Prints where an interpreter really is, and its version; prints nothing if it is no Python >= 3.11.
identity() {
  "$1" -c '
import os, sys
if sys.version_info >= (3, 11):
    print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)), sys.version)
' 2>/dev/null | tr '\n' ' ' || true
}

# Prints a Python of this version.
find_version() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/"python$1"; do
    # A command of pyenv's may be in PATH and say that it is not chosen.
    if [ -n "$(identity "$candidate")" ]; then
      echo "$candidate"
      return
    fi
  done
}

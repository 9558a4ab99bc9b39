#!/usr/bin/env bash
# Sets up the systems that weft is compared with, as far as they are missing.
#
#   peers.sh gloo|openmpi|mpich|horovod...
#
# Asks nothing, and does nothing when all is there. For each peer one line says what it came to:
#   ready PEER PROGRAM     the Python that can import it, or the command that starts its processes
#   absent PEER REASON
# A peer that could not be had is remembered, or every later run would wait for it again; the line
# names the file to remove. Exit status: 0 when all are ready.
#
# What is built stands in WEFT_PEERS (default: weft/peers in the user's cache). WEFT_PYTHON names a
# Python whose torch brings Gloo, instead of Debian's. WEFT_SKIP_SETUP=1: installs nothing.
set -uo pipefail

folder=${WEFT_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/weft/peers}
horovod_version=0.28.1
failed=0

if (($# == 0)); then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
fi

say() { echo "peers: $*" >&2; }
ready() { echo "ready $1 $2"; }

mkdir -p "$folder" || exit 1
exec 9>"$folder/lock"
flock 9 # another bench may be setting up the same
log=$folder/log
: >"$log"

absent() {
  echo "absent $1 $2"
  failed=1
}

# A failure that trying again would not mend.
give_up() {
  local mark=$folder/$1.absent
  echo "$2" >"$mark"
  absent "$1" "$2 (remove $mark to try again)"
}

given_up() {
  local mark=$folder/$1.absent
  [[ -e $mark ]] || return 1
  absent "$1" "$(<"$mark") (remove $mark to try again)"
}

# Prints those of its arguments that are not installed.
missing() {
  local package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      echo "$package"
  done
}

apt() {
  local as_root=()
  ((EUID == 0)) || as_root=(sudo -n)
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 "$@" \
    >>"$log" 2>&1
}

may_install() {
  [[ ${WEFT_SKIP_SETUP:-} != 1 ]] && command -v apt-get >/dev/null &&
    { ((EUID == 0)) || { command -v sudo >/dev/null && sudo -n true 2>/dev/null; }; }
}

# packages PEER NAME...: installs what is missing of them, or says why the peer is absent.
packages() {
  local peer=$1 wanted
  shift
  mapfile -t wanted < <(missing "$@")
  ((${#wanted[@]})) || return 0
  if ! may_install; then
    absent "$peer" "these packages are missing and this user may not install them: ${wanted[*]}"
    return 1
  fi
  say "installing ${wanted[*]} for $peer"
  apt install -y --no-install-recommends "${wanted[@]}" && return 0
  apt update
  apt install -y --no-install-recommends "${wanted[@]}" && return 0
  give_up "$peer" "could not install ${wanted[*]}: $(tail -n 1 "$log")"
  return 1
}

has_torch() { "$1" -c 'import torch.distributed as d; assert d.is_gloo_available()' >>"$log" 2>&1; }

gloo() {
  local python
  for python in ${WEFT_PYTHON:+"$WEFT_PYTHON"} /usr/bin/python3 python3; do
    has_torch "$python" && ready gloo "$python" && return
  done
  given_up gloo && return
  packages gloo python3-torch || return
  if has_torch /usr/bin/python3; then
    ready gloo /usr/bin/python3
  else
    give_up gloo "Debian's python3-torch cannot be imported: $(tail -n 1 "$log")"
  fi
}

# mpi PEER LAUNCHER COMPILER PACKAGE...: Debian has both implementations side by side under names
# of their own.
mpi() {
  local peer=$1 launcher=$2 compiler=$3
  shift 3
  if ! command -v "$launcher" "$compiler" >/dev/null; then
    given_up "$peer" && return
    packages "$peer" "$@" || return
  fi
  if command -v "$launcher" "$compiler" >/dev/null; then
    ready "$peer" "$launcher"
  else
    absent "$peer" "there is no $launcher or no $compiler"
  fi
}

openmpi() { mpi openmpi mpirun.openmpi mpicc.openmpi openmpi-bin libopenmpi-dev gcc; }
mpich() { mpi mpich mpiexec.hydra mpicc.mpich mpich libmpich-dev gcc; }

# Built from its source against Debian's torch and Open MPI. Its extension is as old as it is: newer
# setuptools and newer torch refuse it. Without OpenBLAS that torch computes ten times slower.
horovod() {
  local place=$folder/horovod-$horovod_version tools=$folder/openmpi-tools tool
  if [[ -e $place/complete && -x $place/bin/python3 ]]; then
    ready horovod "$place/bin/python3"
    return
  fi
  given_up horovod && return
  packages horovod python3-torch libopenblas0-pthread libtorch-dev pybind11-dev python3-dev \
    python3-venv openmpi-bin libopenmpi-dev g++ cmake make || return
  if [[ ${WEFT_SKIP_SETUP:-} == 1 ]]; then
    absent horovod "it is not built, and WEFT_SKIP_SETUP forbids it"
    return
  fi
  say "building Horovod $horovod_version, which takes some minutes"
  rm -rf "$place" "$tools"
  mkdir -p "$tools"
  # Its build asks for plain names, which may be those of another MPI.
  for tool in mpicc mpicxx mpirun mpiexec; do
    ln -s "$(command -v "$tool.openmpi")" "$tools/$tool"
  done
  if /usr/bin/python3 -m venv --system-site-packages "$place" >>"$log" 2>&1 &&
    "$place/bin/python3" -m pip install -q 'setuptools<70' wheel >>"$log" 2>&1 &&
    PATH=$tools:$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 \
      HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS=-j1 \
      CMAKE_BUILD_PARALLEL_LEVEL=1 nice "$place/bin/python3" -m pip install -q \
      --no-build-isolation --no-binary horovod "horovod==$horovod_version" >>"$log" 2>&1 &&
    "$place/bin/python3" -c 'import horovod.torch as h; assert h.gloo_built()' >>"$log" 2>&1; then
    touch "$place/complete"
    ready horovod "$place/bin/python3"
  else
    cp "$log" "$folder/horovod.log"
    give_up horovod "could not be built: $(tail -n 1 "$log"); all of it is in $folder/horovod.log"
  fi
}

for peer in "$@"; do
  case $peer in
    gloo | openmpi | mpich | horovod) "$peer" ;;
    *) absent "$peer" "this script does not know it" ;;
  esac
done
exit $failed

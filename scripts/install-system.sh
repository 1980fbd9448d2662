#!/usr/bin/env bash
# install-system.sh: what the transports between instances, and their tests, want of the
# system. As root the libraries come with apt-get; etcd, of which only tests start one, is
# unpacked into .cache/etcd so that no service of it runs. What cannot be had is said in
# one line: then those transports do not work here, and their tests are skipped.
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"
PATH=$PATH:/usr/sbin:/sbin
log=$root/.cache/apt.log
# library -> Debian package
declare -A packages=([libibverbs.so.1]=libibverbs1 [librdmacm.so.1]=librdmacm1
  [libnuma.so.1]=libnuma1 [libcurl.so.4]=libcurl4)

tell() { say install "$@"; }

install_libraries() {
  local known library missing=()
  known=$(ldconfig -p 2>/dev/null) || return 0
  for library in "${!packages[@]}"; do
    if [[ $known != *"$library"* ]]; then missing+=("${packages[$library]}"); fi
  done
  if [ "${#missing[@]}" -eq 0 ]; then return; fi
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort)
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    tell "no Mooncake here: it wants system libraries; on Debian, as root:" \
      "apt-get install ${missing[*]}"
    return
  fi
  tell "installing with apt-get: ${missing[*]}"
  # The lists of packages may be missing or old.
  apt_install "${missing[@]}" ||
    { apt-get update -qq >>"$log" 2>&1 && apt_install "${missing[@]}"; } ||
    tell "no Mooncake here: apt-get could not install ${missing[*]}; see .cache/apt.log"
}

apt_install() {
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" \
    >>"$log" 2>&1
}

unpack_etcd() {
  if command -v etcd >/dev/null || [ -x .cache/etcd/usr/bin/etcd ]; then return; fi
  if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then return; fi
  local work
  work=$(mktemp -d .cache/etcd.XXXXXX)
  if (cd -- "$work" && apt-get download -qq etcd-server >>"$log" 2>&1 &&
    dpkg-deb -x etcd-server_*.deb . && rm -f -- etcd-server_*.deb); then
    rm -rf -- .cache/etcd
    mv -T -- "$work" .cache/etcd
  else
    rm -rf -- "$work"
    tell "etcd could not be fetched, so its tests are skipped; see .cache/apt.log"
  fi
}

mkdir -p -- .cache
install_libraries
unpack_etcd

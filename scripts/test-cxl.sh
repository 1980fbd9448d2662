#!/usr/bin/env bash
# test-cxl.sh VENV [PYTEST ARGUMENTS...]: runs tests/cxl in a QEMU guest that has memory
# like CXL's: two NUMA nodes without cores, and a module that is first devdax and at the
# end, as a third such node, system-ram. Where that cannot run it says why and ends with 0.
#
# The guest has this machine's files, read-only, so it runs the same environment. What
# is made for it lies in out/cxl: Debian's kernel, unpacked and not installed, and an
# initial file system. QEMU computes the guest's instructions itself (a minute or two);
# QEMU_ACCEL="kvm -cpu host" lets the processor do it, where that works.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/scripts/say.sh"
cd -- "$root"

venv=$(realpath -- "${1:?the virtual environment}")
shift
out=$root/out/cxl
accel=${QEMU_ACCEL:-tcg,thread=multi,tb-size=256 -cpu max}
limit_s=${CXL_TEST_LIMIT_S:-900}
# command -> Debian package
declare -A packages=([qemu-system-x86_64]=qemu-system-x86 [ndctl]=ndctl [daxctl]=daxctl
  [busybox]=busybox-static [cpio]=cpio [modprobe]=kmod [depmod]=kmod)
PATH=$PATH:/usr/sbin:/sbin

tell() { say cxl "$@"; }
skip() { say cxl "NOT RUN: $*"; exit 0; }

need_packages() {
  local command missing=()
  for command in "${!packages[@]}"; do
    command -v "$command" >/dev/null || missing+=("${packages[$command]}")
  done
  if [ "${#missing[@]}" -eq 0 ]; then return; fi
  mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
  if [ "$(id -u)" -ne 0 ]; then
    skip "this needs a few packages; as root: apt-get install ${missing[*]}"
  fi
  tell "installing with apt-get: ${missing[*]}"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y \
    --no-install-recommends "${missing[@]}" >"$out/apt.log" 2>&1 ||
    skip "apt-get could not install ${missing[*]}; see $out/apt.log"
}

need_kernel() { # sets version
  if ! compgen -G "$out/kernel/boot/vmlinuz-*" >/dev/null; then
    local package
    package=$(apt-cache depends linux-image-amd64 2>/dev/null |
      awk '$1 == "Depends:" && $2 ~ /^linux-image-/ {print $2; exit}')
    if [ -z "$package" ]; then skip "apt knows no Debian kernel (linux-image-amd64)"; fi
    tell "fetching Debian's kernel package $package into out/cxl (unpacked, not installed)"
    (cd -- "$out" && apt-get download -qq "$package" >>apt.log 2>&1) ||
      skip "$package could not be downloaded; see $out/apt.log"
    rm -rf -- "$out/kernel.part"
    dpkg-deb -x "$out/$package"_*.deb "$out/kernel.part"
    rm -f -- "$out/$package"_*.deb
    depmod -b "$out/kernel.part" "${package#linux-image-}"
    mv -T -- "$out/kernel.part" "$out/kernel"
  fi
  version=$(basename -- "$out"/kernel/boot/vmlinuz-*)
  version=${version#vmlinuz-}
}

make_initramfs() { # the modules that mount this machine's files, and a start script
  local work=$out/initramfs module number=10
  rm -rf -- "$work"
  mkdir -p -- "$work"/{bin,proc,sys,dev,mnt}
  cp -- "$(command -v busybox)" "$work/bin/busybox"
  while read -r module; do
    # Numbered, so that a sorted list is the order to load them in.
    if [ ! -e "$out/initramfs/loaded-$(basename -- "$module")" ]; then
      cp -- "$module" "$work/$number-$(basename -- "$module")"
      : >"$work/loaded-$(basename -- "$module")"
      number=$((number + 1))
    fi
  done < <(for module in virtio_pci 9pnet_virtio 9p; do
    modprobe -C /dev/null -d "$out/kernel" -S "$version" --show-depends "$module"
  done | awk '$1 == "insmod" {print $2}')
  cat >"$work/init" <<INIT
#!/bin/busybox sh
b=/bin/busybox
\$b mount -t proc p /proc; \$b mount -t sysfs s /sys; \$b mount -t devtmpfs d /dev
for module in /[0-9]*.ko; do \$b insmod \$module; done
\$b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /mnt ||
  \$b echo "GUEST ENDED 99" >/dev/ttyS0
for place in proc sys dev; do \$b mount --move /\$place /mnt/\$place; done
export TIERED_ROOT='$root' TIERED_VENV='$venv' TIERED_KERNEL='$out/kernel'
export TIERED_ARGS='$*'
exec \$b switch_root /mnt /bin/bash '$root/tests/cxl/guest.sh'
INIT
  chmod +x "$work/init"
  rm -f -- "$work"/loaded-*
  (cd -- "$work" && find . | cpio --quiet -o -H newc | gzip -1) >"$out/initramfs.gz"
}

memory() { printf -- '-object memory-backend-ram,id=m%s,size=%s ' "$1" "$2"; }

if [ "$(uname -sm)" != "Linux x86_64" ]; then skip "the guest is an x86-64 Linux"; fi
command -v apt-get >/dev/null || skip "the guest is made from Debian's packages (apt-get)"
mkdir -p -- "$out"
need_packages
need_kernel
make_initramfs "$@"
tell "starting the guest; its console is kept in out/cxl/console.log"
# shellcheck disable=SC2046,SC2086 # lists of words are meant
timeout -k 10 "$limit_s" qemu-system-x86_64 -accel $accel \
  -machine pc,nvdimm=on -smp 2 -m 2304M,slots=2,maxmem=8G \
  $(memory 0 1536M) $(memory 1 384M) $(memory 2 384M) $(memory 3 768M) \
  -numa node,nodeid=0,cpus=0-1,memdev=m0 \
  -numa node,nodeid=1,memdev=m1 -numa node,nodeid=2,memdev=m2 -numa node,nodeid=3 \
  -device nvdimm,id=module,memdev=m3,node=3 \
  -kernel "$out/kernel/boot/vmlinuz-$version" -initrd "$out/initramfs.gz" \
  -append "console=ttyS0 panic=1 quiet rdinit=/init" \
  -virtfs local,path=/,mount_tag=host,security_model=passthrough,readonly=on,multidevs=remap \
  -nographic -no-reboot -net none </dev/null 2>&1 |
  sed -uE 's/\r//g; s/\x1b(c|\[[0-9;?]*[A-Za-z])//g' | tee "$out/console.log" ||
  true
ended=$(grep -aoE 'GUEST ENDED [0-9]+' "$out/console.log" | tail -n 1 || true)
case $ended in
  "GUEST ENDED 0") tell "passed on nodes without cores, on devdax and on system-ram" ;;
  "") tell "FAILED: the guest did not come to its end within $limit_s s"; exit 1 ;;
  *) tell "FAILED: ${ended,,}"; exit 1 ;;
esac

#!/usr/bin/env bash
# Runs in the guest of scripts/test-cxl.sh, as its only program; powers it off at the end.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp TMPDIR=/tmp
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 NO_COLOR=1 COLUMNS=88
mount -t tmpfs tmp /tmp
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
cd "$TIERED_ROOT" || exit
status=0

echo "=== guest: Linux $(uname -r)"
# -C /dev/null: Debian's settings for ndctl keep some of these from being loaded.
for module in nfit nd_pmem dax_pmem device_dax kmem; do
  modprobe -C /dev/null -d "$TIERED_KERNEL" "$module" || status=98
done
ndctl create-namespace -f -e namespace0.0 -m devdax -a 2M >/tmp/ndctl.log 2>&1 ||
  { cat /tmp/ndctl.log; ndctl list -NRi; status=97; }
name=$(basename /sys/bus/dax/devices/dax*)
echo "=== $name is there after $SECONDS s; starting the tests"
# --noconftest: what all tests share is not needed here, and slow to import.
# shellcheck disable=SC2086 # several arguments are meant
SGL_TIERED_EXPECT_CXL="nodes=1,2 devdax=$name reconfigure=yes" \
  "$TIERED_VENV/bin/python" -m pytest -v --noconftest -p no:cacheprovider \
  -p no:hypothesispytest --timeout=300 tests/cxl $TIERED_ARGS || status=$?
echo "GUEST ENDED $status"
echo o >/proc/sysrq-trigger
sleep 10

#!/usr/bin/env bash
# Installs what the tests and benchmarks call and this machine lacks (Debian and its kin).
#
#   hack/install-tools.sh          what the driver and its tests need
#   hack/install-tools.sh bench    the same, and fio
#   hack/install-tools.sh vm       the same, and User Mode Linux
#   hack/install-tools.sh lvm      the same, and lvm2
#   hack/install-tools.sh image    what hack/image.sh needs
#   hack/install-tools.sh e2e      what the cluster of the end-to-end tests needs
#   hack/install-tools.sh lint     only golangci-lint, into ./bin; needs no root
#
# When nothing is missing it says nothing and takes milliseconds.
set -euo pipefail

GOLANGCI_LINT_VERSION=2.15.0

cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin # where mkfs lives, also for those who are not root

# need PACKAGE COMMAND...: notes PACKAGE as missing unless all its commands are there.
missing=()
need() {
	local package=$1 command
	shift
	for command; do
		if ! command -v "$command" >/dev/null; then
			missing+=("$package")
			return
		fi
	done
}

# quietly COMMAND...: shows what it printed only when it fails.
quietly() {
	local log
	log=$(mktemp)
	if ! "$@" >"$log" 2>&1 </dev/null; then
		cat "$log" >&2
		rm -f "$log"
		echo "failed: $*" >&2
		exit 1
	fi
	rm -f "$log"
}

install_missing() {
	if ! command -v apt-get >/dev/null; then
		echo "missing: ${missing[*]} (Debian's names; there is no apt-get here, install them by hand)" >&2
		exit 1
	fi
	if [ "$(id -u)" -ne 0 ]; then
		echo "missing: ${missing[*]} (not root; run: sudo apt-get install ${missing[*]})" >&2
		exit 1
	fi
	echo "installing ${missing[*]}"
	quietly apt_install "${missing[@]}"
}

apt_install() {
	apt-get update -qq || true # a source that has none of this may fail: the install decides
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# It is built once on a machine.
install_golangci_lint() {
	local cached=${ASHLAR_CACHE:-$HOME/.cache/ashlar}/golangci-lint-$GOLANGCI_LINT_VERSION
	if [ ! -x "$cached/golangci-lint" ]; then
		echo "building golangci-lint v$GOLANGCI_LINT_VERSION (a few minutes, once)"
		GOBIN=$cached quietly go install "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$GOLANGCI_LINT_VERSION"
	fi
	mkdir -p bin
	ln -sfn "$cached/golangci-lint" bin/golangci-lint
}

case ${1-} in
lint)
	install_golangci_lint
	exit
	;;
bench) need fio fio ;;
vm)
	need user-mode-linux linux.uml
	need secilc secilc
	;;
lvm)
	need lvm2 lvm
	need dmsetup dmsetup
	need thin-provisioning-tools thin_check
	need user-mode-linux linux.uml
	;;
image | e2e)
	need mmdebstrap mmdebstrap
	need jq jq
	need openssl openssl
	need iproute2 ip
	need util-linux unshare nsenter losetup
	need dropbear-bin dropbear dropbearkey dropbearconvert
	;;
"") ;;
*)
	echo "usage: $0 [bench|vm|lvm|image|e2e|lint]" >&2
	exit 2
	;;
esac

need e2fsprogs mkfs.ext4 e2fsck
need xfsprogs mkfs.xfs xfs_repair
need btrfs-progs mkfs.btrfs btrfstune
need kmod modprobe
# go test -race is linked by a C compiler.
echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || missing+=(gcc libc6-dev)

[ ${#missing[@]} -eq 0 ] || install_missing

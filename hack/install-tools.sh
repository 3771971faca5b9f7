#!/usr/bin/env bash
# Installs what the tests and benchmarks call and this machine lacks (Debian and its kin).
#
#   hack/install-tools.sh          what the driver and its tests need
#   hack/install-tools.sh bench    the same, and fio
#   hack/install-tools.sh vm       the same, and QEMU and what hack/vm/kernel.sh needs
#   hack/install-tools.sh lvm      the same as for vm, and lvm2
#   hack/install-tools.sh page     the same, and chromium
#   hack/install-tools.sh image    what hack/image.sh needs
#   hack/install-tools.sh e2e      what the cluster of the end-to-end tests needs
#   hack/install-tools.sh docs     only what make docs needs
#   hack/install-tools.sh lint     only golangci-lint and actionlint, into ./bin; needs no root
#   hack/install-tools.sh release  only helm and crane, into ./bin; needs no root
#   hack/install-tools.sh drbd     only drbdsetup-84 and drbdmeta, into ./bin; needs no root
#   hack/install-tools.sh monitoring  only prometheus and promtool, into ./bin; needs no root
#
# When nothing is missing it says nothing and takes milliseconds.
set -euo pipefail

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

# built NAME PACKAGE VERSION: bin/NAME, of a Go module, which is built once on a machine.
built() {
	local name=$1 cached=${ASHLAR_CACHE:-$HOME/.cache/ashlar}/$1-${3#v}
	if [ ! -x "$cached/$name" ]; then
		echo "building $name $3 (a few minutes, once)"
		GOBIN=$cached quietly go install "$2@$3"
	fi
	mkdir -p bin
	ln -sfn "$cached/$name" "bin/$name"
}

# unpacked PACKAGE COMMAND...: bin/COMMAND, of a package of Debian that is not installed, as that would start its service.
unpacked() {
	local package=$1 cached=${ASHLAR_CACHE:-$HOME/.cache/ashlar}/$1 command scratch
	shift
	if [ ! -x "$cached/$1" ]; then
		command -v apt-get >/dev/null || { echo "missing: $* (there is no apt-get here: put them into $cached by hand)" >&2; exit 1; }
		echo "unpacking $package"
		scratch=$(mktemp -d)
		chmod 755 "$scratch"
		(cd "$scratch" && { apt-get download -qq "$package" >/dev/null 2>&1 || { apt-get update -qq || true; quietly apt-get download -qq "$package"; }; })
		dpkg-deb -x "$scratch/$package"_*.deb "$scratch/root"
		mkdir -p "$cached"
		for command; do
			find "$scratch/root" -type f -name "$command" -exec mv {} "$cached/" \;
		done
		rm -rf "$scratch"
	fi
	mkdir -p bin
	for command; do
		ln -sfn "$cached/$command" "bin/$command"
	done
}

case ${1-} in
lint)
	built golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint v2.15.0
	built actionlint github.com/rhysd/actionlint/cmd/actionlint v1.7.12
	exit
	;;
release)
	built helm helm.sh/helm/v3/cmd/helm "$(go -C tests/deploy list -m -f '{{.Version}}' helm.sh/helm/v3)" # the one that the chart is tested with
	built crane github.com/google/go-containerregistry/cmd/crane v0.22.1
	exit
	;;
drbd)
	unpacked drbd-utils drbdsetup-84 drbdmeta
	exit
	;;
monitoring)
	unpacked prometheus prometheus promtool
	exit
	;;
docs)
	need hugo hugo
	[ ${#missing[@]} -eq 0 ] || install_missing
	exit
	;;
bench) need fio fio ;;
vm | lvm)
	need qemu-system-x86 qemu-system-x86_64
	need make make
	need gcc gcc
	need libc6-dev ldd
	[ -e /usr/include/gelf.h ] || missing+=(libelf-dev)
	need binutils ld
	need flex flex
	need bison bison
	need bc bc
	need xz-utils xz
	need iproute2 ip
	need secilc secilc
	need fio fio
	;;&
lvm)
	need lvm2 lvm
	need dmsetup dmsetup
	need thin-provisioning-tools thin_check
	;;
vm) ;;
page)
	need chromium chromium
	[ -n "$(fc-list Inter 2>/dev/null)" ] || missing+=(fontconfig fonts-inter) # for pictures that look alike everywhere
	;;
image | e2e)
	need mmdebstrap mmdebstrap
	[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring) # not on Debian's kin
	need jq jq
	need openssl openssl
	need iproute2 ip
	need util-linux unshare nsenter losetup
	need dropbear-bin dropbear dropbearkey dropbearconvert
	;;
"") ;;
*)
	echo "usage: $0 [bench|vm|lvm|page|image|e2e|docs|lint|release|drbd|monitoring]" >&2
	exit 2
	;;
esac

need e2fsprogs mkfs.ext4 e2fsck
need xfsprogs mkfs.xfs xfs_repair
need btrfs-progs mkfs.btrfs btrfstune
need kmod modprobe
need procps ps pgrep
need smartmontools smartctl
need cryptsetup-bin cryptsetup
# go test -race is linked by a C compiler.
echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || missing+=(gcc libc6-dev)

[ ${#missing[@]} -eq 0 ] || install_missing

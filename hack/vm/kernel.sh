#!/usr/bin/env bash
# Builds the kernel of the virtual machines (boot.sh), and prints its path: Linux from
# Debian's package linux-source, with what the tests need, and little else (kernel.config). All is built in. Ten to twenty minutes the first time; afterwards it takes milliseconds.
#
#   VM_KERNEL=$(hack/vm/kernel.sh [VERSION]) hack/vm/run.sh COMMAND [ARGUMENT...]
#
# VERSION is that of another linux-source that this Debian has, as 6.12; without it, the one that its kernel is from.
# ASHLAR_CACHE is where it is kept (default: ~/.cache/ashlar). It needs what hack/install-tools.sh vm installs, and apt-get.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
version=${1-}
key=$({ cat kernel.config kernel.sh && uname -m && echo "$version"; } | sha256sum | cut -c 1-16)
cache=${ASHLAR_CACHE:-$HOME/.cache/ashlar}
kernel=$cache/vm-kernel-$key

# One builds, the others that come meanwhile wait for it.
mkdir -p "$cache"
exec 9>"$cache/vm-kernel.lock"
[ -e "$kernel" ] || flock 9
if [ -e "$kernel" ]; then
	echo "$kernel"
	exit
fi

scratch=$(mktemp -d /var/tmp/ashlar-kernel.XXXXXX)
finish() {
	local status=$?
	[ "$status" -eq 0 ] || tail -n 60 "$scratch/log" >&2
	rm -rf "$scratch"
	exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The package of the version; it is not installed, as it is needed once.
sources() {
	if [ -n "$version" ]; then
		apt-cache pkgnames "linux-source-$version" | grep -x "linux-source-$version" || true
	else
		apt-cache depends linux-source 2>/dev/null | awk '/Depends: linux-source-/ && !n++ { print $2 }'
	fi
}

build() {
	local config=$PWD/kernel.config package
	cd "$scratch"
	chmod 755 .
	[ -n "$(sources)" ] || apt-get update -qq || true
	package=$(sources)
	apt-get download -qq "$package" || { apt-get update -qq || true; apt-get download -qq "$package"; }
	mkdir source
	dpkg-deb --fsys-tarfile "$package"_*.deb | tar -xO --wildcards './usr/src/linux-source-*.tar.xz' | tar -xJ -C source --strip-components=1
	cd source
	make -s alldefconfig
	scripts/kconfig/merge_config.sh -m .config "$config"
	make -s olddefconfig
	nice -n 10 make -s -j"$(nproc)" bzImage
}

echo "building a kernel for virtual machines; this takes ten to twenty minutes, once" >&2
(build) >"$scratch/log" 2>&1 </dev/null
cp "$scratch/source/arch/x86/boot/bzImage" "$kernel.part"
mv "$kernel.part" "$kernel"
echo "$kernel"

#!/usr/bin/env bash
# Prints the path of a tlshd, which does the handshakes of TLS for the kernel: this machine's, or else that of Debian 13 (ktls-utils), as Debian 12 has none. That is
# unpacked with all that it needs, into ASHLAR_CACHE (default: ~/.cache/ashlar), and not installed. It needs apt-get, and Debian's mirror as apt has it.
set -euo pipefail

if command -v tlshd; then
	exit
fi
cache=${ASHLAR_CACHE:-$HOME/.cache/ashlar}
all=$cache/tlshd-1

# One unpacks, the others that come meanwhile wait for it.
mkdir -p "$cache"
exec 9>"$cache/tlshd.lock"
[ -e "$all/tlshd" ] || flock 9
if [ -e "$all/tlshd" ]; then
	echo "$all/tlshd"
	exit
fi

scratch=$(mktemp -d "$cache/tlshd.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Lists of packages and a state of their own: what this machine has installed is neither asked nor touched.
mkdir -p "$scratch"/apt/{lists/partial,archives/partial} "$scratch/root"
: >"$scratch/apt/status"
mirror=$(apt-get indextargets --format '$(SITE)' | grep -m 1 '/debian/\?$' || echo http://deb.debian.org/debian)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$scratch/apt/sources.list"
cat >"$scratch/apt/apt.conf" <<END
Dir::Etc::SourceList "$scratch/apt/sources.list";
Dir::Etc::SourceParts "/nonexistent";
Dir::State "$scratch/apt";
Dir::State::status "$scratch/apt/status";
Dir::Cache "$scratch/apt";
APT::Sandbox::User "root";
END
export APT_CONFIG=$scratch/apt/apt.conf
(
	cd "$scratch/apt/archives"
	apt-get update -qq
	apt-get install -qq --yes --no-install-recommends --download-only ktls-utils
	for package in *.deb; do
		dpkg-deb -x "$package" "$scratch/root"
	done
) >&2
cat >"$scratch/tlshd" <<END
#!/bin/sh
root=$all/root/usr
exec \$root/lib64/ld-linux-*.so.* --library-path "\$(echo \$root/lib/*-linux-gnu)" \$root/sbin/tlshd --config $all/root/etc/tlshd.conf "\$@"
END
chmod +x "$scratch/tlshd"
rm -rf "$scratch/apt" "$all"
chmod 755 "$scratch"
mv "$scratch" "$all"
echo "$all/tlshd"

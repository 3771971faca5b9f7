#!/usr/bin/env bash
# Makes the Dockerfile's image as an archive, without Docker and without a registry: the packages of Debian that it
# names, unpacked but not configured (so for any architecture on any other), and on top what hack/image makes of its
# other instructions.
#
#   hack/image.sh [-a amd64|arm64] [-o FILE] [NAME:TAG]
#   hack/image.sh [-a amd64|arm64] -b      only the base, and print the path of its archive
#
# FILE (default bin/image-ARCH.tar) is an OCI layout that `docker load`, `ctr images import`, `podman load`,
# `skopeo copy oci-archive:` and `kind load image-archive` take. The image carries its bill of materials,
# /sbom.spdx.json, which is put beside FILE too. The base is kept in ${ASHLAR_CACHE:-$HOME/.cache/ashlar}.
#
# Needs root, mmdebstrap and jq (Debian and its kin), go. VERSION is what the driver says it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

arch=$(go env GOARCH)
out='' base_only=''
while getopts a:o:b option; do
	case $option in
	a) arch=$OPTARG ;;
	o) out=$OPTARG ;;
	b) base_only=1 ;;
	*) exit 2 ;;
	esac
done
shift $((OPTIND - 1))
version=${VERSION:-$(git describe --tags --always --dirty 2>/dev/null || echo dev)}
name=${1:-ghcr.io/ashlar-csi/ashlar:$version}
out=${out:-bin/image-$arch.tar}
cache=${ASHLAR_CACHE:-$HOME/.cache/ashlar}
mkdir -p "$cache" "$(dirname "$out")"

for tool in mmdebstrap jq; do
	command -v "$tool" >/dev/null || { echo "hack/image.sh: $tool is missing (Debian: apt-get install $tool)" >&2; exit 1; }
done

suite=bookworm
# The Dockerfile's; and a shell with the usual tools, for people.
packages=$(hack/image/run.sh -packages | tr ' ' ,),bash,coreutils,util-linux,mount,grep,sed
# What those depend on for programs that a driver has no use for: xfs_scrub (ICU, Python), fsadm, init scripts.
dropped='python3* libpython3* media-types libicu* libsqlite3* libnsl* libtirpc* libgssapi* libk5* libkrb5* libkeyutils*
	libdb5* libffi* mawk sysvinit-utils lsb-base tar'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The base: built once for each version of this list, or with REBUILD=1 for newer packages.
base=$cache/image-base-$suite-$arch-$({ cat hack/image.sh && echo "$packages"; } | sha256sum | cut -c1-12).tar
cat >"$scratch/trim" <<'TRIM'
#!/bin/bash
# After unpacking: a note of each package in the form that scanners of images without dpkg read, and away with
# what was dropped.
set -eu
root=$1
mkdir -p "$root/var/lib/dpkg/status.d"
for deb in "$root"/var/cache/apt/archives/*.deb; do
	package=$(dpkg-deb -f "$deb" Package)
	for pattern in $DROPPED; do
		# shellcheck disable=SC2053
		[[ $package == $pattern ]] || continue
		dpkg-deb --fsys-tarfile "$deb" | tar -t | sed 's|^\./||' | while read -r path; do
			[ -d "$root/$path" ] && [ ! -L "$root/$path" ] || rm -f "$root/$path"
		done
		continue 2
	done
	dpkg-deb -f "$deb" >"$root/var/lib/dpkg/status.d/$package"
done
cd "$root"
rm -f usr/sbin/xfs_scrub* usr/sbin/fsadm usr/sbin/blkdeactivate
rm -rf usr/share/{locale,man,info,bash-completion,zsh,lintian,bug,initramfs-tools} usr/lib/{systemd,udev,tmpfiles.d} etc/{init.d,rc*.d,cron.*,pam.d}
find usr/share/doc -type f ! -name copyright -delete
find usr/share -depth -type d -empty -delete
mkdir -p tmp run var/lib/ashlar etc/lvm dev proc sys
chmod 1777 tmp
printf 'root:x:0:0:root:/root:/bin/bash\nnonroot:x:65532:65532:nonroot:/:/usr/sbin/nologin\n' >etc/passwd
printf 'root:x:0:\ndisk:x:6:\nnonroot:x:65532:\n' >etc/group
TRIM
chmod +x "$scratch/trim"
if [ ! -e "$base" ] || [ "${REBUILD-}" = 1 ]; then
	echo "unpacking Debian packages for $arch" >&2
	DROPPED=$dropped SOURCE_DATE_EPOCH=0 mmdebstrap --quiet --variant=extract --architectures="$arch" \
		--include="$packages" --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
		--extract-hook="$scratch/trim \"\$1\"" "$suite" "$scratch/base.tar" \
		>"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
	# No device nodes: the runtime makes those that a container has.
	mkdir "$scratch/root"
	tar -C "$scratch/root" -xf "$scratch/base.tar" --exclude='./dev/*' --exclude='./etc/apt' --exclude='./var/cache/*' \
		--exclude='./var/lib/apt' --exclude='./var/log/*' --exclude=./etc/resolv.conf --exclude=./etc/hostname
	tar -C "$scratch/root" --sort=name --numeric-owner --owner=0 --group=0 --mtime=@0 -cf "$base.new" .
	mv "$base.new" "$base"
	rm -rf "$scratch/root" "$scratch/base.tar"
fi

if [ -n "$base_only" ]; then
	echo "$base"
	exit
fi

# The driver, the bill of materials of both, and the settings. dpkg's list is of the base that is used here.
mkdir "$scratch/status"
tar -C "$scratch/status" -xf "$base" --strip-components=5 ./var/lib/dpkg/status.d
for note in "$scratch"/status/*; do cat "$note" && echo; done >"$scratch/dpkg"
hack/image/run.sh -arch "$arch" -version "$version" -status "$scratch/dpkg" -o "$scratch/made"
tar -C "$scratch/made/root" --sort=name --numeric-owner --owner=0 --group=0 --mtime=@0 -cf "$scratch/top.tar" .

# The archive: blobs by their digests.
blobs=$scratch/oci/blobs/sha256
mkdir -p "$blobs"
digest() { sha256sum "$1" | cut -d' ' -f1; }
blob() { # moves a file to the blobs; its digest
	local sum
	sum=$(digest "$1")
	mv "$1" "$blobs/$sum"
	echo "$sum"
}
layers=() diffs=()
for layer in "$base" "$scratch/top.tar"; do
	diffs+=("sha256:$(digest "$layer")")
	gzip -n -6 -c "$layer" >"$scratch/layer.gz"
	layers+=("$(blob "$scratch/layer.gz")")
done
jq --arg arch "$arch" '{architecture: $arch, os: "linux",
	config: (.Env += ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"] | .WorkingDir = "/"),
	rootfs: {type: "layers", diff_ids: $ARGS.positional}}' "$scratch/made/config.json" --args "${diffs[@]}" >"$scratch/config"
config=$(blob "$scratch/config")
describe() { printf '{"mediaType":"%s","digest":"sha256:%s","size":%s}' "$1" "$2" "$(stat -c %s "$blobs/$2")"; }
type=application/vnd.oci.image
printf '{"schemaVersion":2,"mediaType":"%s.manifest.v1+json","config":%s,"layers":[%s,%s]}' "$type" \
	"$(describe "$type.config.v1+json" "$config")" \
	"$(describe "$type.layer.v1.tar+gzip" "${layers[0]}")" "$(describe "$type.layer.v1.tar+gzip" "${layers[1]}")" >"$scratch/manifest"
manifest=$(blob "$scratch/manifest")
jq -n --arg name "$name" --arg arch "$arch" --argjson manifest "$(describe "$type.manifest.v1+json" "$manifest")" \
	'{schemaVersion: 2, mediaType: "application/vnd.oci.image.index.v1+json", manifests: [$manifest + {
		platform: {os: "linux", architecture: $arch},
		annotations: {"io.containerd.image.name": $name, "org.opencontainers.image.ref.name": ($name | split(":") | last)}}]}' >"$scratch/oci/index.json"
echo '{"imageLayoutVersion":"1.0.0"}' >"$scratch/oci/oci-layout"
# For `docker load` of old.
jq -n --arg name "$name" --arg config "$config" --args '[{Config: ("blobs/sha256/" + $config), RepoTags: [$name],
	Layers: [$ARGS.positional[] | "blobs/sha256/" + .]}]' "${layers[@]}" >"$scratch/oci/manifest.json"
tar -C "$scratch/oci" --sort=name --numeric-owner --owner=0 --group=0 --mtime=@0 -cf "$out.new" .
mv "$out.new" "$out"
cp "$scratch/made/root/sbom.spdx.json" "${out%.tar}.spdx.json"
echo "$name for $arch in $out, $(($(stat -c %s "$out") / 1048576)) MiB; its bill of materials: ${out%.tar}.spdx.json"

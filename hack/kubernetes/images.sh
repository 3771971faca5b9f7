#!/usr/bin/env bash
# Makes, from what build.sh built, the images that the cluster asks for: there is no registry. The sidecars get the
# names that Ashlar's manifests have for them, the others those that e2e.test asks for.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
out=$built/images
rm -rf "$out" && mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# archive FILE DIRECTORY then for each image: NAME ENTRYPOINT CMD (JSON lists): images of one layer, for ctr and docker.
archive() {
	local file=$1 layer=$2 sum list=() n=0
	shift 2
	rm -rf "$work/a" && mkdir "$work/a"
	tar -C "$layer" --sort=name --numeric-owner --owner=0 --group=0 --mtime=@0 -cf "$work/a/layer.tar" .
	sum=$(sha256sum "$work/a/layer.tar" | cut -d' ' -f1)
	while [ $# -gt 0 ]; do
		n=$((n + 1))
		jq -n --arg name "$1" --argjson entry "$2" --argjson cmd "$3" --arg sum "$sum" '{architecture: "amd64", os: "linux",
			config: {Env: ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], Entrypoint: $entry, Cmd: $cmd, Labels: {"for": $name}},
			rootfs: {type: "layers", diff_ids: ["sha256:" + $sum]}}' >"$work/a/$n.json"
		list+=("$(jq -n --arg name "$1" --arg n "$n" '{Config: ($n + ".json"), RepoTags: [$name], Layers: ["layer.tar"]}')")
		shift 3
	done
	printf '%s\n' "${list[@]}" | jq -s . >"$work/a/manifest.json"
	tar -C "$work/a" -cf "$file" .
}

# one NAME PROGRAM ENTRY: an image of one static program.
one() {
	rm -rf "$work/one" && mkdir -p "$work/one/tmp"
	cp "$bin/$2" "$work/one/$3"
	archive "$out/$3.tar" "$work/one" "$1" "[\"/$3\"]" null
}

tag() { sed -n "\|name: registry.k8s.io/sig-storage/$1\$|{n;s/.*newTag: //p}" "$hack/../../deploy/kubernetes/kustomization.yaml"; }
for sidecar in csi-provisioner csi-attacher csi-resizer csi-snapshotter; do
	one "registry.k8s.io/sig-storage/$sidecar:$(tag "$sidecar")" "$sidecar" "$sidecar"
done
for sidecar in csi-node-driver-registrar livenessprobe; do
	one "registry.k8s.io/sig-storage/$sidecar:$(tag "$sidecar")" standin "$sidecar"
done

"$bin/e2e.test" --list-images >"$work/list" 2>/dev/null
wanted() { grep -E "/$1:" "$work/list" | sort -V; }
wanted pause | tail -1 >"$out/pause.name"
one "$(cat "$out/pause.name")" standin pause

# What the tests' pods run in: our own image's base, what busybox has beyond that, and agnhost.
root=$work/root
mkdir "$root"
base=$("$hack/../image.sh" -b)
tar -C "$root" -xf "$base"
ln -sf bash "$root/usr/bin/sh"
install "$runtime/bin/busybox" "$root/usr/bin/busybox"
for applet in $("$runtime/bin/busybox" --list); do
	[ -e "$root/usr/bin/$applet" ] || [ -e "$root/usr/sbin/$applet" ] || ln -s busybox "$root/usr/bin/$applet"
done
cp "$bin/agnhost" "$root/agnhost"
ln -s agnhost "$root/agnhost-2"
mkdir -p "$root/uploads" "$root/root" "$root/home" "$root/var/tmp"
chmod 1777 "$root/var/tmp"
images=("$(wanted agnhost | tail -1)" '["/agnhost"]' '["pause"]')
while read -r name; do
	images+=("$name" null '["sh"]')
done < <(wanted busybox; wanted glibc-dns-testing; wanted nginx)
archive "$out/tests.tar" "$root" "${images[@]}"

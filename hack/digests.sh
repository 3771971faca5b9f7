#!/usr/bin/env bash
# Writes the digests of the sidecars' images, as their registry has them now for the tags that are written beside them, into
# deploy/kubernetes/kustomization.yaml and the chart's values.yaml. Kubernetes then runs these very images, whatever becomes
# of the tags. With -c it changes nothing, and fails where another digest is written, or none.
#
#   hack/digests.sh [-c]
#
# Needs crane (hack/install-tools.sh release), or CRANE, and the registry.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
crane=${CRANE:-bin/crane}
check=
[ "${1-}" != -c ] || check=1
kustomization=deploy/kubernetes/kustomization.yaml values=deploy/charts/ashlar/values.yaml

failures=0
while read -r name tag; do
	digest=$("$crane" digest "$name:$tag")
	[[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "$name:$tag: the registry says $digest, which is no digest" >&2; exit 1; }
	for file in $kustomization $values; do
		new=$(awk -v name="$name" -v digest="$digest" -v manifest="$([ $file = $kustomization ] && echo 1)" '
			/^ *(- name|repository): / { mine = ($NF == name) }
			mine && /^ *digest: / { if (!manifest) { sub(/digest: .*/, "digest: " digest); print } next }
			{ print }
			mine && manifest && /^ *newTag: / { print "    digest: " digest }' $file)
		[ "$new" != "$(cat $file)" ] || continue
		if [ -n "$check" ]; then
			echo "$file: $name:$tag is $digest now; run make digests" >&2
			failures=1
		else
			echo "$new" >$file
			echo "$file: $name:$tag is $digest"
		fi
	done
done < <(awk '/name: registry.k8s.io\// { name = $NF } name && /newTag:/ { print name, $NF; name = "" }' $kustomization)
exit $failures

package deploy

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"helm.sh/helm/v3/pkg/chart/loader"
	k8syaml "sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false, "write the chart's README.md anew")

// TestReadme: the chart's README says each value with its default, and what its comment in values.yaml says.
func TestReadme(t *testing.T) {
	want, path := readme(t), chart+"/README.md"
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, want) {
		t.Errorf("%s is not what values.yaml says: run make generate", path)
	}
}

const intro = `# Ashlar

A CSI driver that cuts block volumes out of the disks a node already has.

    helm install ashlar oci://ghcr.io/ashlar-csi/charts/ashlar -n ashlar-system --create-namespace
    kubectl label namespace ashlar-system pod-security.kubernetes.io/enforce=privileged
    helm test ashlar -n ashlar-system

[Installing on Kubernetes](https://github.com/ashlar-csi/ashlar/blob/main/docs/install.md) says what it takes, and what to do for
snapshots, node groups, LVM pools and zones.

## Values

All are checked against a schema. This page is made from values.yaml.

| value | default | |
|---|---|---|
`

// readme is the chart's README as values.yaml says it.
func readme(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(chart + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	out.WriteString(intro)
	rows(&out, "", document.Content[0])
	return out.Bytes()
}

// rows writes a row for each value of a mapping, and for each of those in it that are written in lines of their own.
func rows(out *bytes.Buffer, prefix string, mapping *yaml.Node) {
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name := prefix + key.Value
		says := comment(key, value)
		if value.Kind == yaml.MappingNode && value.Style&yaml.FlowStyle == 0 && len(value.Content) > 0 {
			if says != "" {
				fmt.Fprintf(out, "| `%s` | | %s |\n", name, says)
			}
			rows(out, name+".", value)
			continue
		}
		fmt.Fprintf(out, "| `%s` | `%s` | %s |\n", name, flow(value), says)
	}
}

// comment is what is written above and beside a value. The file's own comment is above its first one, with an empty line between.
func comment(key, value *yaml.Node) string {
	paragraphs := strings.Split(key.HeadComment, "\n\n")
	lines := strings.Split(paragraphs[len(paragraphs)-1], "\n")
	if strings.Contains(key.HeadComment, "values.schema.json") {
		lines = nil
	}
	lines = append(lines, key.LineComment, value.LineComment)
	var words []string
	for _, line := range lines {
		words = append(words, strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "#")))
	}
	return strings.ReplaceAll(strings.TrimSpace(strings.Join(words, " ")), "|", "\\|")
}

// flow is a value in one line.
func flow(value *yaml.Node) string {
	bare := strip1(value)
	bare.Style |= yaml.FlowStyle
	out, err := yaml.Marshal(bare)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(strings.Join(strings.Fields(string(out)), " "), "|", "\\|")
}

// strip1 is a value without its comments.
func strip1(value *yaml.Node) *yaml.Node {
	bare := *value
	bare.HeadComment, bare.LineComment, bare.FootComment, bare.Content = "", "", "", nil
	for _, one := range value.Content {
		bare.Content = append(bare.Content, strip1(one))
	}
	return &bare
}

// notes are what helm install says.
func notes(t *testing.T, values string, apis ...string) string {
	t.Helper()
	files, err := template(values, apis...)
	if err != nil {
		t.Fatal(err)
	}
	return files["ashlar/templates/NOTES.txt"]
}

// TestNotes: what is said after an installation is of what was installed.
func TestNotes(t *testing.T) {
	for name, c := range map[string]struct {
		values    string
		apis      []string
		says, not []string
	}{
		"as it is": {"", snapshotAPIs, []string{"daemonset/ashlar-node\n", "is the directory /var/lib/ashlar", "helm test any -n " + namespace, "are ashlar, ashlar-xfs.", "says kubectl ashlar status (docs/operate/kubectl-ashlar.md).\n"},
			[]string{"service/ashlar-page", "Snapshots are off", "NO ADMISSION POLICY", "Nobody may connect", "agent-not-ready", "lvm://"}},
		"without snapshots": {"", nil, []string{"Snapshots are off"}, nil},
		"all else": {`{admissionPolicy: false, controller: {page: {enabled: true}}, startupTaint: true, networkPolicy: {from: []}, storageClasses: [], nodeGroups: {default: null, fast: {pools: [{name: a, url: "lvm://vg"}]}}}`, nil,
			[]string{"NO ADMISSION POLICY", "Nobody may connect", "agent-not-ready", "is lvm://vg", "daemonset/ashlar-node-fast\n", "There is no storage class", "port-forward service/ashlar-page 9820\n"}, []string{"helm test", "/var/lib/ashlar"}},
	} {
		text := notes(t, c.values, c.apis...)
		for _, want := range c.says {
			if !strings.Contains(text, want) {
				t.Errorf("%s: it does not say %q:\n%s", name, want, text)
			}
		}
		for _, not := range c.not {
			if strings.Contains(text, not) {
				t.Errorf("%s: it says %q:\n%s", name, not, text)
			}
		}
	}
}

// TestArtifactHub: the annotations of the chart are YAML, and name the definitions that there are.
func TestArtifactHub(t *testing.T) {
	loaded, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	var crds []struct{ Kind, Version, Name, DisplayName, Description string }
	if err := k8syaml.UnmarshalStrict([]byte(loaded.Metadata.Annotations["artifacthub.io/crds"]), &crds); err != nil {
		t.Fatal(err)
	}
	all := build(t, manifests)
	for _, crd := range crds {
		if have := all["CustomResourceDefinition <nil>/"+crd.Name]; have == nil || dig(have, "spec", "names", "kind") != crd.Kind {
			t.Errorf("there is no definition %+v", crd)
		}
	}
	if len(crds) != 4 {
		t.Errorf("%d definitions", len(crds))
	}
	var links []struct{ Name, URL string }
	if err := k8syaml.UnmarshalStrict([]byte(loaded.Metadata.Annotations["artifacthub.io/links"]), &links); err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		path, ours := strings.CutPrefix(link.URL, "https://github.com/ashlar-csi/ashlar/blob/main/")
		if _, err := os.Stat("../../" + path); !ours || err != nil {
			t.Errorf("%s leads nowhere: %v", link.URL, err)
		}
	}
}

// TestDigests: hack/digests.sh writes the digest of each sidecar into manifests and chart alike, and finds what is not theirs.
func TestDigests(t *testing.T) {
	dir := t.TempDir()
	for _, file := range []string{"deploy", "hack/digests.sh"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o755); err != nil {
			t.Fatal(err)
		}
		run(t, "", "cp", "-a", "../../"+file, filepath.Join(dir, file))
	}
	crane := filepath.Join(dir, "crane") // says for each image the checksum of its name
	if err := os.WriteFile(crane, []byte("#!/bin/sh\necho sha256:$(echo $2$AGAIN | sha256sum | cut -d' ' -f1)\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	digests := func(env string, flags ...string) error {
		return exec1(dir, append([]string{"CRANE=" + crane}, env), "hack/digests.sh", flags...)
	}
	if err := digests("AGAIN=", "-c"); err == nil {
		t.Error("images without digests pass the check")
	}
	if err := digests("AGAIN=old"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to do
		if err := digests("AGAIN="); err != nil {
			t.Fatal(err)
		}
	}
	if err := digests("AGAIN=", "-c"); err != nil {
		t.Error(err)
	}
	if err := digests("AGAIN=newer", "-c"); err == nil {
		t.Error("digests that are old pass the check")
	}
	image := regexp.MustCompile(`^registry\.k8s\.io/sig-storage/[a-z-]+(:v[0-9.]+)?@sha256:[0-9a-f]{64}$`)
	want, have := images(build(t, dir+"/deploy/kubernetes")), images(renderChart(t, dir+"/deploy/charts/ashlar", ""))
	pinned := 0
	for name, of := range want {
		if strings.HasPrefix(of, "registry.k8s.io/") {
			pinned++
			if !image.MatchString(of) || have[name] != of {
				t.Errorf("%s: %s in the manifests, %s in the chart", name, of, have[name])
			}
		}
	}
	if pinned != 7 {
		t.Errorf("%d images are pinned", pinned)
	}
	own := images(render(t, `{image: {digest: "sha256:`+strings.Repeat("0", 64)+`"}}`))["Deployment "+namespace+"/ashlar-controller driver"]
	if !strings.HasSuffix(own, ":v0.1.0@sha256:"+strings.Repeat("0", 64)) {
		t.Errorf("the driver's own image is %s", own)
	}
}

// images of containers, by workload and container.
func images(all objects) map[string]string {
	found := map[string]string{}
	for key, object := range all {
		for _, c := range containers(object) {
			found[fmt.Sprint(key, " ", c["name"])] = fmt.Sprint(c["image"])
		}
	}
	return found
}

// Package deploy tests the manifests in deploy/kubernetes and the chart in
// deploy/charts/ashlar: that both say the same, and that what they say is sound.
package deploy

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	manifests = "../../deploy/kubernetes"
	chart     = "../../deploy/charts/ashlar"
	namespace = "ashlar-system"
)

// objects by "Kind namespace/name".
type objects map[string]map[string]any

func (o objects) add(t *testing.T, object map[string]any) {
	t.Helper()
	meta, _ := object["metadata"].(map[string]any)
	// Kustomize takes these for namespaced, which the API server does not mind.
	if strings.HasPrefix(fmt.Sprint(object["apiVersion"]), "admissionregistration.k8s.io/") {
		delete(meta, "namespace")
	}
	key := fmt.Sprintf("%v %v/%v", object["kind"], meta["namespace"], meta["name"])
	if _, twice := o[key]; twice {
		t.Errorf("%s is there twice", key)
	}
	o[key] = object
}

// of returns the only object of a kind with a name.
func (o objects) of(t *testing.T, kind, name string) map[string]any {
	t.Helper()
	for key, object := range o {
		if strings.HasPrefix(key, kind+" ") && strings.HasSuffix(key, "/"+name) {
			return object
		}
	}
	t.Fatalf("no %s %s", kind, name)
	return nil
}

// build renders directories with kustomize.
func build(t *testing.T, directories ...string) objects {
	t.Helper()
	all := objects{}
	for _, directory := range directories {
		resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), directory)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range resources.Resources() {
			text, err := r.AsYAML()
			if err != nil {
				t.Fatal(err)
			}
			all.add(t, parse(t, text))
		}
	}
	return all
}

func parse(t *testing.T, text []byte) map[string]any {
	t.Helper()
	var object map[string]any
	if err := yaml.Unmarshal(text, &object); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return object
}

// snapshotAPIs are there when the snapshot CRDs are.
var snapshotAPIs = []string{"snapshot.storage.k8s.io/v1", "groupsnapshot.storage.k8s.io/v1"}

// template renders the chart with values, as YAML, for a cluster that has these APIs beyond its own.
func template(values string, apis ...string) (map[string]string, error) {
	return templateChart(chart, values, apis...)
}

func templateChart(chart, values string, apis ...string) (map[string]string, error) {
	loaded, err := loader.Load(chart)
	if err != nil {
		return nil, err
	}
	given, err := chartutil.ReadValues([]byte(values))
	if err != nil {
		return nil, err
	}
	capabilities := chartutil.DefaultCapabilities.Copy()
	capabilities.APIVersions = append(slices.Clone(capabilities.APIVersions), apis...)
	all, err := chartutil.ToRenderValues(loaded, given, chartutil.ReleaseOptions{Name: "any", Namespace: namespace, IsInstall: true}, capabilities)
	if err != nil {
		return nil, err // the schema is checked here
	}
	return engine.Render(loaded, all)
}

func render(t *testing.T, values string, apis ...string) objects {
	t.Helper()
	return renderChart(t, chart, values, apis...)
}

// renderChart renders a chart, but for its tests.
func renderChart(t *testing.T, chart, values string, apis ...string) objects {
	t.Helper()
	files, err := templateChart(chart, values, apis...)
	if err != nil {
		t.Fatal(err)
	}
	all := objects{}
	for name, text := range files {
		if !strings.HasSuffix(name, ".yaml") || strings.Contains(name, "/tests/") {
			continue
		}
		for document := range strings.SplitSeq(text, "\n---\n") {
			if object := parse(t, []byte(strings.TrimPrefix(document, "---\n"))); object != nil {
				all.add(t, object)
			}
		}
	}
	return all
}

// TestKubeVersion: the chart refuses clusters that lack what the driver needs, and the documents say the same. The least is
// what serves selectable fields of custom resources unasked (beta in 1.31), by which agents find their objects.
func TestKubeVersion(t *testing.T) {
	loaded, err := loader.Load(chart)
	if err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]bool{"v1.29.0": false, "v1.30.14": false, "v1.30.14-gke.1000": false,
		"v1.31.0": true, "v1.31.9+k3s1": true, "v1.31.5-eks-8cce635": true, "v1.37.1": true} {
		if have := chartutil.IsCompatibleRange(loaded.Metadata.KubeVersion, version); have != want {
			t.Errorf("on Kubernetes %s the chart can be installed: %v, want %v", version, have, want)
		}
	}
	selectable := 0
	for key, object := range build(t, manifests) {
		if !strings.HasPrefix(key, "CustomResourceDefinition ") {
			continue
		}
		for _, version := range dig(object, "spec", "versions").([]any) {
			if dig(version.(map[string]any), "selectableFields") != nil {
				selectable++
			}
		}
	}
	if selectable == 0 {
		t.Error("no custom resource has selectable fields any more: the least version is another one")
	}
	if text, err := os.ReadFile("../../docs/install.md"); err != nil || !strings.Contains(string(text), "Kubernetes 1.31 or newer") {
		t.Errorf("docs/install.md names another least version: %v", err)
	}
}

// strip takes away what only one of the two ways of installing says.
func strip(all objects) objects {
	delete(all, "Namespace <nil>/"+namespace) // helm install --create-namespace
	for _, object := range all {
		meta := object["metadata"].(map[string]any)
		labels, _ := meta["labels"].(map[string]any)
		delete(labels, "app.kubernetes.io/managed-by")
		delete(labels, "helm.sh/chart")
		annotations, _ := meta["annotations"].(map[string]any)
		delete(annotations, "helm.sh/resource-policy")
	}
	return all
}

// TestChartAgrees: the chart without values is deploy/kubernetes, object by object.
func TestChartAgrees(t *testing.T) {
	for _, c := range []struct {
		name        string
		directories []string
		apis        []string
	}{
		{"without snapshot CRDs", []string{manifests}, nil},
		{"with snapshot CRDs", []string{manifests, manifests + "/snapshots"}, snapshotAPIs},
	} {
		t.Run(c.name, func(t *testing.T) {
			want, have := strip(build(t, c.directories...)), strip(render(t, "", c.apis...))
			for key := range want {
				if have[key] == nil {
					t.Errorf("the chart has no %s", key)
				} else if !reflect.DeepEqual(have[key], want[key]) {
					t.Errorf("%s: the chart's\n%s\ndeploy/kubernetes'\n%s", key, text(have[key]), text(want[key]))
				}
			}
			for key := range have {
				if want[key] == nil {
					t.Errorf("deploy/kubernetes has no %s", key)
				}
			}
			t.Logf("%d objects", len(want))
		})
	}
}

func text(object any) string {
	out, _ := yaml.Marshal(object)
	return string(out)
}

// TestKnownFields: every built-in object decodes strictly, so no field is misspelt.
func TestKnownFields(t *testing.T) {
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	groups := `{nodeGroups: {default: null, fast: {nodeSelector: {disk: nvme}, tolerations: [], maxVolumes: 9,
		pools: [{name: a, url: "file:///a?reservePercent=1"}, {name: b, url: "lvm://vg/thin"}, {name: c, url: "file:///c"}]}},
		controller: {goneGrace: 5m, abandonGrace: 2h, page: {enabled: true, from: [{podSelector: {matchLabels: {app: proxy}}}]}, podLabels: {a: b}, extraArgs: [--v=3], topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone,
		whenUnsatisfiable: DoNotSchedule, labelSelector: {matchLabels: {app.kubernetes.io/component: controller}}}]}, node: {podLabels: {a: b}},
		commonLabels: {team: storage}, csiDriver: {preventPodSchedulingIfMissing: true}, startupTaint: true, storageClasses: [{name: a, default: true, annotations: {a: b}},
		{name: b, parameters: {pool: "fast-*,slow", spread: required}}], sidecars: {livenessProbe: {resources: {requests: {cpu: 1m, memory: 1Mi}}}}, imagePullSecrets: [{name: x}], image: {pullPolicy: Always}}`
	for _, all := range []objects{build(t, manifests), render(t, ""), render(t, groups)} {
		for key, object := range all {
			version, err := schema.ParseGroupVersion(fmt.Sprint(object["apiVersion"]))
			if err != nil || !scheme.Scheme.IsVersionRegistered(version) {
				continue
			}
			if _, _, err := strict.Decode([]byte(text(object)), nil, nil); err != nil {
				t.Errorf("%s: %v", key, err)
			}
		}
	}
}

// TestUpdateStrategy: one node can be tried first: what is applied later does not say that all nodes are replaced.
func TestUpdateStrategy(t *testing.T) {
	for values, want := range map[string]any{
		"":                                   map[string]any{"type": "RollingUpdate", "rollingUpdate": map[string]any{"maxUnavailable": "10%"}},
		`{node: {updateStrategy: OnDelete}}`: map[string]any{"type": "OnDelete"},
	} {
		if have := dig(render(t, values).of(t, "DaemonSet", "ashlar-node"), "spec", "updateStrategy"); !reflect.DeepEqual(have, want) {
			t.Errorf("%s: %v, want %v", values, have, want)
		}
	}
}

// TestGroupsApart: a group that runs on every node is refused beside another one, whose nodes would have two drivers, of which one has the node's socket, by
// chance; and so are two pools of one name, which no driver starts with.
func TestGroupsApart(t *testing.T) {
	for values, words := range map[string]string{
		`{nodeGroups: {fast: {nodeSelector: {disk: nvme}, pools: [{name: fast, url: "lvm://fast"}]}}}`:                                                                     "nodeGroups.default runs on every node",
		`{nodeGroups: {default: null, a: {tolerations: [{operator: Exists}], pools: [{name: a, url: "lvm://a"}]}, b: {pools: [{name: b, url: "lvm://b"}]}}}`:               "nodeGroups.a runs on every node",
		`{nodeGroups: {default: {pools: [{name: a, url: "lvm://a"}, {name: a, url: "lvm://b"}]}}}`:                                                                         "nodeGroups.default.pools: two pools are called a",
		`{nodeGroups: {default: {nodeSelector: {disk: hdd}}, fast: {nodeSelector: {disk: nvme}, pools: [{name: fast, url: "lvm://fast"}]}}}`:                               "",
		`{nodeGroups: {default: {tolerations: []}, fast: {tolerations: [{key: disk, operator: Exists}], nodeSelector: {disk: nvme}, pools: [{name: a, url: "lvm://a"}]}}}`: "",
	} {
		_, err := template(values)
		if words == "" && err != nil || words != "" && (err == nil || !strings.Contains(err.Error(), words)) {
			t.Errorf("%s: %v, want %q", values, err, words)
		}
	}
}

// TestAnyNodeNeedsClaims: volumes that other nodes use are given to them by claims, so the chart makes no driver without claims for them.
func TestAnyNodeNeedsClaims(t *testing.T) {
	if _, err := template(`{anyNode: {enabled: true}, csiDriver: {attachRequired: false}}`); err == nil || !strings.Contains(err.Error(), "csiDriver.attachRequired") {
		t.Errorf("without claims: %v", err)
	}
	for _, values := range []string{`{anyNode: {enabled: true}}`, `{csiDriver: {attachRequired: false}}`} {
		if _, err := template(values); err != nil {
			t.Errorf("%s: %v", values, err)
		}
	}
}

// TestSchema: values that cannot be right are refused, each by the schema.
func TestSchema(t *testing.T) {
	for name, values := range map[string]string{
		"unknown value":             `{pools: []}`,
		"unknown value, deeper":     `{controller: {replica: 3}}`,
		"replicas":                  `{controller: {replicas: 0}}`,
		"replicas as text":          `{controller: {replicas: "2"}}`,
		"pool without URL":          `{nodeGroups: {default: {pools: [{name: a}]}}}`,
		"pool's name":               `{nodeGroups: {default: {pools: [{name: A_B, url: "file:///a"}]}}}`,
		"pool's URL":                `{nodeGroups: {default: {pools: [{name: a, url: "/var/lib/a"}]}}}`,
		"pool's relative path":      `{nodeGroups: {default: {pools: [{name: a, url: "file://a"}]}}}`,
		"no pool":                   `{nodeGroups: {default: {pools: []}}}`,
		"group's name":              `{nodeGroups: {Big_Nodes: {pools: [{name: a, url: "file:///a"}]}}}`,
		"maxVolumes":                `{nodeGroups: {default: {maxVolumes: -1}}}`,
		"ephemeral pool's name":     `{nodeGroups: {default: {ephemeralPools: [A_B]}}}`,
		"ephemeral pool twice":      `{nodeGroups: {default: {ephemeralPools: [default, default]}}}`,
		"ephemeral pools as text":   `{nodeGroups: {default: {ephemeralPools: default}}}`,
		"ephemeral size":            `{nodeGroups: {default: {ephemeralMaxSize: large}}}`,
		"ephemeral size of nothing": `{nodeGroups: {default: {ephemeralMaxSize: "0"}}}`,
		"kubeletDir":                `{node: {kubeletDir: var/lib/kubelet}}`,
		"kubeletDir with a slash":   `{node: {kubeletDir: /var/lib/kubelet/}}`,
		"pull policy":               `{image: {pullPolicy: Sometimes}}`,
		"class without name":        `{storageClasses: [{parameters: {}}]}`,
		"class's unknown parameter": `{storageClasses: [{name: a, parameters: {fsType: ext4}}]}`,
		"class's set of pools":      `{storageClasses: [{name: a, parameters: {pool: "fast-*,Slow"}}]}`,
		"class's spread":            `{storageClasses: [{name: a, parameters: {pool: "fast-*", spread: "true"}}]}`,
		"class's provisioning":      `{storageClasses: [{name: a, parameters: {provisioning: fat}}]}`,
		"class's filesystem":        `{storageClasses: [{name: a, parameters: {csi.storage.k8s.io/fstype: zfs}}]}`,
		"class's binding":           `{storageClasses: [{name: a, volumeBindingMode: Later}]}`,
		"snapshotClass":             `{snapshotClass: {create: maybe}}`,
		"timeout":                   `{controller: {timeouts: {attach: 15}}}`,
		"goneGrace":                 `{controller: {goneGrace: soon}}`,
		"abandonGrace":              `{controller: {abandonGrace: soon}}`,
		"toleration":                `{controller: {tolerations: [{kee: a}]}}`,
		"metrics":                   `{metrics: on}`,
		"attachRequired":            `{csiDriver: {attachRequired: "yes"}}`,
		"digest":                    `{sidecars: {attacher: {digest: "sha256:1"}}}`,
		"tag as a digest":           `{image: {digest: v1}}`,
		"label":                     `{commonLabels: {a: 1}}`,
		"policy's peers":            `{networkPolicy: {from: monitoring}}`,
		"update strategy":           `{node: {updateStrategy: Recreate}}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(values)
			if err == nil || !strings.Contains(err.Error(), "schema") {
				t.Errorf("%s: %v", values, err)
			}
		})
	}
}

// TestClassParameters: a class of the chart takes each parameter that the driver knows (docs/reference), the Secrets of encryption, and no others.
func TestClassParameters(t *testing.T) {
	given := map[string][]string{
		"pool": {"fast", "fast-*,slow"}, "spread": {"preferred", "required"}, "copies": {"local", "anywhere"}, "provisioning": {"thick", "thin"},
		"encryption": {"luks2"}, "encryption.discard": {"true", "false"}, "access": {"node", "any"}, "homeTimeout": {"90s", "1h30m"},
		"replicas": {"1", "2", "3"}, "replicaTopologyKey": {"topology.kubernetes.io/zone"}, "replaceAfter": {"0", "0s", "10m"}, "placement": {"stay", "follow"},
		"csi.storage.k8s.io/fstype": {"ext4", "xfs", "btrfs"},
	}
	reference, err := os.ReadFile("../../docs/reference/parameters.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(reference), "\n## StorageClass\n")
	section, _, _ = strings.Cut(section, "\n## ")
	known := regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(section, -1)
	if len(known) != len(given) {
		t.Errorf("the reference has %d parameters, and the test %d", len(known), len(given))
	}
	for _, of := range []string{"node-stage", "node-expand", "node-publish", "provisioner", "controller-publish", "controller-expand"} {
		given["csi.storage.k8s.io/"+of+"-secret-name"], given["csi.storage.k8s.io/"+of+"-secret-namespace"] = []string{"${pvc.name}-key"}, []string{"${pvc.namespace}"}
		known = append(known, []string{"", "csi.storage.k8s.io/" + of + "-secret-name"}, []string{"", "csi.storage.k8s.io/" + of + "-secret-namespace"})
	}
	for _, parameter := range known {
		values := given[parameter[1]]
		if len(values) == 0 {
			t.Errorf("the test has no values of %s", parameter[1])
		}
		for _, value := range values {
			all := render(t, fmt.Sprintf(`{storageClasses: [{name: a, parameters: {%q: %q}}]}`, parameter[1], value))
			if have := dig(all["StorageClass <nil>/a"], "parameters", parameter[1]); have != value {
				t.Errorf("%s=%s: the class has %v", parameter[1], value, have)
			}
		}
		for _, value := range []string{`""`, "7", "true"} {
			if _, err := template(fmt.Sprintf(`{storageClasses: [{name: a, parameters: {%q: %s}}]}`, parameter[1], value)); err == nil {
				t.Errorf("%s=%s is not refused", parameter[1], value)
			}
		}
	}
}

// TestInline: inline ephemeral volumes are off unless somebody switches them on, in the same way by either means.
func TestInline(t *testing.T) {
	const on, fast = `{nodeGroups: {default: {ephemeralPools: [default]}}}`, `{nodeGroups: {default: {nodeSelector: {disk: hdd}}, fast: {nodeSelector: {disk: nvme}, pools: [{name: a, url: "file:///a"}, {name: b, url: "lvm://b"}], ephemeralPools: [b, a], ephemeralMaxSize: 16Gi}}}`
	for name, c := range map[string]struct {
		all   objects
		modes []any
		args  map[string][]string // by DaemonSet
	}{
		"manifests":        {build(t, manifests), []any{"Persistent"}, map[string][]string{"ashlar-node": nil}},
		"chart":            {render(t, ""), []any{"Persistent"}, map[string][]string{"ashlar-node": nil}},
		"component":        {build(t, "testdata/inline"), []any{"Persistent", "Ephemeral"}, map[string][]string{"ashlar-node": {"--ephemeral-pools=default", "--ephemeral-max-size=1Gi"}}},
		"chart, on":        {render(t, on), []any{"Persistent", "Ephemeral"}, map[string][]string{"ashlar-node": {"--ephemeral-pools=default", "--ephemeral-max-size=1Gi"}}},
		"chart, one group": {render(t, fast), []any{"Persistent", "Ephemeral"}, map[string][]string{"ashlar-node": nil, "ashlar-node-fast": {"--ephemeral-pools=b,a", "--ephemeral-max-size=16Gi"}}},
	} {
		if modes := dig(c.all.of(t, "CSIDriver", "block.csi.ashlar.dev"), "spec", "volumeLifecycleModes"); !reflect.DeepEqual(modes, c.modes) {
			t.Errorf("%s: lifecycle modes %v, want %v", name, modes, c.modes)
		}
		for set, want := range c.args {
			var have []string
			for _, arg := range container(t, c.all.of(t, "DaemonSet", set), "driver")["args"].([]any) {
				if strings.HasPrefix(arg.(string), "--ephemeral-") {
					have = append(have, arg.(string))
				}
			}
			if !slices.Equal(have, want) {
				t.Errorf("%s: %s has the arguments %v, want %v", name, set, have, want)
			}
		}
	}
	if _, err := template(`{nodeGroups: {default: {ephemeralPools: [other]}}}`); err == nil || !strings.Contains(err.Error(), "has no pool other") {
		t.Errorf("a pool that the group does not have: %v", err)
	}
}

// TestMetrics: both parts serve metrics, unless somebody says otherwise.
func TestMetrics(t *testing.T) {
	for name, c := range map[string]struct {
		all              objects
		controller, node []string
	}{
		"manifests":         {build(t, manifests), []string{"--metrics-endpoint=:9810"}, []string{"--metrics-endpoint=:9811"}},
		"chart":             {render(t, ""), []string{"--metrics-endpoint=:9810"}, []string{"--metrics-endpoint=:9811"}},
		"chart, per volume": {render(t, `{metrics: {perVolume: true}}`), []string{"--metrics-endpoint=:9810"}, []string{"--metrics-endpoint=:9811", "--metrics-per-volume"}},
		"chart, off":        {render(t, `{metrics: {enabled: false, perVolume: true}}`), nil, nil},
	} {
		for _, part := range []struct {
			workload map[string]any
			want     []string
			port     float64
		}{{c.all.of(t, "Deployment", "ashlar-controller"), c.controller, 9810}, {c.all.of(t, "DaemonSet", "ashlar-node"), c.node, 9811}} {
			driver := container(t, part.workload, "driver")
			var have []string
			for _, arg := range driver["args"].([]any) {
				if strings.HasPrefix(arg.(string), "--metrics-") {
					have = append(have, arg.(string))
				}
			}
			if !slices.Equal(have, part.want) {
				t.Errorf("%s: arguments %v, want %v", name, have, part.want)
			}
			there := false
			for _, port := range driver["ports"].([]any) {
				p := port.(map[string]any)
				there = there || p["name"] == "metrics" && fmt.Sprint(p["containerPort"]) == fmt.Sprint(part.port)
			}
			if there != (part.want != nil) {
				t.Errorf("%s: a port named metrics is there: %v, and the arguments are %v", name, there, have)
			}
		}
	}
}

// TestPage: the page is off unless somebody switches it on; then there is a Service that leads to it, and the controller may read
// what it shows.
func TestPage(t *testing.T) {
	for name, all := range map[string]objects{"manifests": build(t, manifests), "chart": render(t, "")} {
		if all["Service "+namespace+"/ashlar-page"] != nil || strings.Contains(text(container(t, all.of(t, "Deployment", "ashlar-controller"), "driver")), "page") ||
			strings.Contains(text(all.of(t, "ClusterRole", "ashlar-controller")), "pods") {
			t.Errorf("%s: the page is on", name)
		}
	}
	all := render(t, `{controller: {page: {enabled: true, from: [{podSelector: {matchLabels: {app: proxy}}}]}}}`)
	driver, service := container(t, all.of(t, "Deployment", "ashlar-controller"), "driver"), all.of(t, "Service", "ashlar-page")
	if !slices.Contains(driver["args"].([]any), any("--page=:9820")) {
		t.Errorf("the arguments %v", driver["args"])
	}
	if !strings.Contains(text(driver["ports"]), "containerPort: 9820\n  name: page") {
		t.Errorf("the ports\n%s", text(driver["ports"]))
	}
	labels, _ := dig(all.of(t, "Deployment", "ashlar-controller"), "spec", "template", "metadata", "labels").(map[string]any)
	for key, value := range dig(service, "spec", "selector").(map[string]any) {
		if labels[key] != value {
			t.Errorf("the Service selects %s=%v, the pods have %v", key, value, labels)
		}
	}
	if kind := dig(service, "spec", "type"); kind != nil && kind != "ClusterIP" {
		t.Errorf("the Service is a %v: there is no login", kind)
	}
	policy := all.of(t, "NetworkPolicy", "ashlar-controller")
	if ingress := text(dig(policy, "spec", "ingress")); !strings.Contains(ingress, "app: proxy") || !strings.Contains(ingress, "port: page") {
		t.Errorf("the policy lets in\n%s", ingress)
	}
	if role := text(all.of(t, "ClusterRole", "ashlar-controller")); !strings.Contains(role, "- pods\n") {
		t.Errorf("the role\n%s", role)
	}
	shut := render(t, `{controller: {page: {enabled: true}}}`)
	if ingress := text(dig(shut.of(t, "NetworkPolicy", "ashlar-controller"), "spec", "ingress")); strings.Contains(ingress, "page") || strings.Contains(ingress, "9820") {
		t.Errorf("the policy lets somebody in:\n%s", ingress)
	}
}

// TestGroups: each kind of node has a DaemonSet with its own pools.
func TestGroups(t *testing.T) {
	all := render(t, `{node: {kubeletDir: /var/lib/k0s/kubelet}, nodeGroups: {default: {nodeSelector: {disk: hdd}},
		fast: {nodeSelector: {disk: nvme}, pools: [{name: nvme, url: "file:///mnt/nvme?overprovision=1.5"}, {name: lvm, url: "lvm://vg"}]}}}`)
	ordinary, fast := container(t, all.of(t, "DaemonSet", "ashlar-node"), "driver"), container(t, all.of(t, "DaemonSet", "ashlar-node-fast"), "driver")
	for _, want := range []string{"--pool=nvme=file:///mnt/nvme?overprovision=1.5", "--pool=lvm=lvm://vg"} {
		if !strings.Contains(text(fast["args"]), want) || strings.Contains(text(ordinary["args"]), want) {
			t.Errorf("%s is not in the one group's arguments only", want)
		}
	}
	if mounts := text(fast["volumeMounts"]); !strings.Contains(mounts, "mountPath: /mnt/nvme\n") || strings.Contains(mounts, "/var/lib/ashlar") || !strings.Contains(mounts, "mountPath: /var/lib/k0s/kubelet\n") {
		t.Errorf("mounts:\n%s", mounts)
	}
	if !strings.Contains(text(ordinary["volumeMounts"]), "/var/lib/ashlar") {
		t.Error("the default group lost its pool")
	}
	if _, both := render(t, `{nodeGroups: {default: null, a: {pools: [{name: a, url: "file:///a"}]}}}`)["DaemonSet "+namespace+"/ashlar-node"]; both {
		t.Error("the default group cannot be taken away")
	}
}

// container of a workload.
func container(t *testing.T, workload map[string]any, name string) map[string]any {
	t.Helper()
	for _, c := range containers(workload) {
		if c["name"] == name {
			return c
		}
	}
	t.Fatalf("no container %s", name)
	return nil
}

func podSpec(workload map[string]any) map[string]any {
	spec, _ := workload["spec"].(map[string]any)
	pod, _ := spec["template"].(map[string]any)
	podSpec, _ := pod["spec"].(map[string]any)
	return podSpec
}

func containers(workload map[string]any) []map[string]any {
	list, _ := podSpec(workload)["containers"].([]any)
	var all []map[string]any
	for _, c := range list {
		all = append(all, c.(map[string]any))
	}
	return all
}

// TestSound holds what a linter of manifests would (kube-linter 0.8.3 finds nothing in them either), container by
// container. Exempt is the node's driver: it has to be privileged and root (devices and mounts of the machine), and has
// no memory limit (a filesystem check must not be killed).
func TestSound(t *testing.T) {
	for _, all := range []objects{build(t, manifests), render(t, "")} {
		seen := 0
		for key, object := range all {
			pod := podSpec(object)
			for _, c := range containers(object) {
				seen++
				where := fmt.Sprintf("%s, container %s", key, c["name"])
				at := func(path ...string) any { return dig(c, path...) }
				node := strings.HasPrefix(key, "DaemonSet")
				exempt := node && c["name"] == "driver"
				if image := fmt.Sprint(c["image"]); !strings.Contains(image, ":") {
					t.Errorf("%s: image %s has no tag", where, image)
				}
				if at("securityContext", "readOnlyRootFilesystem") != true {
					t.Errorf("%s: the root filesystem is writable", where)
				}
				if !exempt && (at("securityContext", "privileged") != nil || at("securityContext", "allowPrivilegeEscalation") != false ||
					!reflect.DeepEqual(at("securityContext", "capabilities", "drop"), []any{"ALL"})) {
					t.Errorf("%s: has more privileges than it needs", where)
				}
				if !node && dig(pod, "securityContext", "runAsNonRoot") != true {
					t.Errorf("%s: may run as root", where)
				}
				if at("resources", "requests", "cpu") == nil || at("resources", "requests", "memory") == nil || (!exempt && at("resources", "limits", "memory") == nil) {
					t.Errorf("%s: says too little about what it needs", where)
				}
				if c["name"] != "liveness-probe" && at("livenessProbe") == nil {
					t.Errorf("%s: has no liveness probe", where)
				}
				if (c["name"] == "driver" || node && c["name"] == "node-driver-registrar") && at("startupProbe", "httpGet", "path") != "/healthz" {
					t.Errorf("%s: is killed while the driver starts, which may take long", where)
				}
				ports, _ := at("ports").([]any)
				for _, p := range ports {
					if p.(map[string]any)["hostPort"] != nil {
						t.Errorf("%s: takes a port of the host", where)
					}
				}
			}
			if pod != nil {
				if pod["hostNetwork"] != nil || pod["hostPID"] != nil || pod["hostIPC"] != nil {
					t.Errorf("%s: shares namespaces of the host", key)
				}
				if dig(pod, "securityContext", "seccompProfile", "type") != "RuntimeDefault" {
					t.Errorf("%s: no seccomp profile", key)
				}
				account := fmt.Sprint(pod["serviceAccountName"])
				all.of(t, "ServiceAccount", account)
			}
			if kind := object["kind"]; kind == "ClusterRole" || kind == "Role" {
				rules := text(object["rules"])
				if strings.Contains(rules, "*") || strings.Contains(rules, "secrets") {
					t.Errorf("%s: grants secrets, or everything", key)
				}
			}
		}
		if seen < 9 {
			t.Errorf("only %d containers seen", seen)
		}
		// Every role is bound, and every binding is to a role that is there.
		for key, object := range all {
			if strings.HasSuffix(fmt.Sprint(object["kind"]), "RoleBinding") {
				ref := object["roleRef"].(map[string]any)
				all.of(t, fmt.Sprint(ref["kind"]), fmt.Sprint(ref["name"]))
				for _, s := range object["subjects"].([]any) {
					subject := s.(map[string]any)
					if all[fmt.Sprintf("ServiceAccount %v/%v", subject["namespace"], subject["name"])] == nil {
						t.Errorf("%s: there is no %v", key, subject)
					}
				}
			}
		}
	}
}

func dig(in map[string]any, path ...string) any {
	var at any = in
	for _, step := range path {
		next, _ := at.(map[string]any)
		at = next[step]
	}
	return at
}

// TestOverlay: what the end-to-end tests install builds.
func TestOverlay(t *testing.T) { build(t, "../e2e/overlay") }

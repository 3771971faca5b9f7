package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"
)

func exec1(dir string, env []string, program string, args ...string) error {
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, out)
	}
	return nil
}

func run(t *testing.T, dir, program string, args ...string) {
	t.Helper()
	if err := exec1(dir, nil, program, args...); err != nil {
		t.Fatal(err)
	}
}

const tokenPath = "/var/run/secrets/kubernetes.io/serviceaccount"

// TestTokens: a token of the API server, which ends soon, is in the containers that call it, and in no other.
func TestTokens(t *testing.T) {
	callers := map[string]bool{"Deployment driver": true, "Deployment provisioner": true, "Deployment attacher": true, "Deployment resizer": true,
		"Deployment snapshotter": true, "DaemonSet driver": true}
	for _, all := range []objects{build(t, manifests), render(t, "")} {
		seen := 0
		for key, object := range all {
			if object["kind"] == "ServiceAccount" && object["automountServiceAccountToken"] != false {
				t.Errorf("%s: its token is mounted into every pod of its", key)
			}
			pod := podSpec(object)
			if pod == nil {
				continue
			}
			if pod["automountServiceAccountToken"] != false {
				t.Errorf("%s: a token is mounted into all of its containers", key)
			}
			for _, v := range pod["volumes"].([]any) {
				sources, _ := dig(v.(map[string]any), "projected", "sources").([]any)
				for _, s := range sources {
					token, _ := s.(map[string]any)["serviceAccountToken"].(map[string]any)
					// The API server makes one of 3607 s last a year.
					if seconds := fmt.Sprint(token["expirationSeconds"]); token != nil && seconds != "3600" {
						t.Errorf("%s: a token for %s s", key, seconds)
					}
				}
			}
			for _, c := range containers(object) {
				mounted := strings.Contains(text(c["volumeMounts"]), tokenPath)
				if name := fmt.Sprint(object["kind"], " ", c["name"]); mounted != callers[name] {
					t.Errorf("%s has a token: %v", name, mounted)
				}
				seen++
			}
		}
		if seen != 9 {
			t.Errorf("%d containers seen", seen)
		}
	}
}

// TestNetworkPolicy: each part's pods have a policy, which says who may connect to what.
func TestNetworkPolicy(t *testing.T) {
	const rule = `{networkPolicy: {from: [], egress: [{to: [{ipBlock: {cidr: 10.0.0.1/32}}], ports: [{port: 6443}]}]}}`
	closed := render(t, rule)
	for part, workload := range map[string]string{"controller": "Deployment", "node": "DaemonSet"} {
		all := render(t, "")
		policy := all.of(t, "NetworkPolicy", "ashlar-"+part)
		labels := dig(all.of(t, workload, "ashlar-"+part), "spec", "template", "metadata", "labels").(map[string]any)
		for key, value := range dig(policy, "spec", "podSelector", "matchLabels").(map[string]any) {
			if labels[key] != value {
				t.Errorf("%s: the policy is for pods with %s=%v", part, key, value)
			}
		}
		if types := dig(policy, "spec", "policyTypes"); !reflect.DeepEqual(types, []any{"Ingress"}) {
			t.Errorf("%s: %v", part, types)
		}
		policy = closed.of(t, "NetworkPolicy", "ashlar-"+part)
		if types := dig(policy, "spec", "policyTypes"); !reflect.DeepEqual(types, []any{"Ingress", "Egress"}) || dig(policy, "spec", "ingress") != nil || dig(policy, "spec", "egress") == nil {
			t.Errorf("%s, closed:\n%s", part, text(policy))
		}
	}
	const api = `networkPolicy: {egress: [{to: [{ipBlock: {cidr: 10.0.0.1/32}}], ports: [{port: 6443}]}]}`
	for values, peers := range map[string]any{`{agentPort: {enabled: true}, ` + api + `}`: "podSelector", `{snapshotMetadata: {enabled: true}, ` + api + `}`: "podSelector",
		`{anyNode: {enabled: true}, ` + api + `}`: "anybody", `{` + api + `}`: "nobody"} {
		for _, part := range []string{"controller", "node"} { // both call agents
			let := "nobody"
			for _, rule := range dig(render(t, values).of(t, "NetworkPolicy", "ashlar-"+part), "spec", "egress").([]any) {
				rule := rule.(map[string]any)
				switch {
				case !strings.Contains(text(rule["ports"]), "9812"):
				case rule["to"] == nil:
					let = "anybody"
				case strings.Contains(text(rule["to"]), "podSelector"):
					let = "podSelector"
				}
			}
			if let != peers {
				t.Errorf("%s: what the %s may call on the agents' port: %s, want %s", values, part, let, peers)
			}
		}
	}
	for key := range render(t, `{networkPolicy: {enabled: false}}`) {
		if strings.HasPrefix(key, "NetworkPolicy") {
			t.Errorf("%s, though they are off", key)
		}
	}
}

// TestGuard: what a node may write is held back unless somebody says otherwise; each policy is bound, denies, and fails closed.
func TestGuard(t *testing.T) {
	for name, c := range map[string]struct {
		all  objects
		want int
	}{
		"manifests": {build(t, manifests), 7}, "chart": {render(t, ""), 7}, "off": {render(t, `{admissionPolicy: false}`), 0},
		"with the startup taint": {build(t, "testdata/startup-taint"), 8}, "chart, with the startup taint": {render(t, `{startupTaint: true}`), 8},
	} {
		policies := 0
		for key, object := range c.all {
			if object["kind"] != "ValidatingAdmissionPolicy" {
				continue
			}
			policies++
			name := dig(object, "metadata", "name").(string)
			binding := c.all.of(t, "ValidatingAdmissionPolicyBinding", name)
			if dig(object, "spec", "failurePolicy") != "Fail" || dig(binding, "spec", "policyName") != name ||
				!reflect.DeepEqual(dig(binding, "spec", "validationActions"), []any{"Deny", "Audit"}) {
				t.Errorf("%s: %s does not deny:\n%s%s", name, key, text(object), text(binding))
			}
		}
		if policies != c.want {
			t.Errorf("%s: %d policies, want %d", name, policies, c.want)
		}
	}
}

// TestComponents: each component and the chart's value for it say the same.
func TestComponents(t *testing.T) {
	for directory, values := range map[string]string{"startup-taint": `{startupTaint: true}`, "page": `{controller: {page: {enabled: true}}}`,
		"agent-port": `{agentPort: {enabled: true}}`, "snapshot-metadata": `{snapshotMetadata: {enabled: true}}`,
		"any-node": `{anyNode: {enabled: true}}`, "any-node-tls": `{anyNode: {enabled: true, tls: true}}`} {
		t.Run(directory, func(t *testing.T) { component(t, directory, values) })
	}
	for key := range render(t, `{snapshotMetadata: {enabled: true}, networkPolicy: {enabled: false}}`) {
		if strings.HasPrefix(key, "NetworkPolicy") {
			t.Errorf("%s, though they are off", key)
		}
	}
}

func component(t *testing.T, directory, values string) {
	want, have := strip(build(t, "testdata/"+directory)), strip(render(t, values))
	for key, object := range want {
		if !reflect.DeepEqual(have[key], object) {
			t.Errorf("%s: the chart's\n%s\nthe component's\n%s", key, text(have[key]), text(object))
		}
	}
	if len(want) != len(have) {
		t.Errorf("%d objects in the chart, %d with the component", len(have), len(want))
	}
}

// TestStartupTaint: the controller runs on nodes that have the taint, whatever it tolerates besides: where all nodes are new there are no
// others, and nobody else takes it off.
func TestStartupTaint(t *testing.T) {
	for _, all := range []objects{strip(build(t, "testdata/startup-taint")), strip(render(t, `{startupTaint: true}`)), render(t, `{startupTaint: true, controller: {tolerations: []}}`)} {
		tolerations, _ := podSpec(all.of(t, "Deployment", "ashlar-controller"))["tolerations"].([]any)
		if !slices.ContainsFunc(tolerations, func(one any) bool {
			return reflect.DeepEqual(one, map[string]any{"key": "ashlar.dev/agent-not-ready", "operator": "Exists"})
		}) {
			t.Errorf("the controller does not tolerate the taint that it takes off:\n%s", text(tolerations))
		}
	}
}

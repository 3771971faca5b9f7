//go:build e2e

package nodes

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/html"

	"github.com/ashlar-csi/ashlar/internal/check"
)

// trouble is one of those that hack/kubernetes/trouble.sh makes, and how each place has it where somebody may see it first.
type trouble struct {
	subject []string          // what the page and the command say of it: one of these
	reasons []string          // ... and one of these
	alert   string            // its name
	labels  map[string]string // of the alert
	claim   string            // what somebody describes who misses their volume
	healed  string            // the reason of the event that says there that all is well
	runbook string            // the page that mends it
}

// place is where a trouble is to be seen. It returns the address of the page that is said to help; empty if nothing is wrong.
type place struct {
	name string
	look func(trouble) (string, error)
}

// TestWalk: somebody new, with a cluster of which one pool is full, one disk is missing and one volume is damaged, finds each of them
// from the page alone, from kubectl ashlar status alone, from an alert alone and from kubectl describe pvc alone; each leads to the
// runbook that mends it; and when its commands were carried out, all four say that it is gone.
func TestWalk(t *testing.T) {
	c := start(t)
	c.plugin()
	prometheus := c.monitor(true)
	page := c.page()
	c.Cleanup(func() { _, _ = c.try("", "kubectl", "delete", "storageclass", c.ns+"-first", "--ignore-not-found") })
	c.Cleanup(func() { // whatever comes of the test
		for _, node := range c.nodes {
			c.mount(node, "mountpoint -q /var/lib/ashlar || mount /var/lib/ashlar")
		}
	})
	began := time.Now()
	t.Log(c.run("", filepath.Join(filepath.Dir(os.Getenv("CLUSTER")), "trouble.sh"), os.Getenv("IMAGE"), c.ns))
	t.Logf("trouble was made in %s", time.Since(began).Round(time.Second))
	full, missing, damaged := c.nodes[0], c.nodes[1], c.nodes[2]
	all := map[string]trouble{
		"full": {subject: []string{full + ".default", "pool default of " + full}, reasons: []string{"PoolFull", "PoolNearlyFull", "NoSpace"},
			alert: "AshlarPoolFull", labels: map[string]string{"node": full, "severity": "warning"}, claim: "refused", healed: "ProvisioningSucceeded", runbook: "docs/runbooks/pool-full.md"},
		"missing": {subject: []string{missing + ".default", "pool default of " + missing}, reasons: []string{"PoolMissing", "PoolUnavailable"},
			alert: "AshlarPoolDown", labels: map[string]string{"node": missing, "severity": "critical"}, claim: "data-missing-0", healed: "Recovered", runbook: "docs/runbooks/pool-down.md"},
		"damaged": {subject: []string{"data-damaged-0"}, reasons: []string{"FilesystemReadOnly"},
			alert: "AshlarVolumeInaccessible", labels: map[string]string{"node": damaged, "reason": "FilesystemReadOnly"}, claim: "data-damaged-0", healed: "Recovered", runbook: "docs/runbooks/filesystem.md"},
	}
	places := []place{
		{"page", func(one trouble) (string, error) {
			return onPage(one, func() (*html.Node, error) { return fetch(t.Context(), page) })
		}},
		{"page in a browser", func(one trouble) (string, error) {
			return onPage(one, func() (*html.Node, error) { return c.browse(page) })
		}},
		{"kubectl ashlar status", c.inStatus},
		{"alert", prometheus.inAlerts},
		{"kubectl describe pvc", c.inDescription},
	}
	for name, one := range all {
		for _, at := range places {
			c.within(2*patience, at.name+" has "+name, func() error { // nodes look at their volumes every five minutes
				found, err := at.look(one)
				if err == nil && found == "" {
					err = errors.New("nothing is wrong")
				}
				if err == nil && !c.open(found).leadsTo(one.runbook, one.reasons) {
					err = fmt.Errorf("it leads to %s, and that not to %s for %v", found, one.runbook, one.reasons)
				}
				return err
			})
			t.Logf("%s: found by %s, %s after the script began", name, at.name, time.Since(began).Round(time.Second))
		}
	}
	c.waits()

	// Each runbook to its end.
	b := c.open(all["full"].runbook)
	c.shell(full, b.command("kubectl delete pvc -n NAMESPACE NAME", "NAMESPACE", c.ns, "NAME", "most"))
	b = c.open(all["missing"].runbook)
	c.mount(missing, b.command("mount /var/lib/ashlar"))
	b = c.open(all["damaged"].runbook)
	names := []string{"NAMESPACE", c.ns, "NAME", "damaged", "PVNAME", c.pv("data-damaged-0").Name}
	c.shell(damaged, b.command("kubectl -n NAMESPACE scale statefulset NAME --replicas=0", names...))
	c.empty("the damaged volume is attached nowhere", b.command("kubectl get volumeattachments | grep PVNAME", names...))
	c.shell(damaged, b.command("kubectl -n NAMESPACE scale statefulset NAME --replicas=1", names...))
	c.runs("missing-0", "damaged-0", "waits")
	for _, name := range []string{"missing", "damaged"} {
		if kept := c.kubectl("exec", name+"-0", "--", "sh", "-c", "cat /data/kept && echo more >/data/more && sync"); kept != name {
			t.Errorf("%s kept %q", name, kept)
		}
	}
	for name, one := range all {
		for _, at := range places {
			c.eventually(at.name+" does not have "+name+" any more", func() error {
				found, err := at.look(one)
				if err == nil && found != "" {
					err = errors.New("it says what to do: " + found)
				}
				return err
			})
		}
	}
	c.eventually("nothing is wrong at all", func() error {
		out, err := c.try("", "kubectl", "ashlar", "status")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	c.delete("statefulset", "missing", "damaged")
	c.delete("pod", "waits")
}

// onPage looks among what is wrong, which the page has first.
func onPage(one trouble, get func() (*html.Node, error)) (string, error) {
	shown, err := get()
	if err != nil {
		return "", err
	}
	for text, link := range wrong(shown) {
		if contains(text, one.subject) && contains(text, one.reasons) {
			return link, nil
		}
	}
	if !strings.Contains(written(shown), "Ashlar") {
		return "", fmt.Errorf("it shows %.300s", written(shown))
	}
	return "", nil
}

var see = regexp.MustCompile(`See (https://\S+)`)

// inStatus looks at what kubectl ashlar status prints: a paragraph for each problem.
func (c *cluster) inStatus(one trouble) (string, error) {
	out, err := c.try("", "kubectl", "ashlar", "status")
	if !strings.Contains(out, "\nNodes ") && !strings.HasPrefix(out, "Nodes ") {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	for paragraph := range strings.SplitSeq(out, "\n\n") {
		if text := strings.Join(strings.Fields(paragraph), " "); contains(text, one.subject) && contains(text, one.reasons) {
			return address + strings.TrimPrefix(see.FindStringSubmatch(text + " See https://nowhere")[1], address), nil
		}
	}
	return "", nil
}

// inAlerts looks at the alerts that fire.
func (m *monitored) inAlerts(one trouble) (string, error) {
	m.discover()
	rules, err := m.Rules(context.Background())
	if err != nil {
		return "", err
	}
	for _, r := range rules {
		for _, a := range r.Alerts {
			is := r.Name == one.alert && a.State == "firing"
			for label, value := range one.labels {
				is = is && a.Labels[label] == value
			}
			if is {
				return a.Annotations["runbook_url"], nil
			}
		}
	}
	return "", nil
}

// inDescription looks at the events of a claim: a warning that leads on, until one says that all is well.
func (c *cluster) inDescription(one trouble) (string, error) {
	out, err := c.try("", "kubectl", "-n", c.ns, "describe", "pvc", one.claim)
	if err != nil {
		return "", err
	}
	_, events, _ := strings.Cut(out, "\nEvents:")
	for line := range strings.Lines(events) {
		if strings.Contains(line, " "+one.healed+" ") {
			return "", nil
		}
	}
	for line := range strings.Lines(events) {
		if link := see.FindStringSubmatch(line); strings.HasPrefix(strings.TrimSpace(line), "Warning") && link != nil {
			return link[1], nil
		}
	}
	return "", fmt.Errorf("no warning leads anywhere: %s", events)
}

func contains(text string, words []string) bool {
	return slices.ContainsFunc(words, func(one string) bool { return strings.Contains(text, one) })
}

// waits: of a claim that waits for its pod Kubernetes asks the driver nothing while no node has room, so only the pod says why. What it
// says is what the list of symptoms has.
func (c *cluster) waits() {
	c.Helper()
	const says = "did not have enough free storage"
	c.eventually("the pod says why it waits", func() error {
		out, err := c.try("", "kubectl", "-n", c.ns, "describe", "pod", "waits")
		if err == nil && !strings.Contains(out, says) {
			_, events, _ := strings.Cut(out, "\nEvents:")
			err = fmt.Errorf("it says %s", events)
		}
		return err
	})
	symptoms := c.open("docs/runbooks/README.md")
	for line := range strings.Lines(symptoms.text) {
		if strings.Contains(line, says) && strings.Contains(line, "(pool-full.md)") {
			return
		}
	}
	check.OK(c, fmt.Errorf("%s does not have it", symptoms.path))
}

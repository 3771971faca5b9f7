package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

var update = flag.Bool("update", false, "write the golden files anew")

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

const gib = 1 << 30

func key(n int) string { return fmt.Sprintf("%032x", n) }

// madeUp returns an overview with all kinds of problems.
func madeUp() *overview.Overview {
	used := int64(3 * gib / 2)
	o := &overview.Overview{Taken: now, Cluster: true, Driver: "block.csi.ashlar.dev", Version: "v1",
		Missing: []string{"pods: you may not list them, so it is not known which of them use the volumes"},
		Classes: []overview.Class{{Name: "ashlar"}, {Name: "fast", Pool: "fast"}}}
	pool := func(node, name, kind string, total, available int64) overview.Pool {
		p := overview.Pool{Node: node, Name: name, Kind: kind, Default: name == "default", UUID: "0f5f3c1e-9a5c-4d5e-8a1b-3b1f6f0a7c11", Total: total, Promised: total - available, Available: available, MaxVolume: available}
		if full, is := p.Full(); is {
			p.Problems = append(p.Problems, full)
		}
		return p
	}
	missing := pool("node-2.a-rather-long-name.of-a-zone.example.com", "fast", "lvm", 0, 0)
	missing.Problems = []overview.Problem{overview.Found(overview.Inaccessible, "PoolMissing", "there is no volume group nvme; bring the disk back", overview.KindPool, overview.PoolName(missing.Node, "fast"))}
	strays := pool("node-1", "slow", "file", 100*gib, 50*gib)
	strays.StrayCount = 2
	strays.Problems = []overview.Problem{overview.Found(overview.Warning, overview.Strays, "it keeps what no object is for: 2", overview.KindPool, "node-1.slow")}
	o.Nodes = []overview.Node{
		{Name: "node-1", Ready: true, Pools: []overview.Pool{pool("node-1", "default", "file", 1000*gib, 70*gib), pool("node-1", "fast", "lvm", 200*gib, 0), strays}},
		{Name: missing.Node, Ready: true, Pools: []overview.Pool{missing, pool(missing.Node, "default", "file", 500*gib, 400*gib)}},
		{Name: "node-3", Pools: []overview.Pool{pool("node-3", "default", "file", 500*gib, 500*gib)},
			Problems: []overview.Problem{overview.Found(overview.Degraded, overview.AgentSilent, "its agent is not heard", overview.KindNode, "node-3")}},
		{Name: "node-4", Pools: []overview.Pool{pool("node-4", "default", "file", 0, 0)},
			Problems: []overview.Problem{overview.Found(overview.Inaccessible, overview.NodeGone, "Kubernetes has no such node, and a volume or snapshot is on it", overview.KindNode, "node-4")}}}
	volume := func(n int, node, pool, claim string, state overview.State) overview.Volume {
		return overview.Volume{ID: "vol." + pool + "." + key(n), Name: fmt.Sprintf("pvc-%d", n), Node: node, Pool: pool, Size: 10 * gib, Filesystem: "xfs", Created: now.Add(-time.Duration(n) * time.Hour),
			Claim: &overview.Ref{Namespace: "shop", Name: claim}, PersistentVolume: fmt.Sprintf("pvc-%d", n), State: state}
	}
	lost := volume(1, "node-1", "default", "database-0", overview.Lost)
	lost.Settings = map[string]string{"writeIOPS": "1000", "readAheadKiB": "256"}
	lost.Used, lost.Pods = &used, []overview.Ref{{Namespace: "shop", Name: "database-0"}}
	lost.Problems = []overview.Problem{overview.Found(overview.DataLoss, "ImageTruncated", "the image of volume vol.default.1 has 4096 of 10737418240 bytes; restore it from a backup, or delete it", overview.KindVolume, lost.ID)}
	o.Volumes = append(o.Volumes, lost)
	for n := 2; n < 9; n++ { // on the missing disk
		v := volume(n, missing.Node, "fast", fmt.Sprintf("cache-%d", n), overview.Ready)
		v.Problems = []overview.Problem{overview.Found(overview.Inaccessible, "PoolUnavailable", "there is no volume group nvme", overview.KindVolume, v.ID)}
		o.Volumes = append(o.Volumes, v)
	}
	copied := volume(10, "node-1", "slow", "restored", overview.Making)
	copied.Progress = &overview.Progress{Done: 4 * gib, Total: 10 * gib}
	copied.Problems = []overview.Problem{overview.Found(overview.Warning, overview.TakesLong, "it has been made for 10h", overview.KindVolume, copied.ID)}
	refused := volume(11, "node-1", "fast", "grown", overview.Failed)
	refused.Failure = "not enough space: 20Gi are asked for, and 0 are left"
	refused.Problems = []overview.Problem{overview.Found(overview.Degraded, "NoSpace", refused.Failure, overview.KindVolume, refused.ID)}
	raw := volume(12, "node-4", "default", "", overview.Deleting)
	raw.Filesystem, raw.Claim = "", nil
	o.Volumes = append(o.Volumes, copied, refused, raw)
	o.Snapshots = []overview.Snapshot{{ID: "snap.default." + key(20), Name: "snapshot-20", Node: "node-1", Pool: "default", Source: lost.ID, Size: 10 * gib, Created: now.Add(-48 * time.Hour), State: overview.Ready}}
	o.Finish()
	return o
}

// withReplicas returns an overview with a volume with replicas, of which one is away, and a volume on one node.
func withReplicas() *overview.Overview {
	o := &overview.Overview{Taken: now, Cluster: true, Driver: "block.csi.ashlar.dev", Version: "v1"}
	for _, node := range []string{"node-1", "node-2", "node-3"} {
		o.Nodes = append(o.Nodes, overview.Node{Name: node, Ready: node != "node-2", Pools: []overview.Pool{{Node: node, Name: "default", Kind: "file", Total: 100 * gib, Available: 90 * gib, MaxVolume: 90 * gib}}})
	}
	o.Nodes[1].Problems = []overview.Problem{overview.Found(overview.Inaccessible, overview.NodeNotReady, "it is not ready", overview.KindNode, "node-2")}
	id := "vol.default." + key(1)
	since, away := now.Add(-4*time.Minute), now.Add(-20*time.Minute)
	o.Volumes = []overview.Volume{{ID: id, Name: "pvc-1", Node: "node-1", Pool: "default", Size: 10 * gib, Filesystem: "xfs", Created: now.Add(-time.Hour), Claim: &overview.Ref{Namespace: "shop", Name: "orders"},
		State: overview.Ready, Published: "node-1", Pods: []overview.Ref{{Namespace: "shop", Name: "orders-0"}},
		Replicas: &overview.Replicas{Wanted: 2, Current: 1, Legs: []overview.Leg{{ID: id, Node: "node-1", Pool: "default", State: overview.LegCurrent, Used: new(int64(gib))},
			{ID: "vol.default." + key(2), Node: "node-2", Pool: "default", State: overview.LegWaiting, Since: &away, Message: "its node does not answer on the network; node node-2, which is not ready"},
			{ID: "vol.default." + key(3), Node: "node-3", Pool: "default", State: overview.LegJoining, Since: &since, Progress: &overview.Progress{Done: 3 * gib, Total: 10 * gib}}}},
		Problems: []overview.Problem{overview.Found(overview.Degraded, "ReplicaNotCurrent", "replica on node node-2: it does not have all that was written: its node does not answer on the network", overview.KindVolume, id)}},
		{ID: "vol.default." + key(4), Name: "pvc-4", Node: "node-3", Pool: "default", Size: gib, Filesystem: "xfs", Created: now.Add(-time.Hour), State: overview.Ready}}
	o.Finish()
	return o
}

// machine is a source without details.
type machine struct{ fixed }

func (machine) Details(context.Context, *overview.Volume) ([]Event, []string, error) {
	return nil, nil, nil
}

// TestUses: the driver of one machine describes volumes of other nodes that the machine uses, as far as it knows them. For a volume with replicas that it uses,
// it shows the devices of the volume, not those of its own replica.
func TestUses(t *testing.T) {
	o := &overview.Overview{Taken: now, Driver: "block.csi.ashlar.dev", Version: "v1", Nodes: []overview.Node{{Name: "node-1", Ready: true}},
		Volumes: []overview.Volume{{ID: "vol.default." + key(1), Name: "leg", Node: "node-1", Pool: "default", Size: gib, Created: now, State: overview.Ready, Devices: []string{"/dev/dm-1"}}},
		Uses:    []overview.Use{{Key: key(1), Devices: []string{"/dev/dm-7"}, Mounts: []string{"/staging/a"}}, {Key: key(2), Devices: []string{"/dev/dm-8"}, Mounts: []string{"/staging/b"}}}}
	for n, words := range map[int][]string{1: {"/dev/dm-7", "/staging/a", "Size"}, 2: {"/dev/dm-8", "/staging/b"}} {
		out, err := run(machine{fixed{o}}, "describe", "vol.default."+key(n))
		if err != nil || strings.Contains(out, "dm-1\n") || n == 2 && strings.Contains(out, "Made") {
			t.Errorf("volume %d: %v\n%s", n, err, out)
		}
		for _, word := range words {
			if !strings.Contains(out, word) {
				t.Errorf("volume %d: it does not say %q:\n%s", n, word, out)
			}
		}
	}
	if _, err := run(machine{fixed{o}}, "describe", "vol.default."+key(3)); err == nil || !strings.Contains(err.Error(), "there is no volume") {
		t.Errorf("what is not there is described: %v", err)
	}
}

// TestReplicas: a volume with replicas is one volume, on all its nodes. Problems around a replica are none of its own while another replica is well. Its
// description has each replica; a replica is no volume by itself.
func TestReplicas(t *testing.T) {
	source := fixed{withReplicas()}
	for what, c := range map[string]struct {
		args []string
		want []string
		not  []string
	}{
		"list":       {[]string{"volumes"}, []string{"REPLICAS", "shop/orders", "node-1,node-2,node-3", "1/2", "ReplicaNotCurrent", "pvc-4"}, []string{"leg", "NodeNotReady"}},
		"of a node":  {[]string{"volumes", "--node=node-3"}, []string{"shop/orders", "pvc-4"}, nil},
		"of another": {[]string{"volumes", "--node=node-2"}, []string{"shop/orders"}, []string{"pvc-4"}},
		"pools":      {[]string{"pools"}, nil, nil},
		"describe": {[]string{"describe", "shop/orders"}, []string{"Replicas: 1 of 2 current", "node-1 (uses it)", "Waiting", "Joining", "30 %", "4m", "20m",
			"replica on node-2: its node does not answer on the network; node node-2, which is not ready", "Degraded: NodeNotReady", "node node-2: it is not ready"}, []string{"Inaccessible"}},
	} {
		out, err := run(source, c.args...)
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		for _, word := range c.want {
			if !strings.Contains(out, word) {
				t.Errorf("%s does not say %q:\n%s", what, word, out)
			}
		}
		for _, word := range c.not {
			if strings.Contains(out, word) {
				t.Errorf("%s says %q:\n%s", what, word, out)
			}
		}
	}
	if n := source.o.Nodes[2].Pools[0].Volumes; n != 2 {
		t.Errorf("a pool has %d volumes", n)
	}
	if _, err := run(source, "describe", key(3)); err == nil || !strings.Contains(err.Error(), "is a replica of volume shop/orders (vol.default."+key(1)+")") {
		t.Errorf("a replica is described: %v", err)
	}
	source.o.Volumes[0].Replicas.Legs[0].Node = "node-2"
	if out, err := run(source, "volumes"); err != nil || !strings.Contains(out, "NodeNotReady") {
		t.Errorf("the node of its only current replica is away:\n%s", out)
	}
	if out, err := run(source, "describe", "shop/orders"); err != nil || !strings.Contains(out, "Inaccessible: NodeNotReady") {
		t.Errorf("the node of its only current replica is away, and it is described:\n%s", out)
	}
	o := withReplicas()
	o.Volumes = o.Volumes[1:]
	if out, err := run(fixed{o}, "volumes"); err != nil || strings.Contains(out, "REPLICAS") {
		t.Errorf("where no volume has replicas, they are told of:\n%s", out)
	}
}

// fixed is a source with one overview.
type fixed struct{ o *overview.Overview }

func (f fixed) Overview(context.Context) (*overview.Overview, error) { return f.o, nil }

func (f fixed) Details(_ context.Context, v *overview.Volume) ([]Event, []string, error) {
	v.Devices, v.Mounts = []string{"/dev/loop3"}, []string{"/var/lib/kubelet/plugins/kubernetes.io/csi/block.csi.ashlar.dev/1/globalmount"}
	return []Event{{Time: now.Add(-time.Hour), Type: "Warning", Reason: "DataLoss", Message: "the image is shorter than its record says", Of: "PersistentVolumeClaim shop/database-0", Count: 3}}, nil, nil
}

// run runs a command with a source, and returns its stdout.
func run(source Source, args ...string) (string, error) {
	out, _, err := runBoth(source, args...)
	return out, err
}

// runBoth is run, which returns stderr too.
func runBoth(source Source, args ...string) (stdout, stderr string, err error) {
	root := &cobra.Command{Use: "ashlar", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(Commands(func() (Source, error) { return source, nil }, false)...)
	var out, beside bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&beside)
	root.SetArgs(args)
	err = root.ExecuteContext(context.Background())
	return out.String(), beside.String(), err
}

// TestGolden: the output of each command for several widths of the terminal, and that it fits.
func TestGolden(t *testing.T) {
	o := madeUp()
	d, _, err := find(t.Context(), fixed{o}, "shop/database-0")
	if err != nil {
		t.Fatal(err)
	}
	for name, print := range map[string]func(*screen){
		"status":   func(to *screen) { printStatus(to, o) },
		"pools":    func(to *screen) { printPools(to, o, poolsOf(o)) },
		"volumes":  func(to *screen) { printVolumes(to, o, volumesOf(o, filter{})) },
		"describe": func(to *screen) { d.print(to, now) },
		"capacity": func(to *screen) { roomOf(o).print(to) },
	} {
		for _, width := range []int{80, 200} {
			var out bytes.Buffer
			print(&screen{Writer: &out, width: width})
			file := filepath.Join("testdata", fmt.Sprintf("%s-%d.txt", name, width))
			if *update {
				if err := os.WriteFile(file, out.Bytes(), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil || out.String() != string(want) {
				t.Errorf("%s (%v) is not what is printed (go test ./internal/cli -update):\n%s", file, err, out.String())
			}
			for line := range strings.Lines(out.String()) {
				words := strings.Fields(line)
				address := strings.Contains(line, "https://") || strings.Contains(line, "globalmount") // which are not broken
				if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > width && len(words) > 1 && !address {
					t.Errorf("%s: wider than the terminal: %s", file, line)
				}
			}
		}
	}
}

// TestTableWidth: a table that is cut is as wide as the terminal, also after columns were left out.
func TestTableWidth(t *testing.T) {
	o := &overview.Overview{Taken: now, Volumes: []overview.Volume{{ID: "vol.default." + key(1), Node: "ip-10-12-33-104.eu-central-1.compute.internal", Pool: "default", Size: 100 * gib,
		Created: now.Add(-31 * time.Hour), Claim: &overview.Ref{Namespace: "production", Name: "data-postgres-cluster-0"}, Pods: []overview.Ref{{Name: "postgres-cluster-0"}},
		State: overview.Making, Progress: &overview.Progress{Done: 34, Total: 100}, Problems: []overview.Problem{{Reason: "FilesystemErrors"}, {Reason: "PoolNearlyFull"}}}}}
	for width := 70; width <= 180; width++ {
		var out bytes.Buffer
		printVolumes(&screen{Writer: &out, width: width}, o, o.Volumes)
		line := strings.Split(out.String(), "\n")[1]
		if n := utf8.RuneCountInString(line); n > width || n < width && strings.Contains(line, "…") {
			t.Errorf("%d of %d columns are used: %s", n, width, line)
		}
	}
}

// TestStatus: the worst problem is first, problems of one kind are one group, and the exit status tells that there are some.
func TestStatus(t *testing.T) {
	out, err := run(fixed{madeUp()}, "status")
	var problems *ProblemsError
	if !errors.As(err, &problems) || Exit("x", err) != StatusProblems || Exit("x", nil) != 0 {
		t.Errorf("error %v", err)
	}
	if !strings.HasPrefix(out, "DataLoss") || !strings.Contains(out, "7 volumes in pool node-2.a-rather-long-name.of-a-zone.example.com.fast") {
		t.Errorf("status says:\n%s", out)
	}
	last := -1
	for _, severity := range []string{"DataLoss  ", "Inaccessible  ", "Degraded  ", "Warning  "} {
		at := strings.Index(out, "\n"+severity)
		if at < last && last > 0 {
			t.Errorf("%s is not in its place:\n%s", severity, out)
		}
		last = at
	}
	well := &overview.Overview{Taken: now}
	well.Finish()
	if out, err := run(fixed{well}, "status"); err != nil || !strings.HasPrefix(out, "Nothing is wrong.\n") {
		t.Errorf("%v: %s", err, out)
	}
	// Without the right to read nodes and agents it is not known whether they are well.
	blind := &overview.Overview{Taken: now, Cluster: true, Blind: true, Nodes: []overview.Node{{Name: "n", Ready: true}}}
	blind.Finish()
	out, err = run(fixed{blind}, "status")
	if Exit("x", err) != 1 || strings.Contains(out, "Nothing is wrong") || strings.Contains(out, "1 of 1 answer") {
		t.Errorf("%v: %s", err, out)
	}
	if out, err = run(fixed{blind}, "status", "-o", "json"); Exit("x", err) != 1 || !strings.Contains(out, `"blind": true`) {
		t.Errorf("%v: %s", err, out)
	}
}

// TestFormats: -o json and -o yaml have the same, and all that the table has; colours are for terminals only.
func TestFormats(t *testing.T) {
	source := fixed{madeUp()}
	for command, args := range map[string][]string{"status": {"status"}, "pools": {"pools"}, "volumes": {"volumes"}, "describe": {"describe", "pvc-1"}, "capacity": {"capacity"}} {
		text, err := run(source, append(args, "-o", "json")...)
		var problems *ProblemsError
		if err != nil && !errors.As(err, &problems) {
			t.Errorf("%s: %v", command, err)
		}
		var value any
		if err := json.Unmarshal([]byte(text), &value); err != nil {
			t.Errorf("%s: %v in\n%s", command, err, text)
		}
		if text, _ := run(source, append(args, "-o", "yaml")...); strings.HasPrefix(text, "{") || !strings.Contains(text, ": ") {
			t.Errorf("%s -o yaml:\n%s", command, text)
		}
		if text, _ := run(source, append(args, "-o", "wide")...); strings.Contains(text, "\x1b") || strings.Contains(text, "…") {
			t.Errorf("%s -o wide:\n%s", command, text)
		}
	}
	for args, want := range map[string]string{"-o xml": "wide, json, yaml", "-output=json": "write --output, with two dashes", "-output json": "write --output, with two dashes"} {
		if _, err := run(source, append([]string{"pools"}, strings.Fields(args)...)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", args, err)
		}
	}
	for _, args := range []string{"-namespace=shop", "-node=node-1", "-n=Shop", "--namespace=a/b"} {
		if text, err := run(source, "volumes", args); err == nil || !strings.Contains(err.Error(), "no namespace can be called") || text != "" {
			t.Errorf("%s: %v, and printed %q", args, err, text)
		}
	}
	var out bytes.Buffer
	printStatus(&screen{Writer: &out, width: 80, colours: true}, madeUp())
	if !strings.Contains(out.String(), "\x1b[31mDataLoss") {
		t.Errorf("no colours on a terminal: %q", out.String())
	}
}

// TestMissing: each command and format says once what is left out; lists for programs on stderr.
func TestMissing(t *testing.T) {
	const said = "you may not list them"
	for command, lists := range map[string]bool{"status": false, "pools": true, "volumes": true, "describe pvc-1": false, "capacity": true} {
		for format, exact := range map[string]bool{"": false, "-o wide": false, "-o json": true, "-o yaml": true} {
			stdout, stderr, _ := runBoth(fixed{madeUp()}, strings.Fields(command+" "+format)...)
			beside := lists && exact
			if n := strings.Count(stdout+stderr, said); n != 1 || strings.Contains(stderr, said) != beside {
				t.Errorf("%s %s says it %d times; on stderr %q", command, format, n, stderr)
			}
			if beside && stderr != "Left out: pods: you may not list them, so it is not known which of them use the volumes.\n" {
				t.Errorf("%s %s: %q", command, format, stderr)
			}
		}
	}
}

// TestFilters: which volumes are listed.
func TestFilters(t *testing.T) {
	for args, want := range map[string]int{"": 11, "--node=node-1": 3, "--pool=fast": 8, "--problems": 11, "--problems --node=node-4": 1, "--namespace=shop": 10, "--namespace=other": 0, "--node=node-1 --pool=fast": 1} {
		text, err := run(fixed{madeUp()}, append([]string{"volumes", "-o", "json"}, strings.Fields(args)...)...)
		var list []overview.Volume
		if err = errors.Join(err, json.Unmarshal([]byte(text), &list)); err != nil || len(list) != want {
			t.Errorf("volumes %s: %d, want %d; %v", args, len(list), want, err)
		}
	}
}

// TestVolumesOfGoneNode: a volume on a node that is gone has a problem, in the table and for programs.
func TestVolumesOfGoneNode(t *testing.T) {
	for format, words := range map[string][]string{"": {"pvc-12", "NodeGone"}, "json": {`"name": "pvc-12"`, `"reason": "NodeGone"`, `"kind": "Node"`, `"name": "node-4"`}} {
		text, err := run(fixed{madeUp()}, "volumes", "--problems", "--node=node-4", "-o", format)
		for _, word := range words {
			if err != nil || !strings.Contains(text, word) {
				t.Errorf("-o %q: no %s in (%v):\n%s", format, word, err, text)
			}
		}
	}
}

// TestDescribeNames: by which names a volume is found, and the errors if none or several volumes have a name.
func TestDescribeNames(t *testing.T) {
	o := madeUp()
	for _, name := range []string{"vol.default." + key(1), key(1), "pvc-1", "shop/database-0"} {
		if d, _, err := find(t.Context(), fixed{o}, name); err != nil || d.Volume.Name != "pvc-1" || len(d.Snapshots) != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := run(fixed{o}, "describe", "shop/none"); err == nil || !strings.Contains(err.Error(), `no volume "shop/none"`) || Exit("x", err) != StatusNoVolume {
		t.Errorf("a volume that is not there: %v", err)
	}
	for _, name := range []string{"snap.default." + key(20), key(20), "snapshot-20"} { // runbooks name volumes and snapshots by their keys
		if _, err := run(fixed{o}, "describe", name); err == nil || !strings.Contains(err.Error(), "is a snapshot; its volume is vol.default."+key(1)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	o.Volumes[0].Claim = &overview.Ref{Namespace: "shop", Name: "cache-2"}
	if _, err := run(fixed{o}, "describe", "shop/cache-2"); err == nil || !strings.Contains(err.Error(), "2 volumes; give the ID of one: vol.") {
		t.Errorf("a name of two: %v", err)
	}
}

// told is a source with an event that an attacker wrote.
type told struct{ fixed }

const illMeant = "\x1b[2J\x1b]0;title\x07\u009b31m\rall is well\u202e"

func (told) Details(context.Context, *overview.Volume) ([]Event, []string, error) {
	return []Event{{Time: now, Type: "Warning", Reason: illMeant, Message: illMeant, Of: "PersistentVolumeClaim shop/database-0"}}, nil, nil
}

// TestIllMeant: texts that others wrote (events of tenants, output of tools) give the terminal no commands.
func TestIllMeant(t *testing.T) {
	o := madeUp()
	o.Volumes[0].Failure, o.Volumes[0].Pods[0].Name = illMeant, illMeant
	for i := range o.Problems {
		o.Problems[i].Message = illMeant
	}
	for i := range o.Volumes {
		for j := range o.Volumes[i].Problems {
			o.Volumes[i].Problems[j].Message = illMeant
		}
	}
	for _, args := range []string{"describe pvc-1", "status", "volumes"} {
		out, err := run(told{fixed{o}}, strings.Fields(args)...)
		var problems *ProblemsError
		if err != nil && !errors.As(err, &problems) {
			t.Errorf("%s: %v", args, err)
		}
		if !strings.Contains(out, "all is well") || strings.ContainsAny(out, "\x1b\x07\r\u009b\u202e") {
			t.Errorf("%s prints %q", args, out)
		}
	}
}

// TestCompletion: names of volumes, nodes and pools are completed.
func TestCompletion(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"describe shop/d", "shop/database-0"}, {"describe vol.slow.", "vol.slow." + key(10)}, {"volumes --node node-3", "node-3"}, {"volumes --pool sl", "slow"}, {"pools -o w", "wide"},
	} {
		out, err := run(fixed{madeUp()}, append([]string{"__complete"}, strings.Fields(c.args)...)...)
		if lines := strings.Split(out, "\n"); err != nil || lines[0] != c.want || !strings.Contains(out, "\n:4\n") {
			t.Errorf("%s: %v\n%s", c.args, err, out)
		}
	}
}

// TestWatch: --watch looks again until it is interrupted, which is no error.
func TestWatch(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	looks := 0
	defer func(before time.Duration) { every = before }(every)
	every = time.Millisecond
	cmd := &cobra.Command{}
	cmd.SetContext(ctx)
	cmd.SetOut(&bytes.Buffer{})
	s := showing{watch: true}
	err := s.run(cmd, func(context.Context, *screen) (any, error) {
		if looks++; looks == 2 {
			cancel()
		}
		return 0, &ProblemsError{1}
	})
	if err != nil || looks != 2 {
		t.Errorf("%d looks, %v", looks, err)
	}
}

// watched runs a command with --watch. Each look shows the next of some texts, or fails if that begins with "!". After the last one it is interrupted.
func watched(t *testing.T, stdout, stderr io.Writer, texts ...string) (looks int, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	defer func(before time.Duration) { every = before }(every)
	every = time.Millisecond
	cmd := &cobra.Command{Use: "ashlar"}
	cmd.SetContext(ctx)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	s := showing{watch: true}
	err = s.run(cmd, func(_ context.Context, to *screen) (any, error) {
		if looks == len(texts) {
			cancel()
			return nil, ctx.Err()
		}
		text := texts[looks]
		looks++
		if strings.HasPrefix(text, "!") {
			return nil, errors.New(text)
		}
		to.print("%s\n", text)
		return text, nil
	})
	return looks, err
}

// TestWatchGoesOn: only the first look must succeed. If a later one fails, the reason is shown, and it looks again. It ends if it cannot write.
func TestWatchGoesOn(t *testing.T) {
	var out, beside strings.Builder
	looks, err := watched(t, &out, &beside, "one", "!no\x1b[2J", "!no", "two")
	if err != nil || looks != 4 || out.String() != "one\ntwo\n" || beside.String() != "ashlar: !no\\x1b[2J\nashlar: !no\n" {
		t.Errorf("%d looks, %v: %q and %q", looks, err, out.String(), beside.String())
	}
	if looks, err = watched(t, io.Discard, io.Discard, "!no", "two"); err == nil || err.Error() != "!no" || looks != 1 {
		t.Errorf("%d looks, %v", looks, err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	check.OK(t, err)
	defer full.Close()
	if looks, err = watched(t, full, io.Discard, "one", "two"); !errors.Is(err, syscall.ENOSPC) || looks != 1 {
		t.Errorf("%d looks, %v", looks, err)
	}
}

// TestWatchOnTerminal: the reason why a look failed is below the text before it, of which as much is shown as still fits.
func TestWatchOnTerminal(t *testing.T) {
	t.Setenv("TERM", "xterm")
	program, person := drivertest.Terminal(t, 6, 20)
	picture := "1\n2\n3\n4"
	looks, err := watched(t, program, program, picture, "!"+strings.Repeat("x", 30), "new")
	if err != nil || looks != 3 {
		t.Fatalf("%d looks, %v", looks, err)
	}
	const lines = "\x1b[H\x1b[2J1\n2\n3\n4\n\x1b[H\x1b[2J1\n2\n... and 2 lines more\nashlar: !xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n\x1b[H\x1b[2Jnew\n"
	want := strings.ReplaceAll(lines, "\n", "\r\n")
	seen := make([]byte, len(want))
	_, err = io.ReadFull(person, seen)
	check.OK(t, err)
	if string(seen) != want {
		t.Errorf("%q, want %q", seen, want)
	}
}

// TestTerminal: on a real terminal each look replaces the one before at once, fits the present size, and has the worst first; what has scrolled away stays.
func TestTerminal(t *testing.T) {
	defer func(before time.Duration) { every = before }(every)
	every = 10 * time.Millisecond
	program, person := drivertest.Terminal(t, 10, 80)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	root := &cobra.Command{Use: "ashlar", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(Commands(func() (Source, error) { return fixed{madeUp()}, nil }, false)...)
	root.SetOut(program)
	root.SetArgs([]string{"status", "--watch"})
	ended := make(chan error, 1)
	go func() { ended <- root.ExecuteContext(ctx) }()
	var seen []byte
	look := func(rows, columns int, says string) { // until there is a whole one of this size
		t.Helper()
		for part := make([]byte, 4096); ; {
			n, err := person.Read(part)
			if err != nil {
				t.Fatalf("%v after %q", err, seen)
			}
			seen = append(seen, part[:n]...)
			looks := strings.Split(string(seen), "\x1b[H\x1b[2J")
			if len(looks) < 3 {
				continue
			}
			if one := looks[len(looks)-2]; strings.Contains(one, says) {
				if lines := strings.Count(one, "\r\n"); lines > rows-1 || !strings.HasPrefix(one, "\x1b[31mDataLoss") {
					t.Errorf("%d lines on a screen of %d: %q", lines, rows, one)
				}
				for line := range strings.SplitSeq(one, "\r\n") {
					if line = control.ReplaceAllString(line, ""); utf8.RuneCountInString(line) > columns && len(strings.Fields(line)) > 1 && !strings.Contains(line, "https://") {
						t.Errorf("wider than %d columns: %q", columns, line)
					}
				}
				return
			}
		}
	}
	look(10, 80, "lines more")
	drivertest.Resize(t, person, 100, 60)
	look(100, 60, "Nodes")
	cancel()
	go func() { _, _ = io.Copy(io.Discard, person) }()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if strings.Contains(string(seen), "\x1b[3J") {
		t.Error("what had scrolled away was wiped out")
	}
}

// TestDumbTerminal: a terminal with TERM=dumb gets no escape sequences.
func TestDumbTerminal(t *testing.T) {
	t.Setenv("TERM", "dumb")
	defer func(before time.Duration) { every = before }(every)
	every = time.Hour
	program, person := drivertest.Terminal(t, 10, 80)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := &cobra.Command{}
	cmd.SetContext(ctx)
	cmd.SetOut(program)
	s := showing{watch: true}
	check.OK(t, s.run(cmd, func(_ context.Context, to *screen) (any, error) {
		to.print("%s\n", to.paint(red, "it is so"))
		time.AfterFunc(100*time.Millisecond, cancel)
		return 0, nil
	}))
	said := make([]byte, 4096)
	n, err := person.Read(said)
	check.OK(t, err)
	if got := string(said[:n]); got != "it is so\r\n" {
		t.Errorf("%q", got)
	}
}

// TestCommandsForTerminals: texts that others wrote give the terminal no commands, in no column and no message.
func TestCommandsForTerminals(t *testing.T) {
	const hostile = "\x1b]0;owned\a\u009b31m\r\b"
	o := madeUp()
	o.Problems[0].Message += hostile
	o.Volumes[0].Problems = o.Problems[:1]
	o.Volumes[0].Claim.Name, o.Nodes[0].Name, o.Nodes[0].Pools[0].Name = hostile, hostile, hostile
	for _, args := range []string{"status", "pools", "volumes", "volumes -o wide", "describe pvc-1", "capacity"} {
		out, err := run(fixed{o}, strings.Fields(args)...)
		var problems *ProblemsError
		if err != nil && !errors.As(err, &problems) || !strings.Contains(out, `\x1b]0;owned\a\u009b31m`) || strings.ContainsAny(out, "\x1b\a\u009b\r\b") {
			t.Errorf("%s: %v: %q", args, err, out)
		}
	}
}

func TestSizes(t *testing.T) {
	for bytes, want := range map[int64]string{0: "0", 1023: "1023", 1024: "1Ki", 1536: "1.5Ki", 10 * gib: "10Gi", 100*gib + 1: "100Gi", 1<<63 - 1: "8Ei"} {
		if have := Size(bytes); have != want {
			t.Errorf("%d bytes are %s, want %s", bytes, have, want)
		}
	}
}

// TestRoomOfSets: a class with several pools has the room of all, and the largest volume of one; nodes that are down have no room.
func TestRoomOfSets(t *testing.T) {
	pool := func(node, name string, available int64, first bool) overview.Pool {
		return overview.Pool{Node: node, Name: name, Available: available, MaxVolume: available, Default: first}
	}
	failing := pool("a", "fast-c", 4, false)
	failing.Problems = []overview.Problem{{Severity: overview.Degraded, Reason: "DiskFailing"}}
	dead := pool("a", "fast-d", 8, false)
	dead.Problems = []overview.Problem{{Severity: overview.Inaccessible, Reason: "PoolMissing"}}
	o := &overview.Overview{Classes: []overview.Class{{Name: "default"}, {Name: "set", Pool: "fast-*"}, {Name: "two", Pool: "slow,fast-b"}, {Name: "one", Pool: "fast-b"},
		{Name: "there", Pool: "fast-*", Nodes: []string{"a", "down"}}, {Name: "nowhere", Nodes: []string{}}}, Nodes: []overview.Node{
		{Name: "a", Ready: true, Pools: []overview.Pool{pool("a", "slow", 1, true), pool("a", "fast-b", 2, false), failing, dead}},
		{Name: "b", Ready: true, Pools: []overview.Pool{pool("b", "fast-b", 16, true)}},
		{Name: "down", Pools: []overview.Pool{pool("down", "fast-b", 32, true)}},
	}}
	for _, have := range roomOf(o).Classes {
		want := map[string]classRoom{"default": {"default", 2, 17, 16}, "set": {"set", 3, 22, 16}, "two": {"two", 3, 19, 16}, "one": {"one", 2, 18, 16},
			"there": {"there", 2, 6, 4}, "nowhere": {Class: "nowhere"}}[have.Class]
		if have != want {
			t.Errorf("%+v, want %+v", have, want)
		}
	}
}

package page

import (
	"cmp"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// view is an overview, prepared for looking up, filtering and sorting. It is never changed.
type view struct {
	*overview.Overview
	number  int
	version string

	Copies []copying
	Groups []group       // shownGroups at most, the worst first
	Others int           // how many problems are in no group
	Total  overview.Pool // sums of all pools

	rows     []*row // of volumes, in the default order
	byID     map[string]*row
	nodes    []*overview.Node
	snapshot map[string][]*overview.Snapshot // by the ID of their volume
	sources  map[string]string               // by the ID of a snapshot: the ID of its volume
	places   overview.Places
	json     func() ([]byte, error)
}

// row is a volume in the list.
type row struct {
	*overview.Volume
	Label     string // its claim, or else its name
	Snapshots int
	Problems  []overview.Problem // of the volume, and of its node and pool (Places.Of); the worst first
	text      string             // all that the filter searches, in lower case
	worst     int                // index of its worst problem in severities
}

// copying is a volume or snapshot that is being copied.
type copying struct {
	Subject  overview.Subject
	Name     string
	Node     string
	Pool     string
	Progress overview.Progress
}

// group is all problems of one severity and reason.
type group struct {
	Severity overview.Severity
	Reason   string
	Problems []overview.Problem
}

// How many problems of a group are shown, as there are thousands if a node is gone, and how many groups. The driver has fewer reasons, but a node that somebody
// took over may report any.
const (
	shownOfGroup = 5
	shownGroups  = 50
)

// Shown returns the problems that are shown in the list of problems.
func (g group) Shown() []overview.Problem { return g.Problems[:min(shownOfGroup, len(g.Problems))] }

// Rest returns how many problems of the group are not shown there.
func (g group) Rest() int { return len(g.Problems) - len(g.Shown()) }

// Address returns where all problems of the group are shown: nodes are sorted by their problems, volumes are filtered.
func (g group) Address() string {
	switch g.Problems[0].Subject.Kind {
	case "Node", "Pool":
		return "#nodes"
	case "Volume":
		return query{Filter: "problem:" + g.Reason, Sort: defaultOrder}.Address() + "#volumes"
	}
	return query{Sort: "-snapshots"}.Address() + "#volumes"
}

func newView(o *overview.Overview, run int64, number int) *view {
	v := &view{Overview: o, number: number, version: fmt.Sprintf("%x-%d", run, number),
		byID: map[string]*row{}, snapshot: map[string][]*overview.Snapshot{}, sources: map[string]string{}, places: o.Places()}
	for i := range o.Snapshots {
		s := &o.Snapshots[i]
		v.snapshot[s.Source] = append(v.snapshot[s.Source], s)
		v.sources[s.ID] = s.Source
		v.copying(s.Progress, overview.Subject{Kind: "Snapshot", Name: s.ID}, s.Name, s.Node, s.Pool)
	}
	for i := range o.Volumes {
		one := &o.Volumes[i]
		r := &row{Volume: one, Label: label(one), Snapshots: len(v.snapshot[one.ID]), Problems: v.places.Of(one)}
		r.worst = worst(r.Problems)
		r.text = r.searched()
		v.rows, v.byID[one.ID] = append(v.rows, r), r
		v.copying(one.Progress, overview.Subject{Kind: "Volume", Name: one.ID}, r.Label, one.Node, one.Pool)
	}
	for i := range o.Nodes {
		v.nodes = append(v.nodes, &o.Nodes[i])
		for _, pool := range o.Nodes[i].Pools {
			v.Total.Total += pool.Total
			v.Total.Promised += pool.Promised
			v.Total.Available += pool.Available
			v.Total.Used += pool.Used
		}
	}
	// Those with the worst problems come first.
	slices.SortStableFunc(v.rows, orders[defaultOrder])
	slices.SortStableFunc(v.nodes, func(a, b *overview.Node) int { return cmp.Compare(worstOfNode(a), worstOfNode(b)) })
	v.group()
	v.json = sync.OnceValues(func() ([]byte, error) { return json.Marshal(o) })
	return v
}

func (v *view) copying(p *overview.Progress, of overview.Subject, name, node, pool string) {
	if p != nil {
		v.Copies = append(v.Copies, copying{of, name, node, pool, *p})
	}
}

// group puts the problems of one severity and reason together, in their order.
func (v *view) group() {
	where := map[[2]string]int{}
	for _, p := range v.Problems {
		key := [2]string{string(p.Severity), p.Reason}
		i, ok := where[key]
		if !ok && len(v.Groups) == shownGroups {
			v.Others++
			continue
		}
		if !ok {
			i = len(v.Groups)
			where[key] = i
			v.Groups = append(v.Groups, group{Severity: p.Severity, Reason: p.Reason})
		}
		v.Groups[i].Problems = append(v.Groups[i].Problems, p)
	}
}

// same reports whether an overview is the one of this view, but for its time.
func (v *view) same(o *overview.Overview) bool {
	now := *o
	now.Taken = v.Taken
	return reflect.DeepEqual(*v.Overview, now)
}

// worst returns the index of the worst problem in severities; their number if there is none.
func worst(problems []overview.Problem) int {
	least := len(severities)
	for _, p := range problems {
		if i := slices.Index(severities, p.Severity); i >= 0 {
			least = min(least, i)
		}
	}
	return least
}

// severities are all severities, the worst first.
var severities = []overview.Severity{overview.DataLoss, overview.Inaccessible, overview.Degraded, overview.Warning}

func worstOfNode(n *overview.Node) int {
	least := worst(n.Problems)
	for _, p := range n.Pools {
		least = min(least, worst(p.Problems))
	}
	return least
}

// label returns what people know a volume by: its claim, or else its name.
func label(v *overview.Volume) string {
	return cmp.Or(refText(v.Claim), v.Name, v.ID)
}

func refText(r *overview.Ref) string {
	if r == nil {
		return ""
	}
	return r.Namespace + "/" + r.Name
}

func (r *row) searched() string {
	words := []string{refText(r.Claim), r.PersistentVolume, r.Name, r.ID, string(r.State), r.Filesystem, r.Encryption, r.Moving, r.Failure, r.Awaits}
	words = append(append(words, r.On()...), r.In()...)
	if r.Replicas != nil {
		words = append(words, "replicas", r.Replicas.Lacks)
		for _, leg := range r.Replicas.Legs {
			words = append(words, leg.ID, string(leg.State), leg.Message)
		}
	}
	for _, pod := range r.Pods {
		words = append(words, refText(&pod))
	}
	for _, p := range r.Problems {
		words = append(words, string(p.Severity), p.Reason, p.Message)
	}
	return strings.ToLower(strings.Join(words, "\n"))
}

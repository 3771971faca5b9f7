package page

import (
	"cmp"
	"fmt"
	"html/template"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/internal/machine"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

// everything is the data of the first page.
type everything struct {
	heading
	Query   query
	Nodes   part[*overview.Node]
	Volumes part[*row]
	Columns []column
}

// column is a column of the list of volumes.
type column struct{ Key, Title string }

var columns = []column{{"claim", "Claim"}, {"pod", "Pod"}, {"node", "Node and pool"}, {"size", "Size"}, {"used", "Used"},
	{"health", "Health"}, {"state", "State"}, {"snapshots", "Snapshots"}}

func allOf(h heading, q query) everything {
	e := everything{heading: h, Query: q, Columns: columns}
	switch n := len(h.View.Problems); {
	case n > 0:
		e.Title = count(n, "problem")
	case h.View.Blind:
		e.Title = "Nothing known"
	default:
		e.Title = "All well"
	}
	e.Nodes = cut(h.View.nodes, q.Nodes, nodesPerPage)
	e.Volumes = cut(q.volumes(h.View), q.Page, volumesPerPage)
	e.Query.Page, e.Query.Nodes = e.Volumes.Page, e.Nodes.Page
	return e
}

// oneVolume is the data of the page of a volume.
type oneVolume struct {
	heading
	ID        string
	Volume    *overview.Volume   // nil: there is none
	Problems  []overview.Problem // of the volume, and those of its pool and node that it suffers from
	Snapshots []*overview.Snapshot
	Copies    []*overview.Volume // that were copied from it or its snapshots
}

func volumeOf(h heading, id string) oneVolume {
	one := oneVolume{heading: h, ID: id, Snapshots: h.View.snapshot[id]}
	one.Title = "No such volume"
	for i := range h.View.Volumes {
		v := &h.View.Volumes[i]
		switch {
		case v.ID == id:
			one.Volume, one.Title, one.Problems = v, label(v), h.View.byID[id].Problems
		case v.Source != "" && (v.Source == id || h.View.sources[v.Source] == id):
			one.Copies = append(one.Copies, v)
		}
	}
	return one
}

// oneNode is the data of the page of a node.
type oneNode struct {
	heading
	Name string
	Node *overview.Node // nil: there is none
}

func nodeOf(h heading, name string) oneNode {
	one := oneNode{heading: h, Name: name}
	one.Title = "No such node"
	if i := slices.IndexFunc(h.View.nodes, func(n *overview.Node) bool { return n.Name == name }); i >= 0 {
		one.Node, one.Title = h.View.nodes[i], name
	}
	return one
}

// functions are those of the templates.
var functions = template.FuncMap{
	"around":  func(v *view, node, pool string) []overview.Problem { return v.places.Around(node, pool) },
	"count":   count,
	"first":   first,
	"kind":    func(kind string) string { return cmp.Or(kinds[kind], kind) },
	"label":   label,
	"longest": func() int { return longestFilter },
	"lower":   func(s overview.Severity) string { return strings.ToLower(string(s)) },
	"minus":   func(a, b int) int { return a - b },
	"percent": percent,
	"plus":    func(a, b int) int { return a + b },
	"size":    machine.Size,
	"stamp":   func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"subject": source,
	"sumOf":   sumOf,
	"target":  target,
	"time":    func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") },
	"words":   func(s overview.Severity) string { return cmp.Or(severityWords[s], string(s)) },
	"worst":   worstProblem,
}

// first returns the first n of a list.
func first(n int, list any) any {
	all := reflect.ValueOf(list)
	return all.Slice(0, min(n, all.Len())).Interface()
}

// kinds are the kinds of pools, as they are shown.
var kinds = map[string]string{"file": "files", "lvm": "LVM", "lvmthin": "LVM, thin"}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	digits := fmt.Sprint(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits + " " + what + "s"
}

// percent returns how much of a whole is taken, 0 to 100. It is 100 only if nothing is left, and 0 only if nothing is taken.
func percent(of, whole int64) int {
	switch {
	case of <= 0 || whole <= 0:
		return 0
	case of >= whole:
		return 100
	}
	return min(99, max(1, int(float64(of)/float64(whole)*100+0.5)))
}

// sumOf returns how many problems there are of each severity, as text.
func sumOf(problems []overview.Problem) string {
	var parts []string
	for _, s := range severities {
		n := 0
		for _, p := range problems {
			if p.Severity == s {
				n++
			}
		}
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, severityWords[s]))
		}
	}
	return strings.Join(parts, ", ")
}

// severityWords are the severities, as they are shown.
var severityWords = map[overview.Severity]string{overview.DataLoss: "data loss", overview.Inaccessible: "inaccessible",
	overview.Degraded: "degraded", overview.Warning: "warning"}

// worstProblem returns the first problem, which is the worst (overview.Finish); nil if there is none.
func worstProblem(problems []overview.Problem) *overview.Problem {
	if len(problems) == 0 {
		return nil
	}
	return &problems[0]
}

// place is a subject of problems as it is shown.
type place struct {
	Kind, Name string
	Address    string
}

// target returns what a subject is called, and the address that shows it; no address if it is not shown.
func target(v *view, s overview.Subject) place {
	p := place{Kind: strings.ToLower(s.Kind), Name: s.Name}
	switch s.Kind {
	case "Node":
		p.Address = "./node?" + url.Values{"name": {s.Name}}.Encode()
	case "Pool":
		if dot := strings.LastIndexByte(s.Name, '.'); dot > 0 { // names of nodes may have dots, those of pools have none
			p.Name = s.Name[dot+1:] + " of " + s.Name[:dot]
			p.Address = "./node?" + url.Values{"name": {s.Name[:dot]}}.Encode()
		}
	case "Volume":
		if r := v.byID[s.Name]; r != nil {
			p.Name = r.Label
		}
		p.Address = "./volume?" + url.Values{"id": {s.Name}}.Encode()
	case "Snapshot":
		if source := v.sources[s.Name]; source != "" {
			p.Address = "./volume?" + url.Values{"id": {source}}.Encode() + "#" + s.Name
		}
	}
	return p
}

// source returns the snapshot or volume that a volume was copied from, as it is shown.
func source(v *view, id string) place {
	if v.sources[id] != "" {
		return target(v, overview.Subject{Kind: "Snapshot", Name: id})
	}
	if v.byID[id] != nil {
		return target(v, overview.Subject{Kind: "Volume", Name: id})
	}
	return place{Name: id} // the source is gone
}

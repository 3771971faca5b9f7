package page

import (
	"cmp"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

const (
	volumesPerPage = 50
	nodesPerPage   = 12
	longestFilter  = 512 // bytes; the name of a node may have 253, that of a pool 24
)

// query is what the parameters of an address ask for.
type query struct {
	Filter string // q: words that all have to be found; those like KEY:VALUE have to be equal
	Sort   string // sort: one of orders; with - before it in reverse
	Page   int    // page: the page of volumes, from 1
	Nodes  int    // nodes: the page of nodes, from 1
}

// orders are how volumes can be sorted. Equal ones stay in the default order.
var orders = map[string]func(a, b *row) int{
	"health":    func(a, b *row) int { return cmp.Or(cmp.Compare(a.worst, b.worst), cmp.Compare(a.Label, b.Label)) },
	"claim":     func(a, b *row) int { return cmp.Compare(a.Label, b.Label) },
	"pod":       func(a, b *row) int { return cmp.Compare(a.pod(), b.pod()) },
	"node":      func(a, b *row) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Pool, b.Pool)) },
	"size":      func(a, b *row) int { return cmp.Compare(a.Size, b.Size) },
	"used":      func(a, b *row) int { return cmp.Compare(a.used(), b.used()) },
	"state":     func(a, b *row) int { return cmp.Compare(a.State, b.State) },
	"snapshots": func(a, b *row) int { return cmp.Compare(a.Snapshots, b.Snapshots) },
	"created":   func(a, b *row) int { return a.Created.Compare(b.Created) },
}

const defaultOrder = "health"

func (r *row) pod() string {
	if len(r.Pods) == 0 {
		return "\xff" // after all that have one
	}
	return r.Pods[0].Name
}

func (r *row) used() int64 {
	if r.Used == nil {
		return -1
	}
	return *r.Used
}

// parseQuery reads the parameters. It replaces wrong ones by defaults: an address may be old, or typed by hand.
func parseQuery(values url.Values) query {
	q := query{Filter: strings.TrimSpace(values.Get("q")), Sort: values.Get("sort"), Page: number(values.Get("page")), Nodes: number(values.Get("nodes"))}
	if len(q.Filter) > longestFilter {
		q.Filter = strings.ToValidUTF8(q.Filter[:longestFilter], "")
	}
	if orders[strings.TrimPrefix(q.Sort, "-")] == nil {
		q.Sort = defaultOrder
	}
	return q
}

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 1
	}
	return n
}

// Address returns the address of the page with this query, relative to the page.
func (q query) Address() string {
	values := url.Values{}
	if q.Filter != "" {
		values.Set("q", q.Filter)
	}
	if q.Sort != defaultOrder {
		values.Set("sort", q.Sort)
	}
	if q.Page > 1 {
		values.Set("page", strconv.Itoa(q.Page))
	}
	if q.Nodes > 1 {
		values.Set("nodes", strconv.Itoa(q.Nodes))
	}
	if len(values) == 0 {
		return "./"
	}
	return "./?" + values.Encode()
}

// SortedBy returns the address of the page sorted by a column; in reverse if it is sorted by that column already.
func (q query) SortedBy(column string) string {
	if q.Sort == column {
		column = "-" + column
	}
	q.Sort, q.Page = column, 1
	return q.Address() + "#volumes"
}

// Direction returns how a column is sorted, as a value of aria-sort; empty if it is not.
func (q query) Direction(column string) string {
	switch q.Sort {
	case column:
		return "ascending"
	case "-" + column:
		return "descending"
	}
	return ""
}

// OnPage returns the address of page n of the volumes.
func (q query) OnPage(n int) string {
	q.Page = n
	return q.Address() + "#volumes"
}

// OnNodes returns the address of page n of the nodes.
func (q query) OnNodes(n int) string {
	q.Nodes = n
	return q.Address() + "#nodes"
}

// exact has, for each key of words KEY:VALUE of a filter, the comparison with a volume.
var exact = map[string]func(r *row, value string) bool{
	"node": func(r *row, value string) bool { return oneOf(r.On(), value) },
	"pool": func(r *row, value string) bool { return oneOf(r.In(), value) },
	"namespace": func(r *row, value string) bool {
		return r.Claim != nil && strings.EqualFold(r.Claim.Namespace, value)
	},
	"state": func(r *row, value string) bool { return strings.EqualFold(string(r.State), value) },
	"problem": func(r *row, value string) bool {
		return slices.ContainsFunc(r.Problems, func(p overview.Problem) bool {
			return value == "any" || strings.EqualFold(p.Reason, value) || strings.EqualFold(string(p.Severity), value)
		})
	},
}

func oneOf(names []string, value string) bool {
	return slices.ContainsFunc(names, func(name string) bool { return strings.EqualFold(name, value) })
}

// volumes returns the rows that match the filter, sorted.
func (q query) volumes(v *view) []*row {
	words := strings.Fields(q.Filter)
	rows := make([]*row, 0, len(v.rows))
	for _, r := range v.rows {
		if r.has(words) {
			rows = append(rows, r)
		}
	}
	if q.Sort == defaultOrder {
		return rows
	}
	compare := orders[strings.TrimPrefix(q.Sort, "-")]
	if strings.HasPrefix(q.Sort, "-") {
		slices.SortStableFunc(rows, func(a, b *row) int { return compare(b, a) })
	} else {
		slices.SortStableFunc(rows, compare)
	}
	return rows
}

func (r *row) has(words []string) bool {
	for _, word := range words {
		key, value, _ := strings.Cut(word, ":")
		if is := exact[strings.ToLower(key)]; is != nil && value != "" {
			if !is(r, value) {
				return false
			}
		} else if !strings.Contains(r.text, strings.ToLower(word)) {
			return false
		}
	}
	return true
}

// part is one page of a list.
type part[T any] struct {
	Items       []T
	Page, Pages int // both from 1
	First, Last int // numbers of the items in the list, from 1; both 0 if there are none
	All         int
}

// cut returns a page of a list; the last page if there are fewer.
func cut[T any](all []T, page, size int) part[T] {
	pages := max(1, (len(all)+size-1)/size)
	page = min(page, pages)
	first, last := (page-1)*size, min(page*size, len(all))
	p := part[T]{Items: all[first:last], Page: page, Pages: pages, First: first + 1, Last: last, All: len(all)}
	if p.All == 0 {
		p.First = 0
	}
	return p
}

package page

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// shown returns the labels of the volumes that a query shows.
func shown(t *testing.T, v *view, address string) []string {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	var labels []string
	for _, r := range parseQuery(u.Query()).volumes(v) {
		labels = append(labels, r.Label)
	}
	return labels
}

func TestFilter(t *testing.T) {
	o := small()
	v := newView(o, 1, 1)
	all := len(o.Volumes)
	for filter, want := range map[string]int{
		"": all, "  ": all, "postgres": 4, "POSTGRES": 4, "shop postgres": 3, "shop/data-postgres-1": 1, "worker-3": 4, "media-7c9f": 1, "truncated": 1, "backup": 2,
		o.Volumes[3].ID: 1, o.Volumes[3].Name: 1, "nothing-like-this": 0, "namespace:shop": 4, "namespace:sho": 0, "node:worker-3 pool:fast": 2, "node:worker": 0, "Node:Worker-3": 4,
		"state:lost": 1, "state:making": 1, "problem:any": 3, "problem:dataloss": 1, "problem:DeviceMissing": 2, "problem:": 0, "node:": 0, "unknown:word": 0,
	} {
		if got := shown(t, v, "/?q="+url.QueryEscape(filter)); len(got) != want {
			t.Errorf("%q: %d volumes, want %d: %q", filter, len(got), want, got)
		}
	}
}

// The name of a node may be the beginning of another one's.
func TestFilterIsExact(t *testing.T) {
	v := newView(large(4000), 1, 1)
	if got := shown(t, v, "/?q=node:node-0001"); len(got) != 200 {
		t.Errorf("%d volumes of a node with 200", len(got))
	}
}

func TestSort(t *testing.T) {
	v := newView(small(), 1, 1)
	first := func(address string) string { return shown(t, v, address)[0] }
	for address, want := range map[string]string{
		"/": "shop/media", "/?sort=nonsense": "shop/media", "/?sort=claim": "build/cache", "/?sort=-claim": "vms/disk-gitlab", "/?sort=-size": "search/data-opensearch-2",
		"/?sort=-snapshots": "shop/data-postgres-0", "/?sort=used": "build/cache", "/?sort=-used": "search/data-opensearch-2", "/?sort=state": "shop/media", "/?sort=-created": "shop/data-postgres-0",
		"/?sort=pod": "shop/media", "/?sort=-pod": "build/cache",
	} {
		if got := first(address); got != want {
			t.Errorf("%s begins with %s, want %s", address, got, want)
		}
	}
	for order := range orders {
		up, down := shown(t, v, "/?sort="+order), shown(t, v, "/?sort=-"+order)
		slices.Sort(up)
		slices.Sort(down)
		if !slices.Equal(up, down) {
			t.Errorf("sorted by %s there are others: %q, %q", order, up, down)
		}
	}
}

func TestPaging(t *testing.T) {
	p := New(&madeUp{overview: large(10000)})
	for address, want := range map[string]string{
		"/": "1–50 of 10000", "/?page=2": "51–100 of 10000", "/?page=200": "9951–10000 of 10000", "/?page=99999": "9951–10000 of 10000", "/?page=-1": "1–50 of 10000",
		"/?page=x&nodes=3": "25–36 of 50", "/?q=team-1+data-0&page=7": " of ", "/?q=team-36&page=6": "251–270 of 270",
	} {
		w := get(t, p, "GET", address)
		if w.Code != http.StatusOK || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s: %d, and %q is not there", address, w.Code, want)
		}
	}
	text := get(t, p, "GET", "/?q=team-36&page=2&sort=-size&nodes=2").Body.String()
	for _, link := range []string{`href="./?nodes=2&amp;page=3&amp;q=team-36&amp;sort=-size#volumes"`, `href="./?nodes=3&amp;page=2&amp;q=team-36&amp;sort=-size#nodes"`, `href="./?nodes=2&amp;q=team-36&amp;sort=size#volumes"`} {
		if !strings.Contains(text, link) {
			t.Errorf("there is no %s", link)
		}
	}
}

func TestLongFilter(t *testing.T) {
	q := parseQuery(url.Values{"q": {strings.Repeat("ü", 5000)}})
	if len(q.Filter) > longestFilter || q.Filter != strings.Repeat("ü", longestFilter/2) {
		t.Errorf("%d bytes: %q", len(q.Filter), q.Filter)
	}
}

// The name of a node may have 253 characters, and links to its volumes contain it.
func TestLongNodeName(t *testing.T) {
	name := strings.Repeat("n", 60) + "." + strings.Repeat("a", 63) + "." + strings.Repeat("b", 63) + "." + strings.Repeat("c", 63)
	o := &overview.Overview{Taken: noon, Cluster: true, Nodes: []overview.Node{{Name: name, Ready: true, Pools: []overview.Pool{{Node: name, Name: strings.Repeat("p", 24)}}}},
		Volumes: []overview.Volume{{ID: "vol.p.1", Name: "pvc-1", Node: name, Pool: strings.Repeat("p", 24), State: overview.Ready}}}
	o.Finish()
	p := New(&madeUp{overview: o})
	for _, filter := range []string{"node:" + name, "node:" + name + " pool:" + o.Volumes[0].Pool} {
		text := get(t, p, "GET", "/?"+url.Values{"q": {filter}}.Encode()).Body.String()
		inOrder(t, text, `maxlength="512"`, `id="vol.p.1"`)
	}
}

func TestPercent(t *testing.T) {
	for _, one := range []struct {
		of, whole int64
		want      int
	}{{0, 100, 0}, {1, 100000, 1}, {99999, 100000, 99}, {100, 100, 100}, {5, 3, 100}, {-1, 3, 0}, {1, 0, 0}, {1, 2, 50}} {
		if got := percent(one.of, one.whole); got != one.want {
			t.Errorf("%d of %d: %d", one.of, one.whole, got)
		}
	}
}

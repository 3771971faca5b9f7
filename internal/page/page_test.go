package page

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

// get returns the answer of a page to a request.
func get(t testing.TB, p *Page, method, address string) *httptest.ResponseRecorder {
	t.Helper()
	w := httptest.NewRecorder()
	p.ServeHTTP(w, httptest.NewRequest(method, address, nil))
	return w
}

// inOrder checks that a text has words in this order.
func inOrder(t *testing.T, text string, words ...string) {
	t.Helper()
	rest := text
	for _, word := range words {
		_, after, found := strings.Cut(rest, word)
		if !found {
			t.Fatalf("%q is not there, or not after %q, in:\n%s", word, words, text)
		}
		rest = after
	}
}

func TestWhatIsWrongComesFirst(t *testing.T) {
	p := New(&madeUp{overview: small()})
	w := get(t, p, "GET", "/")
	if w.Code != http.StatusOK {
		t.Fatal(w.Code)
	}
	inOrder(t, w.Body.String(), "<title>4 problems", "4 problems", "1 data loss, 2 inaccessible, 1 warning", "ImageTruncated", "shop/media", "restore it from a backup",
		`href="https://github.com/ashlar-csi/ashlar/blob/main/docs/runbooks/`, "DeviceMissing", "fast of worker-3", "PoolNearlyFull", "fast of worker-1",
		"Nodes", "worker-3", "worker-1", "95 % promised", "worker-2", "1 stray", "Copies in progress", "snapshot-nightly-23", "82 %", "staging/data-postgres-0", "45 %",
		"Volumes", "13 volumes, 4 snapshots", "<tbody", "media", "media-7c9f9d6d5-x2xkq", "worker-2", "200 GiB", "66 GiB", "data loss", "ImageTruncated", "Lost", "data-opensearch-2")
}

func TestNothingIsWrong(t *testing.T) {
	for name, o := range map[string]*overview.Overview{"many": large(200), "none": {Driver: "block.csi.ashlar.dev"}} {
		for i := range o.Volumes {
			o.Volumes[i].Problems = nil
		}
		o.Finish()
		text := get(t, New(&madeUp{overview: o}), "GET", "/").Body.String()
		inOrder(t, text, "<title>All well", "Nothing is wrong", "Nodes", "Volumes")
		if strings.Contains(text, "problems</a>") || strings.Contains(text, `class="wrong"`) {
			t.Errorf("%s: it shows problems:\n%s", name, text)
		}
	}
}

func TestOneVolume(t *testing.T) {
	o := small()
	p := New(&madeUp{overview: o})
	postgres := slices.IndexFunc(o.Volumes, func(v overview.Volume) bool { return label(&v) == "shop/data-postgres-0" })
	address := "/volume?" + url.Values{"id": {o.Volumes[postgres].ID}}.Encode()
	inOrder(t, get(t, p, "GET", address).Body.String(), "<h1>shop/data-postgres-0", "Nothing is wrong with it", "shop/postgres-0", "100 GiB", "38 GiB", "38 % of the size",
		"worker-1", "default", "xfs", "2026-11-19 15:00:00 UTC", o.Volumes[postgres].Name, o.Volumes[postgres].ID,
		"Snapshots", "snapshot-nightly-20", "snapshot-nightly-23", "Making", "made from it", "staging/data-postgres-0")
	copied := slices.IndexFunc(o.Volumes, func(v overview.Volume) bool { return v.Source != "" })
	inOrder(t, get(t, p, "GET", "/volume?id="+o.Volumes[copied].ID).Body.String(), "Copying", "45 %", "Copied from", "shop/data-postgres-0")
	gone := get(t, p, "GET", "/volume?id=vol.default.1")
	if gone.Code != http.StatusNotFound {
		t.Error(gone.Code)
	}
	inOrder(t, gone.Body.String(), "There is no such volume", "vol.default.1")
}

// Problems of the node and pool of a volume are shown with it, on its page and in the list, but count once among all problems.
func TestVolumeOfWhatIsAway(t *testing.T) {
	node := problem(overview.Inaccessible, overview.NodeGone, "Kubernetes has no such node", overview.KindNode, "worker-9")
	silent := problem(overview.Degraded, overview.AgentSilent, "its agent is not heard", overview.KindNode, "worker-9")
	missing := problem(overview.Inaccessible, overview.PoolMissing, "nobody reports it", overview.KindPool, "worker-9.default")
	full := problem(overview.Degraded, overview.PoolFull, "no further volume fits", overview.KindPool, "worker-9.default")
	for _, test := range []struct {
		of, title, link string
		node, pool      []overview.Problem
	}{
		{"node", "1 problem", `node</span> <a href="./node?name=worker-9">worker-9</a>`, []overview.Problem{node}, nil},
		{"agent", "1 problem", `node</span> <a href="./node?name=worker-9">worker-9</a>`, []overview.Problem{silent}, nil},
		{"pool", "1 problem", `pool</span> <a href="./node?name=worker-9">default of worker-9</a>`, nil, []overview.Problem{missing}},
		{"full pool", "Nothing is wrong with it", "", nil, []overview.Problem{full}},
	} {
		o := &overview.Overview{Taken: noon, Cluster: true, Nodes: []overview.Node{{Name: "worker-9", Problems: test.node, Pools: []overview.Pool{{Node: "worker-9", Name: "default", Problems: test.pool}}}}}
		o.Volumes = []overview.Volume{{ID: "vol.default.1", Name: "pvc-1", Node: "worker-9", Pool: "default", State: overview.Ready}, {ID: "vol.default.2", Name: "pvc-2", Node: "worker-9", Pool: "default", State: overview.Ready}}
		o.Snapshots = []overview.Snapshot{{ID: "snap.default.3", Name: "snapshot-3", Node: "worker-9", Pool: "default", Source: "vol.default.1", State: overview.Ready}}
		o.Finish()
		p := New(&madeUp{overview: o})
		found := slices.Concat(test.node, test.pool)[0]
		well := test.link == ""
		text := get(t, p, "GET", "/volume?id=vol.default.1").Body.String()
		if inOrder(t, text, `id="wrong-title"`, test.title); !well {
			inOrder(t, text, found.Reason, test.link, found.Message, `id="snapshots"`, "snapshot-3", found.Reason)
		}
		if strings.Contains(text, "badge well") != well {
			t.Errorf("%s: well is %v in:\n%s", test.of, !well, text)
		}
		inOrder(t, get(t, p, "GET", "/").Body.String(), `id="wrong-title"`, "1 problem ", "pvc-1")
		for _, filter := range []string{"any", found.Reason, string(found.Severity)} {
			if got := shown(t, newView(o, 1, 1), "/?q=problem:"+filter); len(got) != map[bool]int{true: 0, false: 2}[well] {
				t.Errorf("%s: problem:%s shows %q", test.of, filter, got)
			}
		}
	}
}

// If the state of nodes could not be read, a volume is not said to be well.
func TestVolumeOfWhatIsNotKnown(t *testing.T) {
	o := &overview.Overview{Taken: noon, Cluster: true, Blind: true, Volumes: []overview.Volume{{ID: "vol.default.1", Node: "worker-9", Pool: "default", State: overview.Ready}}}
	o.Finish()
	inOrder(t, get(t, New(&madeUp{overview: o}), "GET", "/volume?id=vol.default.1").Body.String(), `id="wrong-title"`, "Nothing is known to be wrong with it")
}

func TestOneNode(t *testing.T) {
	p := New(&madeUp{overview: small()})
	inOrder(t, get(t, p, "GET", "/node?name=worker-2").Body.String(), "<h1>worker-2", "ready", "Pools", "default", "45 % used", "1 stray", "Strays", "shop/reports", "20 GiB")
	inOrder(t, get(t, p, "GET", "/node?name=worker-3").Body.String(), "fast", "DeviceMissing", "vgreduce", "What to do")
	if w := get(t, p, "GET", "/node?name=worker-9"); w.Code != http.StatusNotFound {
		t.Error(w.Code)
	}
}

func TestJSON(t *testing.T) {
	o := small()
	w := get(t, New(&madeUp{overview: o}), "GET", "/overview.json")
	var got overview.Overview
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if w.Header().Get("Content-Type") != "application/json" || len(got.Volumes) != len(o.Volumes) || got.Problems[0] != o.Problems[0] {
		t.Errorf("got %s %+v", w.Header(), got)
	}
}

func TestOnlyForReading(t *testing.T) {
	p := New(&madeUp{overview: small()})
	for _, address := range []string{"/", "/volume?id=1", "/node?name=1", "/overview.json", "/events", "/style.css", "/follow.js"} {
		for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} {
			if w := get(t, p, method, address); w.Code != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d", method, address, w.Code)
			}
		}
		w := get(t, p, "HEAD", address)
		if w.Body.Len() > 0 || w.Code >= 500 {
			t.Errorf("HEAD %s: %d, %d bytes", address, w.Code, w.Body.Len())
		}
		for name, value := range headers {
			if got := w.Header().Get(name); got != value && name != "Cache-Control" {
				t.Errorf("HEAD %s: %s: %s", address, name, got)
			}
		}
	}
	for _, address := range []string{"/static/", "/../page.go", "/templates/all.html", "/x", "/volume/"} {
		if w := get(t, p, "GET", address); w.Code != http.StatusNotFound && w.Code != http.StatusTemporaryRedirect && w.Code != http.StatusMovedPermanently {
			t.Errorf("%s: %d", address, w.Code)
		}
	}
}

// hostile is a name that a tenant may choose.
const hostile = `<script>document.title="taken"</script>" onfocus="document.title='taken'" autofocus x='javascript:alert(1)' {{.}} ../../x`

// madeHostile returns an overview in which everything has a hostile name.
func madeHostile() *overview.Overview {
	o := &overview.Overview{Taken: noon, Driver: hostile, Version: hostile, Missing: []string{hostile}}
	bad := overview.Problem{Severity: hostile, Reason: hostile, Message: hostile, Subject: overview.Subject{Kind: "Volume", Name: hostile}, Runbook: `javascript:document.title="taken"`}
	ref := overview.Ref{Namespace: hostile, Name: hostile}
	o.Nodes = []overview.Node{{Name: hostile, Problems: []overview.Problem{bad}, Pools: []overview.Pool{{Node: hostile, Name: hostile, Kind: hostile, UUID: hostile, Problems: []overview.Problem{bad},
		Strays: []overview.Stray{{ID: hostile, Name: hostile, Claim: &ref}}, StrayCount: 1}}}}
	o.Volumes = []overview.Volume{{ID: hostile, Name: hostile, Node: hostile, Pool: hostile, Filesystem: hostile, Claim: &ref, PersistentVolume: hostile, Pods: []overview.Ref{ref}, Published: hostile,
		Source: hostile, State: hostile, Failure: hostile, Moving: hostile, Problems: []overview.Problem{bad}, Progress: &overview.Progress{Done: 5, Total: 3}}}
	o.Snapshots = []overview.Snapshot{{ID: hostile + "s", Name: hostile, Node: hostile, Pool: hostile, Source: hostile, Group: hostile, State: hostile, Failure: hostile, Moving: hostile, Problems: []overview.Problem{bad}}}
	o.Finish()
	return o
}

// TestMoving: for a volume or snapshot that moves, the page shows where to and how far that is, and the filter finds it by that.
func TestMoving(t *testing.T) {
	o := small()
	v, far := &o.Volumes[0], overview.Progress{Done: 3, Total: 4}
	v.Moving, v.Progress = "to node node-9: 3 of 4 are copied while node node-7 uses the volume", &far
	o.Snapshots = append(o.Snapshots, overview.Snapshot{ID: "snap.default.moves", Name: "moves", Node: v.Node, Pool: v.Pool, Source: v.ID, State: overview.Ready, Moving: "to node node-8"})
	p := New(&madeUp{overview: o})
	text := get(t, p, "GET", "/volume?id="+url.QueryEscape(v.ID)).Body.String()
	for _, part := range []string{"<dt>Moves</dt><dd>" + v.Moving + "</dd>", "75 %", "moves to node node-8"} {
		if !strings.Contains(text, part) {
			t.Errorf("the page of the volume does not say %q:\n%s", part, text)
		}
	}
	text = get(t, p, "GET", "/?q=node-9").Body.String()
	if !strings.Contains(text, `id="copies"`) || !strings.Contains(text, "75 %") || !strings.Contains(text, label(v)) {
		t.Errorf("it is not found, or not among the copies:\n%s", text)
	}
}

// TestReplicas: a volume with replicas is one line with all its nodes, and is found by each of them. Its page shows each replica.
func TestReplicas(t *testing.T) {
	o := small()
	i := slices.IndexFunc(o.Volumes, func(v overview.Volume) bool { return label(&v) == "shop/data-postgres-0" })
	v, since := &o.Volumes[i], noon.Add(-time.Hour)
	v.Replicas = &overview.Replicas{Wanted: 3, Current: 1, Lacks: "no node has room", Legs: []overview.Leg{{ID: v.ID, Node: "worker-1", Pool: "default", State: overview.LegCurrent},
		{ID: "vol.fast.leg2", Node: "worker-3", Pool: "fast", State: overview.LegJoining, Since: &since, Progress: &overview.Progress{Done: 1, Total: 4}},
		{ID: "vol.default.3", State: overview.LegMaking, Message: "it is <to> be made"}}}
	p := New(&madeUp{overview: o})
	text := get(t, p, "GET", "/?q="+url.QueryEscape("node:worker-3 data-postgres-0")).Body.String()
	inOrder(t, text, "data-postgres-0", "worker-1, worker-3", "default, fast · 1/3 replicas")
	if strings.Contains(text, "vol.fast.leg2") {
		t.Error("a replica is a volume of its own")
	}
	inOrder(t, get(t, p, "GET", "/volume?id="+url.QueryEscape(v.ID)).Body.String(), "Node", "worker-1", "worker-3", "Replicas", "1 of 3 current", "worker-1", "uses it", "current",
		"worker-3", "Joining", "2026-11-23 11:00:00 UTC", "25 %", "none yet", "it is &lt;to&gt; be made", "No node can have another one: no node has room", "Snapshots")
	if found := shown(t, newView(o, 1, 1), "/?q="+url.QueryEscape("node:worker-3 pool:fast")); !slices.Contains(found, "shop/data-postgres-0") {
		t.Errorf("by the pool of a replica %q are found", found)
	}
}

// TestHostileNamesStayText is the same in a browser.
func TestHostileNamesAreEscaped(t *testing.T) {
	p := New(&madeUp{overview: madeHostile()})
	for _, address := range []string{"/?q=" + url.QueryEscape(hostile), "/?sort=" + url.QueryEscape(hostile), "/volume?id=" + url.QueryEscape(hostile), "/node?name=" + url.QueryEscape(hostile), "/volume?id=" + url.QueryEscape(hostile+"none")} {
		text := get(t, p, "GET", address).Body.String()
		if !strings.Contains(text, "&lt;script&gt;") || strings.Contains(text, "<script>") || strings.Contains(text, `"javascript:`) || strings.Contains(text, `" onfocus="`) {
			t.Errorf("%s:\n%s", address, text)
		}
	}
}

func TestNotForOthersNames(t *testing.T) {
	p := New(&madeUp{overview: small()})
	for host, want := range map[string]int{"localhost:9820": 200, "localhost": 200, "127.0.0.1:9820": 200, "[::1]:9820": 200, "[::1]": 200, "evil.example:9820": 421, "evil.example": 421, "": 421} {
		r := httptest.NewRequest("GET", "/", nil)
		r.Host = host
		at := func(address string) int {
			w := httptest.NewRecorder()
			p.ServeHTTP(w, r.WithContext(contextAt(t, address)))
			return w.Code
		}
		if got := at("127.0.0.1:9820"); got != want {
			t.Errorf("%q on loopback: %d, want %d", host, got, want)
		}
		if got := at("10.1.2.3:9820"); got != 200 {
			t.Errorf("%q on an address of the network: %d", host, got)
		}
	}
}

// TestNotForOtherSites: requests that a page of another site makes the browser send are refused, above all for streams of events. Links to pages are allowed
// from anywhere.
func TestNotForOtherSites(t *testing.T) {
	s := serve(t, small(), nil)
	for _, c := range []struct {
		path, site, mode, dest string
		want                   int
	}{
		{"/", "", "", "", http.StatusOK}, // a program or an old browser
		{"/events", "", "", "", http.StatusOK},
		{"/", "none", "navigate", "document", http.StatusOK}, // a typed address
		{"/events", "none", "navigate", "document", http.StatusOK},
		{"/events", "same-origin", "cors", "empty", http.StatusOK},
		{"/style.css", "same-origin", "no-cors", "style", http.StatusOK},
		{"/", "cross-site", "navigate", "document", http.StatusOK}, // a link
		{"/", "same-site", "navigate", "document", http.StatusOK},
		{"/events", "cross-site", "navigate", "document", http.StatusForbidden},
		{"/events", "cross-site", "cors", "empty", http.StatusForbidden},
		{"/events", "cross-site", "no-cors", "image", http.StatusForbidden},
		{"/events", "same-site", "cors", "empty", http.StatusForbidden}, // another port of localhost
		{"/", "cross-site", "navigate", "iframe", http.StatusForbidden},
		{"/overview.json", "cross-site", "no-cors", "script", http.StatusForbidden},
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.address+c.path, http.NoBody)
		check.OK(t, err)
		for name, value := range map[string]string{"Site": c.site, "Mode": c.mode, "Dest": c.dest} {
			if value != "" {
				r.Header.Set("Sec-Fetch-"+name, value)
			}
		}
		answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(r)
		check.OK(t, err)
		check.OK(t, answer.Body.Close())
		if answer.StatusCode != c.want {
			t.Errorf("%+v: %s", c, answer.Status)
		}
	}
}

func TestOneOverviewForAll(t *testing.T) {
	source := &madeUp{overview: small()}
	p := New(source)
	var all sync.WaitGroup
	start := time.Now()
	for n := range 200 {
		all.Go(func() {
			if w := get(t, p, "GET", fmt.Sprintf("/?q=%d", n)); w.Code != http.StatusOK {
				t.Error(w.Code)
			}
		})
	}
	all.Wait()
	if taken, _ := source.counts(); taken > 1+int(time.Since(start)/atMostEvery) {
		t.Errorf("200 viewers had %d overviews taken in %s", taken, time.Since(start))
	}
}

func TestSourceThatFails(t *testing.T) {
	source := &madeUp{err: errors.New("no API server")}
	p := New(source)
	w := get(t, p, "GET", "/")
	if w.Code != http.StatusServiceUnavailable {
		t.Error(w.Code)
	}
	inOrder(t, w.Body.String(), "no API server", "Nothing is known yet")
	age(p)
	source.set(small(), nil)
	if w = get(t, p, "GET", "/"); w.Code != http.StatusOK || strings.Contains(w.Body.String(), "no API server") {
		t.Fatal(w.Code, w.Body)
	}
	age(p)
	source.set(nil, errors.New("the API server went"))
	inOrder(t, get(t, p, "GET", "/").Body.String(), "cannot be found out: the API server went", "4 problems", "13 volumes")
	if w = get(t, p, "GET", "/overview.json"); w.Code != http.StatusServiceUnavailable {
		t.Error(w.Code) // a program must not take the old overview for the present state
	}
}

// age makes what was taken too old to be used again.
func age(p *Page) {
	last := *p.latest.state.Load()
	last.at = time.Time{}
	p.latest.state.Store(&last)
}

func TestVersionIsThatOfWhatIsShown(t *testing.T) {
	source := &madeUp{overview: small()}
	p := New(source)
	version := func() string {
		age(p)
		text := get(t, p, "GET", "/").Body.String()
		_, after, _ := strings.Cut(text, `data-version="`)
		version, _, _ := strings.Cut(after, `"`)
		return version
	}
	first := version()
	later := small()
	later.Taken = noon.Add(time.Hour)
	source.set(later, nil)
	if again := version(); again != first || first == "" {
		t.Errorf("nothing changed, and the version did: %q, %q", first, again)
	}
	later = small()
	later.Volumes[3].State = overview.Deleting
	source.set(later, nil)
	second := version()
	source.set(nil, errors.New("gone"))
	if third := version(); second == first || third == second {
		t.Errorf("versions %q, %q, %q", first, second, third)
	}
}

func TestManyProblemsStayFew(t *testing.T) {
	t.Parallel()
	o := large(10000)
	for i := range o.Volumes {
		v := &o.Volumes[i]
		v.Problems = []overview.Problem{problem(overview.Inaccessible, "NodeNotReady", "its node is gone", "Volume", v.ID)}
	}
	o.Finish()
	text := get(t, New(&madeUp{overview: o}), "GET", "/").Body.String()
	inOrder(t, text, "10,000 problems", "9,995 more problems", "1–12 of 50", "10,000 volumes", "1–50 of 10000")
	if len(text) > 150_000 {
		t.Errorf("the page has %d bytes", len(text))
	}
}

// If nothing could be read, nothing is said to be well.
func TestNothingIsKnown(t *testing.T) {
	t.Parallel()
	o := &overview.Overview{Taken: noon, Cluster: true, Blind: true, Missing: []string{"whatever is new"}}
	o.Finish()
	text := get(t, New(&madeUp{overview: o}), "GET", "/").Body.String()
	inOrder(t, text, "<title>Nothing known · Ashlar", "Left out: whatever is new", "Nothing is known to be wrong")
	if strings.Contains(text, "Nothing is wrong") || strings.Contains(text, "badge well") {
		t.Error("it says that all is well")
	}
}

// However many kinds of problems a node reports, as one that somebody took over may, the page stays small.
func TestManyKindsStayFew(t *testing.T) {
	t.Parallel()
	o := large(10000)
	for i := range o.Volumes {
		v := &o.Volumes[i]
		v.Problems = nil
		for n := range 16 {
			v.Problems = append(v.Problems, problem(overview.DataLoss, fmt.Sprintf("Reason%d", 16*i+n), "so it says", "Volume", v.ID))
		}
	}
	for i := range 5000 {
		o.Nodes[0].Pools = append(o.Nodes[0].Pools, overview.Pool{Node: o.Nodes[0].Name, Name: fmt.Sprint("p", i), Total: gib, Available: gib, MaxVolume: gib})
	}
	o.Finish()
	p := New(&madeUp{overview: o})
	text := get(t, p, "GET", "/").Body.String()
	if len(text) > 250_000 {
		t.Fatalf("the page has %d bytes", len(text))
	}
	inOrder(t, text, "160,000 problems", "159,950 more problems", "of other kinds", "4,978 more pools", "1–12 of 50")
	if text := get(t, p, "GET", "/node?name="+o.Nodes[0].Name).Body.String(); len(text) > 500_000 || !strings.Contains(text, "and 4802 more") {
		t.Errorf("the page of a node has %d bytes", len(text))
	}
}

// contextAt returns the context of a request to an address of the server.
func contextAt(t *testing.T, address string) context.Context {
	t.Helper()
	at, err := net.ResolveTCPAddr("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return context.WithValue(t.Context(), http.LocalAddrContextKey, at)
}

// BenchmarkPage measures a page of a cluster with 10,000 volumes.
func BenchmarkPage(b *testing.B) {
	source := &madeUp{overview: large(10000)}
	p := New(source)
	for name, address := range map[string]string{"first": "/", "filter": "/?q=team-7+data", "sorted": "/?sort=-used&page=100", "volume": "/volume?id=" + volumeID("default", 4000)} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if w := get(b, p, "GET", address); w.Code != http.StatusOK {
					b.Fatal(w.Code)
				}
			}
		})
	}
}

// BenchmarkChange measures the preparation of a new overview of 10,000 volumes, once for all viewers.
func BenchmarkChange(b *testing.B) {
	o, other := large(10000), large(10000)
	for b.Loop() {
		if v := newView(o, 1, 1); !v.same(other) {
			b.Fatal("two overviews of the same differ")
		}
	}
}

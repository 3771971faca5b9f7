package page

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	cdpruntime "github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/overview"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if chromium.end != nil {
		chromium.end()
	}
	os.Exit(code)
}

// chromium is the browser of all tests. The first test starts it.
var chromium struct {
	once sync.Once
	ctx  context.Context
	end  func()
	err  error
}

// startChromium starts the browser with a home directory of its own, which is removed at its end.
func startChromium() error {
	home, err := os.MkdirTemp("", "chromium")
	if err != nil {
		return err
	}
	path, err := exec.LookPath("chromium")
	if err != nil {
		return errors.Join(fmt.Errorf("%w; hack/install-tools.sh page installs it", err), os.Remove(home))
	}
	options := []chromedp.ExecAllocatorOption{chromedp.ExecPath(path), chromedp.UserDataDir(filepath.Join(home, "data")), chromedp.Env("HOME="+home, "TMPDIR="+home),
		chromedp.Flag("enable-automation", true)}
	for _, name := range []string{"headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "no-default-browser-check", "disable-background-networking",
		"disable-component-update", "disable-sync", "disable-default-apps", "disable-extensions", "disable-dev-shm-usage", "hide-scrollbars"} {
		options = append(options, chromedp.Flag(name, true))
	}
	allocated, release := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, _ := chromedp.NewContext(allocated)
	chromium.ctx, chromium.end = ctx, func() {
		closing, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := chromedp.Cancel(closing); err != nil {
			fmt.Fprintln(os.Stderr, "chromium did not end by itself:", err)
		}
		release()
		if err := os.RemoveAll(home); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
	return chromedp.Do(ctx)
}

// tab is a tab of the browser that shows a page. At the end of the test it checks that requests went to the server of the page alone, and that the browser had
// no complaints.
type tab struct {
	*testing.T
	ctx  context.Context
	base string

	mu       sync.Mutex
	requests []string
	troubles []string
	expected []string // words in complaints that belong to the test
}

func newTab(t *testing.T, s served) *tab {
	t.Helper()
	chromium.once.Do(func() { chromium.err = startChromium() })
	if errors.Is(chromium.err, exec.ErrNotFound) && os.Getenv("SKIP_ROOT_TESTS") == "1" {
		t.Skip(chromium.err) // only root can install it
	}
	check.OK(t, chromium.err)
	ctx, cancel := chromedp.NewContext(chromium.ctx, chromedp.WithNewBrowserContext())
	b := &tab{T: t, ctx: ctx, base: s.address}
	t.Cleanup(func() {
		cancel()
		b.judge()
	})
	check.OK(t, chromedp.Listen(ctx, b.note))
	_, err := chromedp.Call(ctx, network.Enable, network.EnableParams{})
	check.OK(t, err)
	_, err = chromedp.Call(ctx, cdplog.Enable, cdp.Empty{})
	check.OK(t, err)
	b.window(1280, 900)
	return b
}

func (b *tab) note(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	case *cdplog.EventEntryAdded:
		b.troubles = append(b.troubles, e.Entry.Text+" "+e.Entry.URL)
	case *cdpruntime.EventExceptionThrown:
		b.troubles = append(b.troubles, e.ExceptionDetails.Text)
	}
}

func (b *tab) judge() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.requests) == 0 {
		b.Error("no request was recorded")
	}
	for _, address := range b.requests {
		if !strings.HasPrefix(address, b.base+"/") {
			b.Errorf("the page asked for %s", address)
		}
	}
	for _, trouble := range b.troubles {
		if !slices.ContainsFunc(b.expected, func(word string) bool { return strings.Contains(trouble, word) }) {
			b.Errorf("the browser says: %s", trouble)
		}
	}
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	check.OK(b, chromedp.Do(ctx, steps...))
}

func (b *tab) open(address string) {
	b.Helper()
	b.do(chromedp.Navigate(b.base + address))
}

// at does something with an element of the page. If the element was replaced since it was found, it looks for the new one.
func (b *tab) at(step chromedp.Action[chromedp.Void]) {
	b.Helper()
	for tries := 1; ; tries++ {
		ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
		err := chromedp.Do(ctx, step)
		cancel()
		if err == nil || tries == 10 || !strings.Contains(err.Error(), "node with given id") {
			check.OK(b, err)
			return
		}
	}
}

func (b *tab) click(selector string) {
	b.Helper()
	b.at(chromedp.Click(chromedp.CSS(selector)))
}

func (b *tab) keys(selector, text string) {
	b.Helper()
	b.at(chromedp.SendKeys(chromedp.CSS(selector), text))
}

func (b *tab) window(width, height int64) {
	b.Helper()
	b.do(chromedp.EmulateViewport(width, height))
}

// scheme sets which colour scheme the browser prefers: light or dark.
func (b *tab) scheme(name string) {
	b.Helper()
	_, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
	check.OK(b, err)
}

// eval evaluates JavaScript in the page.
func eval[T any](b *tab, script string) T {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](script))
	if err != nil {
		b.Fatalf("%s: %v", script, err)
	}
	return value
}

// wait waits until a JavaScript expression is true in the page. While the page is loading, none is.
func (b *tab) wait(script string) {
	b.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		is, err := chromedp.Run(b.ctx, chromedp.Evaluate[bool]("document.readyState !== 'loading' && Boolean("+script+")"))
		if err == nil && is {
			return
		}
		if time.Now().After(end) {
			b.Fatalf("it does not come true that %s (%v), in:\n%s", script, err, eval[string](b, "document.body.innerText"))
		}
	}
}

func (b *tab) waitText(selector, text string) {
	b.Helper()
	b.wait(fmt.Sprintf("(document.querySelector(%q)?.textContent ?? '').includes(%q)", selector, text))
}

const rows = "document.querySelectorAll('#volumes tbody tr').length"

func TestClickThrough(t *testing.T) {
	t.Parallel()
	b := newTab(t, serve(t, small(), nil))
	b.open("/")
	b.waitText("#wrong-title", "4 problems")
	b.click("#wrong li:first-child a[href^='./volume']")
	b.waitText("h1", "shop/media")
	b.waitText("#wrong", "ImageTruncated")
	b.click("dd a[href^='./node']")
	b.waitText("h1", "worker-2")
	b.waitText("#pools", "shop/reports")
	b.click("#pools > p a") // the link to the volumes of the pool
	b.waitText("#volumes-title", "4 of 13 volumes")
	if got := eval[int](b, rows); got != 4 {
		t.Errorf("%d rows", got)
	}
	b.click("header .brand")
	b.wait(rows + " === 13") // not "13 volumes", which the page before has in its title too: that page would be left while it is clicked
	b.click("th.size a")
	b.wait("document.querySelector('th.size').ariaSort === 'ascending'")
	b.click("th.size a")
	b.wait("document.querySelector('th.size').ariaSort === 'descending'")
	b.waitText("#volumes tbody tr:first-child .size", "300 GiB")
	b.wait("document.querySelector('#sort').value === '-size'")
	if got := eval[string](b, "document.querySelector('.runbook').href"); !strings.HasPrefix(got, "https://github.com/ashlar-csi/ashlar/blob/main/docs/runbooks/") {
		t.Errorf("what to do is at %s", got)
	}
}

func TestFilterWhileTyping(t *testing.T) {
	t.Parallel()
	b := newTab(t, serve(t, small(), nil))
	b.open("/")
	eval[int](b, "window.mark = 1")
	b.keys("#q", "postgres shop")
	b.wait(rows + " === 3")
	b.waitText("#volumes-title", "3 of 13 volumes")
	if got := eval[string](b, "location.search + ' ' + document.activeElement.id + ' ' + document.activeElement.value + ' ' + window.mark"); got != "?q=postgres+shop&sort=health q postgres shop 1" {
		t.Errorf("got %s", got)
	}
	b.do(chromedp.Reload()) // the address has the filter
	b.wait(rows + " === 3")
	b.wait("document.querySelector('#q').value === 'postgres shop'")
	b.keys("#q", " nowhere")
	b.waitText(".none", "No volume has all of these words")
	b.click(".none a")
	b.wait(rows + " === 13")
	b.open("/?q=problem%3Aany&sort=claim")
	b.wait(rows + " === 3")
}

func TestPages(t *testing.T) {
	t.Parallel()
	b := newTab(t, serve(t, large(10000), nil))
	b.open("/")
	b.waitText("nav[aria-label='Pages of volumes']", "1–50 of 10000")
	b.click("nav[aria-label='Pages of volumes'] [rel=next]")
	b.waitText("nav[aria-label='Pages of volumes']", "51–100 of 10000")
	b.click("nav[aria-label='Pages of nodes'] [rel=next]")
	b.waitText("nav[aria-label='Pages of nodes']", "13–24 of 50")
	b.waitText("nav[aria-label='Pages of volumes']", "51–100 of 10000")
	b.click("nav[aria-label='Pages of volumes'] [rel=prev]")
	b.waitText("nav[aria-label='Pages of volumes']", "1–50 of 10000")
	b.click("#wrong .more a")
	b.waitText("#volumes-title", "200 of 10,000 volumes")
}

func TestFollowsChanges(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), nil)
	b := newTab(t, s)
	b.window(1280, 500)
	b.open("/")
	b.waitText("#following", "Follows changes")
	// The user has scrolled down, and is typing; a row and a text are watched.
	b.keys("#q", "worker")
	b.wait("location.search.includes('q=worker')")
	eval[bool](b, `window.scrollTo(0, 700); window.row = document.querySelector("#volumes tbody tr:nth-child(3)"); window.name_ = row.id; true`)
	scrolled := eval[float64](b, "scrollY")

	changed := small()
	changed.Volumes = slices.Delete(changed.Volumes, 1, 2)
	for i := range changed.Volumes {
		if v := &changed.Volumes[i]; v.State == overview.Lost {
			v.State, v.Problems = overview.Ready, nil
		} else if v.Progress != nil {
			v.Progress.Done = 30 * gib
		}
	}
	changed.Finish()
	s.source.set(changed, nil)
	b.waitText("#volumes-title", "12 of 12 volumes")
	b.waitText("#wrong-title", "3 problems")
	b.wait("document.title.startsWith('3 problems')")
	b.waitText("#copies", "79 %")
	if got := eval[string](b, "document.activeElement.id + document.activeElement.value"); got != "qworker" {
		t.Errorf("what was typed is now %q", got)
	}
	if !eval[bool](b, "row.isConnected && row.id === name_") {
		t.Error("a row that did not change was made anew")
	}
	if now := eval[float64](b, "scrollY"); now > scrolled || now < scrolled-200 { // above, one problem is gone
		t.Errorf("scrolled from %v to %v", scrolled, now)
	}

	// The focus is on a row, and rows before it go.
	eval[bool](b, `document.querySelector("#volumes tbody tr:last-child a").focus(); window.focused = document.activeElement; true`)
	fewer := *changed
	fewer.Volumes = fewer.Volumes[len(fewer.Volumes)-6:]
	name := eval[string](b, "focused.textContent")
	if !slices.ContainsFunc(fewer.Volumes, func(v overview.Volume) bool { return label(&v) == name }) {
		fewer.Volumes = append(slices.Clone(fewer.Volumes), changed.Volumes[slices.IndexFunc(changed.Volumes, func(v overview.Volume) bool { return label(&v) == name })])
	}
	s.source.set(&fewer, nil)
	b.wait(fmt.Sprint(rows, " === ", len(fewer.Volumes)))
	if !eval[bool](b, "document.activeElement === focused") {
		t.Error("the focus went")
	}

	s.source.set(changed, errors.New("no API server"))
	b.waitText("#failure", "no API server")
	empty := &overview.Overview{Taken: noon, Cluster: true}
	empty.Finish()
	s.source.set(empty, nil)
	b.waitText("#wrong-title", "Nothing is wrong")
	b.wait("!document.querySelector('#failure') && !document.querySelector('#volumes table')")
	s.source.set(small(), nil)
	b.waitText("#wrong-title", "4 problems")
	b.wait(rows + " === 13")
}

// Of two problems of one thing with one reason both stay shown.
func TestFollowsProblemsAlike(t *testing.T) {
	t.Parallel()
	twice := func(messages ...string) *overview.Overview {
		o := &overview.Overview{Taken: noon, Cluster: true, Nodes: []overview.Node{{Name: "n", Ready: true, Pools: []overview.Pool{{Node: "n", Name: "p", Total: gib, Available: gib, MaxVolume: gib}}}}}
		for _, message := range messages {
			o.Nodes[0].Pools[0].Problems = append(o.Nodes[0].Pools[0].Problems, problem(overview.Degraded, "RecordDamaged", message, "Pool", "n.p"))
		}
		o.Finish()
		return o
	}
	s := serve(t, twice("that of one", "that of another"), nil)
	b := newTab(t, s)
	b.open("/")
	b.waitText("#following", "Follows changes")
	shown := func(messages ...string) {
		t.Helper()
		s.source.set(twice(messages...), nil)
		b.wait(fmt.Sprintf("[...document.querySelectorAll('#wrong .message')].map((e) => e.textContent).join() === %q", strings.Join(messages, ",")))
	}
	shown("that of one", "that of two")
	shown("that of one", "that of two", "that of three")
	shown("that of three")
}

// The page of a volume follows changes, too, until the volume is gone.
func TestFollowsOneVolume(t *testing.T) {
	t.Parallel()
	o := small()
	s := serve(t, o, nil)
	b := newTab(t, s)
	b.expected = []string{"404"}
	copied := slices.IndexFunc(o.Volumes, func(v overview.Volume) bool { return v.Progress != nil })
	b.open("/volume?id=" + o.Volumes[copied].ID)
	b.waitText("#following", "Follows changes")
	b.wait("document.querySelector('progress').position > 0.4 && document.querySelector('progress').position < 0.5")
	later := small()
	later.Volumes[copied].Progress.Done = 38 * gib
	s.source.set(later, nil)
	b.wait("document.querySelector('progress').position === 1")
	later = small()
	later.Volumes = slices.Delete(later.Volumes, copied, copied+1)
	s.source.set(later, nil)
	b.waitText("h1", "no such volume")
}

// When a stream of events ends because of its age, the page follows by another one, without a message.
func TestFollowsOnAnotherStream(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), func(l *limits) { l.stream, l.streams = 400*time.Millisecond, 1 })
	b := newTab(t, s)
	b.open("/")
	b.waitText("#following", "Follows changes")
	eval[bool](b, `window.opened = 0; window.said = [];
		window.EventSource = class extends EventSource { constructor(address) { super(address); window.opened++; } };
		new MutationObserver(() => window.said.push(document.querySelector("#following").textContent)).observe(document.querySelector("#following"), { childList: true, characterData: true, subtree: true });
		true`)
	b.wait("opened > 3")
	s.source.set(large(200), nil)
	b.waitText("#volumes-title", "200 volumes")
	if said := eval[string](b, "said.join()"); said != "" {
		t.Errorf("it says %q", said)
	}
}

func TestFollowsAfterRestart(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), nil)
	b := newTab(t, s)
	b.expected = []string{"ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_EMPTY_RESPONSE"}
	b.open("/")
	b.waitText("#following", "Follows changes")
	s.end()
	b.waitText("#following", "No connection")
	other := large(400)
	listener, err := net.Listen("tcp", strings.TrimPrefix(s.address, "http://"))
	check.OK(t, err)
	ctx, stop := context.WithCancel(context.Background())
	result := make(chan error, 1)
	go func() { result <- New(&madeUp{overview: other}).Serve(ctx, listener) }()
	b.waitText("#volumes-title", "400 volumes")
	b.waitText("#following", "Follows changes")
	stop()
	check.OK(t, <-result)
}

func TestNarrow(t *testing.T) {
	t.Parallel()
	o := small()
	long := strings.Repeat("a-very-long-name", 15)
	o.Volumes[2].Claim = &overview.Ref{Namespace: long, Name: long}
	o.Volumes[2].Pods = []overview.Ref{{Namespace: long, Name: long}}
	o.Nodes[0].Name = long
	o.Problems[0].Reason = long
	s := serve(t, o, nil)
	b := newTab(t, s)
	for _, width := range []int64{320, 375, 600, 840, 1024} {
		b.window(width, 640)
		for _, address := range []string{"/", "/?q=nothing-there", "/volume?id=" + o.Volumes[2].ID, "/volume?id=" + o.Volumes[0].ID, "/node?name=" + long, "/node?name=worker-2"} {
			b.open(address)
			if got := eval[int64](b, "document.documentElement.scrollWidth"); got > width {
				t.Errorf("%s is %d wide in a window of %d: %s", address, got, width, eval[string](b, fmt.Sprintf(
					"[...document.querySelectorAll('*')].filter((e) => e.getBoundingClientRect().right > %d).map((e) => e.tagName + '.' + e.getAttribute('class')).join(' ')", width)))
			}
		}
	}
}

func TestWithoutScript(t *testing.T) {
	t.Parallel()
	b := newTab(t, serve(t, large(400), nil))
	_, err := chromedp.Call(b.ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
	check.OK(t, err)
	b.open("/")
	b.waitText("#following", "Reload to see changes")
	b.click("nav[aria-label='Pages of volumes'] [rel=next]")
	b.waitText("nav[aria-label='Pages of volumes']", "51–100 of 400")
	b.keys("#q", "node:node-0001 problem:any")
	b.click("form button")
	b.waitText("#volumes-title", "4 of 400 volumes")
	b.click("#volumes tbody tr:first-child a")
	b.waitText("#wrong", "FilesystemErrors")
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, address := range b.requests {
		if strings.HasSuffix(address, "/events") {
			t.Error("it follows changes, so scripts do run")
		}
	}
}

func TestHostileNamesStayText(t *testing.T) {
	t.Parallel()
	s := serve(t, small(), nil)
	b := newTab(t, s)
	b.expected = []string{"404"}
	intact := func(where string) {
		t.Helper()
		b.waitText("main", `<script>document.title="taken"</script>`)
		if got := eval[string](b, "document.title"); strings.HasPrefix(got, "taken") {
			t.Errorf("%s: a name has run as a script", where)
		}
		bad := eval[[]string](b, `[...document.body.querySelectorAll("script, [onfocus], [autofocus], [x], iframe, object"), ...document.querySelectorAll("a[href^='javascript:' i]")].map((e) => e.outerHTML)`)
		if len(bad) > 0 {
			t.Errorf("%s: a name has become %q", where, bad)
		}
	}
	b.open("/")
	b.waitText("#following", "Follows changes")
	s.source.set(madeHostile(), nil) // first by the script, then as new pages
	intact("a change")
	id := eval[string](b, "encodeURIComponent("+fmt.Sprintf("%q", hostile)+")")
	for _, address := range []string{"/", "/?q=" + id, "/volume?id=" + id, "/node?name=" + id, "/volume?id=none" + id} {
		b.open(address)
		intact(address)
		for _, link := range eval[[]string](b, "[...document.links].map((a) => a.href)") {
			if !strings.HasPrefix(link, b.base+"/") && !strings.HasSuffix(link, "#ZgotmplZ") {
				t.Errorf("%s: a link leads to %s", address, link)
			}
		}
	}
	// A link with such a name leads to its volume.
	b.open("/")
	eval[bool](b, "document.querySelector('#volumes tbody a').click(), true") // a mouse click in the middle of the link would miss its lines
	b.waitText("h1", "<script>")
	b.waitText("dl", "PersistentVolume")
}

func TestByKeyboard(t *testing.T) {
	t.Parallel()
	b := newTab(t, serve(t, small(), nil))
	b.open("/")
	b.do(chromedp.KeyEvent("\t"))
	if got := eval[string](b, "document.activeElement.className + ' ' + (document.activeElement.getBoundingClientRect().width > 50)"); got != "skip true" {
		t.Errorf("the first stop is %s", got)
	}
	b.do(chromedp.KeyEvent("\r"))
	b.wait("document.activeElement.id === 'main'")
	b.do(chromedp.KeyEvent("\t"))
	b.wait("document.activeElement.closest('#wrong')")
}

// What screen readers get.
func TestAccessibility(t *testing.T) {
	t.Parallel()
	o := small()
	b := newTab(t, serve(t, o, nil))
	for _, width := range []int64{1280, 320} {
		b.window(width, 900)
		for _, address := range []string{"/", "/volume?id=" + o.Volumes[0].ID, "/node?name=worker-2"} {
			b.open(address)
			b.waitText("#following", "Follows changes")
			tree := b.accessible()
			where := fmt.Sprintf("%s at %d", address, width)
			tree.check(t, where)
			for role, count := range map[string]int{"main": 1, "banner": 1, "contentinfo": 1} {
				if got := len(tree[role]); got != count {
					t.Errorf("%s: %d × %s", where, got, role)
				}
			}
			if address == "/" {
				tree.checkAll(t, where)
			}
		}
	}
	b.window(1280, 900)
	b.open("/")
	for selector, want := range map[string]string{"#wrong-title": "polite", "#volumes-title [aria-live]": "polite"} {
		if got := eval[string](b, fmt.Sprintf("document.querySelector(%q).getAttribute('aria-live')", selector)); got != want {
			t.Errorf("%s is %q", selector, got)
		}
	}
	if got := eval[string](b, "document.documentElement.lang"); got != "en" {
		t.Errorf("the language is %q", got)
	}
}

// accessible has the nodes of the accessibility tree by role, in their order.
type accessible map[string][]accessibleNode

type accessibleNode struct{ name, level string }

func (b *tab) accessible() accessible {
	b.Helper()
	result, err := chromedp.Call(b.ctx, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
	check.OK(b, err)
	tree := accessible{}
	for _, n := range result.Nodes {
		if n.Ignored || n.Role == nil {
			continue
		}
		one := accessibleNode{}
		if n.Name != nil {
			one.name = strings.Trim(string(n.Name.Value), `"`)
		}
		for _, p := range n.Properties {
			if p.Name == "level" {
				one.level = string(p.Value.Value)
			}
		}
		role := strings.Trim(string(n.Role.Value), `"`)
		tree[role] = append(tree[role], one)
	}
	return tree
}

// check checks what holds for every page.
func (tree accessible) check(t *testing.T, where string) {
	t.Helper()
	for _, role := range []string{"link", "button", "searchbox", "combobox", "image", "img", "progressbar", "table", "navigation", "region", "columnheader", "rowheader", "heading"} {
		for _, one := range tree[role] {
			if strings.TrimSpace(one.name) == "" {
				t.Errorf("%s: a %s has no name", where, role)
			}
		}
	}
	above := "0"
	for i, one := range tree["heading"] {
		if (one.level == "1") != (i == 0) || one.level > string(rune(above[0]+1)) {
			t.Errorf("%s: heading %q of level %s follows one of level %s", where, one.name, one.level, above)
		}
		above = one.level
	}
	if len(tree["heading"]) < 3 {
		t.Errorf("%s: headings %v", where, tree["heading"])
	}
}

// checkAll checks the page of everything.
func (tree accessible) checkAll(t *testing.T, where string) {
	t.Helper()
	named := func(role, name string) bool {
		return slices.ContainsFunc(tree[role], func(n accessibleNode) bool { return strings.Contains(n.name, name) })
	}
	for _, one := range [][2]string{{"region", "4 problems"}, {"region", "Nodes"}, {"region", "Copies in progress"}, {"region", "Volumes"}, {"searchbox", "Filter"}, {"combobox", "Sort by"},
		{"button", "Show"}, {"table", "Volumes"}, {"columnheader", "Health"}, {"rowheader", "shop/media"}, {"progressbar", "copied"}, {"image", "95 % promised, 54 % used"},
		{"link", "What to do about ImageTruncated of shop/media"}} {
		if !named(one[0], one[1]) {
			t.Errorf("%s: there is no %s %q among %v", where, one[0], one[1], tree[one[0]])
		}
	}
	if len(tree["search"]) != 1 || len(tree["columnheader"]) != 8 || len(tree["rowheader"]) != 13 || len(tree["row"]) != 14 || len(tree["cell"]) != 13*7 || len(tree["image"]) != 5 {
		t.Errorf("%s: %d search, %d columns, %d names, %d rows, %d cells, %d images", where, len(tree["search"]), len(tree["columnheader"]), len(tree["rowheader"]), len(tree["row"]), len(tree["cell"]), len(tree["image"]))
	}
}

// contrasts returns the texts that are hard to read, by the contrast of WCAG 2.2 (AA: 4.5), and the number of texts.
const contrasts = `(() => {
  const pixel = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (text) => {
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = text;
    pixel.fillRect(0, 0, 1, 1);
    return [...pixel.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const below = (e) => {
    for (; e; e = e.parentElement) {
      const c = colour(getComputedStyle(e).backgroundColor);
      if (c[3] === 255) return c;
      if (c[3] !== 0) throw new Error("a background that is partly transparent: " + e.className);
    }
    return [255, 255, 255, 255];
  };
  const bad = [];
  let texts = 0;
  for (const e of document.body.querySelectorAll("*")) {
    if (!e.checkVisibility() || e.closest("svg, select, noscript") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    texts++;
    const [light, dark] = [colour(getComputedStyle(e).color), below(e)].map((c) => luminance(c.slice(0, 3))).sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) bad.push(contrast.toFixed(2) + " " + e.tagName + "." + e.className + " " + e.textContent.trim().slice(0, 40));
  }
  return { bad, texts };
})()`

func TestContrast(t *testing.T) {
	t.Parallel()
	o := small()
	o.Volumes[0].Failure, o.Volumes[0].State = "no room", overview.Failed
	o.Volumes[1].State = overview.Deleting
	o.Nodes[2].Ready = false
	o.Nodes[0].Problems = []overview.Problem{problem(overview.Degraded, "AgentSilent", "its agent is silent", "Node", o.Nodes[0].Name)}
	o.Missing = []string{"pods: not allowed"}
	o.Finish()
	b := newTab(t, serve(t, o, nil))
	var grounds []string
	for _, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		for _, address := range []string{"/", "/?q=nothing", "/volume?id=" + o.Volumes[0].ID, "/node?name=worker-2", "/node?name=worker-3"} {
			b.open(address)
			got := eval[struct {
				Bad   []string `json:"bad"`
				Texts int      `json:"texts"`
			}](b, contrasts)
			if len(got.Bad) > 0 || got.Texts < 15 {
				t.Errorf("%s, %s: of %d texts are hard to read: %q", address, scheme, got.Texts, got.Bad)
			}
		}
		grounds = append(grounds, eval[string](b, "getComputedStyle(document.body).backgroundColor"))
	}
	if grounds[0] == grounds[1] {
		t.Errorf("light and dark look alike: %q", grounds)
	}
}

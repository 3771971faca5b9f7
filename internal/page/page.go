// Package page serves an overview as a read-only page of HTML, for a browser with or without JavaScript. It finds out nothing by itself, changes nothing, and
// refers to no addresses but its own and those of the runbooks.
//
// All addresses are relative to that of the page, so that it works below a path of a proxy too.
package page

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"html/template"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/ashlar-csi/ashlar/internal/overview"
)

// Source is where the page gets what it shows.
type Source interface {
	// Overview returns everything as it is now. The caller must not change it.
	Overview(ctx context.Context) (*overview.Overview, error)
	// Changes returns a channel that can be received from when another overview may be had, until ctx ends. Several changes may be one. It is called only while
	// somebody follows the page.
	Changes(ctx context.Context) <-chan struct{}
}

// Page is the page of a source.
type Page struct {
	latest  latest
	viewers viewers
	routes  http.Handler
	limits  limits
}

// New returns the page of a source. It is served by Serve, or as an http.Handler.
func New(source Source) *Page {
	p := &Page{limits: defaults}
	p.latest.init(source)
	p.viewers.news = make(chan struct{})
	routes := http.NewServeMux()
	routes.HandleFunc("GET /{$}", p.all)
	routes.HandleFunc("GET /volume", p.volume)
	routes.HandleFunc("GET /node", p.node)
	routes.HandleFunc("GET /overview.json", p.json)
	routes.HandleFunc("GET /events", p.events)
	for name, kind := range map[string]string{"style.css": "text/css; charset=utf-8", "follow.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"} {
		routes.HandleFunc("GET /"+name, static(name, kind))
	}
	p.routes = routes
	return p
}

//go:embed templates/*.html
var templateFiles embed.FS

//go:embed static
var staticFiles embed.FS

var templates = template.Must(template.New("").Funcs(functions).ParseFS(templateFiles, "templates/*.html"))

// headers are those of every answer. The browser must load nothing but the files of this package, run no scripts within the page, and show the page in no
// frame.
var headers = map[string]string{
	"Content-Security-Policy":      "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
	"Cross-Origin-Opener-Policy":   "same-origin",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"Cache-Control":                "no-store",
}

func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for name, value := range headers {
		w.Header().Set(name, value)
	}
	if !ours(r) {
		http.Error(w, fmt.Sprintf("This page is served at an address of this machine alone, and not as %q: ask for it as localhost. A proxy in front of it has to do so too.", r.Host), http.StatusMisdirectedRequest)
		return
	}
	if elsewhere(r) {
		http.Error(w, "A page of another site asks for this; open the address itself.", http.StatusForbidden)
		return
	}
	p.routes.ServeHTTP(w, r)
}

// elsewhere reports whether a page of another site makes the browser send this request (Fetch Metadata Request Headers, W3C). Such a page cannot read the
// answer, but could hold streams of events open until there is none for others. Links to a page are allowed from anywhere. Programs send no such headers.
func elsewhere(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
		return false
	}
	link := r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	return !link || r.URL.Path == "/events"
}

// ours reports whether a request is meant for this page. The page has no login: if it listens on this machine alone, a page of another site must not read it by
// giving its own name this address (DNS rebinding).
func ours(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok || !local.IP.IsLoopback() {
		return true
	}
	host, _, err := net.SplitHostPort(r.Host)
	if err != nil {
		host = strings.Trim(r.Host, "[]")
	}
	return host == "localhost" || net.ParseIP(host) != nil
}

// heading is the part that all pages have.
type heading struct {
	Title   string
	View    *view  // nil: nothing is known yet
	Failure string // why the view is not new; empty: it is new
	Version string // the version that events send while this page is up to date
}

// look returns the heading of a page. If nothing is known, it answers that, and returns false.
func (p *Page) look(w http.ResponseWriter, r *http.Request) (heading, bool) {
	t, err := p.latest.recent(r.Context())
	if err != nil {
		return heading{}, false // the client is gone
	}
	h := heading{View: t.view, Version: t.version()}
	if t.err != nil {
		h.Failure = t.err.Error()
	}
	if t.view == nil {
		h.Title = "Not known"
		render(w, r, http.StatusServiceUnavailable, "failed.html", h)
		return heading{}, false
	}
	return h, true
}

func (p *Page) all(w http.ResponseWriter, r *http.Request) {
	if h, ok := p.look(w, r); ok {
		render(w, r, http.StatusOK, "all.html", allOf(h, parseQuery(r.URL.Query())))
	}
}

func (p *Page) volume(w http.ResponseWriter, r *http.Request) {
	if h, ok := p.look(w, r); ok {
		one := volumeOf(h, r.URL.Query().Get("id"))
		render(w, r, found(one.Volume != nil), "volume.html", one)
	}
}

func (p *Page) node(w http.ResponseWriter, r *http.Request) {
	if h, ok := p.look(w, r); ok {
		one := nodeOf(h, r.URL.Query().Get("name"))
		render(w, r, found(one.Node != nil), "node.html", one)
	}
}

func found(is bool) int {
	if is {
		return http.StatusOK
	}
	return http.StatusNotFound
}

func (p *Page) json(w http.ResponseWriter, r *http.Request) {
	t, err := p.latest.recent(r.Context())
	if err == nil {
		err = t.err // a program has to notice
	}
	var text []byte
	if err == nil {
		text, err = t.view.json()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	write(w, r, http.StatusOK, "application/json", text)
}

// render answers with a page. The page is made as a whole before any of it is sent, so a slow client holds nothing but these bytes.
func render(w http.ResponseWriter, r *http.Request, status int, name string, data any) {
	var text bytes.Buffer
	if err := templates.ExecuteTemplate(&text, name, data); err != nil {
		klog.FromContext(r.Context()).Error(err, "Cannot make the page", "page", name)
		http.Error(w, "the page could not be made; the log of the driver says why", http.StatusInternalServerError)
		return
	}
	write(w, r, status, "text/html; charset=utf-8", text.Bytes())
}

func write(w http.ResponseWriter, r *http.Request, status int, kind string, text []byte) {
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", fmt.Sprint(len(text)))
	w.WriteHeader(status)
	if r.Method != http.MethodHead {
		_, _ = w.Write(text) // the client may be gone
	}
}

func static(name, kind string) http.HandlerFunc {
	text, err := fs.ReadFile(staticFiles, "static/"+name)
	if err != nil {
		panic(err) // it is embedded
	}
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-cache")
		w.Header().Set("Content-Type", kind)
		http.ServeContent(w, r, name, time.Time{}, bytes.NewReader(text))
	}
}

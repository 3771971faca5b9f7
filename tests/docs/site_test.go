package docs_test

import (
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var (
	idForm   = regexp.MustCompile(`\sid="?([^"\s>]+)`)
	hrefForm = regexp.MustCompile(`<a [^>]*?href="?([^"\s>]+)`)
	// loads is what a browser fetches by itself.
	loads = regexp.MustCompile(`(?:<(?:img|script|iframe|link|source|video)\b[^>]*?\b(?:src|href|srcset)=|url\(|@import |fetch\()["']?([^"'\s>)]+)`)
)

// TestSite: the site that make docs builds has all pages, its links lead to what is there, and a browser fetches nothing from
// elsewhere for it.
func TestSite(t *testing.T) {
	if _, err := exec.LookPath("hugo"); err != nil && os.Getenv("SKIP_ROOT_TESTS") == "1" {
		t.Skip("no hugo, and no root to install it (hack/install-tools.sh docs)")
	}
	site := t.TempDir()
	if out, err := exec.Command(filepath.Join(root, "hack/docs/build.sh"), site).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	built := map[string]string{}
	err := fs.WalkDir(os.DirFS(site), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := os.ReadFile(filepath.Join(site, name))
		built[name] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range pages(t) {
		to := strings.TrimSuffix(strings.TrimSuffix(name, ".md"), "/README") + ".html"
		if !strings.Contains(name, "/") {
			to = strings.ReplaceAll(strings.ToLower(to), "readme", "index")
		}
		if built[to] == "" {
			t.Errorf("%s is not in the site as %s", name, to)
		}
	}
	checked := 0
	for name, html := range built {
		if path.Ext(name) != ".html" {
			continue
		}
		for _, found := range loads.FindAllStringSubmatch(html, -1) {
			if u, err := url.Parse(found[1]); err != nil || u.Host != "" {
				t.Errorf("%s has a browser fetch %s", name, found[1])
			} else if built[path.Join(path.Dir(name), u.Path)] == "" {
				t.Errorf("%s shows %s, which is not there", name, found[1])
			}
		}
		for _, found := range hrefForm.FindAllStringSubmatch(html, -1) {
			u, err := url.Parse(found[1])
			if err != nil {
				t.Errorf("%s: the link %s: %v", name, found[1], err)
				continue
			}
			if u.Host != "" {
				continue
			}
			checked++
			target := name
			if u.Path != "" {
				target = path.Join(path.Dir(name), u.Path)
			}
			ids := slices.Collect(func(yield func(string) bool) {
				for _, id := range idForm.FindAllStringSubmatch(built[target], -1) {
					if !yield(id[1]) {
						return
					}
				}
			})
			if built[target] == "" || (u.Fragment != "" && !slices.Contains(ids, u.Fragment)) {
				t.Errorf("%s: the link %s leads nowhere", name, found[1])
			}
		}
	}
	if checked < 1000 {
		t.Errorf("%d links were checked", checked)
	}
}

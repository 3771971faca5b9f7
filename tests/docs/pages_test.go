package docs_test

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/text"
	"sigs.k8s.io/yaml"
)

// page is what the checks look at of a page.
type page struct {
	path    string // in the tree
	anchors []string
	links   []string
	code    []string // lines of code blocks, and code in the text
	text    string   // all of it, as it is written
	loose   []string // rows that are in no table
}

// pages reads all pages of the tree that the site has.
func pages(t *testing.T) map[string]*page {
	t.Helper()
	all := map[string]*page{}
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			if top, _, _ := strings.Cut(name, "/"); name != "." && top != "docs" {
				return fs.SkipDir
			}
			return err
		}
		if strings.HasSuffix(name, ".md") {
			all[name] = read(t, name)
		}
		return nil
	})
	if err != nil || len(all) < 40 {
		t.Fatal(len(all), err)
	}
	return all
}

func read(t *testing.T, name string) *page {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	p := &page{path: name, text: string(source)}
	document := goldmark.New(goldmark.WithExtensions(extension.GFM)).Parser().Parse(text.NewReader(source))
	err = ast.Walk(document, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if entering {
			p.take(n, source)
		}
		return ast.WalkContinue, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *page) take(n ast.Node, source []byte) {
	switch n := n.(type) {
	case *ast.Heading:
		p.anchors = append(p.anchors, p.anchor(plain(n, source)))
	case *ast.Link:
		p.links = append(p.links, string(n.Destination))
	case *ast.Image:
		p.links = append(p.links, string(n.Destination))
	case *ast.Paragraph:
		if row := plain(n, source); strings.HasPrefix(row, "|") {
			p.loose = append(p.loose, row)
		}
	case *ast.CodeSpan:
		p.code = append(p.code, plain(n, source))
	case *ast.CodeBlock, *ast.FencedCodeBlock:
		joined := strings.ReplaceAll(string(n.Lines().Value(source)), "\\\n", " ")
		p.code = append(p.code, strings.Split(joined, "\n")...)
	}
}

// plain is the text of a node.
func plain(n ast.Node, source []byte) string {
	var out strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if leaf, ok := n.(*ast.Text); ok && entering {
			out.Write(leaf.Segment.Value(source))
			if leaf.SoftLineBreak() {
				out.WriteByte(' ')
			}
		}
		return ast.WalkContinue, nil
	})
	return out.String()
}

// anchor is how GitHub, and Hugo as we have it, call a heading.
func (p *page) anchor(heading string) string {
	id := strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		}
		return -1
	}, heading)
	for n, free := 1, id; ; n++ {
		if !slices.Contains(p.anchors, free) {
			return free
		}
		free = fmt.Sprintf("%s-%d", id, n)
	}
}

// TestLinks: each link within the tree has its file, and its heading.
func TestLinks(t *testing.T) {
	all := pages(t)
	checked := 0
	for _, p := range all {
		for _, link := range p.links {
			if strings.Contains(link, "://") || strings.HasPrefix(link, "mailto:") {
				continue
			}
			checked++
			file, anchor, _ := strings.Cut(link, "#")
			target := path.Join(path.Dir(p.path), file)
			if file == "" {
				target = p.path
			}
			if _, err := os.Stat(filepath.Join(root, target)); err != nil {
				t.Errorf("%s: the link %s leads nowhere: %v", p.path, link, err)
			} else if to := all[target]; anchor != "" && (to == nil || !slices.Contains(to.anchors, anchor)) {
				t.Errorf("%s: the link %s leads to no heading", p.path, link)
			}
		}
	}
	if checked < 100 {
		t.Errorf("%d links were checked", checked)
	}
}

// TestTables: each row is in a table. One after a blank line is not: readers see its bars.
func TestTables(t *testing.T) {
	for _, p := range pages(t) {
		for _, row := range p.loose {
			t.Errorf("%s: in no table: %.80s", p.path, row)
		}
	}
}

// TestNavigation: the table of contents has every page once, and those that it leaves to a list are in that list.
func TestNavigation(t *testing.T) {
	source, err := os.ReadFile(filepath.Join(root, "hack/docs/data/navigation.yaml"))
	var sections []struct {
		Section string `json:"section"`
		Pages   []struct{ Title, Page string }
	}
	if err == nil {
		err = yaml.Unmarshal(source, &sections)
	}
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]int{}
	for _, section := range sections {
		for _, p := range section.Pages {
			listed[strings.ReplaceAll(strings.TrimPrefix(p.Page, "/"), "_index.md", "README.md")]++
		}
	}
	all := pages(t)
	for name := range all {
		list := all[path.Dir(name)+"/README.md"]
		ownList := strings.HasPrefix(name, "docs/decisions/") || strings.HasPrefix(name, "docs/runbooks/")
		switch {
		case listed[name] > 1:
			t.Errorf("%s is in the table of contents %d times", name, listed[name])
		case listed[name] == 1:
		case !ownList:
			t.Errorf("%s is not in hack/docs/data/navigation.yaml", name)
		case !slices.ContainsFunc(list.links, func(link string) bool { return path.Join(path.Dir(name), link) == name }):
			t.Errorf("%s is not in %s", name, list.path)
		}
	}
}

var (
	driverCall = regexp.MustCompile(`(?:^(?:\S*/)?|<\()driver (\S.*)$`)
	makeCall   = regexp.MustCompile(`^(?:# )?make ([a-z0-9-]+)`)
	pluginCall = regexp.MustCompile(`kubectl ashlar ([a-z]+)`)
	flagForm   = regexp.MustCompile(`--[a-z][a-z0-9-]*`)
	pathForm   = regexp.MustCompile(`^(?:\./)?(?:cmd|deploy|docs|hack|internal|pkg|tests)/[\w./*-]+$`)
	workload   = regexp.MustCompile(`\b(deployment|daemonset)/([a-z-]+)`)
	resource   = regexp.MustCompile(`[\s,]([a-z]+\.ashlar\.dev)\b(/?)`) // with a slash it begins the key of a label
	fieldForm  = regexp.MustCompile(`^(spec|status)(\.[a-zA-Z]+)+$`)
	testForm   = regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w+(?:\.\.\.)?`)
	testFunc   = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Z]\w+)\(`)
)

// foreign are flags in the pages that belong to other programs.
var foreign = []string{"--as", "--config", "--context", "--extra-create-metadata", "--force", "--from-literal", "--kube-api-capacity-qps", "--kube-api-qps", "--node-taint", "--register-with-taints", "--request-timeout", "--reset-then-reuse-values", "--set", "--setactivationskip", "--snapshot-move-data", "--strict-topology"}

// kubernetesFields are fields in the pages that belong to Kubernetes' own objects.
var kubernetesFields = []string{"spec.claimRef"}

// TestNames: each command, flag, make target, workload, resource, field, file and test that a page names is there.
func TestNames(t *testing.T) {
	all := pages(t)
	flags, plugin := commandFlags(all["docs/reference/driver.md"], "driver"), commandFlags(all["docs/reference/kubectl-ashlar.md"], "kubectl ashlar")
	if len(flags) < 5 || !slices.Contains(flags["serve"], "--pool") {
		t.Fatalf("commands found in docs/reference/driver.md: %v", flags)
	}
	makefile := file(t, "Makefile")
	manifests := file(t, "deploy/kubernetes/*.yaml", "deploy/kubernetes/*/*.yaml")
	objects := all["docs/reference/objects.md"]
	tests := testNames(t)
	counts := map[string]int{}
	for _, p := range all {
		complain := func(format string, args ...any) { t.Errorf(p.path+": "+format, args...) }
		for _, name := range testForm.FindAllString(p.text, -1) {
			counts["test"]++
			begin, some := strings.CutSuffix(name, "...")
			if !tests[name] && !(some && slices.ContainsFunc(slices.Collect(maps.Keys(tests)), func(one string) bool { return strings.HasPrefix(one, begin) })) {
				complain("there is no test %s", name)
			}
		}
		for _, code := range p.code {
			if call := driverCall.FindStringSubmatch(code); call != nil {
				counts["command"]++
				checkDriver(call[1], flags, complain)
			} else if flagForm.FindString(code) == code && code != "" && !slices.Contains(foreign, code) {
				if counts["flag"]++; !anyHas(flags, code) && !anyHas(plugin, code) {
					complain("no command of the driver has the flag %s", code)
				}
			}
			if call := makeCall.FindStringSubmatch(code); call != nil {
				if counts["make"]++; !strings.Contains(makefile, "\n"+call[1]+":") && !strings.Contains(makefile, " "+call[1]+":") && !strings.Contains(makefile, "\n"+call[1]+" ") {
					complain("there is no make target %s", call[1])
				}
			}
			if call := pluginCall.FindStringSubmatch(code); len(call) > 1 && plugin[call[1]] == nil {
				complain("kubectl ashlar has no command %s", call[1])
			}
			for _, found := range workload.FindAllStringSubmatch(code, -1) {
				if strings.HasPrefix(found[2], "ashlar") && !strings.Contains(manifests, "name: "+found[2]+"\n") {
					complain("the manifests have no %s", found[0])
				}
			}
			for _, found := range resource.FindAllStringSubmatch(code, -1) {
				if found[2] == "" && strings.HasPrefix(code, "kubectl ") && !strings.Contains(manifests, "name: "+found[1]+"\n") {
					complain("there is no resource %s", found[1])
				}
			}
			if fieldForm.MatchString(code) && !slices.Contains(kubernetesFields, code) {
				if counts["field"]++; !hasField(objects, code) {
					complain("no object has the field %s", code)
				}
			}
			if pathForm.MatchString(code) {
				counts["file"]++
				found, _ := filepath.Glob(filepath.Join(root, code))
				if p.path == "docs/cluster.md" && found == nil { // which has a table of what is below it
					found, _ = filepath.Glob(filepath.Join(root, "pkg/cluster", code))
				}
				if len(found) == 0 {
					complain("there is no %s", code)
				}
			}
		}
	}
	for what, least := range map[string]int{"command": 15, "flag": 10, "make": 20, "field": 10, "file": 20, "test": 20} {
		if counts[what] < least {
			t.Errorf("%d names of the kind %q were found, at least %d are expected", counts[what], what, least)
		}
	}
}

// commandFlags are the flags of each command of a program, as its page has them.
func commandFlags(p *page, program string) map[string][]string {
	flags := map[string][]string{}
	for section := range strings.SplitSeq(p.text, "\n## "+program+" ") {
		name, rest, _ := strings.Cut(section, "\n")
		for row := range strings.Lines(rest) {
			if cell, ok := strings.CutPrefix(row, "| `"); ok {
				flags[name] = append(flags[name], flagForm.FindString(cell))
			} else if flags[name] == nil {
				flags[name] = []string{"--help"}
			}
		}
	}
	return flags
}

func anyHas(flags map[string][]string, flag string) bool {
	for _, some := range flags {
		if slices.Contains(some, flag) {
			return true
		}
	}
	return false
}

// checkDriver checks what follows "driver" in a line of code: a command, or flags of serve.
func checkDriver(call string, flags map[string][]string, complain func(string, ...any)) {
	call, _, _ = strings.Cut(call, "#")
	call, _, _ = strings.Cut(call, "|")
	words := strings.Fields(call)
	if len(words) == 0 || strings.Trim(words[0], ".`") == "" || words[0] == "COMMAND" || words[0] == "[flags]" || words[0] == "[serve]" {
		return
	}
	command := "serve"
	if !strings.HasPrefix(words[0], "-") {
		command = strings.TrimRight(words[0], ")>`,.:")
	}
	if flags[command] == nil {
		complain("the driver has no command %q", command)
		return
	}
	for _, flag := range flagForm.FindAllString(call, -1) {
		if flag != "--help" && !slices.Contains(flags[command], flag) {
			complain("driver %s has no flag %s", command, flag)
		}
	}
}

// hasField reports whether the page of the objects has a field, at any depth of one that it has.
func hasField(objects *page, field string) bool {
	return slices.ContainsFunc(objects.code, func(code string) bool { return strings.ReplaceAll(code, "[]", "") == field })
}

// file is all that the files of some patterns have.
func file(t *testing.T, patterns ...string) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range patterns {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatal(pattern, err)
		}
		for _, name := range found {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(text)
		}
	}
	return all.String()
}

// testNames are the tests of the tree.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	err := fs.WalkDir(os.DirFS(root), ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, ".go") {
			return err
		}
		source, err := os.ReadFile(filepath.Join(root, name))
		for _, found := range testFunc.FindAllSubmatch(source, -1) {
			names[string(found[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

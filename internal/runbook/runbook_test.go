package runbook

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const root = "../.."

// well are the reasons of conditions that are no problems, and need no page.
var well = map[string]bool{"AgentHeard": true, "AllKnown": true, "Blank": true, "Copied": true, "Copying": true, "Created": true, "Cut": true, "Found": true, "HomeBack": true, "Moved": true, "Moving": true, "NodeReady": true, "NoProblems": true, "NotBlank": true, "Recovered": true, "ReplicaAdded": true, "ReplicaCurrent": true, "ReplicaJoining": true, "ReplicaRemoved": true, "ReplicasEqual": true}

// TestReasons: each reason of a problem, condition or failure in the source has a page, with a section there; and each reason with a page is in the source.
func TestReasons(t *testing.T) {
	found := reasons(t)
	for _, sure := range []string{"PoolMissing", "FilesystemErrors", "ImageTruncated", "PoolUnavailable", "SpaceUnknown", "Strays", "InUse", "Internal", "NotConfigured", "NoProblems"} {
		if found[sure] == "" {
			t.Errorf("the search does not find %s any more", sure)
		}
	}
	for reason, at := range found {
		if !well[reason] && pages[reason] == "" {
			t.Errorf("%s: the reason %s has no page; say in docs/runbooks what to do about it, and here where", at, reason)
		}
	}
	for reason, page := range pages {
		if found[reason] == "" {
			t.Errorf("nothing in the source has the reason %s", reason)
		}
		text, err := os.ReadFile(filepath.Join(root, "docs/runbooks", page+".md"))
		if err != nil {
			t.Errorf("the page of %s: %v", reason, err)
		} else if !regexp.MustCompile(`(?m)^#.*\b` + reason + `\b`).Match(text) {
			t.Errorf("%s.md has no section with %s in its title", page, reason)
		}
		if !strings.HasSuffix(URL(reason), "/docs/runbooks/"+page+".md") {
			t.Errorf("%s is led to %s", reason, URL(reason))
		}
	}
	for reason := range well {
		if found[reason] == "" {
			t.Errorf("nothing in the source has the reason %s, which needs no page", reason)
		}
	}
	if URL("NoSuchReason") != base+"README.md" {
		t.Error("a reason without a page is not led to the list")
	}
}

func TestSee(t *testing.T) {
	for message, want := range map[string]string{"it is full": "it is full. See ", "it is full.\n": "it is full. See ", "is it mounted?": "is it mounted? See "} {
		if got := See(message, "NoSpace"); got != want+base+"pool-full.md" {
			t.Errorf("%q becomes %q", message, got)
		}
	}
}

// TestPages: each page is for a reason or an alert, and the list has all pages.
func TestPages(t *testing.T) {
	rules, err := os.ReadFile(filepath.Join(root, "deploy/monitoring/rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	list, err := os.ReadFile(filepath.Join(root, "docs/runbooks/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	wanted := map[string]bool{}
	for _, page := range pages {
		wanted[page] = true
	}
	for _, m := range regexp.MustCompile(regexp.QuoteMeta(base)+`([a-z-]+)\.md`).FindAllSubmatch(rules, -1) {
		wanted[string(m[1])] = true
	}
	files, err := filepath.Glob(filepath.Join(root, "docs/runbooks/*.md"))
	if err != nil || len(files) < 10 {
		t.Fatalf("%d pages: %v", len(files), err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".md")
		if name == "README" {
			continue
		}
		if !wanted[name] {
			t.Errorf("%s is for no reason and for no alert", file)
		}
		if !strings.Contains(string(list), "("+name+".md") {
			t.Errorf("docs/runbooks/README.md does not lead to %s.md", name)
		}
	}
	for name := range wanted {
		if _, err := os.Stat(filepath.Join(root, "docs/runbooks", name+".md")); err != nil {
			t.Errorf("a page that something leads to: %v", err)
		}
	}
}

// reasons returns where in pkg and internal/overview each reason is given: as a field or variable with the name Reason or reason, as a constant whose name
// begins with reason, or as an argument of a function that reports problems.
func reasons(t *testing.T) map[string]string {
	t.Helper()
	found, overview := map[string]string{}, map[string]ast.Expr{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return err
		}
		if path != root && path != filepath.Join(root, "internal") && !strings.HasPrefix(path, filepath.Join(root, "pkg")) && path != filepath.Join(root, "internal/overview") {
			return fs.SkipDir
		}
		set := token.NewFileSet()
		files, err := filepath.Glob(filepath.Join(path, "*.go"))
		if err != nil {
			return err
		}
		p := packageReasons{set: set, constants: map[string]ast.Expr{}, overview: overview, found: found}
		if filepath.Base(path) == "overview" {
			p.constants = overview
		}
		var parsed []*ast.File
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			parsed = append(parsed, f)
			ast.Inspect(f, p.constant)
		}
		for _, f := range parsed {
			ast.Inspect(f, p.look)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// packageReasons finds the reasons in one package.
type packageReasons struct {
	set       *token.FileSet
	constants map[string]ast.Expr
	overview  map[string]ast.Expr // constants of internal/overview
	found     map[string]string   // by reason: where it is
}

func (p packageReasons) constant(n ast.Node) bool {
	if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Values) == len(spec.Names) && !is(spec.Type, "Severity") {
		for i, name := range spec.Names {
			p.constants[name.Name] = spec.Values[i]
			if strings.HasPrefix(strings.ToLower(name.Name), "reason") {
				p.add(spec.Values[i])
			}
		}
	}
	return true
}

func (p packageReasons) look(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.KeyValueExpr:
		if is(n.Key, "Reason", "reason") {
			p.add(n.Value)
		}
	case *ast.AssignStmt:
		for i, to := range n.Lhs {
			if len(n.Lhs) == len(n.Rhs) && is(to, "reason", "Reason") {
				p.add(n.Rhs[i])
			}
		}
	case *ast.CallExpr:
		if is(n.Fun, "say", "report", "setCondition", "setWell") {
			for _, argument := range n.Args {
				p.add(argument)
			}
		}
	}
	return true
}

// word matches a reason.
var word = regexp.MustCompile(`^([A-Z][a-z]+)+$`)

// add adds the reasons in an expression: a text, a constant, or the texts in a composite literal.
func (p packageReasons) add(e ast.Expr) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if text, err := strconv.Unquote(e.Value); err == nil && e.Kind == token.STRING && word.MatchString(text) {
			p.found[text] = p.set.Position(e.Pos()).String()
		}
	case *ast.Ident:
		if value, ok := p.constants[e.Name].(*ast.BasicLit); ok {
			p.add(value)
		}
	case *ast.SelectorExpr: // a constant of internal/overview
		if value, ok := p.overview[e.Sel.Name].(*ast.BasicLit); ok && is(e.X, "overview") {
			p.add(value)
		}
	case *ast.CompositeLit:
		for _, element := range e.Elts {
			p.add(element)
		}
	}
}

// is reports whether an expression is one of some names, or a selector that ends with one.
func is(e ast.Expr, names ...string) bool {
	if selector, ok := e.(*ast.SelectorExpr); ok {
		e = selector.Sel
	}
	name, ok := e.(*ast.Ident)
	for _, one := range names {
		if ok && name.Name == one {
			return true
		}
	}
	return false
}

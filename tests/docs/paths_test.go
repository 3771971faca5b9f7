// Package docs_test holds the documents to the code.
package docs_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const root = "../.."

// step is a row of a table of docs/paths.md: what happens, the file, the function.
var step = regexp.MustCompile(`(?m)^\|[^|]*\| (pkg/\S+\.go) \| (\S+) \|$`)

// TestPaths: each function that docs/paths.md names is in the file that it names.
func TestPaths(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs", "paths.md"))
	if err != nil {
		t.Fatal(err)
	}
	steps := step.FindAllSubmatch(page, -1)
	if len(steps) < 30 {
		t.Fatalf("%d steps found in the three paths; are the tables of another form now?", len(steps))
	}
	for _, s := range steps {
		file, function := string(s[1]), string(s[2])
		if !functions(t, file)[function] {
			t.Errorf("docs/paths.md: %s has no %s", file, function)
		}
	}
}

// listedName is a name in the list of packages of docs/design.md; one that is indented further is below the last one that is not.
var listedName = regexp.MustCompile(`(?m)^ {4}(  )?([a-z][a-z0-9/-]*) `)

// TestPackages: the list of packages has each part of the repository, once.
func TestPackages(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs", "design.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, list, _ := strings.Cut(string(page), "## Packages\n")
	list, _, _ = strings.Cut(list, "\n## ")
	listed := map[string]int{}
	above := ""
	for _, one := range listedName.FindAllStringSubmatch(list, -1) {
		name := one[2]
		if one[1] == "" {
			above = name
		} else {
			name = above + "/" + name
		}
		listed[name]++
	}
	parts := []string{"deploy", "docs", "hack", "pkg/volume/storetest", "pkg/metrics/metricstest"}
	for _, in := range []string{"cmd", "pkg", "internal", "tests", "pkg/blockdev", "pkg/blockdev/internal", "pkg/cluster", "pkg/cluster/internal"} {
		entries, err := os.ReadDir(filepath.Join(root, in))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			if entry.IsDir() && entry.Name() != "internal" {
				parts = append(parts, in+"/"+entry.Name())
			}
		}
	}
	for _, part := range parts {
		if listed[part] != 1 {
			t.Errorf("docs/design.md: the list of packages has %s %d times", part, listed[part])
		}
		delete(listed, part)
	}
	for part := range listed {
		t.Errorf("docs/design.md: the list of packages has %s, which is not there", part)
	}
}

// functions returns the functions of a file, methods as Type.Method.
func functions(t *testing.T, file string) map[string]bool {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, file), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Error(err)
		return nil
	}
	found := map[string]bool{}
	for _, declaration := range parsed.Decls {
		if f, ok := declaration.(*ast.FuncDecl); ok {
			found[receiver(f)+f.Name.Name] = true
		}
	}
	return found
}

// receiver is "Type." of a method, whether it has a pointer, type parameters, or neither.
func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	of := f.Recv.List[0].Type
	if pointer, ok := of.(*ast.StarExpr); ok {
		of = pointer.X
	}
	if generic, ok := of.(*ast.IndexExpr); ok {
		of = generic.X
	}
	return of.(*ast.Ident).Name + "."
}

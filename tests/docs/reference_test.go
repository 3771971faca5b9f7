package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/pools"
	"github.com/ashlar-csi/ashlar/pkg/cluster"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
	"github.com/ashlar-csi/ashlar/pkg/volume"
	"github.com/ashlar-csi/ashlar/tests/docs/reference"
)

// TestReferenceParameters: what can be said of pools and of classes.
func TestReferenceParameters(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Parameters\n\n## Pool URLs\n\nA pool is where volumes are kept: `--pool NAME=URL` of the driver, `nodeGroups.*.pools` of the chart. " +
		"A name has 1 to 24 of a-z, 0-9 and -, with no - at either end. Numbers may have fractions; an option that is unknown or out of range keeps the driver from starting.\n\n")
	var urls, options [][]string
	at := map[string]int{} // the row of an option with its default
	for _, form := range pools.Forms() {
		var names []string
		for _, o := range form.Options {
			names = append(names, reference.Code(o.Name))
			key := o.Name + o.Default
			if row, known := at[key]; known {
				options[row][1] += ", " + reference.Code(form.URL)
				continue
			}
			at[key] = len(options)
			options = append(options, []string{reference.Code(o.Name), reference.Code(form.URL), fmt.Sprintf("%g to %g", o.From, o.To), o.Means, o.Default})
		}
		urls = append(urls, []string{reference.Code(form.URL), form.Means, strings.Join(names, ", ")})
	}
	page.WriteString(reference.Table([]string{"URL", "volumes are", "options"}, urls) + "\n" +
		reference.Table([]string{"option", "of", "values", "means", "default"}, options))

	page.WriteString("\n## StorageClass\n\n`parameters` of a StorageClass, and volume attributes of an inline ephemeral volume, which has `size` (`64Mi`) beside them. " +
		"`fstype`, the deprecated name of the filesystem, is taken too. Any other parameter, and any other value, is refused (InvalidArgument).\n\n")
	var rows [][]string
	for _, p := range csimap.ClassParameters() {
		rows = append(rows, []string{reference.Code(p.Name), p.Values, p.Default})
		if _, err := csimap.ParseParameters(map[string]string{p.Name: "/"}); err == nil || strings.Contains(err.Error(), "unknown parameter") {
			t.Errorf("parameter %s is documented, and not known: %v", p.Name, err)
		}
	}
	page.WriteString(reference.Table([]string{"parameter", "values", "default"}, rows))

	page.WriteString("\n## VolumeAttributesClass\n\nThese may be changed while the volume is in use. What a class does not name stays as it is.\n\n")
	rows = nil
	for _, p := range volume.MutableParameters() {
		rows = append(rows, []string{reference.Code(p.Name), p.Values, p.Means})
	}
	page.WriteString(reference.Table([]string{"parameter", "values", "means"}, rows))
	page.WriteString("\n## VolumeSnapshotClass, VolumeGroupSnapshotClass\n\nNone: any parameter is refused, but for those of Kubernetes' own (`csi.storage.k8s.io/...`).\n")
	reference.Check(t, root, "parameters.md", page.String())
}

// advice is what to do about an error, by its sentinel.
var advice = map[string]string{
	"ErrInvalid":      "change the request: the class, the claim, the pod",
	"ErrNotFound":     "nothing, if it was deleted; else look for it: `kubectl get ashlar`",
	"ErrExists":       "take another name, or delete what has this one",
	"ErrOutOfRange":   "ask for another size: a filesystem has a least one, a pool a largest one, and nothing shrinks. Or make room, if the message says that there is none now",
	"ErrNoSpace":      "free or add space ([grow a pool](../operate/grow-a-pool.md)), or let another node have the volume",
	"ErrLimit":        "take volumes off the node, or raise `--max-volumes`",
	"ErrInUse":        "end what uses it: the message names it",
	"ErrPrecondition": "do what the message says; a retry alone does not help",
	"ErrBusy":         "nothing: the caller asks again",
	"ErrBadToken":     "list from the start",
	"ErrDataLoss":     "stop, and look at what the message names. Nothing was repaired or made anew. [Replace a disk](../operate/replace-a-disk.md), [back up and restore](../operate/backup.md)",
	"ErrUnavailable":  "see why the pool, the node or the API server does not answer; the caller asks again",
	"ErrUnsupported":  "take another kind of pool, or a newer kernel or tool: the message says which",
}

// TestReferenceErrors: each sentinel of pkg/errdefs with its gRPC code, its word in objects, and what to do.
func TestReferenceErrors(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, "pkg/errdefs/errdefs.go"), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	sentinels := map[string]error{
		"ErrInvalid": errdefs.ErrInvalid, "ErrNotFound": errdefs.ErrNotFound, "ErrExists": errdefs.ErrExists, "ErrOutOfRange": errdefs.ErrOutOfRange,
		"ErrNoSpace": errdefs.ErrNoSpace, "ErrLimit": errdefs.ErrLimit, "ErrInUse": errdefs.ErrInUse, "ErrPrecondition": errdefs.ErrPrecondition,
		"ErrBusy": errdefs.ErrBusy, "ErrBadToken": errdefs.ErrBadToken, "ErrDataLoss": errdefs.ErrDataLoss, "ErrUnavailable": errdefs.ErrUnavailable,
		"ErrUnsupported": errdefs.ErrUnsupported,
	}
	var rows [][]string
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || spec.Doc == nil || !strings.HasPrefix(spec.Names[0].Name, "Err") {
			return true
		}
		name := spec.Names[0].Name
		sentinel := sentinels[name]
		if sentinel == nil || advice[name] == "" {
			t.Errorf("%s has no advice in this test", name)
			return true
		}
		_, means, _ := strings.Cut(spec.Doc.Text(), ": ")
		rows = append(rows, []string{sentinel.Error(), reference.Code(rpc.Code(sentinel).String()), reference.Code(cluster.FailureOf(sentinel).Reason), means, advice[name]})
		return true
	})
	if len(rows) != len(sentinels) {
		t.Fatalf("%d of %d sentinels found in pkg/errdefs", len(rows), len(sentinels))
	}
	reference.Check(t, root, "errors.md", "# Errors\n\nWhat the driver answers, by the words that its message has in it. *Code* is what gRPC calls answer, and what events of claims and pods "+
		"show; *reason* is `status.failure.reason` of a Volume or Snapshot. All else is `Internal`: an unexpected failure of the system, in its own words; look at the log of the driver on that node.\n\n"+
		"To Kubernetes a code also says whether the work may still be going on: `Canceled`, `DeadlineExceeded`, `Unavailable`, `Aborted` (and, when a volume is made, `ResourceExhausted`) mean "+
		"that it may, and it asks again; all others mean that it is over.\n\n"+reference.Table([]string{"message", "code", "reason", "means", "what to do"}, rows))
}

// TestReferenceObjects: the custom resources, as their definitions have them.
func TestReferenceObjects(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(root, "deploy/kubernetes/crds/*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	var page strings.Builder
	page.WriteString("# Objects\n\nAll are of the group `ashlar.dev`, and of no namespace. What they are for is in [A cluster](../cluster.md#objects). Sizes are bytes. " +
		"`kubectl explain volumes.ashlar.dev.spec` says the same.\n")
	for _, path := range files {
		text, err := os.ReadFile(path)
		var definition apiextensions.CustomResourceDefinition
		if err == nil {
			err = yaml.UnmarshalStrict(text, &definition)
		}
		if err != nil {
			t.Fatal(path, err)
		}
		version := definition.Spec.Versions[0]
		schema := version.Schema.OpenAPIV3Schema
		fmt.Fprintf(&page, "\n## %s\n\n%s (`%s.%s/%s`)\n\n", definition.Spec.Names.Kind, oneLine(schema.Description), definition.Spec.Names.Plural, definition.Spec.Group, version.Name)
		var rows [][]string
		for _, part := range []string{"spec", "status"} {
			fields(&rows, part, schema.Properties[part])
		}
		page.WriteString(reference.Table([]string{"field", "type", ""}, rows))
		rows = nil
		for _, c := range version.AdditionalPrinterColumns {
			wide := ""
			if c.Priority > 0 {
				wide = "with `-o wide`"
			}
			rows = append(rows, []string{c.Name, reference.Code(c.JSONPath), c.Description, wide})
		}
		page.WriteString("\n" + reference.Table([]string{"column", "is", "", ""}, rows))
	}
	reference.Check(t, root, "objects.md", page.String())
}

// fields appends a row for each field below one of a schema, at any depth.
func fields(rows *[][]string, at string, schema apiextensions.JSONSchemaProps) {
	for _, name := range slices.Sorted(maps.Keys(schema.Properties)) {
		field := schema.Properties[name]
		path := at + "." + name
		kind := field.Type
		if field.Format != "" {
			kind = field.Format
		}
		nested := field
		switch {
		case field.Items != nil && field.Items.Schema != nil:
			kind, nested = "list", *field.Items.Schema
			path += "[]"
			if nested.Type != "object" {
				kind += " of " + nested.Type
			}
		case field.AdditionalProperties != nil:
			kind = "map"
		}
		var values []string
		for _, v := range field.Enum {
			values = append(values, strings.Trim(string(v.Raw), `"`))
		}
		if values != nil {
			kind = strings.Join(values, ", ")
		}
		if slices.Contains(schema.Required, name) {
			kind += ", required"
		}
		*rows = append(*rows, []string{reference.Code(path), kind, oneLine(field.Description)})
		if name != "conditions" { // Kubernetes' own
			fields(rows, path, nested)
		}
	}
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

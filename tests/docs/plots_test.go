package docs_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	tables "github.com/yuin/goldmark/extension/ast"
	"github.com/yuin/goldmark/text"

	"github.com/ashlar-csi/ashlar/tests/docs/reference"
	"github.com/ashlar-csi/ashlar/tests/figures"
)

// plots are the pictures of docs/benchmarks.md, each drawn from the first table below one of its headings.
var plots = []struct {
	heading string
	chart   figures.Chart
	columns []string // of the series, by what stands above them
	rows    []string // by what their first cell begins with; none: all
}{
	{heading: "A volume's life", columns: []string{"of the floor", "of the floor with records"},
		chart: figures.Chart{Name: "life", Title: "Lives of a volume, by how many at once", Unit: "rate, beside bare system calls and mkfs", Mark: figures.Mark{At: 1, Name: "bare system calls"}}},
	{heading: "In a cluster", columns: []string{"nothing", "csi-driver-host-path", "Ashlar"}, rows: []string{"1,000 claims", "their deletion"},
		chart: figures.Chart{Name: "cluster", Title: "1,000 claims at once", Unit: "in a second"}},
	{heading: "Reading and writing", columns: []string{"file : image file", "another node's : bare export", "two replicas : DRBD"},
		chart: figures.Chart{Name: "fio", Title: "fio on a volume", Unit: "rate, beside the same without the driver, and of DRBD", Mark: figures.Mark{At: 1, Name: "as fast"}}},
}

// TestReferencePlots: the pictures show what the tables say, and the page shows the pictures.
func TestReferencePlots(t *testing.T) {
	const name = "docs/benchmarks.md"
	links := read(t, name).links
	for _, p := range plots {
		chart := p.chart
		head, rows := tableBelow(t, name, p.heading)
		for _, column := range p.columns {
			at := slices.Index(head, column)
			if at < 0 {
				t.Fatalf("%s, %s: no column %q in %q", name, p.heading, column, head)
			}
			series := figures.Series{Name: column}
			chart.Rows = nil
			for _, row := range rows {
				if len(p.rows) > 0 && !slices.ContainsFunc(p.rows, func(begins string) bool { return strings.HasPrefix(row[0], begins) }) {
					continue
				}
				chart.Rows = append(chart.Rows, row[0])
				series.Values = append(series.Values, valueOf(t, row[at]))
			}
			chart.Series = append(chart.Series, series)
		}
		svg, err := chart.SVG()
		if err != nil {
			t.Fatalf("%s: %v", p.heading, err)
		}
		file := "benchmarks/" + chart.Name + ".svg"
		reference.CheckPicture(t, root, file, svg)
		if !slices.Contains(links, file) {
			t.Errorf("%s does not show %s", name, file)
		}
	}
}

// tableBelow is the first table below a heading of a page.
func tableBelow(t *testing.T, name, heading string) (head []string, rows [][]string) {
	t.Helper()
	source, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	below := false
	document := goldmark.New(goldmark.WithExtensions(extension.GFM)).Parser().Parse(text.NewReader(source))
	for n := document.FirstChild(); n != nil; n = n.NextSibling() {
		if h, is := n.(*ast.Heading); is {
			below = plain(h, source) == heading
		}
		if table, is := n.(*tables.Table); is && below {
			for row := table.FirstChild(); row != nil; row = row.NextSibling() {
				var cells []string
				for cell := row.FirstChild(); cell != nil; cell = cell.NextSibling() {
					cells = append(cells, plain(cell, source))
				}
				rows = append(rows, cells)
			}
			return rows[0], rows[1:]
		}
	}
	t.Fatalf("%s has no table below %q", name, heading)
	return nil, nil
}

var number = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// valueOf is what a cell says: one number, or a range between the least and the largest of several; "-" is none.
func valueOf(t *testing.T, cell string) figures.Value {
	t.Helper()
	var found []float64
	for _, text := range number.FindAllString(cell, -1) {
		n, err := strconv.ParseFloat(text, 64)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, n)
	}
	if len(found) == 0 {
		if cell != "-" {
			t.Fatalf("no number in the cell %q", cell)
		}
		return figures.Value{}
	}
	low, high := slices.Min(found), slices.Max(found)
	return figures.Value{Median: (low + high) / 2, Low: low, High: high}
}

// TestValueOf: what cells of tables look like.
func TestValueOf(t *testing.T) {
	for cell, want := range map[string]figures.Value{"-": {}, "0.63": {Median: 0.63, Low: 0.63, High: 0.63}, "0.5 to 0.75": {Median: 0.625, Low: 0.5, High: 0.75}} {
		if have := valueOf(t, cell); have != want {
			t.Errorf("%s: %v, should be %v", cell, have, want)
		}
	}
}

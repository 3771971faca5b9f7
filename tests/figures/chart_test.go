package figures_test

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/tests/figures"
)

var update = flag.Bool("update", false, "write testdata/fixed.svg instead of comparing it")

var fixed = figures.Chart{
	Name: "fixed", Title: "A whole life", Unit: "lives per second", Rows: []string{"1 at once", "4 at once"}, Mark: figures.Mark{At: 60, Name: "the goal"},
	Series: []figures.Series{
		{Name: "driver", Values: []figures.Value{{Median: 46.2, Low: 43.4, High: 53.3}, {Median: 71.5, Low: 62.3, High: 78.3}}},
		{Name: "floor", Values: []figures.Value{{Median: 67.1, Low: 62.7, High: 77}, {Median: 106.3, Low: 90.8, High: 114.8}}},
	},
}

// TestChart: a fixed result is always the same picture, that of testdata, which is small.
func TestChart(t *testing.T) {
	const file = "testdata/fixed.svg"
	svg, err := fixed.SVG()
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, svg, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(svg, want) {
		t.Errorf("the picture is another one; look at it, and go test ./tests/figures -update:\n%s", svg)
	}
	if len(svg) > 16<<10 {
		t.Errorf("it has %d bytes", len(svg))
	}
	if bytes.Contains(svg, []byte("#0")) && bytes.Contains(svg, []byte("fill:#0")) {
		t.Error("a colour is not one of the theme, which is readable in light and in dark")
	}
}

// TestDraw: a chart that is printed on one machine is drawn by another one, as it would be there.
func TestDraw(t *testing.T) {
	dir := t.TempDir()
	to := figures.Draws{Dir: dir}
	if is, err := to.Line("| a | table |"); is || err != nil {
		t.Errorf("a line without a chart: %v, %v", is, err)
	}
	if is, err := to.Line(`figure {"Name":"a","Title":"A","Unit":"ms","Log":true,"Rows":["x"],"Series":[{"Name":"s","Values":[{"Median":2,"Low":1,"High":30}]}]}`); !is || err != nil {
		t.Fatalf("a chart: %v, %v", is, err)
	}
	if svg, err := os.ReadFile(dir + "/a.svg"); err != nil || !strings.Contains(string(svg), "<title>A</title>") {
		t.Errorf("%s, %v", svg, err)
	}
	for name, bad := range map[string]figures.Chart{
		"nothing":        {Name: "b"},
		"too few values": {Name: "b", Rows: []string{"x", "y"}, Series: []figures.Series{{Name: "s", Values: []figures.Value{{Median: 1}}}}},
	} {
		if err := to.Draw(bad); err == nil {
			t.Errorf("%s was drawn", name)
		}
	}
}

func TestOf(t *testing.T) {
	if v := figures.Of([]float64{5, 1, 4, 2, 3}); v != (figures.Value{Median: 3, Low: 1, High: 5}) {
		t.Errorf("%+v", v)
	}
}

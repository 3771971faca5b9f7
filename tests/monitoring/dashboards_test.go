package monitoring

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is what we use of Grafana's model of a dashboard (JSON model, schema version 41).
type dashboard struct {
	UID           string   `json:"uid"`
	Title         string   `json:"title"`
	Description   string   `json:"description"`
	Tags          []string `json:"tags"`
	ID            *int     `json:"id"`
	SchemaVersion int      `json:"schemaVersion"`
	Panels        []panel  `json:"panels"`
	Templating    struct {
		List []variable `json:"list"`
	} `json:"templating"`
}

type variable struct {
	Name       string          `json:"name"`
	Type       string          `json:"type"`
	Query      json.RawMessage `json:"query"`
	Definition string          `json:"definition"`
	Datasource *source         `json:"datasource"`
}

type source struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

type panel struct {
	ID          int    `json:"id"`
	Type        string `json:"type"`
	Title       string `json:"title"`
	Description string `json:"description"`
	Datasource  source `json:"datasource"`
	GridPos     struct {
		X, Y, W, H int
	} `json:"gridPos"`
	FieldConfig struct {
		Defaults struct {
			Unit string `json:"unit"`
		} `json:"defaults"`
	} `json:"fieldConfig"`
	Targets []struct {
		RefID      string `json:"refId"`
		Expr       string `json:"expr"`
		Datasource source `json:"datasource"`
	} `json:"targets"`
}

// units that panels use, all of Grafana's own (https://github.com/grafana/grafana/blob/main/packages/grafana-data/src/valueFormats/categories.ts).
var units = []string{"bytes", "Bps", "cps", "percentunit", "reqps", "s", "short"}

// provided are the variables that Grafana has by itself.
var provided = []string{"__rate_interval", "__data", "__all"}

var used = regexp.MustCompile(`\$\{?(\w+)`)

func dashboards(t *testing.T) map[string]dashboard {
	t.Helper()
	paths, err := filepath.Glob(directory + "/dashboards/*.json")
	if err != nil || len(paths) != 3 {
		t.Fatalf("%d dashboards: %v", len(paths), err)
	}
	all := map[string]dashboard{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var d dashboard
		if err := json.Unmarshal(text, &d); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all[strings.TrimSuffix(filepath.Base(path), ".json")] = d
	}
	return all
}

// TestDashboards: each dashboard is one that Grafana shows whole, of any Prometheus that it has, and says what each panel shows.
func TestDashboards(t *testing.T) {
	all := dashboards(t)
	for name, d := range all {
		t.Run(name, func(t *testing.T) {
			if d.UID != "ashlar-"+name || !strings.HasPrefix(d.Title, "Ashlar / ") || d.Description == "" || d.ID != nil || d.SchemaVersion != 41 || !slices.Equal(d.Tags, []string{"ashlar"}) {
				t.Errorf("%q %q %q, id %v, schema %d, tags %v", d.UID, d.Title, d.Description, d.ID, d.SchemaVersion, d.Tags)
			}
			known := slices.Clone(provided)
			for i, v := range d.Templating.List {
				if i == 0 {
					if v.Name != "datasource" || v.Type != "datasource" || string(v.Query) != `"prometheus"` {
						t.Errorf("the first variable is no choice of a Prometheus: %+v", v)
					}
				} else if v.Type != "query" || v.Definition == "" || v.Datasource == nil || *v.Datasource != (source{"prometheus", "${datasource}"}) {
					t.Errorf("variable %s: %+v", v.Name, v)
				}
				for _, m := range used.FindAllStringSubmatch(v.Definition, -1) {
					if !slices.Contains(known, m[1]) {
						t.Errorf("variable %s uses %s, which is not before it", v.Name, m[1])
					}
				}
				known = append(known, v.Name)
			}
			for _, m := range used.FindAllStringSubmatch(whole(t, name), -1) {
				if !slices.Contains(known, m[1]) {
					t.Errorf("there is no variable %s", m[1])
				}
			}
			panels(t, d.Panels)
		})
		for _, m := range regexp.MustCompile(`/d/ashlar-(\w+)`).FindAllStringSubmatch(whole(t, name), -1) {
			if _, there := all[m[1]]; !there {
				t.Errorf("%s links to %s, which is none", name, m[1])
			}
		}
	}
}

func whole(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(directory + "/dashboards/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	return string(bytes.ReplaceAll(text, []byte(`\"`), []byte(`"`)))
}

func panels(t *testing.T, all []panel) {
	t.Helper()
	ids, titles, cells := map[int]bool{}, map[string]bool{}, map[string]string{}
	for _, p := range all {
		if ids[p.ID] || (p.Type != "row" && titles[p.Title]) {
			t.Errorf("panel %d %s is there twice", p.ID, p.Title)
		}
		ids[p.ID] = true
		titles[p.Title] = titles[p.Title] || p.Type != "row"
		for x := range p.GridPos.W {
			for y := range p.GridPos.H {
				cell := fmt.Sprint(p.GridPos.X+x, p.GridPos.Y+y)
				if cells[cell] != "" || p.GridPos.X+x >= 24 {
					t.Errorf("panel %s lies over %s, or beyond the edge", p.Title, cells[cell])
				}
				cells[cell] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if !slices.Contains([]string{"bargauge", "stat", "table", "timeseries"}, p.Type) || p.Title == "" || len(p.Description) < 10 || !slices.Contains(units, p.FieldConfig.Defaults.Unit) ||
			p.Datasource != (source{"prometheus", "${datasource}"}) || len(p.Targets) == 0 || p.GridPos.W < 3 || p.GridPos.H < 3 {
			t.Errorf("panel %+v", p)
		}
		refs := map[string]bool{}
		for _, target := range p.Targets {
			if refs[target.RefID] || target.RefID == "" || target.Expr == "" || target.Datasource != p.Datasource {
				t.Errorf("panel %s: target %+v", p.Title, target)
			}
			refs[target.RefID] = true
		}
	}
	if len(ids) < 15 {
		t.Errorf("%d panels", len(ids))
	}
}

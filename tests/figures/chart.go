package figures

import (
	"bytes"
	"encoding/json"
	"fmt"
	"image/color"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Chart has a line for each row, and in it for each series the median, and the spread from p10 to p90.
type Chart struct {
	Name   string // of its file, without .svg
	Title  string
	Unit   string // what the values are, below the title
	Log    bool   // the axis is logarithmic
	Mark   Mark
	Rows   []string
	Series []Series
}

// Mark is a line through all rows, at what the values are held against; none at 0.
type Mark struct {
	At   float64
	Name string
}

// Series is one of the things that a chart compares.
type Series struct {
	Name   string
	Values []Value // by row
}

// Add adds a row, with a value for each series.
func (c *Chart) Add(row string, values ...Value) {
	c.Rows = append(c.Rows, row)
	for i, v := range values {
		c.Series[i].Values = append(c.Series[i].Values, v)
	}
}

// Value is a median, and its spread. The zero value is left out.
type Value struct{ Median, Low, High float64 }

// Of is the value of some samples: their median, p10 and p90.
func Of(samples []float64) Value {
	return Value{Median(samples), Quantile(samples, 0.1), Quantile(samples, 0.9)}
}

// Milliseconds is the value of some durations.
func Milliseconds(samples []time.Duration) Value {
	var ms []float64
	for _, d := range samples {
		ms = append(ms, float64(d)/1e6)
	}
	return Of(ms)
}

// Draws says where charts go.
type Draws struct {
	// Dir is the directory for the pictures; empty: none are made. Print has the charts printed instead, each as a line that
	// Line draws elsewhere: from a machine that has no disk of its own.
	Dir string
}

// Print is a Dir.
const Print = "-"

const linePrefix = "figure "

// Draw draws a chart into its file, and prints the Markdown that shows it.
func (d Draws) Draw(c Chart) error {
	switch d.Dir {
	case "":
		return nil
	case Print:
		text, err := json.Marshal(c)
		fmt.Printf("%s%s\n", linePrefix, text)
		return err
	}
	svg, err := c.SVG()
	if err == nil {
		err = os.MkdirAll(d.Dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(d.Dir, c.Name+".svg"), svg, 0o644)
	}
	if err != nil {
		return fmt.Errorf("draw %s: %w", c.Name, err)
	}
	fmt.Printf("\n![%s](figures/%s.svg)\n", c.Title, c.Name)
	return nil
}

// Line draws the chart that a line has, if it is one that Print made.
func (d Draws) Line(line string) (is bool, err error) {
	text, is := strings.CutPrefix(line, linePrefix)
	if !is {
		return false, nil
	}
	var c Chart
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return true, fmt.Errorf("read a chart: %w", err)
	}
	return true, d.Draw(c)
}

// theme has a colour for each that is drawn with, as CSS has it for light and for dark.
var theme = []struct {
	drawn       color.RGBA
	name        string
	light, dark string
}{
	{color.RGBA{1, 1, 1, 255}, "ink", "#1c2330", "#d9dfe8"},
	{color.RGBA{2, 2, 2, 255}, "line", "#cfd5de", "#3a4453"},
	{color.RGBA{3, 3, 3, 255}, "s0", "#0b62b5", "#72b4f5"},
	{color.RGBA{4, 4, 4, 255}, "s1", "#b5540b", "#f0a36b"},
	{color.RGBA{5, 5, 5, 255}, "s2", "#2f7d3b", "#7ccf8a"},
	{color.RGBA{6, 6, 6, 255}, "s3", "#8a3fa0", "#d59be8"},
}

var shapes = []draw.GlyphDrawer{draw.CircleGlyph{}, draw.SquareGlyph{}, draw.PyramidGlyph{}, draw.RingGlyph{}}

const (
	width     = 17 * vg.Centimeter
	lineSpace = 0.38 * vg.Centimeter // of a series in a row
	margin    = 2 * vg.Millimeter
)

// SVG is the picture: the same for the same chart, readable in light and in dark.
func (c Chart) SVG() ([]byte, error) {
	if len(c.Series) == 0 || len(c.Series) > len(shapes) || len(c.Rows) == 0 {
		return nil, fmt.Errorf("%d series and %d rows", len(c.Series), len(c.Rows))
	}
	p := c.plot()
	for i, s := range c.Series {
		if len(s.Values) != len(c.Rows) {
			return nil, fmt.Errorf("series %s has %d values for %d rows", s.Name, len(s.Values), len(c.Rows))
		}
		if err := c.add(p, i); err != nil {
			return nil, err
		}
	}
	rows := vg.Length(len(c.Rows)) * lineSpace * (vg.Length(len(c.Series)) + 0.8)
	canvas := vgsvg.New(width, rows+c.legend()+2.6*vg.Centimeter)
	p.Draw(draw.Crop(draw.New(canvas), margin, -margin, margin, -margin))
	var out bytes.Buffer
	if _, err := canvas.WriteTo(&out); err != nil {
		return nil, err
	}
	return themed(out.Bytes(), c.Title), nil
}

// plot is a chart without its values.
func (c Chart) plot() *plot.Plot {
	ink, line := theme[0].drawn, theme[1].drawn
	p := plot.New()
	p.BackgroundColor = nil
	p.Title.Text, p.Title.TextStyle.Color = c.Title+"\n"+c.Unit, ink // the axis' own label would make room for itself, and too much of it
	p.Title.Padding = c.legend() + margin
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Tick.Label.Color, axis.Color, axis.Tick.Color = ink, line, line
		axis.Tick.Label.Font.Size = 9
	}
	p.Title.TextStyle.Font.Size, p.Legend.TextStyle.Font.Size = 11, 9
	p.X.Min, p.X.Max = 0, 1.05*c.most()
	if c.Log {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.TickerFunc(decades)
		p.X.Min = 0.8 * c.least()
	}
	p.Y.Min, p.Y.Max = -0.5, float64(len(c.Rows))-0.5
	var ticks plot.ConstantTicks
	for i, row := range c.Rows {
		ticks = append(ticks, plot.Tick{Value: c.at(i), Label: row})
	}
	p.Y.Tick.Marker, p.Y.Tick.LineStyle.Width, p.Y.LineStyle.Width = ticks, 0, 0
	p.Legend.Top, p.Legend.TextStyle.Color = true, ink
	p.Legend.YOffs = c.legend()
	grid := plotter.NewGrid()
	grid.Vertical.Color, grid.Horizontal.Width = line, 0
	p.Add(grid)
	if c.Mark.At > 0 {
		mark, _ := plotter.NewLine(plotter.XYs{{X: c.Mark.At, Y: p.Y.Min}, {X: c.Mark.At, Y: p.Y.Max}}) // these are numbers
		mark.Color, mark.Dashes = ink, []vg.Length{vg.Points(3), vg.Points(3)}
		p.Add(mark)
		p.Legend.Add(c.Mark.Name+"  ", mark)
	}
	return p
}

// legend is the height of the legend, which is above the rows.
func (c Chart) legend() vg.Length {
	lines := len(c.Series)
	if c.Mark.At > 0 {
		lines++
	}
	return vg.Length(lines) * lineSpace
}

// most is the highest value.
func (c Chart) most() float64 {
	most := c.Mark.At
	for _, s := range c.Series {
		for _, v := range s.Values {
			most = max(most, v.High)
		}
	}
	return most
}

// at is where a row is: the first one is the highest.
func (c Chart) at(row int) float64 { return float64(len(c.Rows) - 1 - row) }

// decades are the ticks of a logarithmic axis, with its labels as people write them; those outside of it would make room for themselves.
func decades(low, high float64) []plot.Tick {
	ticks := plot.LogTicks{}.Ticks(low, high)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = strconv.FormatFloat(ticks[i].Value, 'f', -1, 64)
		}
	}
	return slices.DeleteFunc(ticks, func(t plot.Tick) bool { return t.Value < low || t.Value > high })
}

// least is where a logarithmic axis begins.
func (c Chart) least() float64 {
	var lows []float64
	for _, s := range c.Series {
		for _, v := range s.Values {
			if v.Low > 0 {
				lows = append(lows, v.Low)
			}
		}
	}
	return slices.Min(append(lows, 1))
}

// add adds a series: a mark for each median, and a line for its spread.
func (c Chart) add(p *plot.Plot, i int) error {
	var points spreads
	step := 0.8 / float64(len(c.Series))
	for row, v := range c.Series[i].Values {
		if v == (Value{}) {
			continue
		}
		y := c.at(row) + step*(float64(len(c.Series)-1)/2-float64(i))
		points.XYs = append(points.XYs, plotter.XY{X: v.Median, Y: y})
		points.XErrors = append(points.XErrors, struct{ Low, High float64 }{v.Median - v.Low, v.High - v.Median})
	}
	marks, err := plotter.NewScatter(points.XYs)
	if err != nil {
		return fmt.Errorf("series %s: %w", c.Series[i].Name, err)
	}
	bars, err := plotter.NewXErrorBars(points)
	if err != nil {
		return fmt.Errorf("series %s: %w", c.Series[i].Name, err)
	}
	marks.GlyphStyle = draw.GlyphStyle{Color: theme[2+i].drawn, Radius: vg.Points(3), Shape: shapes[i]}
	bars.LineStyle = draw.LineStyle{Color: theme[2+i].drawn, Width: vg.Points(1.2)}
	bars.CapWidth = vg.Points(4)
	p.Add(bars, marks)
	p.Legend.Add(c.Series[i].Name+"  ", marks)
	return nil
}

type spreads struct {
	plotter.XYs
	plotter.XErrors
}

// themed gives a picture its colours, which are the reader's, and fonts as wide as the one that was measured.
func themed(svg []byte, title string) []byte {
	text := string(svg)
	var light, dark strings.Builder
	for _, t := range theme {
		text = strings.ReplaceAll(text, fmt.Sprintf("#%02X%02X%02X", t.drawn.R, t.drawn.G, t.drawn.B), "var(--"+t.name+")")
		fmt.Fprintf(&light, "--%s:%s;", t.name, t.light)
		fmt.Fprintf(&dark, "--%s:%s;", t.name, t.dark)
	}
	head := strings.Index(text, "<svg")
	end := head + strings.Index(text[head:], ">") + 1
	return []byte(text[head:end] + "\n<title>" + title + "</title>\n<style>:root{" + light.String() + "}@media(prefers-color-scheme:dark){:root{" + dark.String() +
		"}}text{font-family:\"Liberation Sans\",Arial,Helvetica,sans-serif!important}</style>" + text[end:])
}

func init() {
	plot.DefaultFont = font.Font{Typeface: "Liberation", Variant: "Sans"} // what widths are measured by
}

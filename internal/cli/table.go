package cli

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/duration"
)

// column is a column of a table.
type column struct {
	title string
	least int  // least width, to which it may be cut; 0: it is not cut
	drop  int  // if there is no room, columns with the highest number are left out first; 0: never
	right bool // aligned right, for numbers
	wide  bool // only with -o wide
}

// cell is a cell of a table.
type cell struct{ text, colour string }

func plain(texts ...string) []cell {
	var cells []cell
	for _, text := range texts {
		cells = append(cells, cell{text: text})
	}
	return cells
}

// table is rows of cells, with a title for each column.
type table struct {
	columns []column
	rows    [][]cell
}

func (t *table) add(cells ...cell) { t.rows = append(t.rows, cells) }

// Table prints rows of texts below their titles, with the width that they need.
func Table(to io.Writer, titles []string, rows [][]string) error {
	out := screenOf(to)
	var text bytes.Buffer
	out.Writer = &text
	var t table
	for _, one := range titles {
		t.columns = append(t.columns, column{title: one})
	}
	for _, row := range rows {
		cells := plain(row...)
		for i := range cells {
			cells[i].text = Line(cells[i].text)
		}
		t.add(cells...)
	}
	out.wide = true
	t.print(out)
	_, err := to.Write(text.Bytes())
	return err
}

// gap is the space between two columns.
const gap = "  "

// print prints the table. To fit the screen, columns are cut, then left out; not with -o wide.
func (t *table) print(to *screen) {
	limit := to.width
	if to.wide {
		limit = 0
	}
	widths := t.widths(to.wide)
	fit(t.columns, widths, limit)
	header := make([]cell, len(t.columns))
	for i, c := range t.columns {
		header[i] = cell{c.title, bold}
	}
	for _, row := range slices.Concat([][]cell{header}, t.rows) {
		t.line(to, row, widths)
	}
}

// line prints one row.
func (t *table) line(to *screen, row []cell, widths []int) {
	var line strings.Builder
	for i, c := range row {
		if widths[i] < 0 {
			continue
		}
		text := cut(cmp.Or(c.text, "-"), widths[i])
		pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(text))
		if line.Len() > 0 {
			line.WriteString(gap)
		}
		if t.columns[i].right {
			line.WriteString(pad)
			pad = ""
		}
		line.WriteString(to.paint(c.colour, text) + pad)
	}
	to.print("%s\n", strings.TrimRight(line.String(), " "))
}

// widths returns the widths of the columns; -1: it is not shown.
func (t *table) widths(wide bool) []int {
	widths := make([]int, len(t.columns))
	for i, c := range t.columns {
		if c.wide && !wide {
			widths[i] = -1
			continue
		}
		widths[i] = utf8.RuneCountInString(c.title)
		for _, row := range t.rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(cmp.Or(row[i].text, "-")))
		}
	}
	return widths
}

// fit makes columns narrower until all fit into limit (0: none). If that is not enough, it leaves one out and begins anew, as there may be room for the full
// others then.
func fit(columns []column, widths []int, limit int) {
	for full := slices.Clone(widths); limit > 0 && total(widths) > limit; {
		if i := widest(columns, widths); i >= 0 {
			widths[i]--
			continue
		}
		last := -1
		for i, c := range columns {
			if widths[i] >= 0 && c.drop > 0 && (last < 0 || c.drop >= columns[last].drop) {
				last = i
			}
		}
		if last < 0 {
			return // the terminal breaks the lines
		}
		full[last] = -1
		copy(widths, full)
	}
}

func total(widths []int) int {
	sum := -len(gap)
	for _, w := range widths {
		if w >= 0 {
			sum += w + len(gap)
		}
	}
	return sum
}

// widest returns the widest column that may still be cut; -1: none.
func widest(columns []column, widths []int) int {
	found := -1
	for i, c := range columns {
		if c.least > 0 && widths[i] > c.least && (found < 0 || widths[i] > widths[found]) {
			found = i
		}
	}
	return found
}

// cut shortens a text to width characters; the last one is then "…".
func cut(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	return string([]rune(text)[:max(width-1, 0)]) + "…"
}

// wrapped breaks a text between words into lines of at most width, each with the indent. Width 0 is no limit.
func wrapped(text, indent string, width int) string {
	if width <= 0 {
		return indent + text + "\n"
	}
	var out strings.Builder
	line := indent
	for _, word := range strings.Fields(text) {
		if len(line) > len(indent) && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
			out.WriteString(line + "\n")
			line = indent
		}
		if len(line) > len(indent) {
			line += " "
		}
		line += word
	}
	out.WriteString(line + "\n")
	return out.String()
}

// Size returns a number of bytes as text, with a binary unit and about three digits.
func Size(bytes int64) string {
	value, unit := float64(bytes), 0
	for value >= 1024 && unit < len(units)-1 {
		value /= 1024
		unit++
	}
	if unit == 0 || value >= 100 || value == float64(int64(value)) {
		return fmt.Sprintf("%.0f%s", value, units[unit])
	}
	return fmt.Sprintf("%.1f%s", value, units[unit])
}

var units = []string{"", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"}

// age returns how long ago something was, as kubectl shows it.
func age(now, then time.Time) string {
	if then.IsZero() {
		return ""
	}
	return duration.HumanDuration(now.Sub(then))
}

// bar returns a bar of width characters that shows the share.
func bar(done, all int64, width int) string {
	filled := 0
	if all > 0 {
		filled = int(float64(min(max(done, 0), all)) / float64(all) * float64(width))
	}
	return "[" + strings.Repeat("#", filled) + strings.Repeat(".", width-filled) + "]"
}

// percent returns the share in percent; empty if all is 0.
func percent(done, all int64) string {
	if all <= 0 {
		return ""
	}
	return fmt.Sprintf("%.0f %%", 100*float64(done)/float64(all))
}

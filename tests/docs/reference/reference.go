// Package reference writes pages of docs/reference from the code, and pictures from the tables of a page, and says when one of them is stale.
package reference

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the pages of docs/reference instead of comparing them (make generate)")

// made is below the title of a page.
const made = "\n\n<!-- Made from the code by make generate. -->\n"

// Check fails unless a page, which root/docs/reference has as file, is of the text; with -update it writes it.
func Check(t *testing.T, root, file, text string) {
	t.Helper()
	text = strings.Replace(strings.TrimRight(text, "\n"), "\n", made, 1) + "\n"
	if !same(t, filepath.Join(root, "docs", "reference", file), text) {
		t.Errorf("docs/reference/%s is not what the code says (make generate); it should be:\n%s", file, text)
	}
}

// CheckPicture fails unless docs has, as file, this picture; with -update it writes it.
func CheckPicture(t *testing.T, root, file string, picture []byte) {
	t.Helper()
	if !same(t, filepath.Join(root, "docs", file), string(picture)) {
		t.Errorf("docs/%s does not show what the table says (make generate)", file)
	}
}

// same reports whether a file has a text; with -update it writes it.
func same(t *testing.T, path, text string) bool {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return true
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(have) == text
}

// Table is a table of Markdown. Cells are one line each.
func Table(head []string, rows [][]string) string {
	var out strings.Builder
	line := func(cells []string) {
		for i, cell := range cells {
			cells[i] = strings.ReplaceAll(strings.Join(strings.Fields(cell), " "), "|", "\\|")
		}
		fmt.Fprintf(&out, "| %s |\n", strings.Join(cells, " | "))
	}
	line(head)
	out.WriteString(strings.Repeat("|---", len(head)) + "|\n")
	for _, row := range rows {
		line(row)
	}
	return out.String()
}

// Code is a text as code; empty if the text is.
func Code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}

// Commands is a section for each command below one, and its flags. titleOf is the title of the group of a flag; empty: it has none.
func Commands(root *cobra.Command, titleOf func(*pflag.Flag) string) string {
	var out strings.Builder
	for _, cmd := range root.Commands() {
		if !cmd.IsAvailableCommand() {
			continue
		}
		fmt.Fprintf(&out, "## %s\n\n    %s\n\n%s\n", cmd.CommandPath(), cmd.UseLine(), paragraphs(cmd.Long, cmd.Short+"."))
		var rows [][]string
		last := ""
		end := func() {
			if len(rows) > 0 {
				fmt.Fprintf(&out, "%s\n", Table([]string{last, "", "default"}, rows))
			}
			rows = nil
		}
		cmd.LocalFlags().SortFlags = false
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden || f.Name == "help" {
				return
			}
			if title := titleOf(f); title != last {
				end()
				last = title
			}
			rows = append(rows, flagRow(f))
		})
		end()
		if cmd.HasAvailableSubCommands() {
			out.WriteString(Commands(cmd, titleOf))
		}
	}
	return out.String()
}

// flagRow is a flag, what it is for, and its default.
func flagRow(f *pflag.Flag) []string {
	value, usage := pflag.UnquoteUsage(f)
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	if value != "" {
		name += " " + value
	}
	standard := f.DefValue
	switch standard {
	case "[]", "false", "<nil>":
		standard = ""
	}
	return []string{Code(name), usage, Code(standard)}
}

// paragraphs is the text of a help page as Markdown: its indented lines are code.
func paragraphs(text, instead string) string {
	if text == "" {
		text = instead
	}
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, "  ") {
			line = "    " + strings.TrimPrefix(line, "  ")
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n") + "\n"
}

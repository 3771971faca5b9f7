package demo

import (
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// printer prints the lines of the demo, on a terminal with bold and red text, unless NO_COLOR is set (https://no-color.org).
type printer struct {
	out      *os.File
	terminal bool
}

func newPrinter(out *os.File) *printer {
	_, err := unix.IoctlGetTermios(int(out.Fd()), unix.TCGETS)
	return &printer{out, err == nil && os.Getenv("NO_COLOR") == ""}
}

func (p *printer) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(p.out, format, args...) // if the output is closed, nobody reads it
}

func (p *printer) styled(style, text string) string {
	if !p.terminal {
		return text
	}
	return "\x1b[" + style + "m" + text + "\x1b[0m"
}

const (
	bold = "1"
	red  = "1;31"
)

func (p *printer) heading(text string) { p.printf("\n%s\n", p.styled(bold, text)) }

// stepWidth is the width of the text of a step.
const stepWidth = 49

// columns are what is printed of a device: name, size, ro or rw, filesystem, its use, and where it is mounted.
const columns = "%-13s %8s %-2s  %-5s  %-18s  %s"

func (p *printer) printColumns() {
	p.printf("%3s  %-*s %10s  "+columns+"\n", "#", stepWidth, "step", "time", "device", "size", "", "fs", "used", "mounted at; remark")
}

// printStep prints a step: one line, and one more for each further device. A failed step has its error below.
func (p *printer) printStep(number int, what string, took time.Duration, seen []string, remark string, err error) {
	lines := strings.Split(strings.Join(seen, "\n"), "\n")
	last := len(lines) - 1
	if remark != "" {
		if lines[last] = strings.TrimRight(lines[last], " "); lines[last] != "" {
			lines[last] += "; "
		}
		lines[last] += remark
	}
	for i, line := range lines {
		if i == 0 {
			line = fmt.Sprintf("%3d  %-*s %7.1f ms  %s", number, stepWidth, what, float64(took.Microseconds())/1000, line)
		} else {
			line = strings.Repeat(" ", stepWidth+18) + line
		}
		p.printf("%s\n", strings.TrimRight(line, " "))
	}
	if err != nil {
		p.printf("     %s %v\n", p.styled(red, "FAILED:"), err)
	}
}
